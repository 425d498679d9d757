"""Bytes that the kernel counted on the ranks' sockets equal those of `spec.work`."""

from pathlib import Path

import pytest
from msgspec import json

from greylag.spec import Job, Step
from greylag.spec.work import data_parallel_messages
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from jobs import SMALL_MOE, tiny_job


def fly(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"zero": 0}),
        (2, {"zero": 1}),
        (2, {"zero": 2}),
        (2, {"zero": 3}),
        (3, {"zero": 3}),
        (2, {"replicas": 2}),
        (4, {"replicas": 2, "zero": 0}),
        (4, {"replicas": 2, "zero": 3}),
    ],
)
def test_bytes_on_the_wire(world: int, strategy: dict, ranks, tmp_path: Path) -> None:
    job = tiny_job(SMALL_MOE, dp=world, strategy=strategy, global_batch=2 * world, run={"steps": 3})
    ranks(world, fly, job, str(tmp_path))
    steps = [json.decode(line, type=Step) for line in (tmp_path / "steps.jsonl").read_bytes().splitlines()]
    expected = sum(message.sent(gloo=True) for message in data_parallel_messages(job))
    assert expected > 1e6
    # What is more: headers, and the few scalars on which ranks agree.
    assert steps[1].wire_bytes == pytest.approx(expected, rel=0.01)
    assert steps[1].wire_bytes >= expected
