"""Linear's three GEMMs against the reference's, what it keeps for backward, and the segments of experts."""

import msgspec
import pytest
import torch
from torch import nn

from greylag.numerics import Linear, Quantizer, grouped_linear, reference
from greylag.spec.load import load_preset, presets

PRECISIONS = presets("precisions")

each_precision = pytest.mark.parametrize("name", PRECISIONS)


def precision(name, **changes):
    return msgspec.structs.replace(load_preset("precision", name), **{"high": "fp32", **changes})


def random(*shape, seed=0):
    """Normal, with outliers down some columns as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.exp2(3 * torch.randn(shape[-1], generator=generator))
    return torch.randn(shape, generator=generator) * columns


def close(ours, exact):
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


def three_gemms(x, w, g, recipe, segments):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = grouped_linear(x, w, recipe, segments)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def check(x, w, g, how, segments):
    """Our three GEMMs are the reference's; returns them."""
    ours = three_gemms(x, w, g, Quantizer(how), segments)
    for result, exact in zip(ours, reference.linear(x, w, g, how, segments), strict=True):
        close(result, exact)
    return ours


@each_precision
@pytest.mark.parametrize("shape", [(256, 128, 256), (128, 256, 384), (5, 130, 70), (1, 1, 1)], ids=str)
def test_three_gemms_are_the_references(name, shape):
    P, K, N = shape
    check(random(P, K), random(1, N, K, seed=1), random(P, N, seed=2), precision(name), [(0, P)])


@pytest.mark.parametrize("name", [p for p in PRECISIONS if p.startswith("fp8")])
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
def test_either_kind_of_scale_is_the_references(name, kind):
    how = precision(name, scale=kind)
    check(random(192, 256), random(1, 130, 256, seed=1), random(192, 130, seed=2), how, [(0, 192)])


@each_precision
def test_experts_are_the_references(name):
    """An empty expert first and last, one with one token, and gaps up to the next multiple of 128."""
    segments = [(0, 0), (0, 130), (256, 1), (384, 128), (512, 0)]
    x, g = torch.zeros(512, 256), torch.zeros(512, 192)
    for expert, (start, count) in enumerate(segments):
        x[start : start + count] = random(count, 256, seed=expert)
        g[start : start + count] = random(count, 192, seed=10 + expert)
    y, dx, dw = check(x, random(5, 192, 256, seed=20), g, precision(name), segments)
    for gap in (slice(130, 256), slice(257, 384)):
        assert not y[gap].any()
        assert not dx[gap].any()
    assert not dw[0].any()
    assert not dw[4].any()


@each_precision
def test_all_tokens_to_one_expert(name):
    segments = [(0, 0), (0, 200), (256, 0)]
    x, g = torch.zeros(256, 128), torch.zeros(256, 64)
    x[:200], g[:200] = random(200, 128), random(200, 64, seed=1)
    check(x, random(3, 64, 128, seed=2), g, precision(name), segments)


@each_precision
def test_no_tokens_at_all(name):
    y, dx, dw = three_gemms(
        torch.zeros(0, 128), random(2, 64, 128), torch.zeros(0, 64), Quantizer(precision(name)), [(0, 0), (0, 0)]
    )
    assert y.shape == (0, 64)
    assert dx.shape == (0, 128)
    assert not dw.any()


def test_blocks_do_not_reach_into_the_next_expert():
    how = precision("fp8-block128")
    w = random(2, 70, 128)
    x, g = random(256, 128, seed=1), random(256, 70, seed=2)
    segments = [(0, 128), (128, 128)]
    before = three_gemms(x, w, g, Quantizer(how), segments)[0]
    w[1] *= 1000
    assert torch.equal(three_gemms(x, w, g, Quantizer(how), segments)[0][:128], before[:128])


@pytest.mark.parametrize("high", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
@each_precision
def test_takes_the_place_of_torch_linear(name, bias, high):
    layer, plain = Linear(64, 48, load_preset("precision", name), bias), nn.Linear(64, 48, bias)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "quantizer" not in k})
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(high).requires_grad_()
    y = layer(x)
    assert y.dtype == high
    assert y.shape == (2, 3, 48)
    assert (y - plain(x.float())).abs().max() < 0.4
    y.sum().backward()
    assert x.grad.dtype == high
    for weight in layer.parameters():
        assert weight.grad.dtype == torch.float32


@each_precision
def test_one_weight_is_a_group_of_one(name):
    layer, x = Linear(256, 130, precision(name)), random(2, 96, 256)
    expected = grouped_linear(x.flatten(0, 1), layer.weight[None], Quantizer(precision(name)), [(0, 192)])
    assert torch.equal(layer(x), expected.view(2, 96, 130))


def kept_bytes(layer, x):
    """Bytes that autograd keeps for backward, weights aside."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    weights = {w.untyped_storage().data_ptr() for w in layer.parameters()}
    return sum(size for place, (size, _) in kept.items() if place not in weights), y


@pytest.mark.parametrize("name", [p for p in PRECISIONS if p.startswith("fp8")])
def test_only_codes_and_scales_are_kept(name):
    x = random(256, 512).requires_grad_()
    size, y = kept_bytes(Linear(512, 384, precision(name)), x)
    assert size <= 0.27 * x.numel() * 4
    y.sum().backward()


def test_fp32_keeps_all_of_the_input():
    x = random(256, 512).requires_grad_()
    assert kept_bytes(Linear(512, 384, precision("fp32")), x)[0] == x.numel() * 4


@each_precision
def test_no_gradient_where_none_is_wanted(name):
    recipe = Quantizer(precision(name))
    x, w, g = random(128, 128), random(1, 64, 128, seed=1), random(128, 64, seed=2)
    _, dx, dw = three_gemms(x, w, g, recipe, [(0, 128)])
    only_w = w.clone().requires_grad_()
    grouped_linear(x, only_w, Quantizer(precision(name)), [(0, 128)]).backward(g)
    assert torch.equal(only_w.grad, dw)
    only_x = x.clone().requires_grad_()
    grouped_linear(only_x, w, Quantizer(precision(name)), [(0, 128)]).backward(g)
    assert torch.equal(only_x.grad, dx)


def test_delayed_scales_come_from_the_last_step():
    how = precision("fp8-tensor-delayed")
    layer = Linear(128, 128, how)
    first, second = random(64, 128), random(64, 128, seed=1) / 100
    layer(first).sum().backward()
    for role in ("input", "weight", "grad"):
        getattr(layer.quantizer, f"{role}_scale").roll()
    amax = first.abs().max().item()
    assert layer.quantizer.quantize("forward", "input", second).scale_inv.item() == reference.scale_inv(
        amax, layer.quantizer.input_scale.fmt, "fp32"
    )


def test_not_finite_is_counted_in_forward_and_backward():
    layer = Linear(128, 128, precision("fp8-block128"))
    x = random(4, 128)
    x[0, 0] = float("inf")
    layer(x)
    assert layer.quantizer.nonfinite == 1
    y = layer(random(4, 128).requires_grad_())
    g = torch.zeros_like(y)
    g[1, 1] = float("nan")
    y.backward(g)
    assert layer.quantizer.nonfinite > 1
    assert layer.weight.grad.isnan().any()


def test_print_says_the_precision_of_each_role():
    for name in PRECISIONS:
        how = load_preset("precision", name)
        text = str(Linear(128, 256, how))
        assert "128 -> 256" in text
        for role in ("input", "weight", "grad"):
            assert f"{role} {getattr(how, role)}" in text
