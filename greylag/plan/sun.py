"""Sun et al., Scaling Laws for Floating-Point Quantization Training (arXiv 2501.02423), also called Capybara.

    L = n / N^alpha + d / D^beta + epsilon + D^beta / N^alpha log2(B) / (gamma (E + 1/2)^delta (M + 1/2)^nu)    (26)

N parameters, D tokens, E exponent and M mantissa bits, B numbers that share a scale; L in nats per token. The last term
grows with D: beyond a critical data size D_crit, at which it grows as fast as d / D^beta falls, more tokens hurt.
What the two laws share is `law`'s.
"""

import re
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from greylag.plan.reach import Number, Range
from greylag.spec.error import SpecError

SOURCE = "Sun et al., arXiv 2501.02423, equation 26 and Table 2"
RANGES = (Range("parameters", 41e6, 679e6), Range("tokens", 0, 100e9), Range("exponent", 1, 8), Range("mantissa", 0, 7))
"""Parameters: the paper's runs of 41M to 679M. Tokens: of the order of 100B, by a review of the paper; no lower end is
known to us. Bits: the layouts that the paper names, FP4 to BF16; which were fitted is not known to us."""
REMARKS = (
    "fitted where three operands of six were quantized: weights forward and backward, inputs in the weight gradient; "
    "not the activations forward nor the gradients, which lose most",
    "held against runs of 1.2B, 7B and 70B parameters; the paper puts the best precision at 4 to 8 bits for 1e21 to "
    "1e31 FLOPs",
    "says nothing of the KV cache, nor of quantizing after training",
    "losses have no interval: the paper prints its constants without errors",
)
CHANNEL = 2**13.1567
"""B of one scale per channel: log2 B = 13.1567 was fitted (Table 2)."""
BLOCK = 128.0
NAMES = {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}
"""Exponent and mantissa bits of the formats that are not named by them."""
FORMATS = ("fp32", "bf16", "e5m6", "e4m3", "e5m2", "e3m2", "e2m3", "e2m2", "e2m1")
"""What may be chosen from: each can be trained with on some machine, or emulated here (`numerics.formats`)."""
SOUGHT = (3.0, 32.0)
"""Bits between which the best precision is sought: the paper tells of FP3, and of nothing narrower."""
_LAYOUT = re.compile(r"e(\d)m(\d\d?)")


class Layout(NamedTuple):
    """A floating-point format with its scale: numbers, or arrays of one shape."""

    exponent: Number
    """Bits."""
    mantissa: Number
    """Bits after the leading one."""
    block: Number = BLOCK
    """Numbers that share a scale."""

    def __str__(self) -> str:
        e, m, block = (float(value) for value in self)
        whole = e == round(e) and m == round(m)
        return (f"E{e:.0f}M{m:.0f}" if whole else f"E{e:.1f}M{m:.1f}") + f", {block:,.0f} numbers a scale"


class Sun(msgspec.Struct, frozen=True, kw_only=True):
    """The law with its constants: the paper's, or those of a fit."""

    name: str = "sun"
    source: str = SOURCE
    n: float = 69.2343
    alpha: float = 0.2368
    d: float = 68973.0621
    beta: float = 0.5162
    epsilon: float = 1.9061
    gamma: float = 11334.5197
    delta: float = 3.1926
    nu: float = 2.9543
    block: float = BLOCK
    """Of the formats that are chosen from."""
    bits_sought: tuple[float, float] = SOUGHT
    """Of a fit, what its runs spanned."""
    ranges: tuple[Range, ...] = RANGES
    remarks: tuple[str, ...] = REMARKS

    def fineness(self, precision: Layout) -> Number:
        """gamma (E + 1/2)^delta (M + 1/2)^nu / log2 B; the precision term is D^beta / N^alpha over it."""
        e, m, block = (np.asarray(value, float) for value in precision)
        with np.errstate(divide="ignore"):  # a scale for each number costs nothing
            fineness: Number = self.gamma * (e + 0.5) ** self.delta * (m + 0.5) ** self.nu / np.log2(block)
        return fineness

    def loss(self, parameters: Number, tokens: Number, precision: Layout) -> Number:
        """Nats per token."""
        size, data = np.asarray(parameters, float) ** self.alpha, np.asarray(tokens, float) ** self.beta
        return self.n / size + self.d / data + self.epsilon + data / size / self.fineness(precision)

    def critical_tokens(self, parameters: float, precision: Layout) -> float | None:
        """D_crit: tokens beyond which more raise the loss, where dL/dD = 0."""
        most = self.d * np.asarray(parameters, float) ** self.alpha * self.fineness(precision)
        return float(most ** (1 / (2 * self.beta)))

    def post_training(self, parameters: float, tokens: float) -> tuple[()]:
        """Nothing: the law is of training."""
        return ()

    def bits(self, precision: Layout) -> Number:
        """P of the cost (6/16) N D P: sign, exponent and mantissa."""
        return 1 + precision.exponent + precision.mantissa

    def at_bits(self, bits: Number) -> Layout:
        """The best split of any number of bits, which the law has at E + 1/2 : M + 1/2 = delta : nu.

        Neither goes below 0: from there on, all further bits are taken from the other.
        """
        bits = np.asarray(bits, float)
        exponent = np.clip(bits * self.delta / (self.delta + self.nu) - 0.5, 0, np.maximum(bits - 1, 0))
        return Layout(exponent, bits - 1 - exponent, np.full_like(bits, self.block))

    def choices(self) -> dict[str, Layout]:
        """The formats to choose from, by name."""
        return {name.upper(): layout(name, self.block) for name in FORMATS}

    def coordinates(self, precision: Layout) -> dict[str, float]:
        """What `ranges` are held against."""
        return {field: float(value) for field, value in zip(Layout._fields, precision, strict=True)}


def layout(name: str, block: float | Literal["channel"] = BLOCK) -> Layout:
    """A format by its name (bf16, e4m3) whose scale is shared by a block, or a channel. SpecError if there is none."""
    size = CHANNEL if block == "channel" else float(block)
    if not 1 <= size < float("inf"):
        raise SpecError(f"--block {block}: give how many numbers share a scale (128), or channel")
    match = _LAYOUT.fullmatch(name.lower())
    split = NAMES.get(name.lower()) or (match and (int(match[1]), int(match[2])))
    if split is None:
        hint = {"fp8": "e4m3 or e5m2", "fp6": "e2m3 or e3m2", "fp4": "e2m1"}.get(name.lower(), "bf16, e4m3 or e2m1")
        raise SpecError(f"--format {name!r}: no format by that name; write its exponent and mantissa bits ({hint})")
    return Layout(float(split[0]), float(split[1]), size)
