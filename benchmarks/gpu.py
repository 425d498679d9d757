"""Kernels on a GPU: first whether each gives what the CPU reference gives, then how fast it is, as ratios.

Quantizing kernels are held against the speed of a plain copy on the same device: what they move, over the time they
take, is at best that. GEMMs are held against cuBLAS in BF16, and torch's scaled_mm per tensor and per block; the
grouped GEMM against a loop over the experts; fused kernels against the torch operators that they replace. Shapes are a
DeepSeek-V3 layer's. Ratios come from one run on one device, medians of many launches with a cold L2 cache.

    python benchmarks/gpu.py [--tokens 8192] [--out gpu.json] [--minutes 7]

Without a CUDA device it says so and exits with 2; with a kernel that is wrong it times nothing and exits with 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics import Quantized, quantize
from greylag.numerics.formats import E4M3, E5M2
from greylag.numerics.swiglu import swiglu
from greylag.spec.precision import ScaleKind

HIDDEN, EXPERT_WIDTH, EXPERTS, TOP_K = 7168, 2048, 32, 8
"""DeepSeek-V3 (arXiv 2412.19437, section 4.2); of its 256 experts the 32 that one of 8 GPUs of a group would hold."""
COPY_BYTES = 1 << 30
Timer = Callable[[Callable[[], Any]], float]  # seconds of a call


@dataclass
class Check:
    """Whether a kernel gives what the reference gives: the worst of it against a bound."""

    kernel: str
    worst: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the worst is within the bound; a NaN is not."""
        return self.worst <= self.bound


@dataclass
class Timing:
    """One kernel's time, and its speed relative to something timed in the same run: above 1 is faster."""

    kernel: str
    seconds: float
    against: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.kernel:44} {1e6 * self.seconds:10.1f} us {self.ratio:8.3f} x {self.against}"


def main() -> int:
    arguments = parse(sys.argv[1:])
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked and nothing was timed")
        return 2
    device = torch.device("cuda")
    checks = [*quantize_checks(device), *fused_checks(device), *product_checks(device)]
    print(check_table(checks))
    right = all(check.holds for check in checks)
    timings = [*timed(device, arguments)] if right else []
    arguments.out.write_text(json.dumps(record(device, arguments.tokens, checks, timings), indent=1))
    print(f"written to {arguments.out}")
    return 0 if right else 1


def timed(device: torch.device, arguments: argparse.Namespace) -> Iterator[Timing]:
    """All timings that the minutes allow, each printed as it comes."""
    import triton.testing

    def timer(call: Callable[[], Any]) -> float:
        return 1e-3 * triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median")

    stop = time.monotonic() + 60 * arguments.minutes
    for section in (memory_bound, products, grouped):
        for timing in section(device, arguments.tokens, timer):
            print(timing, flush=True)
            yield timing
            if time.monotonic() > stop:
                print(f"{arguments.minutes:g} minutes are over: the rest is not timed")
                return


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check and time greylag's kernels on this machine's GPU.")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of activations; a multiple of 128")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the numbers go, as JSON")
    parser.add_argument("--minutes", type=float, default=6.0, help="stop timing after these")
    arguments = parser.parse_args(words)
    if arguments.tokens <= 0 or arguments.tokens % 128:
        parser.error(f"--tokens {arguments.tokens} is not a multiple of 128")
    return arguments


def record(device: torch.device, tokens: int, checks: list[Check], timings: list[Timing]) -> dict[str, Any]:
    """All that was seen, for the file."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "tokens": tokens,
        "checks": [asdict(check) | {"holds": check.holds} for check in checks],
        "timings": [asdict(timing) for timing in timings],
    }


def check_table(checks: list[Check]) -> str:
    """The checks, one a line."""
    lines = [f"{'kernel':44} {'worst':>10} {'bound':>10}"]
    lines += [f"{c.kernel:44} {c.worst:10.3g} {c.bound:10.3g}{'' if c.holds else '  WRONG'}" for c in checks]
    return "\n".join(lines)


# Checks: shapes are ragged on purpose


def normal(rows: int, columns: int, seed: int) -> Tensor:
    """BF16 numbers (rows, columns) on the CPU, the rows of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp2(2.0 * torch.randn(rows, 1, generator=generator))).bfloat16()


