"""Calibrate: measure this machine as a job will use it, in under a minute, for the simulator to read.

All ranks measure at once, one after another the same things, since they share caches and memory bandwidth; what is
written down is the mean over ranks of each rank's median. The operators measured are the model's own.
"""

import datetime
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.progress import Progress
from torch import Tensor

from greylag.model.attention import attend
from greylag.model.moe import Router, slots
from greylag.model.norm import RMSNorm
from greylag.model.rope import angles, rotate
from greylag.numerics.formats import E4M3, decode
from greylag.numerics.quantize import quantize
from greylag.numerics.swiglu import swiglu
from greylag.spec.calibration import save_local
from greylag.spec.cluster import Calibration, Curve, GemmPoint
from greylag.spec.model import MoE

GEMM_M, GEMM_NK = (64, 256, 1024, 4096), (128, 512, 2048)
ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23, 1 << 25)
WIDTH = 256
CACHE_BYTES = 1 << 22
"""More than a core's own caches, less than the shared one: a tensor of a training step was made a few operators ago."""
REPEATS, PATIENCE = 9, 0.12
"""A measurement is repeated this often, or for this many seconds, but at least three times."""

Timed = Callable[[], None]


def calibrate_local(num_ranks: int) -> Path:
    """Measure with `num_ranks` processes at once; write this machine's calibration and return its path."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    multiprocessing.spawn(_measure_all, args=(num_ranks, store.port), nprocs=num_ranks)
    return save_local(msgspec.json.decode(store.get("calibration"), type=Calibration))


def _measure_all(rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("measure", store), rank=rank, world_size=num_ranks)
    gemms = [(m, n, k) for m in GEMM_M for n in GEMM_NK for k in GEMM_NK]
    operators = list(_operators())
    with Progress(disable=rank != 0, transient=True) as progress:
        task = progress.add_task("measuring this machine", total=len(gemms) + len(operators) + 3)
        points = []
        for m, n, k in gemms:
            points.append(GemmPoint(m=m, n=n, k=k, seconds=_agreed(_gemm(m, n, k))))
            progress.advance(task)
        ops: dict[str, Curve] = {}
        for name, sizes, make in operators:
            ops |= _curves(name, sizes, make)
            progress.advance(task)
        collectives = {}
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            if num_ranks > 1:
                collectives[name] = _collective(name, num_ranks)
            progress.advance(task)
    if rank == 0:
        store.set("calibration", _encoded(points, ops, collectives, num_ranks))
    dist.barrier()
    dist.destroy_process_group()


def _encoded(points: list[GemmPoint], ops: dict[str, Curve], collectives: dict[str, Curve], num_ranks: int) -> bytes:
    return msgspec.json.encode(
        Calibration(
            device=f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            num_ranks=num_ranks,
            torch=str(torch.__version__),
            gemm=points,
            ops=ops,
            collectives=collectives,
        )
    )


def _seconds(run: Timed, prepare: Timed = lambda: None) -> float:
    """Median seconds of `run`, each after a `prepare` that is not counted.

    A core's own caches are swept before each: in a training step other tensors have been there since.
    """
    sweep = torch.zeros(CACHE_BYTES // 4)
    prepare()
    run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < REPEATS and sum(times) < PATIENCE):
        prepare()
        sweep.add_(1.0)
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return median(times)


def _agreed(seconds: float) -> float:
    """Mean over ranks, who start the next measurement together."""
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _gemm(m: int, n: int, k: int) -> float:
    """Mean of the three multiplies of a linear layer."""
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    return (_seconds(lambda: x @ w.t()) + _seconds(lambda: g @ w) + _seconds(lambda: g.t() @ x)) / 3


def _curves(
    name: str, sizes: tuple[int, ...], make: Callable[[int], tuple[Callable[[], Tensor], bool]]
) -> dict[str, Curve]:
    """Seconds by size of an operator; forward and backward apart where it has both."""
    forward, backward = [], []
    for size in sizes:
        run, differentiates = make(size)
        forward.append(_agreed(_seconds(lambda run=run: run())))
        if differentiates:
            backward.append(_agreed(_backward(run)))
    points = [float(size) for size in sizes]
    if not backward:
        return {name: Curve(size=points, seconds=forward)}
    return {
        f"{name}.forward": Curve(size=points, seconds=forward),
        f"{name}.backward": Curve(size=points, seconds=backward),
    }


def _backward(run: Callable[[], Tensor]) -> float:
    held: list[Tensor] = []

    def prepare() -> None:
        held[:] = [run()]

    gradient = torch.ones_like(run())
    return _seconds(lambda: held[0].backward(gradient), prepare)


def _operators() -> Iterator[tuple[str, tuple[int, ...], Callable[[int], tuple[Callable[[], Tensor], bool]]]]:
    """(name, sizes, maker of a callable and whether it has a backward) of each operator in `spec.work`."""
    yield "norm", ELEMENTS, lambda n: (_of(RMSNorm(WIDTH, 1e-6), _rows(n)), True)
    yield "residual", ELEMENTS, _residual
    yield "rope", ELEMENTS, _rope
    yield "reshape", ELEMENTS, _reshape
    yield "swiglu", ELEMENTS, lambda n: (_of(swiglu, _rows(2 * n, 2 * WIDTH)), True)
    yield "gelu", ELEMENTS, lambda n: (_of(torch.nn.functional.gelu, _rows(n)), True)
    yield "router", (1 << 10, 1 << 13, 1 << 16), _router
    yield "permute", ELEMENTS, _permute
    yield "embedding", ELEMENTS, _embedding
    yield "loss", ELEMENTS, _loss
    yield "attention", (1 << 24, 1 << 27, 1 << 30), _attention
    for name, tile in (("1x128", (1, 128)), ("128x1", (128, 1)), ("128x128", (128, 128)), ("tensor", (0, 0))):
        kind = "fp32" if name == "tensor" else "pow2"
        yield (
            f"quantize.{name}",
            ELEMENTS,
            lambda n, t=tile, s=kind: (lambda x=_plain(n): quantize(x, E4M3, t, s).dequantize(), False),
        )
    yield "encode", ELEMENTS, _encode_codes
    yield "decode", ELEMENTS, lambda n: (lambda x=_plain(n).to(E4M3.dtype): decode(x), False)
    yield "adamw", ELEMENTS, _adamw
    yield "copy", (*ELEMENTS, 1 << 22), _copy


def _plain(n: int) -> Tensor:
    return torch.randn(n // WIDTH, WIDTH)


def _rows(n: int, width: int = WIDTH) -> Tensor:
    return torch.randn(n // width, width, requires_grad=True)


def _of(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: function(x)


def _residual(n: int) -> tuple[Callable[[], Tensor], bool]:
    """Adding the branch; in backward the sum of the two gradients."""
    x = _rows(n)

    def run() -> Tensor:
        y = x * 1.0
        return y + y

    return run, True


def _rope(n: int) -> tuple[Callable[[], Tensor], bool]:
    cos, sin = angles(max(1, n // WIDTH), 64, 1e4)
    x = torch.randn(1, n // WIDTH, 4, 64, requires_grad=True)
    return lambda: rotate(x, cos, sin), True


def _reshape(n: int) -> tuple[Callable[[], Tensor], bool]:
    x = torch.randn(n // WIDTH, 4, 64, requires_grad=True)
    return lambda: torch.cat(x.split((32, 32), dim=-1), dim=-1), True


def _router(n: int) -> tuple[Callable[[], Tensor], bool]:
    moe = MoE(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=1,
        scoring="sigmoid",
        num_groups=4,
        top_k_groups=2,
        bias_update_rate=1e-3,
    )
    router = Router(8, moe)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(n // 8, 8, requires_grad=True)
    return lambda: router(x)[1], True


def _permute(n: int) -> tuple[Callable[[], Tensor], bool]:
    """Rows out to experts and back; `n` elements of the rows that experts see."""
    tokens = max(1, n // WIDTH // 2)
    chosen = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    weights = torch.full((tokens, 2), 0.5)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    index = torch.arange(tokens).repeat_interleave(2)

    def run() -> Tensor:
        rows, _, count = slots(chosen, 8)
        there = x.new_zeros(count, WIDTH).index_copy(0, rows.flatten(), x.index_select(0, index))
        back = there.index_select(0, rows.flatten()).view(tokens, 2, -1)
        return torch.bmm(weights.unsqueeze(1), back).squeeze(1)

    return run, True


def _embedding(n: int) -> tuple[Callable[[], Tensor], bool]:
    table = torch.randn(256, WIDTH, requires_grad=True)
    tokens = torch.randint(0, 256, (n // WIDTH,))
    return lambda: torch.nn.functional.embedding(tokens, table), True


def _loss(n: int) -> tuple[Callable[[], Tensor], bool]:
    x, target = _rows(n), torch.randint(0, WIDTH, (n // WIDTH,))
    return lambda: torch.nn.functional.cross_entropy(x, target), True


def _attention(flops: int) -> tuple[Callable[[], Tensor], bool]:
    """The causal core, by its forward FLOPs, at 4 heads of 64 and sequences of 256."""
    sequence, width = 256, 4 * (64 + 64)
    batch = max(1, round(flops / (width * sequence * (sequence + 1))))
    q, k, v = (torch.randn(batch, sequence, 4, 64, requires_grad=True) for _ in range(3))
    return lambda: attend(q, k, v, 0.125), True


def _encode_codes(n: int) -> tuple[Callable[[], Tensor], bool]:
    q = quantize(_plain(n), E4M3, (1, 128), "pow2")

    def run() -> Tensor:
        q.codes = None
        return q.encoded()

    return run, False


def _copy(n: int) -> tuple[Callable[[], Tensor], bool]:
    """Into memory that was just given back, as FSDP2 fills gathered parameters."""
    x, there = _plain(n), torch.empty(n // WIDTH, WIDTH)
    storage = there.untyped_storage()

    def run() -> Tensor:
        storage.resize_(0)
        storage.resize_(4 * n)
        return there.copy_(x)

    return run, False


def _adamw(n: int) -> tuple[Callable[[], Tensor], bool]:
    weight = torch.nn.Parameter(torch.randn(n))
    weight.grad = torch.randn(n)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def run() -> Tensor:
        torch._foreach_norm([weight.grad])
        torch._foreach_mul_([weight.grad], 1.0)
        optimizer.step()
        return weight

    return run, False


def _collective(name: str, num_ranks: int) -> Curve:
    """Seconds by bytes of the whole tensor."""
    seconds = []
    for size in MESSAGE_BYTES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // num_ranks)
        run = {
            "all_reduce": lambda w=whole: dist.all_reduce(w),
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
        }[name]
        dist.barrier()
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        seconds.append(_agreed(median(times[1:])))
    return Curve(size=[float(s) for s in MESSAGE_BYTES], seconds=seconds)
