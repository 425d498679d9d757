"""Segments: the rows of each expert, as kernels look them up.

A segment is (first row, number of rows); segments ascend, and first rows are multiples of 128, so that no tile of rows
belongs to two experts. Kernels read them from a small table on the device: where the table is made there, nothing
waits for the host.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from greylag.spec.precision import BLOCK

FAR = tl.constexpr(2**31 - 1)
"""First row of no segment."""


def segment_table(segments: Sequence[tuple[int, int]] | Tensor, device: torch.device) -> Tensor:
    """`segments` as (E, 2), int32, on `device`; a tensor of them is taken as it is.

    ValueError if first rows do not ascend in multiples of 128.
    """
    if isinstance(segments, Tensor):
        return segments.to(device, torch.int32).contiguous()
    end = 0
    for start, count in segments:
        if start % BLOCK or start < end:
            raise ValueError(f"segment ({start}, {count}) does not start at a multiple of {BLOCK} behind row {end}")
        end = start + count
    return torch.tensor(segments, dtype=torch.int32, device=device).view(-1, 2)


def table_size(table: Tensor) -> dict[str, int]:
    """What a kernel is compiled for: the number of segments, rounded up to a power of two."""
    return {"SEGMENTS": triton.next_power_of_2(max(table.shape[0], 1))}


@triton.jit
def segment_of(row, table_ptr, num_segments, SEGMENTS: tl.constexpr):
    """(expert, end of its rows) for a tile that starts at `row`; the end is not above `row` if none owns it.

    Of segments that start at one row all but the last are empty, and it is the last that is found.
    """
    index = tl.arange(0, SEGMENTS)
    starts = tl.load(table_ptr + 2 * index, mask=index < num_segments, other=FAR)
    expert = tl.maximum(tl.sum((starts <= row).to(tl.int32), 0) - 1, 0)
    start = tl.load(table_ptr + 2 * expert)
    return expert, tl.where(start <= row, start + tl.load(table_ptr + 2 * expert + 1), 0)
