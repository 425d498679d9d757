"""SwiGLU against autograd of the plain formula, and what it keeps."""

import pytest
import torch
from torch.nn import functional as F

from greylag.numerics.swiglu import swiglu


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
