"""Dense feed-forward layers: SwiGLU (arXiv 2002.05202) and GPT's GELU."""

from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model.attention import LinearFactory
from greylag.numerics.swiglu import swiglu


class SwiGLU(nn.Module):
    """(silu(x gate) * (x up)) down, gate and up as one projection."""

    def __init__(self, hidden_size: int, width: int, linear: LinearFactory, bias: bool) -> None:
        super().__init__()
        self.w_gate_up = linear(hidden_size, 2 * width, bias)
        self.w_down = linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., D) to (..., D)."""
        return self.w_down(swiglu(self.w_gate_up(x)))


class GELU(nn.Module):
    """gelu(x up) down."""

    def __init__(self, hidden_size: int, width: int, linear: LinearFactory, bias: bool) -> None:
        super().__init__()
        self.w_up = linear(hidden_size, width, bias)
        self.w_down = linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., D) to (..., D)."""
        return self.w_down(F.gelu(self.w_up(x), approximate="tanh"))
