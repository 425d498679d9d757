"""One of two real ranks is slow: the run writes what tells, and `greylag compare` names rank and phase.

Computing is a nap that dwarfs what the tiny model computes, on both ranks in the same places, and twice as long on the
slow one: a busy machine changes little of that.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commands import greylag_here, write_job
from greylag.parallel import ReplicaCommit, start
from greylag.spec import load_job
from greylag.spec.grid import Grid
from greylag.train.build import build
from greylag.train.folder import RunFolder
from greylag.train.loop import Control, fly

NAP = 0.1


def sleepy(rank: int, world: int, folder: str, phase: str, slow: int) -> None:
    """Fly as one rank whose layers nap in forward and in backward; the slow one's in `phase` as long again."""
    job = load_job(Path(folder) / "small.toml")
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    here = start(Grid.of(job.strategy), rank, store, torch.device("cpu"))
    flight = build(job, here)
    naps = {name: NAP * (2 if rank == slow and name == phase else 1) for name in ("forward", "backward")}

    def nap(layer: torch.nn.Module, given: object, made: torch.Tensor) -> None:
        time.sleep(naps["forward"])
        made.register_hook(lambda _: time.sleep(naps["backward"]))

    for layer in flight.model.layers:
        layer.register_forward_hook(nap)
    run = RunFolder(Path(folder) / "run")
    if here.is_first:
        run.claim(job)
    fly(flight, run, ReplicaCommit(here), [], Control())


def flown(ranks: Callable, folder: Path, phase: str, slow: int, strategy: dict, steps: int = 8) -> str:
    """What `compare` says of such a run, on one line."""
    run = {"steps": steps, "checkpoint_every": 0}
    write_job(folder, run={**run, "data": [str(folder / "text.txt")]}, strategy=strategy)
    ranks(2, sleepy, str(folder), phase, slow)
    result = greylag_here(folder, "compare", folder / "run")
    assert (result.returncode, result.stderr) == (0, "")
    return " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("phase", "slow", "strategy"),
    [
        ("backward", 1, {"zero": 0}),
        ("forward", 0, {"zero": 3}),
        ("backward", 1, {"ep": 2, "zero": 1}),
    ],
    ids=str,
)
def test_a_slow_rank_is_named(phase: str, slow: int, strategy: dict, ranks: Callable, tmp_path: Path) -> None:
    told = flown(ranks, tmp_path, phase, slow, strategy)
    assert f"Largest excess: {phase} on rank {slow}, " in told
    assert f"- {phase}: a slow rank: rank {slow} computes +" in told
    assert told.count("a slow rank") == 1


def test_of_even_ranks_none_is_named(ranks: Callable, tmp_path: Path) -> None:
    told = flown(ranks, tmp_path, "forward", -1, {"zero": 3})
    assert "on no rank much more than on others" in told
    assert "a slow rank" not in told
    assert " on rank" not in told
