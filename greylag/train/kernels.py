"""Kernels: GEMMs, attention cores and moves at given shapes, to be timed by `train.accelerator`.

They are torch's own (cuBLAS, cuDNN, FlashAttention), since those are what the constants of `spec.cluster.Efficiency`
stand for; and this package's FP8 quantization, where it is one kernel. A short kernel is timed several times in a row,
on operands of its own each, which no cache holds. Operands are random normal numbers: on zeros an accelerator draws
less power, throttles less and is up to 15% faster than in training
(https://www.thonking.ai/p/strangely-matrix-multiplications).
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from greylag.numerics import quantize
from greylag.numerics.device import by_kernel, implementation
from greylag.numerics.formats import E4M3
from greylag.numerics.gemm import device_refusal
from greylag.spec.measurement import AttentionSample, Dtype, GemmSample, MoveSample, Sample
from greylag.spec.precision import BLOCK
from greylag.spec.work import core_flops
from greylag.train.stopwatch import IN_A_ROW, Timed, Trial, in_a_row, seconds

KINDS = {
    "fp8": "GEMMs in FP8",
    "grouped bf16": "grouped GEMMs in BF16",
    "grouped fp8": "grouped GEMMs in FP8",
    "accumulating": "GEMMs that add to FP32",
    "attention": "fused attention",
    "quantize": "quantization to FP8",
}
"""What a device may lack a kernel for, in words."""

OUT_BYTES = 2.0
"""Of an element of a GEMM's result, BF16 unless it adds to FP32."""
HEAD_DIM = 128
WIDTH = 4096
"""Elements of a row of what is moved."""
ROW_BYTES = 1 << 27
"""Of the operands of kernels that are timed in a row, in all."""
LAUNCHES, ROUNDS = 500, 5
"""So few that the driver's queue does not fill and let the host wait: it holds about 1000
(forums.developer.nvidia.com/t/68937)."""
ONE_GROUPED_KERNEL = {"bf16": (9, 10), "fp8": (9,)}
"""Major compute capabilities where torch has one kernel for all groups: GroupedBlas.cpp, which loops over them
elsewhere, and in FP8 traps on 10.3 (pytorch/pytorch issue 187095)."""
AMPERE = (8, 0)
"""The first compute capability with BF16."""
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
"""The first of these that the device has: on a Hopper cuDNN's, written for it, as `Efficiency.attention` means."""


def gemm(m: int, n: int, k: int, dtype: Dtype, device: torch.device) -> Trial:
    """A product (m, k) x (k, n); in FP8 with one scale for each tensor, without fast accumulation."""

    def make() -> Timed:
        x, w = _operand((m, k), dtype, device), _operand((n, k), dtype, device)
        if dtype != "fp8":
            return _kept(lambda: torch.mm(x, w.t()))
        one = torch.ones((), device=device)
        return _kept(lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16))

    def sample(s: float) -> GemmSample:
        return GemmSample(m=m, n=n, k=k, dtype=dtype, out_bytes=OUT_BYTES, seconds=s)

    return _trial(_gemm_memory(1, m, n, k, dtype), make, sample, device)


def accumulating_gemm(m: int, n: int, k: int, device: torch.device) -> Trial:
    """A product of BF16 added to what its FP32 result holds, as weight gradients of a fused framework are."""

    def make() -> Timed:
        x, w = _operand((m, k), "bf16", device), _operand((n, k), "bf16", device)
        out = torch.zeros(m, n, device=device)
        return lambda: torch.addmm(out, x, w.t(), out_dtype=torch.float32, out=out)

    def sample(s: float) -> GemmSample:
        return GemmSample(m=m, n=n, k=k, dtype="bf16", out_bytes=8.0, seconds=s)

    return _trial(_gemm_memory(1, m, n, k, "bf16") + 2.0 * m * n, make, sample, device)


def grouped_gemm(groups: int, m: int, n: int, k: int, dtype: Dtype, device: torch.device) -> Trial:
    """Products (m, k) x (k, n) in one launch; in FP8 with a scale for each row and column."""

    def make() -> Timed:
        x, w = _operand((groups * m, k), dtype, device), _operand((groups, n, k), dtype, device).transpose(1, 2)
        ends = torch.arange(m, groups * m + 1, m, dtype=torch.int32, device=device)
        if dtype != "fp8":
            return _kept(lambda: torch._grouped_mm(x, w, offs=ends))
        rows, columns = torch.ones(groups * m, device=device), torch.ones(groups, n, device=device)
        return _kept(lambda: torch._scaled_grouped_mm(x, w, rows, columns, offs=ends, out_dtype=torch.bfloat16))

    def sample(s: float) -> GemmSample:
        return GemmSample(m=m, n=n, k=k, dtype=dtype, groups=groups, out_bytes=OUT_BYTES, seconds=s)

    return _trial(_gemm_memory(groups, m, n, k, dtype), make, sample, device)


def attention(batch: int, heads: int, sequence: int, backward: bool, device: torch.device) -> Trial:
    """A causal attention core in BF16, heads of 128."""

    def make() -> Timed:
        q, k, v = (_operand((batch, heads, sequence, HEAD_DIM), "bf16", device) for _ in range(3))
        if not backward:
            return _kept(lambda: _core(q, k, v))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = _core(*inputs)
        gradient = torch.randn_like(out)
        return _kept(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))

    flops = core_flops(heads * 2 * HEAD_DIM, sequence, batch * sequence)

    def sample(s: float) -> AttentionSample:
        return AttentionSample(flops=flops, width=2 * HEAD_DIM, backward=backward, seconds=s)

    return _trial(2.0 * (9 if backward else 4) * batch * heads * sequence * HEAD_DIM, make, sample, device)


