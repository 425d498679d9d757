"""Calibrate: measure this machine as a job will use it, in under a minute, for the simulator to read.

All ranks measure at once, one after another the same things, since they share caches and memory bandwidth; what is
written down is the mean over ranks of each rank's median. The operators measured are the model's own.
"""

import datetime
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.progress import Progress
from torch import Tensor

from greylag.parallel import ReplicaCommit, World, start, stop
from greylag.spec import Job
from greylag.spec.calibration import reference_job, save_local
from greylag.spec.cluster import Calibration, Curve, GemmPoint
from greylag.spec.grid import Grid
from greylag.spec.measurement import Collective
from greylag.spec.step import PHASES
from greylag.train.build import build
from greylag.train.collectives import COLLECTIVES, collective
from greylag.train.device import name_of
from greylag.train.folder import RunFolder
from greylag.train.launch import threads
from greylag.train.loop import MEASURED_STEP, Control, take_step
from greylag.train.operators import Maker, operators
from greylag.train.stopwatch import CPU, agreed, seconds, seconds_together

GEMM_M, GEMM_NK = (64, 256, 1024, 4096), (128, 512, 2048)
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23, 1 << 25)
STEPS, WARM_UP = 17, 2
"""Steps of the reference job, and how many of them do not count."""


def calibrate_local(num_ranks: int) -> Path:
    """Measure with `num_ranks` processes at once; write this machine's calibration and return its path."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    multiprocessing.spawn(_measure_all, args=(num_ranks, store.port), nprocs=num_ranks)
    return save_local(msgspec.json.decode(store.get("calibration"), type=Calibration))


def _measure_all(rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(threads(num_ranks))
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    job = reference_job(num_ranks)
    world = start(Grid.of(job.strategy), rank, dist.PrefixStore("measure", store), CPU)
    gemms = [(m, n, k) for m in GEMM_M for n in GEMM_NK for k in GEMM_NK]
    measured = list(operators())
    names = [name for name in COLLECTIVES if name != "p2p"]
    with Progress(disable=rank != 0, transient=True) as progress:
        task = progress.add_task("measuring this machine", total=len(gemms) + len(measured) + len(names) + STEPS)
        points = []
        for m, n, k in gemms:
            points.append(GemmPoint(m=m, n=n, k=k, seconds=agreed(_gemm(m, n, k))))
            progress.advance(task)
        ops: dict[str, Curve] = {}
        for name, sizes, make in measured:
            ops |= _curves(name, sizes, make)
            progress.advance(task)
        collectives: dict[str, Curve] = {}
        for name in names:
            if num_ranks > 1:
                collectives[name] = _collective(name, num_ranks)
            progress.advance(task)
        reference = _reference(job, world, lambda: progress.advance(task))
    if rank == 0:
        store.set("calibration", _encoded(points, ops, collectives, reference, num_ranks).decode())
    dist.barrier()
    stop(world)


def _encoded(
    points: list[GemmPoint],
    ops: dict[str, Curve],
    collectives: dict[str, Curve],
    reference: dict[str, float],
    num_ranks: int,
) -> bytes:
    return msgspec.json.encode(
        Calibration(
            device=name_of(CPU),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            num_ranks=num_ranks,
            torch=str(torch.__version__),
            gemm=points,
            ops=ops,
            collectives=collectives,
            reference=reference,
        )
    )


def _gemm(m: int, n: int, k: int) -> float:
    """Mean of the three multiplies of a linear layer."""
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    return sum(seconds([run]) for run in (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x)) / 3


def _curves(name: str, sizes: tuple[int, ...], make: Maker) -> dict[str, Curve]:
    """Seconds by size of an operator; forward and backward apart where it has both."""
    forward, backward = [], []
    for size in sizes:
        run, differentiates = make(size)
        forward.append(agreed(seconds([run])))
        if differentiates:
            backward.append(agreed(_backward(run)))
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
    return seconds([lambda: held[0].backward(gradient)], prepare)


def _collective(name: Collective, num_ranks: int) -> Curve:
    """Seconds by bytes of the whole tensor."""
    taken = []
    for size in MESSAGE_BYTES:
        run = collective(name, size, num_ranks)
        dist.barrier()
        taken.append(agreed(seconds_together([run])))
    return Curve(size=[float(s) for s in MESSAGE_BYTES], seconds=taken)


def _reference(job: Job, world: World, advance: Callable[[], None]) -> dict[str, float]:
    """Median seconds by phase of whole steps of a job."""
    flight, commit = build(job, world), ReplicaCommit(world)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(MEASURED_STEP + 1, MEASURED_STEP + 1 + STEPS):
            taken.append(take_step(flight, number, commit, Control(), 0.0, RunFolder(Path(folder)))[0])
            advance()
    return {phase: agreed(median(step.seconds[phase] for step in taken[WARM_UP:])) for phase in PHASES}
