"""RMSNorm against autograd of the plain formula."""

import pytest
import torch

from greylag.model.norm import RMSNorm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 4, 48)], ids=str)
def test_is_the_plain_formula(shape, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(shape[-1], eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.2, generator=generator)
    x = (4 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    g = torch.randn(shape, generator=generator).to(dtype)
    exact, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    expected.backward(g.double())
    y = norm(x)
    y.backward(g)
    assert y.dtype == x.grad.dtype == dtype
    assert norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=bound, atol=bound)
    torch.testing.assert_close(norm.weight.grad.double(), weight.grad, rtol=bound, atol=10 * bound)


def test_eps_keeps_zero_finite():
    norm = RMSNorm(8, eps=1e-6)
    x = torch.zeros(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()
