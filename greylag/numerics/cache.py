"""Cache: in what form a matrix is kept from forward to backward.

A `Kept` is a few tensors and the way back from them. The tensors go through autograd's `save_for_backward`, of
whoever needs the matrix again, so that recompute, offload and measurement see them; two readers of one matrix (the
attention and the projection behind it, SwiGLU and the down-projection) save the same tensors, and nothing twice.
Scales that are powers of two are kept as E8M0, a byte each.

Shape suffixes: P rows (tokens), K columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from greylag.numerics.formats import E4M3, FORMATS, decode_e8m0, encode_e8m0, pack_e5m6, unpack_e5m6
from greylag.numerics.quantize import (
    Quantized,
    inverse,
    over_tiles,
    plain,
    quantize,
    tile_amax,
    tile_name,
    tile_of,
    tiled,
    untiled,
)
from greylag.numerics.scaling import scale_inv_from_amax
from greylag.spec.precision import ScaleKind

Form = Literal["e4m3", "e5m6"]


def form_of(setting: str) -> Form | None:
    """The form that a setting of `Precision` names; None for `high` and `recipe`."""
    forms: dict[str, Form] = {"e4m3": "e4m3", "e5m6": "e5m6"}
    return forms.get(setting)


@dataclass(frozen=True)
class Kept:
    """A matrix as it is kept."""

    tensors: tuple[Tensor, ...]
    restore: Callable[..., Quantized]
    """(*tensors) to the matrix."""
    form: str
    """The format and its tiles, for who asks what was kept."""

    def matrix(self) -> Tensor:
        """The matrix, restored in FP32."""
        return self.restore(*self.tensors).dequantize()


def keep(q: Quantized, kind: ScaleKind) -> Kept:
    """Keep a quantized matrix as codes and scales; one that has no scale as it is."""
    shape, tile, fmt = q.shape, q.tile, q.fmt
    if q.scale_inv is None:
        assert q.codes is not None
        return Kept((q.codes,), plain, str(q.codes.dtype).removeprefix("torch."))
    assert fmt is not None
    is_power = kind != "fp32"

    def restore(codes: Tensor, scale: Tensor) -> Quantized:
        return Quantized(shape, tile, decode_e8m0(scale) if is_power else scale, codes, fmt=fmt)

    scale = encode_e8m0(q.scale_inv) if is_power else q.scale_inv
    return Kept((q.encoded(), scale), restore, f"{fmt.name} {q.tiles}")


def keep_blocks(x_PK: Tensor, form: Form) -> Kept:
    """Keep `x` (P, K) in 1x128 blocks with power-of-two scales: E4M3, or E5M6 in 12 bits (DeepSeek-V3, 3.3.3)."""
    if form == "e4m3":
        return keep(quantize(x_PK, E4M3, tile_of("1x128"), "pow2"), "pow2")
    shape, tile, fmt = (x_PK.shape[0], x_PK.shape[1]), tile_of("1x128"), FORMATS[form]
    x = tiled(x_PK.detach().float(), tile)
    scale_inv = scale_inv_from_amax(tile_amax(x.abs()), fmt, "pow2")
    scaled = untiled(x * inverse(over_tiles(scale_inv)), shape)

    def restore(packed: Tensor, scale: Tensor) -> Quantized:
        values = tiled(unpack_e5m6(packed, shape), tile).mul_(over_tiles(decode_e8m0(scale)))
        return plain(untiled(values, shape))

    return Kept((pack_e5m6(scaled), encode_e8m0(scale_inv)), restore, f"{form} {tile_name(tile)}")
