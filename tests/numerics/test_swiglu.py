"""SwiGLU against autograd of the plain formula, what it keeps, recompute from FP8, and Smooth-SwiGLU."""

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from greylag.numerics import Quantizer, grouped_linear
from greylag.numerics.swiglu import fold, gated, smooth_factors, swiglu
from greylag.spec.load import load_preset


def plain(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(7, 10), (2, 3, 256)], ids=str)
def test_is_the_plain_formula(shape, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    g = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    exact = x.detach().double().requires_grad_()
    expected = plain(exact)
    expected.backward(g.double())
    y = swiglu(x)
    y.backward(g)
    assert y.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=bound, atol=bound)


def test_large_inputs_stay_finite():
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]], requires_grad=True)
    swiglu(x).sum().backward()
    assert x.grad.isfinite().all()


def test_keeps_only_its_input():
    kept = []
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


ROWS = [(0, 96)]


def block(form=None, smooth=False, name="fp8-block128", segments=ROWS):
    """A function (x, w_gate_up, w_down) to the output of a feed-forward layer."""
    how = msgspec.structs.replace(load_preset("precision", name), high="fp32")
    first, second = Quantizer(how), Quantizer(how)

    def forward(x, w_gate_up, w_down):
        inner = grouped_linear(x, w_gate_up, first, segments)
        y, kept, factors, ready = gated(inner, segments, form, smooth, second)
        return grouped_linear(y, w_down, second, segments, kept, factors, ready)

    return forward


def weights(experts=1, outlier=1.0, width=256):
    generator = torch.Generator().manual_seed(1)
    w_gate_up = torch.randn(experts, 2 * width, 128, generator=generator) * 128**-0.5
    w_gate_up[:, width + 3] *= outlier
    w_down = torch.randn(experts, 128, width, generator=generator) * width**-0.5
    w_down[:, :, 3] /= outlier
    return w_gate_up, w_down


def run(forward, x, *ws):
    tensors = [t.clone().requires_grad_() for t in (x, *ws)]
    y = forward(*tensors)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return [y.detach(), *(t.grad for t in tensors)]


def tokens(rows=96):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))


def error(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


def test_recomputed_output_changes_the_gradients_by_the_rounding_of_the_cache_alone():
    plain_, cached = (run(block(form), tokens(), *weights()) for form in (None, "e4m3"))
    assert torch.equal(cached[0], plain_[0])  # the forward knows nothing of the cache
    exact = run(block(name="fp32"), tokens(), *weights())
    for ours, kept_high, right in zip(cached[1:], plain_[1:], exact[1:], strict=True):
        assert error(ours, kept_high) < 0.06
        assert error(ours, right) < 0.08


@pytest.mark.parametrize("form", [None, "e4m3"])
def test_bytes_kept_between_the_projections(form):
    kept = {}
    x, (w_gate_up, w_down) = tokens().requires_grad_(), weights()
    own = {t.data_ptr() for t in (x, w_gate_up, w_down)}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(form)(x, w_gate_up.requires_grad_(), w_down.requires_grad_())
    inputs = 96 * 128 * (1 + 1 / 128)
    between = 96 * 512 * (1 + 1 / 128) if form else 96 * (512 * 4 + 256 * (1 + 1 / 128))
    assert sum(kept.values()) == inputs + between
    y.sum().backward()


@pytest.mark.parametrize("name", ["fp8-block128", "fp8-tensor-current", "mxfp8", "fp8-row", "fp32"])
@pytest.mark.parametrize("form", [None, "e4m3"])
def test_smoothing_leaves_the_function_and_its_gradients(name, form):
    exact = run(block(name="fp32"), tokens(), *weights())
    rough, smooth = (run(block(form, s, name), tokens(), *weights()) for s in (False, True))
    for ours, plain_, right in zip(smooth, rough, exact, strict=True):
        assert error(ours, right) < 1.2 * error(plain_, right) + 1e-6


def test_smoothing_saves_a_tensor_scale_from_outlier_channels():
    y, w_down = torch.randn(96, 256, generator=torch.Generator().manual_seed(3)), weights()[1]
    y[:, :4] *= 30000.0
    w_down[..., :4] /= 30000.0
    factors = smooth_factors(y, ROWS)

    def product(name, factors_EF):
        how = msgspec.structs.replace(load_preset("precision", name), high="fp32")
        return grouped_linear(y, w_down, Quantizer(how), ROWS, None, factors_EF)

    exact = product("fp32", None)
    assert error(product("fp8-tensor-current", None), exact) > 0.1
    assert error(product("fp8-tensor-current", factors), exact) < 0.04
    assert error(product("fp8-block128", None), exact) > 0.07  # 4 of the 128 numbers of a block are the outliers
    assert error(product("fp8-block128", factors), exact) < 0.04


def test_every_expert_has_factors_of_its_own():
    segments = [(0, 40), (128, 0), (128, 1), (256, 100)]
    x = torch.zeros(384, 128)
    for start, count in segments:
        x[start : start + count] = tokens(count) * (1 + start)
    ws = weights(4)
    exact = run(block(name="fp32", segments=segments), x, *ws)
    rough, smooth = (run(block("e4m3", s, segments=segments), x, *ws) for s in (False, True))
    for ours, plain_, right in zip(smooth, rough, exact, strict=True):
        assert error(ours, right) < 1.1 * error(plain_, right)
    assert not smooth[2][1].any()


@settings(deadline=None, max_examples=200)
@given(st.floats(2.0**-90, 2.0**90, width=32))
def test_a_factor_brings_the_channel_just_to_one(amax):
    factor = smooth_factors(torch.tensor([[amax], [-amax / 2]]), [(0, 2)])[0, 0].item()
    assert 0.5 < amax * factor <= 1
    assert math.frexp(factor)[0] == 0.5  # a power of two


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_a_channel_without_a_magnitude_stays(bad):
    assert smooth_factors(torch.tensor([[bad]]), [(0, 1)]).item() == 1.0
    assert smooth_factors(torch.zeros(0, 3), [(0, 0)]).tolist() == [[1.0, 1.0, 1.0]]


def test_folded_weights_are_the_same_function_to_the_bit():
    x, (w_gate_up, w_down) = tokens().double(), (w[0].double() for w in weights(outlier=3000.0))
    factors = smooth_factors(plain(x @ w_gate_up.t()), ROWS)[0].double()
    assert factors.min() < 1e-3
    folded_up, folded_down = fold(w_gate_up, w_down, factors)
    y, folded = plain(x @ w_gate_up.t()) * factors, plain(x @ folded_up.t())
    assert torch.equal(folded, y)
    assert torch.equal(
        torch.sum(folded[:, None] * folded_down, -1), torch.sum(plain(x @ w_gate_up.t())[:, None] * w_down, -1)
    )
