"""Launch: how ranks come to be, and what one rank does from birth to end.

Under torchrun or srun the ranks exist already and say so in their environment. Otherwise `launch` starts the local
ones with torchrun's own variables, holds their store, passes Ctrl-C on once, and ends them all if one fails. No
rank hosts the store: torchrun's agent, this launcher or, under srun, a file in the run folder does. Only where the
agent hosts none (torchrun's static rendezvous) must rank 0.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from greylag.parallel import ReplicaCommit, start, stop
from greylag.parallel.world import TIMEOUT
from greylag.spec import Job, SpecError
from greylag.spec.grid import Grid
from greylag.train.audit import AuditHook
from greylag.train.build import build
from greylag.train.folder import STORE, RunFolder
from greylag.train.hooks import ProgressHook, TensorBoardHook
from greylag.train.loop import Control, fly
from greylag.train.telemetry import TelemetryHook

LAUNCHED = "GREYLAG_LAUNCHED"
"""Set, to a word that no other start has, for ranks that `launch` started: the launcher holds the folder's lock."""
FAULT = "fault"
"""Key of the store under which a rank that must end leaves the reason for the others."""
STOPS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""Exit code of a run that was asked to stop and saved (128 + SIGINT)."""
GRACE = 20.0
"""Seconds that ranks get to end by themselves after another one failed."""


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher: str
    """torchrun, srun or greylag."""
    attempt: str
    """Tells this start of the job from any earlier one, so that no stale address is read from the store."""


def find_place(environ: Mapping[str, str], job: Job) -> Place | None:
    """What torchrun or srun says of this process; None if nobody launched it as a rank.

    Raises SpecError if it says nonsense, or made another number of ranks than the job has.
    """
    place = place_of(environ)
    if place and (place.world != job.strategy.world or place.rank >= place.world):
        raise SpecError(
            f"{job.name}: {place.launcher} made this rank {place.rank} of {place.world}, the job needs "
            f"{job.strategy.world} ranks (dp {job.strategy.dp}); change strategy.dp and cluster, or start as many"
        )
    return place


def place_of(environ: Mapping[str, str]) -> Place | None:
    """What torchrun or srun says of this process, of whatever job; None if nobody launched it as a rank.

    Raises SpecError if it says nonsense.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Place(
            rank=_number(environ, "RANK"),
            world=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", "0"),
            local_world=_number(environ, "LOCAL_WORLD_SIZE", "1"),
            launcher="greylag" if LAUNCHED in environ else "torchrun",
            attempt=environ.get(LAUNCHED, "")
            + environ.get("TORCHELASTIC_RUN_ID", "")
            + environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    if {"SLURM_PROCID", "SLURM_STEP_ID"} <= environ.keys() and _number(environ, "SLURM_NTASKS", "1") > 1:
        return Place(
            rank=_number(environ, "SLURM_PROCID"),
            world=_number(environ, "SLURM_NTASKS"),
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            local_world=int(environ.get("SLURM_TASKS_PER_NODE", environ["SLURM_NTASKS"]).split("(")[0].split(",")[0]),
            launcher="srun",
            attempt=".".join(environ.get(f"SLURM_{key}", "0") for key in ("JOB_ID", "STEP_ID", "RESTART_COUNT")),
        )
    return None


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not text.isdecimal():
        raise SpecError(
            f"{name}: {text!r} in the environment is not a number; unset it, or let torchrun or srun set it"
        )
    return int(text)


def run_rank(job: Job, folder: RunFolder, place: Place, peak_flops: float = 0.0) -> bool:
    """Train as one rank. True if the run reached its last step, False if it was asked to stop before.

    Raises SpecError, on every rank, if one of them meets a fault of the job, its data or its folder.
    """
    device = _device(job, place)
    torch.manual_seed(job.run.seed)
    store = dist.PrefixStore(place.attempt, _store(job, folder, place))
    world = start(Grid.of(job.strategy), place.rank, store, device)
    hooks: list[ProgressHook | TensorBoardHook | AuditHook | TelemetryHook] = []
    if world.is_first:
        hooks.append(ProgressHook(job.run.steps))
        if job.run.tensorboard:
            hooks.append(TensorBoardHook(folder.path))
    try:
        with _listening() as control, sharing_faults(store):
            flight = build(job, world)
            if world.is_first:
                hooks.append(AuditHook(flight, folder))
                if job.run.telemetry_every:
                    hooks.append(TelemetryHook(flight, folder, job.run.telemetry_every))
            last = fly(flight, folder, ReplicaCommit(world), hooks, control, peak_flops)
    finally:
        for hook in hooks:
            hook.close()
    stop(world)
    return last >= job.run.steps


def threads(num_ranks: int) -> int:
    """Threads of each of this machine's ranks: what OMP_NUM_THREADS says, or an equal share of the cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // num_ranks))


def _device(job: Job, place: Place) -> torch.device:
    kind = job.cluster.device.kind
    if kind == "cpu":
        torch.set_num_threads(threads(place.local_world))
        return torch.device("cpu")
    if place.local_rank >= torch.accelerator.device_count():
        raise SpecError(
            f"cluster: a node has {job.cluster.devices_per_node} devices, and torch finds "
            f"{torch.accelerator.device_count()} here; change cluster.devices_per_node"
        )
    device = torch.device(kind, place.local_rank)
    torch.accelerator.set_device_index(place.local_rank)
    return device


def _store(job: Job, folder: RunFolder, place: Place) -> dist.Store:
    if place.launcher == "torchrun" and job.run.store == "file" and place.world > 1 and place.attempt in ("0", "none0"):
        raise SpecError('run.store = "file" needs a name of its own for each start: give torchrun an --rdzv-id')
    if place.launcher == "srun" or job.run.store == "file":
        folder.path.mkdir(parents=True, exist_ok=True)
        return dist.FileStore(str(folder.path / f"{STORE}{place.attempt}"), place.world)
    return named_store(place)


def named_store(place: Place) -> dist.Store:
    """The store that the environment names. Raises SpecError if it names none."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise SpecError(
            'MASTER_ADDR and MASTER_PORT are not set; start with torchrun, or set run.store = "file"'
        ) from None
    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and place.rank == 0
    return dist.TCPStore(host, port, is_master=hosts, timeout=TIMEOUT)