def off(codes: Tensor, expected: Tensor) -> float:
    """The share of codes that differ, but for the sign of zeros."""
    return ((codes.cpu().float() + 0.0) != (expected.float() + 0.0)).double().mean().item()


def differing(codes: Tensor, scale_inv: Tensor, expected: Quantized) -> float:
    """The shares of codes and of scales that differ, together."""
    assert expected.scale_inv is not None
    return off(codes, expected.encoded()) + off(scale_inv, expected.scale_inv)


def quantize_checks(device: torch.device) -> Iterator[Check]:
    """Codes and scales, which are to be the same bits."""
    from greylag.numerics.kernels import quantize as kernels

    x = normal(300, 520, 0)
    x[5, 7], x[9, 300], x[40:50] = float("inf"), float("nan"), 0.0
    finite = x.float().nan_to_num(0.0, 0.0, 0.0).bfloat16()
    kinds: tuple[ScaleKind, ScaleKind] = ("pow2", "fp32")
    for fmt in (E4M3, E5M2):
        for kind in kinds:
            out = kernels.quantize_1x128(finite.to(device), fmt, kind)
            rows, columns = quantize(finite, fmt, (1, 128), kind), quantize(finite, fmt, (128, 1), kind)
            turned, turned_scale = out.columns
            worst = differing(*out.rows, rows) + differing(turned.t(), turned_scale.t(), columns)
            yield Check(f"quantize 1x128 and 128x1, {fmt.name} {kind}", worst, 0.0)
            square = kernels.quantize_128x128(finite.to(device), fmt, kind)
            q = quantize(finite, fmt, (128, 128), kind)
            worst = differing(*square.rows, q) + off(square.columns[0], q.encoded().t())
            yield Check(f"quantize 128x128, {fmt.name} {kind}", worst, 0.0)
            whole, _ = kernels.quantize_tensor(finite.to(device), fmt, kind)
            q = quantize(finite, fmt, (0, 0), kind)
            yield Check(f"quantize a tensor, {fmt.name} {kind}", differing(*whole.rows, q), 0.0)
            turned, turned_scale = kernels.turn_1x128(*out.rows, kind)
            again = quantize(rows.dequantize(), fmt, (128, 1), kind)
            yield Check(f"turn 1x128 to 128x1, {fmt.name} {kind}", differing(turned.t(), turned_scale.t(), again), 0.0)
    counted = torch.zeros((), dtype=torch.int64, device=device)
    kernels.quantize_1x128(x.to(device), E4M3, "pow2", nonfinite=counted)
    yield Check("tiles with Inf and NaN counted, of 4", abs(counted.item() - 4), 0.0)


def fused_checks(device: torch.device) -> Iterator[Check]:
    """The share of codes that differ: the exponential and the order of sums are the device's own."""
    from greylag.numerics.kernels import norm
    from greylag.numerics.kernels import swiglu as gated

    x = normal(300, 1040, 1)
    out = gated.swiglu_quantize(x.to(device), E4M3, "pow2", turned=True)
    y = swiglu(x)
    rows, columns = quantize(y, E4M3, (1, 128), "pow2"), quantize(y, E4M3, (128, 1), "pow2")
    worst = max(off(out.codes, rows.encoded()), off(out.columns[0].t(), columns.encoded()))
    yield Check("SwiGLU + quantize", worst, 1e-3)
    weight = normal(1, 1040, 2)[0].float()
    y = (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).bfloat16()
    rows = quantize(y, E4M3, (1, 128), "pow2")
    for turned in (False, True):
        out, _ = norm.rmsnorm_quantize(x.to(device), weight.to(device), 1e-5, E4M3, "pow2", turned)
        yield Check(f"RMSNorm + quantize{' both ways' * turned}", off(out.codes, rows.encoded()), 1e-3)


def values(codes: Tensor, scale_inv: Tensor, rows: int = 1) -> Tensor:
    """FP64 values on the CPU of codes with a scale for each `rows` rows and 128 columns."""
    scale = scale_inv.cpu().double().repeat_interleave(rows, 0)[: codes.shape[0]]
    return codes.cpu().float().double() * scale.repeat_interleave(128, 1)[:, : codes.shape[1]]


