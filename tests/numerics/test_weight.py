"""A weight that comes as codes: a linear layer gives the bits that it gives for the FP32 weight, gradients too."""

import pytest
import torch
from torch import nn

from greylag.numerics import Linear, Quantizer, grouped_linear
from greylag.numerics.formats import FORMATS
from greylag.numerics.quantize import quantize, tile_of
from greylag.numerics.weight import QuantizedWeight, quantize_to
from greylag.spec.load import load_preset

PRESETS = ("fp8-block128", "fp8-block128-fp32", "fp8-tensor-current")


def coded(w: torch.Tensor, quantizer: Quantizer) -> QuantizedWeight:
    """As a gather would bring it."""
    made = quantizer.weights("forward", w)
    codes = torch.stack([q.encoded().contiguous() for q in made]).view(w.shape)
    scales = torch.stack([q.scale_inv for q in made])
    shared = w.dim() == 2 or made[0].tile == (0, 0)
    return QuantizedWeight(codes, scales[0] if shared else scales, made[0].tile, made[0].fmt)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tokens", [1, 3, 40])  # BLAS sums few rows in another order
def test_linear_gives_the_same_bits(preset: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    layer, other = (Linear(200, 160, load_preset("precision", preset).recipe) for _ in range(2))
    other.weight = nn.Parameter(coded(layer.weight.detach(), layer.quantizer))
    assert isinstance(other.weight, nn.Parameter)
    assert other.weight.dtype == torch.float32
    x, g = torch.randn(tokens, 200), torch.randn(tokens, 160)
    results = []
    for each in (layer, other):
        x_ = x.clone().requires_grad_()
        for _ in range(2):  # gradients add up
            y = each(x_)
            y.backward(g)
        assert type(each.weight.grad) is torch.Tensor
        results.append((y, x_.grad, each.weight.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("preset", PRESETS)
def test_experts_give_the_same_bits(preset: str) -> None:
    torch.manual_seed(0)
    quantizer = Quantizer(load_preset("precision", preset).recipe)
    w = torch.randn(3, 160, 256) * torch.tensor([1.0, 1e-3, 50.0]).view(3, 1, 1)
    x, segments = torch.randn(384, 256), [(0, 100), (128, 0), (128, 200)]
    results = []
    for weight in (w.requires_grad_(), coded(w.detach(), quantizer).requires_grad_()):
        y = grouped_linear(x, weight, quantizer, segments)
        (y.square().sum() / y.numel()).backward()
        results.append((y, weight.grad))
    assert all(map(torch.equal, *results))


def test_any_other_operator_reads_values() -> None:
    quantizer = Quantizer(load_preset("precision", "fp8-block128").recipe)
    w = torch.randn(130, 140)
    weight = coded(w, quantizer)
    values = quantizer.weights("forward", w)[0].dequantize()
    assert torch.equal(weight + 0, values)
    assert torch.equal(weight.t(), values.t())
    assert torch.equal(weight.detach().dequantize(), values)
    assert torch.equal(weight.view(-1), values.reshape(-1))
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert torch.zeros_like(weight).sum() == 0
    assert "e4m3" in repr(weight)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e2m1"])
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@pytest.mark.parametrize("granularity", ["tensor", "128x128"])
def test_quantize_to_given_scales(name: str, kind: str, granularity: str) -> None:
    x = torch.randn(200, 300) * torch.exp2(60 * torch.rand(200, 300) - 30)
    x[:128, :128] = 0.0
    x[130, 1], x[131, 2] = -1e-40, 0.0
    tile = tile_of(granularity)
    theirs = quantize(x, FORMATS[name], tile, kind)
    mine = quantize_to(x, FORMATS[name], tile, theirs.scale_inv)
    assert torch.equal(mine.dequantize().view(torch.int32), theirs.dequantize().view(torch.int32))
    assert torch.equal(mine.encoded().view(torch.uint8), theirs.encoded().view(torch.uint8))
