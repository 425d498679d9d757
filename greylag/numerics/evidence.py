"""Evidence: what a quantized matrix itself shows about how it was made, whatever its fields claim.

Values are coded and decoded again, scales are computed again from the tensor that was quantized, by every rule there
is. An audit (`train.audit`) asks here; it costs a few passes over each matrix.

Shape suffixes: M rows, K columns.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from greylag.numerics.formats import decode, encode
from greylag.numerics.quantize import Quantized, inverse, over_tiles, tile_amax, tile_name, tiled
from greylag.numerics.scaling import DelayedScale, scale_inv_from_amax
from greylag.spec.precision import BLOCK, ScaleKind

_PLACES = 64
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def format_name(q: Quantized) -> str:
    """The format that holds the numbers: by the claim where there are scales, else by the dtype."""
    if q.scale_inv is not None:
        return q.fmt.name if q.fmt else "unknown"
    held = q.codes if q.codes is not None else q.dequantize()
    return _NAMES.get(held.dtype, str(held.dtype).removeprefix("torch."))


def is_on_grid(q: Quantized) -> bool:
    """Whether every value that would be multiplied is a value of the format times the scale of its tile."""
    if q.scale_inv is None or q.fmt is None:
        return q.scale_inv is None
    if q.values is None:
        return q.codes is not None and q.codes.dtype == q.fmt.container
    values, unit = tiled(q.values.float(), q.tile), over_tiles(q.scale_inv)
    return torch.equal(decode(encode(values * inverse(unit), q.fmt), unit, q.fmt), values)


def is_nearest(source_MK: Tensor, q: Quantized) -> bool:
    """Whether every value is the one of the format that is nearest to the source's, at the scale of its tile."""
    assert q.scale_inv is not None
    assert q.fmt is not None
    unit = over_tiles(q.scale_inv)
    nearest = encode(tiled(source_MK.detach().float(), q.tile) * inverse(unit), q.fmt)
    return torch.equal(decode(nearest, unit, q.fmt), tiled(_values(q), q.tile))


def row_marks(q: Quantized) -> Tensor:
    """A number for each row, (M,) int64, that tells its values from others: the sum of their bits."""
    return (_values(q) + 0.0).contiguous().view(torch.int32).sum(1, dtype=torch.int64)  # + 0.0: zero has one sign


def _values(q: Quantized) -> Tensor:
    """Its FP32 values, which a matrix of codes does not keep for having been asked."""
    return replace(q).dequantize()


def find_rows(part_m: Tensor, whole_M: Tensor) -> list[int]:
    """Where the marks of a run of rows lie among those of a matrix; a few places, since rows of zeros are alike."""
    alive = part_m.nonzero().flatten().tolist()
    first = alive[0] if alive else 0
    starts = ((whole_M == part_m[first]).nonzero().flatten() - first).tolist()[:_PLACES] if len(part_m) else []
    return [s for s in starts if s >= 0 and torch.equal(whole_M[s : s + len(part_m)], part_m)]


def is_pow2(q: Quantized) -> bool:
    """Whether every scale is a power of two."""
    return q.scale_inv is not None and bool((torch.frexp(q.scale_inv.float())[0] == 0.5).all())


def granularity(q: Quantized, contracted: int) -> str:
    """What shares a scale, in the words of `spec.precision` where it lies along the dim that is `contracted`."""
    return tile_name(q.tile if contracted == 1 else (q.tile[1], q.tile[0]))


def scale_kinds(source_MK: Tensor, q: Quantized) -> list[str]:
    """The kinds of scale whose rule gives exactly the scales of `q` from the amax of its source's tiles."""
    return _kinds(_amax(source_MK, q), q)


def group_scale_kinds(source_MK: Tensor, q: Quantized) -> list[str]:
    """The same where tiles of 128 rows share a scale per column with others: one for each expert's columns."""
    assert q.scale_inv is not None
    return _kinds(_shared_amax(_amax(source_MK, q), q.scale_inv), q) if q.tile == (BLOCK, 1) else []


def is_delayed(q: Quantized, scales: Iterable[DelayedScale]) -> bool:
    """Whether the scale of `q` is one that earlier steps left."""
    own = [float(scale.scale_inv) for scale in scales if float(scale.scale_inv) > 0]
    return q.scale_inv is not None and q.tile == (0, 0) and float(q.scale_inv) in own


def _amax(source_MK: Tensor, q: Quantized) -> Tensor:
    return tile_amax(tiled(source_MK.detach().float(), q.tile).abs())


def _kinds(amax: Tensor, q: Quantized) -> list[str]:
    assert q.scale_inv is not None
    assert q.fmt is not None
    scales = q.scale_inv.float()
    return [kind for kind in get_args(ScaleKind) if torch.equal(scale_inv_from_amax(amax, q.fmt, kind), scales)]


def _shared_amax(amax: Tensor, scale_inv: Tensor) -> Tensor:
    """The largest amax, column by column, of all rows of tiles that have the same scales: a group's share theirs."""
    alike, group = torch.unique(scale_inv, dim=0, return_inverse=True)
    most = amax.new_zeros(alike.shape).scatter_reduce_(0, group[:, None].expand_as(amax), amax, "amax")
    return most[group]
