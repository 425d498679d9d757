"""Audit: what one step of a run really multiplied, kept, stored and sent, as its observers saw it.

The trainer writes one `Audit` per line of `audit.jsonl`; `report.audit` holds it against what the job says. Where a
tensor cannot tell two settings apart (a row of a single block), all that fit are named. Nothing here says what should
be: that is `spec.precision`'s and `spec.messages`'s.
"""

import msgspec

from greylag.spec.precision import GemmName

DELAYED = "delayed"
"""Name of the rule whose scale comes from earlier steps; those of the tensor at hand are `current_rule`'s."""


def current_rule(kind: str) -> str:
    """Name of the rule that takes a scale of a kind from the tensor at hand."""
    return f"current {kind}"


class OperandSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operand of a GEMM, as the kernel was handed it."""

    format: str
    """A key of `spec.precision.BYTES`."""
    tiles: tuple[str, ...] = ()
    """Granularities that its scales fit, along the contracted dimension; empty without scales."""
    rules: tuple[str, ...] = ()
    """Rules that reproduce its scales from the tensor or from the history, bit for bit; empty if none does."""
    is_pow2: bool = False
    """Whether every scale is a power of two."""
    on_grid: bool = True
    """Whether every value is one of the format's times its scale."""
    is_nearest: bool = True
    """Whether every value is the nearest one to that of the tensor it was made of."""


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """A GEMM of a layer, `count` times over."""

    layer: str
    gemm: GemmName
    a: OperandSeen
    """The first operand of `spec.precision.OPERANDS`."""
    b: OperandSeen
    kernel: str
    """What `numerics.gemm` says that it calls."""
    op: str
    """What torch's dispatcher was asked to multiply, with dtypes; empty if it was not asked (a Triton kernel)."""
    dtype: str
    """Of the result."""
    count: int = 1


class CacheSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix that a layer keeps for backward."""

    layer: str
    what: str
    """`input`, `attention output` or `SwiGLU input`."""
    form: str
    """Format and tiles."""
    bytes_per_element: float
    """Of all tensors that are kept, scales among them."""
    count: int = 1


class StateSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors at rest of one kind and dtype."""

    what: str
    """`weights`, `gradients`, or a key of the optimizer's state."""
    of: str
    """`matrices` or `vectors`."""
    dtype: str
    elements: int


class MessageSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind and dtype."""

    collective: str
    """As in `spec.messages.Message`; what it does not know goes by its name in torch."""
    dtype: str
    bytes: int
    """Of the whole tensors: gathered, or before scattering; of all `count` together."""
    count: int


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of rank 0."""

    step: int
    device: str
    torch: str
    """Version."""
    time: float
    """Unix time at the end of the step."""
    products: tuple[Product, ...]
    caches: tuple[CacheSeen, ...]
    states: tuple[StateSeen, ...]
    messages: tuple[MessageSeen, ...]
