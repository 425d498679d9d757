"""The attention core whose output is kept in E5M6: forward to the bit, backward within the rounding, kept once."""

import pytest
import torch
from msgspec.structs import replace

from greylag.model import Transformer
from greylag.model.attention import attend
from greylag.numerics.formats import E5M6
from greylag.numerics.reference import round_trip
from greylag.spec.load import load_preset

SHAPES = {
    "multi-head": (2, 33, 4, 4, 64, 64),
    "grouped": (1, 128, 4, 2, 32, 32),
    "narrow values": (2, 64, 4, 4, 96, 64),
}


def operands(shape):
    B, S, H, G, K, V = shape
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, S, heads, width, generator=generator, requires_grad=True)
        for heads, width in ((H, K), (G, K), (G, V))
    ]


def gradients(tensors, form, g=None):
    for t in tensors:
        t.grad = None
    o, kept = attend(*tensors, 0.125, form)
    o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))
    return o.detach(), [t.grad for t in tensors], kept


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward_is_the_same_and_backward_sees_the_rounded_output(shape):
    tensors = operands(shape)
    o, exact, nothing = gradients(tensors, None)
    kept_o, rounded, kept = gradients(tensors, "e5m6")
    assert nothing is None
    assert torch.equal(kept_o, o)
    matrix = o.flatten(0, 1)
    assert torch.equal(kept.matrix(), round_trip(matrix, E5M6, (1, 128), "pow2")[0])
    assert torch.equal(rounded[2], exact[2])  # the values' gradient needs no output
    for ours, right in zip(rounded[:2], exact[:2], strict=True):
        assert not torch.equal(ours, right)
        assert (ours - right).norm() < 0.01 * right.norm()


def test_gradient_of_queries_is_that_of_the_formula_with_the_rounded_output():
    """dS = P * (dP - sum(dO * O)): the output enters in the sum alone (arXiv 2205.14135, appendix B)."""
    q, k, v = operands(SHAPES["multi-head"])
    o, (dq, _, _), kept = gradients([q, k, v], "e5m6")
    g = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).view(v.shape).transpose(1, 2).double()
    rounded = kept.matrix().view(v.shape).transpose(1, 2).double()
    Q, K, V = (t.detach().transpose(1, 2).double() for t in (q, k, v))
    scores = (Q @ K.transpose(-1, -2) * 0.125).masked_fill(torch.ones(33, 33).triu(1).bool(), float("-inf"))
    p = scores.softmax(-1)
    ds = p * (g @ V.transpose(-1, -2) - (g * rounded).sum(-1, keepdim=True))
    expected = (ds @ K * 0.125).transpose(1, 2)
    assert (dq - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama-3-tiny", "deepseek-v3-tiny", "gpt-3-tiny", "mixtral-tiny"])
def test_models_train_with_every_cache_and_smoothing(name):
    model = load_preset("model", name)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    gated = model.activation == "swiglu"
    plain = replace(load_preset("precision", "fp8-block128"), high="fp32", most_sensitive="B")
    cached = replace(plain, attention_output="e5m6", swiglu_input="e4m3" if gated else "high", smooth_swiglu=gated)
    losses, norms = [], []
    for precision in (plain, cached):
        built = Transformer(model, precision)
        built.initialize(0)
        loss = torch.nn.functional.cross_entropy(built(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in built.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert torch.allclose(norms[0], norms[1], rtol=0.1, atol=1e-3 * norms[0].max())
