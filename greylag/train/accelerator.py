"""Accelerator: measure the kernels and collectives of the accelerators at hand, for `sim.fit` to fit a device by.

Every rank holds one device, and all measure the same things at once, since devices of a node share power and links;
what is handed back is the mean over ranks of each rank's median. Under torchrun or srun the ranks are those of the
launcher, over all its nodes; otherwise one is started here for each device. The path through CUDA has not run on
hardware yet: tests run this on CPUs.
"""

import datetime
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.progress import Progress
from torch.multiprocessing import ProcessRaisedException

from greylag.parallel import World, start, stop
from greylag.spec.error import SpecError
from greylag.spec.grid import Grid
from greylag.spec.measurement import Dtype, GemmSample, Measurements, Sample
from greylag.train import kernels
from greylag.train.collectives import collective_trials, peers
from greylag.train.device import name_of
from greylag.train.launch import FAULT, Place, named_store, place_of, sharing_faults, threads
from greylag.train.stopwatch import Trial, agreed

MEASURED = "measurements"
"""Key of the store under which a first rank that was started here leaves what all measured."""
STORE = ".greylag-calibrate-"
"""Of the file, in the working folder, where ranks under srun meet."""
GEMM_M = (512, 1536, 4096, 8192, 16384)
GEMM_NK = (
    (512, 4096),
    (1536, 7168),
    (2816, 1024),
    (4096, 512),
    (4096, 4096),
    (7168, 2048),
    (11008, 4096),
    (16384, 16384),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured: about a minute on an H100, by estimate, most of it the start of ranks and of their links."""

    dtypes: tuple[Dtype, ...] = ("bf16", "fp8")
    gemms: tuple[tuple[int, int, int], ...] = tuple((m, n, k) for (n, k), m in product(GEMM_NK, GEMM_M))
    """(m, n, k), of few tiles and of many, with last waves full and empty."""
    accumulating: tuple[tuple[int, int, int], ...] = ((4096, 4096, 8192), (7168, 2048, 8192), (11008, 4096, 8192))
    """Of these the result is added to FP32."""
    grouped: tuple[tuple[int, int, int, int], ...] = (
        (4, 4096, 4096, 4096),
        (8, 2048, 14336, 4096),
        (8, 2048, 4096, 14336),
        (16, 512, 2816, 2048),
        (16, 1024, 4096, 2048),
        (32, 256, 4096, 7168),
        (32, 1024, 4096, 7168),
        (32, 1024, 7168, 2048),
    )
    """(groups, m of each, n, k)."""
    attention: tuple[tuple[int, int, int], ...] = (
        (4, 16, 2048),
        (8, 32, 2048),
        (2, 16, 4096),
        (4, 32, 4096),
        (1, 16, 8192),
        (2, 32, 8192),
    )
    """(batch, heads, sequence)."""
    moves: tuple[int, ...] = tuple(1 << power for power in range(24, 31))
    """Bytes of a tensor."""
    messages: tuple[int, ...] = (*(1 << power for power in range(16, 29, 2)), 1 << 29)
    """Bytes of a collective in all."""
    warm_up: float = 1.0
    """Seconds of work before anything is measured."""


def measure_accelerators(
    num_ranks: int | None, device_type: str = "cuda", sizes: Sizes | None = None
) -> Measurements | None:
    """Measure with a launcher's ranks, or with `num_ranks` devices of this machine (None: all). Prints progress.

    What does not fit into half of the free memory is left out, and so is, with a remark, what a device has no kernel
    for. Launched ranks other than the first get None. Raises SpecError if there is no such device, or not as many as
    asked for; if the devices of the ranks are not of one kind; and if no GEMM fits.
    """
    sizes = sizes or Sizes()
    place = place_of(os.environ)
    if place is not None:
        if place.rank >= place.world:
            raise SpecError(f"{place.launcher} made this rank {place.rank} of {place.world}; ranks count from 0")
        if num_ranks not in (None, place.world):
            raise SpecError(f"--ranks {num_ranks}: {place.launcher} made {place.world} ranks; leave it out")
        file = Path.cwd() / f"{STORE}{place.attempt}"
        store = dist.FileStore(str(file), place.world) if place.launcher == "srun" else named_store(place)
        return _measure(place, dist.PrefixStore(f"calibrate{place.attempt}", store), device_type, sizes)
    found = num_devices(device_type)
    num_ranks = num_ranks or found
    if num_ranks > found:
        raise SpecError(f"--ranks {num_ranks}: this machine has {found} {device_type.upper()} devices")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        multiprocessing.spawn(_spawned, args=(num_ranks, store.port, device_type, sizes), nprocs=num_ranks)
    except ProcessRaisedException:
        if store.check([FAULT]):
            raise SpecError(store.get(FAULT).decode()) from None
        raise
    return msgspec.json.decode(store.get(MEASURED), type=Measurements)


def num_devices(device_type: str) -> int:
    """Devices of a type on this machine; of a CPU, its cores. Raises SpecError if there is none."""
    if device_type == "cpu":
        return os.cpu_count() or 1
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        raise SpecError(f"no {device_type.upper()} device here; measure on the cluster, or give --from-trace")
    return torch.accelerator.device_count()


def _spawned(rank: int, num_ranks: int, port: int, device_type: str, sizes: Sizes) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    place = Place(rank, num_ranks, rank, num_ranks, launcher="greylag", attempt="")
    measured = _measure(place, store, device_type, sizes)
    if measured:
        store.set(MEASURED, msgspec.json.encode(measured).decode())


def _measure(place: Place, store: dist.Store, device_type: str, sizes: Sizes) -> Measurements | None:
    """As one rank: all samples, on the first."""
    with sharing_faults(store), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives
        world = start(Grid(1, 1, place.world, 1, 1), place.rank, store, _device(place, device_type))
        torch.manual_seed(place.rank)
        kernels.warm_up(sizes.warm_up, world.device)
        facts = _facts(world)
        trials = fitting(_trials(sizes, facts, place, world), facts.memory)
        samples = _samples(trials, world, facts)
        launch = kernels.launch_seconds(world.device)
        launch = launch and agreed(launch, world.saver)
        dist.barrier(group=world.saver)
        stop(world)
    if not world.is_first:
        return None
    ranks = f"{place.world} rank{'s' * (place.world > 1)}"
    return Measurements.of(
        samples,
        device=facts.device,
        source=f"greylag calibrate, {datetime.date.today()}, torch {torch.__version__}, {ranks}",
        launch_us=launch and 1e6 * launch,
    )


def _device(place: Place, device_type: str) -> torch.device:
    """This rank's own, made the current one."""
    found = num_devices(device_type)
    if device_type == "cpu":
        torch.set_num_threads(threads(place.local_world))
        return torch.device("cpu")
    if place.local_rank >= found:
        raise SpecError(f"this node has {found} {device_type.upper()} devices; start a rank for each, not more")
    torch.accelerator.set_device_index(place.local_rank)
    return torch.device(device_type, place.local_rank)


class Facts(NamedTuple):
    """What the ranks know of their devices together."""

    device: str
    memory: float
    """Bytes that a measurement may take: half of what is free where the least is."""
    lacks: dict[str, str]
    """Of `kernels.KINDS`, those that some device has no kernel for, and why."""


def _facts(world: World) -> Facts:
    told: list[tuple[str, float, dict[str, str]]] = [("", 0.0, {})] * world.grid.world
    mine = (name_of(world.device), _free(world), kernels.lacking(world.device))
    dist.all_gather_object(told, mine, group=world.saver)
    lacks = {kind: why for _, _, lacking in told for kind, why in lacking.items()}
    return Facts(one_kind([name for name, _, _ in told]), min(free for _, free, _ in told) / 2, lacks)


def one_kind(names: Sequence[str]) -> str:
    """What all devices are called. Raises SpecError if they are of more kinds than one."""
    if len(set(names)) > 1:
        found = ", ".join(f"{name} (rank {names.index(name)})" for name in dict.fromkeys(names))
        raise SpecError(f"the ranks have different devices: {found}; measure one kind at a time")
    return names[0]


def _free(world: World) -> float:
    """Bytes of memory that nobody uses; of a CPU, this rank's share of them."""
    if world.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / world.grid.world
    return float(torch.get_device_module(world.device).mem_get_info(world.device)[0])


def _trials(sizes: Sizes, facts: Facts, place: Place, world: World) -> list[Trial]:
    """All that devices have kernels for, and the collectives. Every rank forms its groups here."""
    lacks, device = facts.lacks, world.device
    dtypes = [dtype for dtype in sizes.dtypes if dtype not in lacks]
    trials = [kernels.gemm(*shape, dtype, device) for dtype in dtypes for shape in sizes.gemms]
    if "accumulating" not in lacks:
        trials += [kernels.accumulating_gemm(*shape, device) for shape in sizes.accumulating]
    groupable = [dtype for dtype in dtypes if f"grouped {dtype}" not in lacks]
    trials += [kernels.grouped_gemm(*shape, dtype, device) for dtype in groupable for shape in sizes.grouped]
    if "attention" not in lacks:
        trials += [kernels.attention(*s, backward, device) for backward in (False, True) for s in sizes.attention]
    moves = [name for name in kernels.MOVES if name not in lacks]
    trials += [kernels.move(name, size, device) for name in moves for size in sizes.moves]
    for among in peers(place.rank, place.world, place.local_world):
        is_all = len(among.ranks) == place.world
        group = dist.group.WORLD if is_all else dist.new_group(among.ranks, use_local_synchronization=True)
        for size in sizes.messages:
            trials += collective_trials(size, among, group, device)
    return trials


def fitting(trials: Sequence[Trial], memory: float) -> list[Trial]:
    """Those that take no more memory. Raises SpecError if no GEMM, of which the first is one, is among them."""
    kept = [trial for trial in trials if trial.memory <= memory]
    if not any(isinstance(trial.sample(1.0), GemmSample) for trial in kept):
        raise SpecError(f"no GEMM fits into {memory / 2**30:.2g} GiB, half of the memory that is free; free the rest")
    return kept


def _samples(trials: Sequence[Trial], world: World, facts: Facts) -> list[Sample]:
    """Every trial taken, by all ranks at once."""
    samples = []
    console = Console(stderr=True)
    with Progress(console=console, disable=not world.is_first, transient=True) as progress:
        if world.is_first:
            for kind, why in facts.lacks.items():
                console.print(f"not measured: {kernels.KINDS[kind]} ({why})", highlight=False, markup=False)
        for trial in progress.track(trials, description=f"measuring {facts.device}"):
            samples.append(trial.sample(agreed(trial.take(), world.saver)))
    return samples