@contextlib.contextmanager
def sharing_faults(store: dist.Store) -> Iterator[None]:
    """Let every rank end with the fault of the one that met it: the others only see its connection close."""
    try:
        yield
    except SpecError as error:
        with contextlib.suppress(RuntimeError):
            store.set(FAULT, str(error))
        raise
    except RuntimeError:
        if store.check([FAULT]):
            raise SpecError(store.get(FAULT).decode()) from None
        raise


@contextlib.contextmanager
def _listening() -> Iterator[Control]:
    """Turn the first SIGINT or SIGTERM into a request to save and stop; a second one ends the process."""
    control = Control()

    def ask(number: int, frame: object) -> None:
        if control.stop:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        control.stop = True

    before = {number: signal.signal(number, ask) for number in STOPS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        yield control
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(arguments: Sequence[str], num_ranks: int, lock: int) -> int:
    """Start `greylag ARGUMENTS` as local ranks and wait for them. Returns the exit code of the first that failed.

    The ranks inherit the folder's `lock`, so that it holds as long as one of them lives, even without this launcher.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # ranks inherit it: what comes before they listen is kept for them
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads(num_ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        LAUNCHED: secrets.token_hex(4),
    }
    command = [sys.executable, "-m", "greylag", *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)},
            start_new_session=True,
            pass_fds=(lock,),
        )
        for r in range(num_ranks)
    ]

    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        for rank in ranks:
            rank.send_signal(number if len(asked) == 1 else signal.SIGKILL)

    for number in STOPS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    return _await(ranks)


def _await(ranks: list["subprocess.Popen[bytes]"]) -> int:
    """Wait for all ranks; once one fails, give the others a grace and end them."""
    failed, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks):
        codes = [rank.returncode for rank in ranks if rank.returncode and rank.returncode != INTERRUPTED]
        if codes and not failed:
            failed, deadline = min(codes), time.monotonic() + GRACE  # a signal before what it made others say
        if time.monotonic() > deadline:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        time.sleep(0.02)
    codes = [rank.returncode for rank in ranks if rank.returncode]
    return failed or min(codes, default=0)


def run_folder(path: Path | None, job: Job) -> RunFolder:
    """The folder of a run: the one given, or `runs/NAME`."""
    return RunFolder(path or Path("runs") / job.name)
