"""SwiGLU and its projection through the fused kernel, as a GPU would run them, against the same on a CPU.

Gates are 0 or so large that silu is exact on any device: then all is the same but for the order of the GEMMs' sums.
"""

import importlib
from collections import Counter

import pytest
import torch
from numerics.triton_interpreter import INTERPRETED, matrix, mend, on, on_device
from torch.utils._python_dispatch import TorchDispatchMode

from greylag.numerics import Quantizer, device, evidence, grouped_linear
from greylag.numerics.kernels import choose
from greylag.numerics.swiglu import gated, swiglu
from greylag.spec.load import load_preset
from greylag.spec.precision import Gemms

pytest.importorskip("triton")
if INTERPRETED:
    mend()

RECIPES = ["fp8-block128", "fp8-block128-fp32", "fp8-block128-hybrid"]
DENSE = [(0, 100)]
EXPERTS = [(0, 0), (0, 60), (128, 1), (256, 0)]

each_recipe = pytest.mark.parametrize("name", RECIPES)
each_form = pytest.mark.parametrize("form", [None, "e4m3"])


def counting(kernel, counted):
    def launch(*arguments, **named):
        counted[kernel.__name__] += 1
        return kernel(*arguments, **named)

    return launch


@pytest.fixture
def launches(monkeypatch):
    """From here on a GPU's kernels are chosen; how often each was launched."""
    counted = Counter()
    monkeypatch.setattr(device, "choose", lambda kind, capability, what: choose("cuda", (9, 0), what))
    for module, name in (("quantize", "quantize_1x128"), ("swiglu", "swiglu_quantize"), ("swiglu", "swiglu_amax")):
        kernels = importlib.import_module(f"greylag.numerics.kernels.{module}")

        monkeypatch.setattr(kernels, name, counting(getattr(kernels, name), counted))
    return counted


def unlaunched(monkeypatch):
    """As on a CPU."""
    monkeypatch.setattr(device, "choose", choose)


class Seen:
    """Remembers the operands and what they were made of."""

    def __init__(self):
        self.operands, self.caches = [], []

    def quantized(self, gemm, role, source, operand):
        self.operands.append((gemm, role, source.clone(), operand))

    def multiplied(self, *_):
        """Not of interest."""

    def kept(self, what, kept):
        self.caches.append((what, kept.form))


