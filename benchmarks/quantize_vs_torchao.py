"""Quantization on this CPU: as a fraction of memory copy speed, and against torchao, in one run on one core.

For each way to quantize a matrix in FP32: seconds a element, bytes moved (input read, output written) per second over
what a copy of the input reaches, and seconds of torchao's over ours. Ours makes the dequantized values, which a CPU
multiplies, and (`codes`) FP8 codes, which are kept and sent; torchao makes codes. Rounds alternate between all, so
that a burst of other work on the machine meets all of them.

Usage: quantize_vs_torchao.py [rows] [columns]
"""

import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from greylag.numerics import quantize
from greylag.numerics.cache import keep_blocks
from greylag.numerics.formats import E4M3, E5M2

ROUNDS = 15


def ours(tile: tuple[int, int], kind: str, codes: bool = False, fmt=E4M3) -> Callable[[Tensor], object]:
    return lambda x: quantize(x, fmt, tile, kind).encoded() if codes else quantize(x, fmt, tile, kind).dequantize()


def theirs(granularity: ScalingGranularity) -> Callable[[Tensor], object]:
    axiswise = -1 if granularity is ScalingGranularity.AXISWISE else None
    return lambda x: hp_tensor_to_float8_dynamic(
        x, torch.float8_e4m3fn, LinearMMConfig(), gemm_input_role=GemmInputRole.INPUT,
        scaling_granularity=granularity, axiswise_dim=axiswise,
    )  # fmt: skip


WAYS: dict[str, tuple[Callable[[Tensor], object], float, str | None]] = {
    "copy": (lambda x: x.clone(), 8, None),
    "torchao tensor, codes": (theirs(ScalingGranularity.TENSORWISE), 5, None),
    "torchao row, codes": (theirs(ScalingGranularity.AXISWISE), 5, None),
    "torchao MX 1x32 floor, codes": (
        lambda x: to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR), 5, None),
    "tensor, values": (ours((0, 0), "fp32"), 8, "torchao tensor, codes"),
    "tensor, codes": (ours((0, 0), "fp32", True), 5, "torchao tensor, codes"),
    "row, codes": (ours((1, 0), "pow2", True), 5, "torchao row, codes"),
    "1x128, values": (ours((1, 128), "pow2"), 8, "torchao tensor, codes"),
    "1x128, codes": (ours((1, 128), "pow2", True), 5, "torchao tensor, codes"),
    "1x128 FP32 scale, values": (ours((1, 128), "fp32"), 8, "torchao tensor, codes"),
    "128x1, values": (ours((128, 1), "pow2"), 8, "torchao tensor, codes"),
    "128x128, values": (ours((128, 128), "pow2"), 8, "torchao tensor, codes"),
    "MX 1x32 ceil, codes": (ours((1, 32), "mx-ceil", True), 5, "torchao MX 1x32 floor, codes"),
    "E5M2 1x128, values": (ours((1, 128), "pow2", fmt=E5M2), 8, "torchao tensor, codes"),
    "E5M6 1x128, kept": (lambda x: keep_blocks(x, "e5m6"), 5.5, None),
}  # fmt: skip
"""(what is timed, bytes moved an element, what it is compared with) by name."""


def main() -> None:
    torch.set_num_threads(1)
    rows, columns = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (2048, 2048)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(ROUNDS):
        for name, (way, _, _) in WAYS.items():
            started = time.process_time()
            way(x)
            best[name] = min(best[name], time.process_time() - started)
    table = Table(title=f"{rows} x {columns} FP32, one core, best of {ROUNDS}")
    for heading in ("", "ns an element", "of copy speed", "torchao / ours"):
        table.add_column(heading, justify="left" if not heading else "right")
    copied = 8 * x.numel() / best["copy"]
    for name, (_, moved, peer) in WAYS.items():
        ratio = f"{best[peer] / best[name]:.2f}" if peer else ""
        speed = moved * x.numel() / best[name]
        table.add_row(name, f"{1e9 * best[name] / x.numel():.2f}", f"{speed / copied:.2f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