def _core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


Move = Literal["copy", "add", "silu", "norm", "quantize"]
MOVES: dict[Move, tuple[Callable[[Tensor, Tensor], object], float]] = {
    "copy": (lambda x, y: x.clone(), 4.0),
    "add": (lambda x, y: x + y, 6.0),
    "silu": (lambda x, y: F.silu(x), 4.0),
    "norm": (lambda x, y: F.layer_norm(x, (WIDTH,)), 4.0),  # an RMSNorm is one kernel in new versions of torch alone
    "quantize": (lambda x, y: quantize(x, E4M3, (1, BLOCK), "pow2"), 2.0 + 1.0 + 4.0 / BLOCK),
}
"""Kernels that only move bytes, of two tensors of BF16 at most, and the bytes read and written for each element."""


def move(name: Move, size: int, device: torch.device) -> Trial:
    """One of `MOVES` on tensors of about `size` bytes: whole rows of them."""
    rows = max(1, size // (2 * WIDTH))
    run, bytes_each = MOVES[name]

    def make() -> Timed:
        x, y = (_operand((rows, WIDTH), "bf16", device) for _ in range(2))
        return _kept(lambda: run(x, y))

    def sample(s: float) -> MoveSample:
        return MoveSample(bytes=bytes_each * rows * WIDTH, seconds=s)

    return _trial(6.0 * rows * WIDTH, make, sample, device)


def launch_seconds(device: torch.device) -> float | None:
    """Host time of a kernel launch where nothing waits for anything; None on a CPU, which launches nothing."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    x, times = torch.zeros(1, device=device), []
    module.synchronize()
    with module.stream(module.Stream()):
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                x.add_(1.0)
            times.append(time.perf_counter() - begin)
            module.synchronize()
    return median(times) / LAUNCHES


def lacking(device: torch.device) -> dict[str, str]:
    """What this device has no kernel for, and why: by `KINDS`."""
    found: dict[str, str] = {}
    x = torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16, device=device)
    capability = torch.cuda.get_device_capability(device) if x.is_cuda else None
    if implementation(x, "tensor gemm") != "torch scaled_mm":
        found["fp8"] = (capability and device_refusal(capability)) or f"{device.type} devices multiply no FP8 here"
    dtypes: tuple[Dtype, ...] = ("bf16", "fp8")
    for dtype in dtypes:
        if dtype in found:
            found[f"grouped {dtype}"] = found[dtype]
        elif capability and capability[0] not in ONE_GROUPED_KERNEL[dtype]:
            found[f"grouped {dtype}"] = f"torch has no one kernel for it at compute capability {capability[0]}.x"
        else:
            _note(found, f"grouped {dtype}", grouped_gemm(2, BLOCK, BLOCK, BLOCK, dtype, device))
    _note(found, "accumulating", accumulating_gemm(BLOCK, BLOCK, BLOCK, device))
    _note(found, "attention", attention(1, 1, BLOCK, True, device))
    if by_kernel(x, "quantize"):
        _note(found, "quantize", move("quantize", 2 * BLOCK * BLOCK, device))
    else:
        found["quantize"] = "several kernels here"
    return found


def _note(found: dict[str, str], what: str, trial: Trial) -> None:
    """Try it, and note a refusal."""
    try:
        trial.take()
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as refusal:
        found[what] = str(refusal).splitlines()[0].partition(" with arguments")[0]


def warm_up(duration: float, device: torch.device) -> None:
    """Multiply for so many seconds, until clocks are what they are under load."""
    x = _operand((WIDTH // 2, WIDTH // 2), "bf16", device)
    end = time.monotonic() + duration
    while time.monotonic() < end:
        for _ in range(IN_A_ROW):
            torch.mm(x, x)
        torch.get_device_module(device).synchronize()


def _trial(memory: float, make: Callable[[], Timed], sample: Callable[[float], Sample], device: torch.device) -> Trial:
    """Of kernels with so many bytes of operands and results."""
    count = in_a_row(memory, ROW_BYTES)
    return Trial(count * memory, lambda: seconds([make() for _ in range(count)], device=device), sample)


def _kept(run: Callable[[], object]) -> Timed:
    """`run`, its result kept until it runs again: no two in a row write to one place, which a cache would hold."""
    kept: list[object] = []

    def again() -> None:
        kept.clear()
        kept.append(run())

    return again


def _operand(shape: tuple[int, ...], dtype: Dtype, device: torch.device) -> Tensor:
    """Random normal numbers; FP16 where a CUDA device is too old for BF16, at whose rate it runs."""
    if dtype == "fp8":
        assert E4M3.dtype is not None
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(E4M3.dtype)
    too_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < AMPERE
    return torch.randn(shape, dtype=torch.float16 if too_old else torch.bfloat16, device=device)


def _gemm_memory(groups: int, m: int, n: int, k: int, dtype: Dtype) -> float:
    """Bytes of operands and results; operands in FP8 come from some in BF16."""
    width = {"fp8": 3.0, "bf16": 2.0}[dtype]
    return groups * ((m + n) * k * width + m * n * OUT_BYTES)
