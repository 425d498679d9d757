"""Experts: where each choice goes, what the router chooses, and the sum against a loop over tokens."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from greylag.model.mlp import SwiGLU
from greylag.model.moe import MoEFeedForward, Router, slots
from greylag.numerics import Linear, Quantizer
from greylag.spec.load import load_preset
from greylag.spec.model import MoE

DEEPSEEK = load_preset("model", "deepseek-v3-tiny")
MIXTRAL = load_preset("model", "mixtral-tiny")
FP32 = load_preset("precision", "fp32")


def layers_in(precision):
    """Factories of linear layers and quantizers, all at one precision."""
    return lambda name, i, o, bias: Linear(i, o, precision, bias), lambda name: Quantizer(precision)


def generator():
    return torch.Generator().manual_seed(0)


def router(hidden=32, **moe):
    made = Router(hidden, MoE(**{"num_experts": 16, "top_k": 4, "ffn_hidden_size": 8, **moe}))
    torch.nn.init.normal_(made.weight, generator=generator())
    return made


@settings(deadline=None, max_examples=50)
@given(data=st.data(), num_experts=st.integers(1, 9), num_tokens=st.integers(1, 300))
def test_slots_give_each_choice_its_own_row_in_its_experts_segment(data, num_experts, num_tokens):
    top_k = data.draw(st.integers(1, num_experts))
    seed, favourite = data.draw(st.integers(0, 99)), data.draw(st.floats(0, 5))
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    scores[:, 0] += favourite
    chosen = scores.topk(top_k, dim=-1).indices
    rows, segments, num_rows = slots(chosen, num_experts)
    assert rows.shape == chosen.shape
    assert rows.unique().numel() == rows.numel()
    assert len(segments) == num_experts
    end = 0
    for expert, (start, count) in enumerate(segments):
        assert start % 128 == 0
        assert start >= end
        end = start + count
        mine = rows[chosen == expert]
        assert sorted(mine.tolist()) == list(range(start, end))  # filled without holes, in the order of tokens
        assert mine.tolist() == sorted(mine.tolist())
    assert num_rows % 128 == 0
    assert end <= num_rows < end + 128


@pytest.mark.parametrize("model", [DEEPSEEK, MIXTRAL], ids=["deepseek", "mixtral"])
def test_output_is_that_of_a_loop_over_tokens(model):
    layer = MoEFeedForward(model, FP32, *layers_in(FP32))
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.05, generator=generator())
    x = torch.randn(2, 9, model.hidden_size, generator=generator(), requires_grad=True)
    y = layer(x)
    chosen, weights = layer.router(x.flatten(0, 1))
    expected = []
    for token, experts, shares in zip(x.flatten(0, 1), chosen, weights, strict=True):
        total = layer.shared(token) if model.moe.num_shared_experts else torch.zeros(model.hidden_size)
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (layer.experts.w_gate_up[expert] @ token).chunk(2)
            total = total + share * (layer.experts.w_down[expert] @ (F.silu(gate) * up))
        expected.append(total)
    expected = torch.stack(expected).view_as(y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-6)
    g = torch.randn(y.shape, generator=generator())
    inputs = [x, *layer.parameters()]
    for ours, plain in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.001], ids=["plain", "with-bias"])
def test_choices_stay_within_the_groups(rate):
    made = router(num_groups=4, top_k_groups=2, bias_update_rate=rate, scoring="sigmoid")
    chosen, _ = made(torch.randn(200, 32, generator=generator()))
    groups = chosen // 4
    assert max(row.unique().numel() for row in groups) <= 2
    assert groups.unique().numel() == 4
    assert all(row.unique().numel() == 4 for row in chosen)


@pytest.mark.parametrize(("rate", "best"), [(0.0, [0, 1]), (0.001, [4, 5])], ids=["best-one", "sum-of-best-two"])
def test_groups_count_by_their_best_expert_or_by_the_two_best(rate, best):
    made = router(num_experts=8, top_k=2, num_groups=2, top_k_groups=1, bias_update_rate=rate)
    scores = torch.tensor([[0.5, 0.1, 0.0, 0.0, 0.4, 0.3, 0.0, 0.0]])
    assert sorted(made.choose(scores)[0].tolist()) == best


def test_bias_moves_the_choice_but_not_the_weights():
    made = router(bias_update_rate=0.001, scoring="sigmoid", normalize_top_k=False)
    x = torch.randn(50, 32, generator=generator())
    scores = (x @ made.weight.t()).sigmoid()
    made.bias[3] = 10.0
    chosen, weights = made(x)
    assert (chosen == 3).any(1).all()
    torch.testing.assert_close(weights, scores.gather(1, chosen))
    made.bias[3] = -10.0
    assert not (made(x)[0] == 3).any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_scores_are_as_asked(scoring, normalize):
    made = router(scoring=scoring, normalize_top_k=normalize, routed_scale=2.5)
    x = torch.randn(50, 32, generator=generator())
    logits = x @ made.weight.t()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    best = scores.topk(4)
    chosen, weights = made(x)
    assert torch.equal(chosen, best.indices)
    expected = best.values / best.values.sum(-1, keepdim=True) if normalize else best.values
    torch.testing.assert_close(weights, 2.5 * expected)


def test_the_router_is_fp32_whatever_comes_in():
    made = router()
    _, weights = made(torch.randn(5, 32, generator=generator()).bfloat16())
    assert weights.dtype == torch.float32


def test_rebalance_raises_the_starved_and_lowers_the_crowded():
    made = router(num_experts=4, top_k=1, bias_update_rate=0.5)
    made.load.copy_(torch.tensor([10.0, 0.0, 4.0, 2.0]))  # mean 4
    made.rebalance()
    assert made.bias.tolist() == [-0.5, 0.5, 0.0, 0.5]
    assert not made.load.any()


def test_rebalance_evens_out_the_load():
    made = router(bias_update_rate=0.02, scoring="sigmoid")
    x = torch.randn(400, 32, generator=generator()) + made.weight[0]  # all lean to expert 0
    loads = []
    for _ in range(100):
        made(x)
        assert made.load.sum() == 400 * 4
        loads.append(made.load.max().item())
        made.rebalance()
    assert loads[-1] < 0.7 * loads[0]


def test_without_a_rate_there_is_no_bias():
    made = router()
    made(torch.randn(5, 32, generator=generator()))
    made.rebalance()
    assert "bias" not in made.state_dict()
    assert not made.load.any()


def test_fp8_stays_near_fp32():
    torch.manual_seed(0)
    how = msgspec.structs.replace(load_preset("precision", "fp8-block128"), high="fp32")
    exact = MoEFeedForward(DEEPSEEK, FP32, *layers_in(FP32))
    for weight in exact.parameters():
        torch.nn.init.normal_(weight, std=0.05, generator=generator())
    layer = MoEFeedForward(DEEPSEEK, how, *layers_in(how))
    layer.load_state_dict(exact.state_dict())
    assert isinstance(layer.shared, SwiGLU)
    x = torch.randn(2, 40, 256, generator=generator())
    assert 0 < (layer(x) - exact(x)).norm() / exact(x).norm() < 0.1