def distance(out: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest error of `out` = a b^T, relative to the sum of the magnitudes of its products."""
    magnitude = (a.abs() @ b.abs().t()).clamp_min(1e-30)
    return ((out.cpu().double() - a @ b.t()).abs() / magnitude).max().item()


def product_checks(device: torch.device) -> Iterator[Check]:
    """Errors of FP32 products; positive operands and a long sum show a sum that is not promoted every 128."""
    from greylag.numerics.kernels import gemm
    from greylag.numerics.kernels import grouped as experts
    from greylag.numerics.kernels import quantize as kernels

    bound = 2.0**-10  # the tensor core keeps about 14 bits of a sum of 128
    x = kernels.quantize_1x128(normal(300, 520, 3).to(device), E4M3, "pow2")
    g = kernels.quantize_1x128(normal(300, 400, 4).to(device), E5M2, "pow2")
    w = kernels.quantize_128x128(normal(400, 520, 5).to(device), E4M3, "fp32")
    out = gemm.block_scaled_gemm(*x.rows, *w.rows, torch.float32)
    worst = distance(out, values(*x.rows), values(*w.rows, 128))
    yield Check("block GEMM, forward", worst, bound)
    out = gemm.block_scaled_gemm(*g.rows, *w.columns, torch.float32)
    worst = distance(out, values(*g.rows), values(*w.columns, 128))
    yield Check("block GEMM, input gradient", worst, bound)
    out = gemm.block_scaled_gemm(*g.columns, *x.columns, torch.float32)
    worst = distance(out, values(*g.columns), values(*x.columns))
    yield Check("block GEMM, weight gradient", worst, bound)
    a = kernels.quantize_1x128(normal(128, 8192, 6).abs().to(device), E4M3, "pow2", turned=False)
    out = gemm.block_scaled_gemm(*a.rows, *a.rows, torch.float32)
    positive = values(*a.rows)
    yield Check("block GEMM, a sum of 8192 positive numbers", distance(out, positive, positive), bound)
    segments, inside = [(0, 100), (128, 0), (128, 172)], torch.ones(300, 1)
    inside[100:128] = 0.0
    x = kernels.quantize_1x128((normal(300, 520, 3) * inside).to(device), E4M3, "pow2")
    g = kernels.quantize_1x128((normal(300, 400, 4) * inside).to(device), E4M3, "pow2")
    w3 = [kernels.quantize_128x128(normal(400, 520, seed).to(device), E4M3, "pow2") for seed in (5, 6, 7)]
    codes, scale_inv = torch.stack([q.codes for q in w3]), torch.stack([q.scale_inv for q in w3])
    y = experts.grouped_gemm(*x.rows, codes, scale_inv, segments, torch.float32)
    dw = experts.grouped_weight_gradient(*g.columns, *x.columns, segments, torch.float32)
    worst, worst_w = y[100:128].abs().max().item(), dw[1].abs().max().item()
    for expert, rows in ((0, slice(0, 100)), (2, slice(128, 300))):
        weight = values(*w3[expert].rows, 128)
        worst = max(worst, distance(y[rows], values(x.codes[rows], x.scale_inv[rows]), weight))
        gx = (values(*q.columns)[:, rows] for q in (g, x))
        worst_w = max(worst_w, distance(dw[expert], *gx))
    yield Check("grouped GEMM, and zero between segments", worst, bound)
    yield Check("grouped weight gradient, and zero for no token", worst_w, bound)


# Timings


def memory_bound(device: torch.device, tokens: int, timer: Timer) -> Iterator[Timing]:
    """Quantizing kernels against a copy of as many bytes, and against the torch operators they replace."""
    from greylag.numerics.kernels import norm
    from greylag.numerics.kernels import quantize as kernels
    from greylag.numerics.kernels import swiglu as gated

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / timer(lambda: target.copy_(source))
    yield Timing(f"copy, {copy / 1e9:.0f} GB/s", 2 * source.numel() / copy, "itself", 1.0)
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    wide = torch.randn(tokens, 2 * EXPERT_WIDTH, device=device).bfloat16()
    weight = torch.ones(HIDDEN, device=device)
    codes = kernels.quantize_1x128(x, E4M3, "pow2", turned=False)
    cases: list[tuple[str, Callable[[], Any], float, Callable[[], Any] | None]] = [
        ("quantize 1x128", lambda: kernels.quantize_1x128(x, E4M3, "pow2", turned=False), 3, lambda: along(x, 1)),
        ("quantize 1x128 and 128x1", lambda: kernels.quantize_1x128(x, E4M3, "pow2"), 4, lambda: along(x, 2)),
        ("quantize 1x128 and 128x1, fp32 scales", lambda: kernels.quantize_1x128(x, E4M3, "fp32"), 4, None),
        ("turn 1x128 to 128x1", lambda: kernels.turn_1x128(*codes.rows, "pow2"), 2, None),
        ("quantize 128x128 and transpose", lambda: kernels.quantize_128x128(x, E4M3, "pow2"), 4, None),
        ("quantize a tensor, two readings", lambda: kernels.quantize_tensor(x, E4M3, "pow2"), 6, None),
        (
            "RMSNorm + quantize 1x128",
            lambda: norm.rmsnorm_quantize(x, weight, 1e-5, E4M3, "pow2"),
            3,
            lambda: along(F.rms_norm(x, (HIDDEN,), weight.bfloat16(), 1e-5), 1),
        ),
    ]
    for name, call, bytes_each, unfused in cases:
        seconds = timer(call)
        moved = bytes_each * x.numel()
        yield Timing(name, seconds, "the speed of a copy", moved / seconds / copy)
        if unfused:
            yield Timing(name, seconds, "torch operators", timer(unfused) / seconds)
    seconds = timer(lambda: gated.swiglu_quantize(wide, E4M3, "pow2"))
    yield Timing("SwiGLU + quantize 1x128", seconds, "the speed of a copy", 2.5 * wide.numel() / seconds / copy)
    apart = timer(lambda: kernels.quantize_1x128(swiglu(wide), E4M3, "pow2", turned=False))
    yield Timing("SwiGLU + quantize 1x128", seconds, "SwiGLU, then quantize 1x128", apart / seconds)


def along(x: Tensor, directions: int) -> list[Any]:
    """Quantize by torch's operators in 1x128 tiles, and with two directions in 128x1 as well, transposed."""
    out: list[Any] = [quantize(x, E4M3, (1, 128), "pow2")]
    return out if directions == 1 else [*out, quantize(x, E4M3, (128, 1), "pow2").encoded().t().contiguous()]


def products(device: torch.device, tokens: int, timer: Timer) -> Iterator[Timing]:
    """GEMMs of a dense layer against cuBLAS."""
    from greylag.numerics.kernels import gemm
    from greylag.numerics.kernels import quantize as kernels

    M, K, N = tokens, HIDDEN, 2 * EXPERT_WIDTH
    x, w = torch.randn(M, K, device=device).bfloat16(), torch.randn(N, K, device=device).bfloat16()
    qx, qw = kernels.quantize_1x128(x, E4M3, "pow2"), kernels.quantize_128x128(w, E4M3, "pow2")
    qg = kernels.quantize_1x128(torch.randn(M, N, device=device).bfloat16(), E4M3, "pow2")
    one = torch.ones((), device=device)
    per_tensor = (F.ScalingType.TensorWise, one), (F.ScalingType.TensorWise, one)
    per_block = (
        (F.ScalingType.BlockWise1x128, qx.scale_inv),
        (F.ScalingType.BlockWise128x128, qw.scale_inv.t().contiguous().t()),
    )
    rivals = {
        "cuBLAS BF16": attempt(timer, lambda: torch.mm(x, w.t())),
        "scaled_mm per tensor": attempt(timer, lambda: scaled_mm(qx.codes, qw.codes, *per_tensor)),
        "scaled_mm 1x128 x 128x128": attempt(timer, lambda: scaled_mm(qx.codes, qw.codes, *per_block)),
    }
    shapes = [gemm.Shape(), gemm.Shape(stages=3), gemm.Shape(64, 128, 4, 3), gemm.Shape(64, 128, 4, 4)]
    operands = *qx.rows, *qw.rows
    for shape in shapes:
        seconds = timer(partial(gemm.block_scaled_gemm, *operands, torch.bfloat16, shape))
        for rival, time_of_it in rivals.items():
            if time_of_it:
                yield Timing(f"block GEMM {'x'.join(map(str, shape))}", seconds, rival, time_of_it / seconds)
    seconds = timer(lambda: gemm.block_scaled_gemm(*qg.rows, *qw.columns, torch.bfloat16))
    yield Timing("block GEMM, input gradient", seconds, "cuBLAS BF16", (rivals["cuBLAS BF16"] or 0.0) / seconds)
    operands = *qg.columns, *qx.columns
    for shape in shapes:
        seconds = timer(partial(gemm.block_scaled_gemm, *operands, torch.float32, shape))
        name = f"weight gradient {'x'.join(map(str, shape))}"
        yield Timing(name, seconds, "cuBLAS BF16", (rivals["cuBLAS BF16"] or 0.0) / seconds)


def scaled_mm(a: Tensor, b_NK: Tensor, a_scale: tuple[Any, Tensor], b_scale: tuple[Any, Tensor]) -> Tensor:
    """Torch's own FP8 product."""
    return F.scaled_mm(a, b_NK.t(), a_scale[1], a_scale[0], b_scale[1], b_scale[0], output_dtype=torch.bfloat16)


def attempt(timer: Timer, call: Callable[[], Any]) -> float | None:
    """Seconds of a call, or None where torch refuses it on this device."""
    try:
        return timer(call)
    except (RuntimeError, ValueError) as refusal:
        print(f"refused: {str(refusal).splitlines()[0][:100]}")
        return None


def grouped(device: torch.device, tokens: int, timer: Timer) -> Iterator[Timing]:
    """GEMMs of all experts in one launch against a loop over them, and BF16's grouped product."""
    from greylag.numerics.kernels import gemm
    from greylag.numerics.kernels import grouped as kernels
    from greylag.numerics.kernels import quantize as quantizing

    segments, P = crowd(tokens)
    K, N = HIDDEN, 2 * EXPERT_WIDTH
    x, g = (torch.randn(P, width, device=device).bfloat16() for width in (K, N))
    w = torch.randn(EXPERTS, N, K, device=device).bfloat16()
    qx, qg = quantizing.quantize_1x128(x, E4M3, "pow2"), quantizing.quantize_1x128(g, E4M3, "pow2")
    square = quantizing.quantize_128x128(w.view(-1, K), E4M3, "pow2", turned=False)
    codes, scale_inv = square.codes.unflatten(0, (EXPERTS, N)), square.scale_inv.unflatten(0, (EXPERTS, -1))
    table = torch.tensor(segments, dtype=torch.int32, device=device)

    def loop() -> None:
        for (start, count), w_NK, w_scale in zip(segments, codes, scale_inv, strict=True):
            rows = slice(start, start + count)
            if count:
                gemm.block_scaled_gemm(qx.codes[rows], qx.scale_inv[rows], w_NK, w_scale, torch.bfloat16)

    seconds = timer(lambda: kernels.grouped_gemm(*qx.rows, codes, scale_inv, table, torch.bfloat16))
    yield Timing(f"grouped GEMM, {EXPERTS} experts", seconds, "a loop of block GEMMs", timer(loop) / seconds)
    ends = table[:, 0] + (table[:, 1] + 127) // 128 * 128
    bf16 = attempt(timer, lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends))
    if bf16:
        yield Timing(f"grouped GEMM, {EXPERTS} experts", seconds, "grouped_mm BF16", bf16 / seconds)
    operands = *qg.columns, *qx.columns
    seconds = timer(lambda: kernels.grouped_weight_gradient(*operands, table, torch.float32))
    bf16 = attempt(timer, lambda: F.grouped_mm(g.t(), x, offs=ends))
    if bf16:
        yield Timing("grouped weight gradient", seconds, "grouped_mm BF16", bf16 / seconds)


def crowd(tokens: int) -> tuple[list[tuple[int, int]], int]:
    """(segments, rows) when each of `tokens` tokens of every GPU of the group goes to `TOP_K` experts, some crowded."""
    popularity = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(0)) + 0.5
    segments, row = [], 0
    for share in (popularity / popularity.sum()).tolist():
        segments.append((row, int(share * tokens * TOP_K)))
        row += -(-segments[-1][1] // 128) * 128
    return segments, row


if __name__ == "__main__":
    sys.exit(main())
