"""Dense feed-forward layers: SwiGLU (arXiv 2002.05202) and GPT's GELU."""

from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model.attention import LinearFactory
from greylag.numerics.cache import form_of
from greylag.numerics.swiglu import gated
from greylag.spec.precision import Precision


class SwiGLU(nn.Module):
    """(silu(x gate) * (x up)) down, gate and up as one projection."""

    def __init__(
        self, hidden_size: int, width: int, linear: LinearFactory, bias: bool, precision: Precision, at: str = "ffn"
    ) -> None:
        super().__init__()
        self.form, self.smooth = form_of(precision.swiglu_input), precision.smooth_swiglu
        self.w_gate_up = linear(f"{at}.w_gate_up", hidden_size, 2 * width, bias)
        self.w_down = linear(f"{at}.w_down", width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., D) to (..., D)."""
        inner_PF = self.w_gate_up(x.reshape(-1, x.shape[-1]))
        rows = [(0, inner_PF.shape[0])]
        y_PF, kept, factors_EF, ready = gated(inner_PF, rows, self.form, self.smooth, self.w_down.quantizer)
        y_PD: Tensor = self.w_down(y_PF, kept, factors_EF, ready)
        return y_PD.view(*x.shape[:-1], -1)


class GELU(nn.Module):
    """gelu(x up) down."""

    def __init__(self, hidden_size: int, width: int, linear: LinearFactory, bias: bool) -> None:
        super().__init__()
        self.w_up = linear("ffn.w_up", hidden_size, width, bias)
        self.w_down = linear("ffn.w_down", width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., D) to (..., D)."""
        return self.w_down(F.gelu(self.w_up(x), approximate="tanh"))
