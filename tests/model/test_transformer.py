"""The decoder: causal, deterministic, finite in BF16, and legible when printed."""

import functools

import msgspec
import pytest
import torch
from torch.nn import functional as F

from greylag.model import Transformer
from greylag.numerics import Linear, Quantizer
from greylag.spec.load import load_preset, presets

TINY = [name for name in presets("models") if name.endswith("-tiny")]

each_model = pytest.mark.parametrize("name", TINY)


def transformer(name, precision="fp32", **changes):
    how = msgspec.structs.replace(load_preset("precision", precision), **changes)
    model = Transformer(load_preset("model", name), how)
    model.initialize(seed=0)
    return model


@functools.cache
def fp32(name):
    """One for all tests that only look."""
    return transformer(name)


def tokens(batch=2, sequence=24, seed=0):
    return torch.randint(256, (batch, sequence), generator=torch.Generator().manual_seed(seed))


@each_model
@torch.no_grad()
def test_logits_do_not_see_later_tokens(name):
    model, first = fp32(name), tokens()
    second = first.clone()
    second[:, 15] = (second[:, 15] + 1) % 256
    a, b = model(first), model(second)
    torch.testing.assert_close(a[:, :15], b[:, :15], rtol=0, atol=1e-5)
    assert ((a[:, 15:] - b[:, 15:]).abs().amax((0, 2)) > 1e-4).all()


@each_model
@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other(name):
    model, both = fp32(name), tokens()
    torch.testing.assert_close(model(both)[:1], model(both[:1]), rtol=0, atol=1e-5)


@each_model
def test_initialize_depends_on_the_seed_alone(name):
    first, second = fp32(name), transformer(name)
    for (key, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), key
    second.initialize(seed=1)
    assert not torch.equal(first.embed.weight, second.embed.weight)


@each_model
def test_initialize_has_the_spread_it_says(name):
    model = fp32(name)
    std = model.model.init_std
    for key, weight in model.named_parameters():
        if "norm" in key or key.endswith("bias"):
            assert weight.unique().numel() == 1, key
            continue
        into_residual = "wo." in key or "w_down" in key
        expected = std * (2 * model.model.num_layers) ** -0.5 if into_residual else std
        assert weight.std().item() == pytest.approx(expected, rel=0.1), key
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=1).flatten())
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.2)


@each_model
@pytest.mark.parametrize("precision", ["bf16", "fp8-block128"])
def test_a_step_with_bf16_between_the_linears(name, precision):
    model = transformer(name, precision)
    assert model.high is torch.bfloat16
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    logits = model(tokens(1, 8))
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert logits.dtype == torch.float32
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(1, 8, seed=1).flatten())
    loss.backward()
    assert loss.isfinite()
    for key, weight in model.named_parameters():
        assert weight.grad.dtype == torch.float32, key
        assert weight.grad.isfinite().all(), key


@each_model
@pytest.mark.parametrize("precision", [p for p in presets("precisions") if p.startswith("fp8")])
@torch.no_grad()
def test_fp8_stays_near_fp32(name, precision, monkeypatch):
    """Given the same experts: which are best may turn on the last bits, and then a token meets other weights."""
    exact, model = fp32(name), transformer(name, precision, high="fp32")
    for theirs, ours in zip(exact.routers(), model.routers(), strict=True):
        chosen = []
        choose = theirs.choose
        monkeypatch.setattr(theirs, "choose", lambda x, choose=choose, to=chosen: to.append(choose(x)) or to[-1])
        monkeypatch.setattr(ours, "choose", lambda x, chosen=chosen: chosen[-1])
    logits = exact(tokens())
    error = model(tokens()) - logits
    assert 0 < error.norm() / logits.norm() < 0.1


def test_print_says_the_precision_of_every_linear():
    model = transformer("deepseek-v3-tiny", "fp8-block128")
    text = str(model)
    quantizers = [m for m in model.modules() if isinstance(m, Quantizer)]
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    said = "input E4M3 1x128 current, weight E4M3 128x128 current, grad E4M3 1x128 current"
    assert len(quantizers) == len(linears) + 2 * model.model.num_moe_layers
    assert sum(str(q).count(said) for q in quantizers) == len(quantizers) - 2 * len(model.layers)
    assert said in text
    assert "8 experts, top 2, FP32" in text
    assert "statistics FP32" in text


def test_every_layer_rank_and_seed_rounds_with_noise_of_its_own():
    model = transformer("deepseek-v3-tiny", "fp8-block128")
    seeds = []
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        model.initialize(seed, rank)
        seeds += [m.seed for m in model.modules() if isinstance(m, Quantizer)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**32