def inner(segments, F=200, dtype=torch.float32):
    """Input of SwiGLU (P, 2F) whose gates are 0 or large; zero between the segments."""
    P = max(-(-(start + count) // 128) * 128 for start, count in segments) if len(segments) > 1 else segments[0][1]
    x = torch.zeros(P, 2 * F)
    for expert, (start, count) in enumerate(segments):
        gate = 200.0 * torch.randint(-1, 2, (count, F), generator=torch.Generator().manual_seed(expert))
        x[start : start + count] = torch.cat([gate, matrix(max(count, 1), F, seed=expert)[:count]], 1)
    return x.to(dtype)


def through(x, w, g, quantizer, segments, form=None, smooth=False):
    """Output and both gradients of SwiGLU and its projection."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y, kept, factors, ready = gated(x, segments, form, smooth, quantizer)
    out = grouped_linear(y, w, quantizer, segments, kept, factors, ready)
    out.backward(g)
    return out.detach(), x.grad, w.grad


def weights(segments):
    return matrix(len(segments) * 64, 200, seed=20).view(len(segments), 64, 200)


@each_recipe
@each_form
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("segments", [DENSE, EXPERTS], ids=["dense", "experts"])
@on_device
def test_is_the_same_on_a_cpu(monkeypatch, launches, name, form, smooth, segments):
    x, w = inner(segments), weights(segments)
    g = swiglu(inner(segments, 64)) / 200.0
    quantizer = Quantizer(load_preset("precision", name))
    ours = through(*on(x, w, g), quantizer, segments, form, smooth)
    assert launches["swiglu_quantize"] == 1
    assert launches["swiglu_amax"] == smooth
    unlaunched(monkeypatch)
    expected = through(x, w, g, Quantizer(load_preset("precision", name)), segments, form, smooth)
    for result, right in zip(ours, expected, strict=True):
        assert (result.cpu() - right).abs().max() <= 2e-6 * right.abs().max()
    assert quantizer.nonfinite == 0


@each_recipe
@each_form
@on_device
def test_an_observer_sees_what_was_quantized_and_changes_nothing(launches, name, form):
    (x,) = on(matrix(130, 400, spread=0.5).bfloat16())
    quantizer = Quantizer(load_preset("precision", name))
    _, kept, factors_EF, alone = gated(x, DENSE, form, True, quantizer)
    quantizer.observer = Seen()
    _, kept, again_EF, ready = gated(x, DENSE, form, True, quantizer)
    assert torch.equal(again_EF, factors_EF)
    assert torch.equal(ready.scale_inv, alone.scale_inv)
    assert torch.equal(ready.codes.view(torch.uint8), alone.codes.view(torch.uint8))
    seen = quantizer.observer
    turned = form is None and name.endswith("fp32")
    gemms = ["forward", "weight-gradient"] if turned else ["forward"]
    assert [(gemm, role) for gemm, role, _, _ in seen.operands] == [(gemm, "input") for gemm in gemms]
    for _, _, source, operand in seen.operands:
        assert source.dtype == x.dtype
        assert evidence.is_nearest(source, operand)
        assert quantizer.gemms.forward.scale in evidence.scale_kinds(source, operand)
    assert seen.caches == ([("SwiGLU input", "e4m3 1x128")] if form else [("input", kept.form)])
    assert launches["swiglu_quantize"] == 2


class Allocations(TorchDispatchMode):
    """Shapes and dtypes of every tensor that comes of an operator."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() >= t.nbytes:
                self.seen.add((tuple(t.shape), t.dtype))
        return out


@each_recipe
@each_form
@on_device
def test_the_activation_is_never_there(launches, name, form):
    x, w = on(torch.randn(384, 512), torch.randn(1, 64, 256))
    kept = {}

    def pack(t):
        if t.data_ptr() not in (x.data_ptr(), w.data_ptr()):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    quantizer = Quantizer(load_preset("precision", name))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Allocations() as allocated:
        y, cache, factors, ready = gated(x.requires_grad_(), [(0, 384)], form, False, quantizer)
        grouped_linear(y, w.requires_grad_(), quantizer, [(0, 384)], cache, factors, ready)
    assert y.shape == (384, 256)
    assert y.untyped_storage().nbytes() == y.element_size()
    wide = {dtype for shape, dtype in allocated.seen if shape in ((384, 256), (256, 384))}
    assert wide <= {torch.float8_e4m3fn, torch.uint8}
    scale = 4 if name.endswith("fp32") else 1
    assert sum(kept.values()) == (384 * 512 * (1 + 1 / 128) if form else 384 * 256 * (1 + scale / 128))


@each_recipe
@on_device
def test_a_layer_reads_its_output_gradient_once(monkeypatch, launches, name):
    x, w, g = matrix(100, 130), matrix(70, 130, seed=1), matrix(100, 70, seed=2)
    g[5, 7] = float("inf")
    counts = []
    for tensors in (on(x, w, g), [x, w, g]):
        quantizer = Quantizer(load_preset("precision", name))
        a, b = (t.clone().requires_grad_() for t in tensors[:2])
        y = grouped_linear(a, b, quantizer, DENSE)
        before = launches["quantize_1x128"]
        y.backward(tensors[2])
        again = not name.endswith("fp32")  # the input's tiles are turned
        assert launches["quantize_1x128"] - before == (1 + again if not counts else 0)
        counts.append(quantizer.nonfinite.item())
        unlaunched(monkeypatch)
    assert counts == [2, 2]  # a tile in each direction


@on_device
def test_what_no_kernel_makes_is_left_to_torch(monkeypatch, launches):
    (x,) = on(inner(DENSE))
    block, high = load_preset("precision", "fp8-block128"), load_preset("precision", "bf16")
    others = [load_preset("precision", name) for name in ("fp8-tensor-current", "fp8-row", "mxfp8", "bf16")]
    for recipe in (*others, Gemms(block, block, high), Gemms(high, block, block)):
        y, _, _, ready = gated(x, DENSE, None, False, Quantizer(recipe))
        assert ready is None
        assert torch.equal(y, swiglu(x))
    assert gated(x, DENSE, "e4m3", False, Quantizer(Gemms(block, block, high)))[3] is not None
    assert set(launches) == {"quantize_1x128", "swiglu_quantize"}
    unlaunched(monkeypatch)
    assert gated(inner(DENSE), DENSE, None, False, Quantizer(block))[3] is None
