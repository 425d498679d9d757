"""A linear layer and experts through the kernels, as a GPU would run them, against the same layers on a CPU."""

import pytest
import torch
from numerics.triton_interpreter import INTERPRETED, matrix, mend, on, on_device

from greylag.numerics import Quantizer, device, grouped_linear
from greylag.numerics.kernels import choose
from greylag.spec.load import load_preset

pytest.importorskip("triton")
if INTERPRETED:
    mend()

RECIPES = ["fp8-block128", "fp8-block128-fp32", "fp8-block128-hybrid"]


class Heard:
    """Remembers which kernels ran."""

    def __init__(self) -> None:
        self.kernels = []

    def quantized(self, *_) -> None:
        """Not of interest."""

    def kept(self, *_) -> None:
        """Not of interest."""

    def multiplied(self, gemm, a, b, kernel, dtype) -> None:
        self.kernels.append((gemm, kernel))


def three_gemms(x, w, g, name, segments):
    """Output, both gradients and the kernels that made them."""
    quantizer = Quantizer(load_preset("precision", name))
    quantizer.observer = Heard()
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = grouped_linear(x, w, quantizer, segments)
    y.backward(g)
    return (y.detach(), x.grad, w.grad), quantizer.observer.kernels, quantizer.nonfinite.item()


def check(monkeypatch, x, w, g, name, segments):
    plain, _, _ = three_gemms(x, w, g, name, segments)
    monkeypatch.setattr(device, "choose", lambda kind, capability, what: choose("cuda", (9, 0), what))
    ours, kernels, nonfinite = three_gemms(*on(x, w, g), name, segments)
    assert kernels == [(gemm, "triton block gemm") for gemm in ("forward", "input-gradient", "weight-gradient")]
    for result, expected in zip(ours, plain, strict=True):
        assert (result.cpu() - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert nonfinite == 0


@pytest.mark.parametrize("name", RECIPES)
@on_device
def test_a_dense_layer(monkeypatch, name):
    x, w, g = matrix(100, 130), matrix(70, 130, seed=1), matrix(100, 70, seed=2)
    check(monkeypatch, x, w, g, name, [(0, 100)])


@pytest.mark.parametrize("name", RECIPES)
@on_device
def test_experts(monkeypatch, name):
    segments = [(0, 0), (0, 60), (128, 1), (256, 0)]
    x, g = torch.zeros(256, 128), torch.zeros(256, 64)
    for expert, (start, count) in enumerate(segments):
        if count:
            x[start : start + count] = matrix(count, 128, seed=expert)
            g[start : start + count] = matrix(count, 64, seed=10 + expert)
    w = matrix(4 * 64, 128, seed=20).view(4, 64, 128)
    check(monkeypatch, x, w, g, name, segments)
