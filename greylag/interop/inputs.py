"""Inputs: an operator's arguments as torch's profiler records them with record_shapes=True, by position."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

Shape: TypeAlias = tuple[int, ...]
Recorded: TypeAlias = tuple[bytes, bytes, bytes, bytes]
"""JSON of the dims, the types, the strides and the scalars."""

WIDTHS = {
    **dict.fromkeys(("double", "long", "long int", "int64_t"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("bfloat16", "half", "short", "short int"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bool", "byte", "char", "unsigned char", "signed char"), 1),
}
"""Bytes of an element, by c10's and C++'s names of the type."""


class Inputs(msgspec.Struct, frozen=True, array_like=True):
    """An operator's arguments as recorded; those that are no tensor have neither dims nor strides."""

    dims: list[Any] = []
    types: list[str] = []
    strides: list[list[Any]] = []
    values: list[Any] = []

    @staticmethod
    def of(recorded: Recorded) -> Inputs:
        """What an operator recorded; nothing if it is of another form."""
        try:
            return msgspec.convert([msgspec.json.decode(part) for part in recorded], Inputs)
        except msgspec.ValidationError:
            return Inputs()

    def shape(self, i: int) -> Shape:
        """Dims of an argument; () if it is no tensor, or one of no dims."""
        dims = self.dims[i] if i < len(self.dims) else None
        return tuple(dims) if isinstance(dims, list) and all(isinstance(d, int) for d in dims) else ()

    def type(self, i: int) -> str:
        """Type of an argument's elements, as in `WIDTHS`."""
        return self.types[i].lower().removeprefix("c10::") if i < len(self.types) else ""

    def width(self, i: int) -> int:
        """Bytes of an argument's element; 0 if unknown."""
        return WIDTHS.get(self.type(i), 0)

    def size(self, i: int) -> int:
        """Bytes that reading a tensor takes: dims that are expanded have stride 0 and are not read again."""
        shape = self.shape(i)
        strides = self.strides[i] if i < len(self.strides) and len(self.strides[i]) == len(shape) else (1,) * len(shape)
        return self.width(i) * math.prod(d for d, s in zip(shape, strides, strict=True) if s) if shape else 0

    def fastest(self, i: int) -> int | None:
        """`fastest_dim` of a tensor."""
        return fastest_dim(self.shape(i), self.strides[i] if i < len(self.strides) else [])

    def value(self, i: int) -> str:
        """A scalar as PyTorch prints it; empty if not recorded."""
        return str(self.values[i]) if i < len(self.values) else ""

    def integer(self, i: int | None) -> int | None:
        """An integer; None if there is none."""
        text = "" if i is None else self.value(i)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def last_like(self, shape: Shape, start: int) -> int | None:
        """The last tensor of this shape from position `start` on: the result of an `out=` variant."""
        return next(
            (i for i in reversed(range(start, len(self.dims))) if self.shape(i) == shape and self.width(i)), None
        )


def fastest_dim(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The dim, counted from the last, whose elements are neighbours in memory; None if strides are not recorded.

    Tensors that differ in it are transposes of one another.
    """
    if len(shape) != len(strides):
        return None
    backwards = enumerate(zip(shape[::-1], strides[::-1], strict=True))
    steps = [(step, at) for at, (size, step) in backwards if size > 1 and step]
    return min(steps)[1] if steps else None
