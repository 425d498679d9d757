"""However the ranks share the work, the loss is the same to FP32 rounding, and a resumed run is the same bits."""

from pathlib import Path

import pytest
from msgspec import json
from msgspec.structs import replace

from greylag.spec import Job, Step
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from jobs import SMALL_MOE, tiny_job


def fly(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def steps_of(folder: Path) -> list[Step]:
    return [json.decode(line, type=Step) for line in (folder / "steps.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory) -> list[Step]:
    folder = tmp_path_factory.mktemp("alone")
    ranks(1, fly, tiny_job(SMALL_MOE, run={"steps": 20}), str(folder))
    return steps_of(folder)


@pytest.mark.parametrize(
    "strategy",
    [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"replicas": 2}, {"zero": 3, "micro_batch": 2}],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)
def test_two_ranks_equal_one(strategy: dict, alone: list[Step], ranks, tmp_path: Path) -> None:
    ranks(2, fly, tiny_job(SMALL_MOE, dp=2, strategy=strategy, run={"steps": 20}), str(tmp_path))
    together = steps_of(tmp_path)
    assert len(together) == len(alone) == 20
    assert [s.loss for s in together] == pytest.approx([s.loss for s in alone], rel=2e-5)
    assert [s.grad_norm for s in together] == pytest.approx([s.grad_norm for s in alone], rel=1e-3)
    assert together[-1].loss < together[0].loss - 0.3


@pytest.mark.parametrize(
    ("precision", "dp", "strategy"),
    [
        ("fp8-block128", 2, {"zero": 3}),
        ("fp8-tensor-delayed", 2, {"zero": 1}),
        ("fp8-tensor-delayed", 2, {"replicas": 2}),
        ("fp8-tensor-current", 1, {}),
        ("bf16", 2, {"zero": 0}),
    ],
)
def test_resume_is_bit_identical(precision: str, dp: int, strategy: dict, ranks, tmp_path: Path) -> None:
    job = tiny_job(
        SMALL_MOE,
        precision,
        dp,
        strategy=strategy,
        run={"steps": 6},
        precision_table={"amax_history": 4} if "delayed" in precision else {},
    )
    ranks(dp, fly, job, str(tmp_path / "straight"))
    broken = replace(job, run=replace(job.run, checkpoint_every=3))
    ranks(dp, fly, replace(broken, run=replace(broken.run, steps=6)), str(tmp_path / "broken"))
    straight, broken_steps = steps_of(tmp_path / "straight"), steps_of(tmp_path / "broken")
    # Throw the last checkpoint away: the run falls back to step 3 and flies 4 to 6 again.
    newest = sorted((tmp_path / "broken" / "checkpoints").glob("step_*"))[-1]
    assert newest.name == "step_00000006"
    newest.rename(tmp_path / "gone")
    ranks(dp, fly, broken, str(tmp_path / "broken"))
    resumed = steps_of(tmp_path / "broken")[6:]
    assert [s.number for s in resumed] == [4, 5, 6]
    assert [(s.loss, s.grad_norm) for s in broken_steps] == [(s.loss, s.grad_norm) for s in straight]
    assert [(s.loss, s.grad_norm) for s in resumed] == [(s.loss, s.grad_norm) for s in straight[3:]]
