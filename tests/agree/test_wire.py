"""Bytes that the kernel counted on the ranks' sockets equal those of `spec.messages`."""

from pathlib import Path

import pytest
import torch.distributed as dist
from msgspec import json

from greylag.spec import Job, Step
from greylag.spec.messages import data_parallel_messages, model_parallel_messages
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


def fly_counting(rank: int, world: int, job: Job, folder: str) -> list[int]:
    """Bytes that each all-to-all was given for other ranks."""
    counted, whole = [], dist.all_to_all_single

    def count(output, input, output_splits=None, input_splits=None, **keywords):
        own = input_splits[rank] if input_splits else len(input) // world
        counted.append(input.nbytes - input[:own].nbytes)
        return whole(output, input, output_splits, input_splits, **keywords)

    dist.all_to_all_single = count  # the process ends with this run
    fly(rank, world, job, folder)
    return counted


@pytest.mark.parametrize("dispatch", ["high", "e4m3"])
def test_bytes_between_experts(dispatch: str, ranks, tmp_path: Path) -> None:
    how = {"strategy": {"ep": 2}, "precision_table": {"dispatch": dispatch}, "run": {"steps": 2}}
    job = tiny_job("mixtral-tiny", "fp8-block128", 2, sequence=512, **how)
    counted = ranks(2, fly_counting, job, str(tmp_path))
    steps = [json.decode(line, type=Step) for line in (tmp_path / "steps.jsonl").read_bytes().splitlines()]
    calls = len(counted[0]) // len(steps)
    assert calls == 5 * job.model.num_moe_layers * job.num_micro_batches
    handed = [sum(rank[-calls:]) for rank in counted]
    shards = sum(message.sent(gloo=True) for message in data_parallel_messages(job))
    assert steps[1].wire_bytes == pytest.approx(shards + handed[0], rel=0.01)
    assert steps[1].wire_bytes >= shards + handed[0]
    # `work` takes routing to be balanced, which it is not: tests/parallel holds it equal for what routers chose.
    tokens = job.strategy.micro_batch * job.sequence
    balanced = job.num_micro_batches * sum(m.sent(gloo=True) for m in model_parallel_messages(job, tokens))
    assert sum(handed) / 2 == pytest.approx(balanced, rel=0.1)
