"""Feed-forward layers through the kernels, as a GPU would run them, against the same layers on a CPU."""

import importlib

import msgspec
import pytest
import torch
from numerics.triton_interpreter import DEVICE, INTERPRETED, mend, on_device

from greylag.model.mlp import SwiGLU
from greylag.model.moe import Experts, OneRank
from greylag.numerics import Linear, Quantizer, device
from greylag.numerics.kernels import choose
from greylag.spec.load import load_preset
from greylag.spec.model import MoE

pytest.importorskip("triton")
if INTERPRETED:
    mend()

BOUND = 1e-3
"""Relative to the norm: a device's exponential moves a few codes by a step."""
DENSE, ROUTED = "dense", "experts"


def layer(kind, precision):
    torch.manual_seed(0)
    if kind == DENSE:
        made = SwiGLU(130, 200, lambda name, i, o, bias: Linear(i, o, precision, bias), False, precision)
    else:
        moe = MoE(num_experts=4, top_k=2, ffn_hidden_size=128)
        made = Experts(130, moe, precision, lambda name: Quantizer(precision), OneRank())
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=130**-0.5)
    return made


def run(kind, precision, where):
    """Output and the gradients of all that has one."""
    made = layer(kind, precision).to(where)
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(60, 130, generator=generator), torch.randn(60 if kind == DENSE else 90, 130, generator=generator)
    row = torch.randint(0, 60, (90,), generator=generator)
    expert = torch.tensor([0, 1, 3])[torch.randint(0, 3, (90,), generator=generator)]
    x = x.to(where).requires_grad_()
    y = made(x) if kind == DENSE else made(x, row.to(where), expert.to(where))
    y.backward(g.to(where))
    return [t.detach().cpu() for t in (y, x.grad, *(weight.grad for weight in made.parameters()))]


@pytest.mark.parametrize("kind", [DENSE, ROUTED])
@pytest.mark.parametrize("form", ["high", "e4m3"])
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@on_device
def test_is_the_layer_of_a_cpu(monkeypatch, kind, form, smooth):
    block = load_preset("precision", "fp8-block128")
    precision = msgspec.structs.replace(block, high="fp32", swiglu_input=form, smooth_swiglu=smooth)
    expected = run(kind, precision, "cpu")
    monkeypatch.setattr(device, "choose", lambda of, capability, what: choose("cuda", (9, 0), what))
    kernels = importlib.import_module("greylag.numerics.kernels.swiglu")
    launches, fused = [], kernels.swiglu_quantize
    monkeypatch.setattr(kernels, "swiglu_quantize", lambda *a: launches.append(a) or fused(*a))
    ours = run(kind, precision, DEVICE)
    assert len(launches) == 1
    for result, right in zip(ours, expected, strict=True):
        assert (result - right).norm() <= BOUND * right.norm()
