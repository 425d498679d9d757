"""Payload: rows of numbers as bytes, the form in which tokens and their gradients travel between ranks.

In `high` a row's bytes are its numbers' own. In `e4m3` they are a code for each number and, behind the codes, a power
of two as an E8M0 byte for each 128 of them (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Bytes go over every
backend; gloo takes no FP8 dtype (torch 2.13).

A layer whose input is E4M3 in 1x128 blocks with powers of two rounds what arrives to itself: every value lies on the
grid of its block's scale, and on any finer one. So FP8 on the wire changes none of that layer's numbers.

Shape suffixes: M rows, K numbers of a row, B bytes of a row.
"""

from typing import Literal

import torch
from torch import Tensor

from greylag.numerics.formats import E4M3, E8M0_NAN, decode_e8m0, encode_e8m0
from greylag.numerics.quantize import Quantized, quantize, tile_of

Form = Literal["high", "e4m3"]

_TILE = tile_of("1x128")


def pack(x_MK: Tensor, form: Form) -> Tensor:
    """Bytes (M, B), uint8, of FP32 or BF16 rows (M, K).

    A saturating cast hides Inf: with Inf or NaN anywhere all scales become NaN, so that whoever unpacks it sees it.
    """
    if form == "high":
        return x_MK.contiguous().view(torch.uint8)
    nonfinite = torch.zeros((), dtype=torch.int64, device=x_MK.device)
    q = quantize(x_MK, E4M3, _TILE, "pow2", nonfinite=nonfinite)
    assert q.scale_inv is not None
    scales = encode_e8m0(q.scale_inv).masked_fill_(nonfinite > 0, E8M0_NAN)
    return torch.cat((q.encoded().contiguous().view(torch.uint8), scales), dim=1)


def unpack(packed_MB: Tensor, width: int, form: Form, dtype: torch.dtype) -> Tensor:
    """Rows (M, `width`) of `dtype` from the bytes that `pack` made of rows of that width and dtype."""
    if form == "high":
        return packed_MB.reshape(-1).view(dtype).view(-1, width)
    codes, scales = packed_MB[:, :width].contiguous(), packed_MB[:, width:]
    shape = (packed_MB.shape[0], width)
    return Quantized(shape, _TILE, decode_e8m0(scales), codes.view(torch.float8_e4m3fn)).dequantize().to(dtype)


def pack_marks(marks_MN: Tensor) -> Tensor:
    """Bytes (M, ceil(N / 8)), a bit for each of the booleans (M, N), the first lowest."""
    M, N = marks_MN.shape
    bits = torch.nn.functional.pad(marks_MN.to(torch.uint8), (0, -N % 8)).view(M, -(-N // 8), 8)
    return bits.bitwise_left_shift_(_places(bits)).sum(-1, dtype=torch.uint8)


def unpack_marks(packed_MB: Tensor, num_marks: int) -> Tensor:
    """The booleans (M, `num_marks`) of the bytes that `pack_marks` made of them."""
    bits = packed_MB.unsqueeze(-1).bitwise_right_shift(_places(packed_MB)).bitwise_and_(1)
    return bits.flatten(1)[:, :num_marks].bool()


def _places(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)
