"""Observers: who looks on at the GEMMs of which layer. `numerics.Quantizer` has one place; here several share it."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from greylag.numerics import Quantized, Quantizer
from greylag.numerics.cache import Kept
from greylag.numerics.quantizer import Observer
from greylag.spec.precision import GemmName, OperandRole


class Several:
    """Tells several observers of one layer."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)

    def quantized(self, gemm: GemmName, role: OperandRole, source: Tensor, operand: Quantized) -> None:
        """A matrix became an operand."""
        for observer in self.observers:
            observer.quantized(gemm, role, source, operand)

    def multiplied(self, gemm: GemmName, a: Quantized, b: Quantized, kernel: str, dtype: torch.dtype) -> None:
        """A GEMM was computed."""
        for observer in self.observers:
            observer.multiplied(gemm, a, b, kernel, dtype)

    def kept(self, what: Literal["input", "attention output", "SwiGLU input"], kept: Kept) -> None:
        """A matrix was kept."""
        for observer in self.observers:
            observer.kept(what, kept)


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """What quantizes each linear layer, by the layer's name in `spec.parts` without `.weight`."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Quantizer):
            at, _, last = name.rpartition(".")
            own = last.removesuffix("quantizer").removesuffix("_")  # experts hold one for each of their weights
            found[f"{at}.w_{own}" if own else at] = module
    return found


def attach(quantizer: Quantizer, observer: Observer) -> None:
    """Let one more look on."""
    now = quantizer.observer
    others = now.observers if isinstance(now, Several) else () if now is None else (now,)
    quantizer.observer = Several((*others, observer)) if others else observer


def detach(quantizer: Quantizer, observer: Observer) -> None:
    """Let one of those who look on go."""
    now = quantizer.observer
    rest = tuple(o for o in now.observers if o is not observer) if isinstance(now, Several) else ()
    quantizer.observer = Several(rest) if len(rest) > 1 else rest[0] if rest else None
