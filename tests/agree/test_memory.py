"""Peak bytes that the allocator saw agree with the simulator's, and resting bytes are the same."""

from pathlib import Path

import pytest
from msgspec import json

from greylag.sim import predict_memory
from greylag.spec import Job, Step
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from greylag.train.loop import MEASURED_STEP
from jobs import tiny_job

WIDE = {"preset": "llama-3-tiny", "vocab_size": 8192}
"""Its peak is at the head."""


def fly(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


@pytest.mark.parametrize(
    ("model", "precision", "dp", "strategy"),
    [
        ("deepseek-v3-tiny", "fp8-block128", 2, {"zero": 3}),
        ("deepseek-v3-tiny", "fp8-block128", 2, {"zero": 1}),
        ("deepseek-v3-tiny", "fp32", 1, {}),
        ("deepseek-v3-tiny", "fp8-block128", 2, {"replicas": 2}),
        ("llama-3-tiny", "fp8-block128", 1, {}),
        ("llama-3-tiny", "fp8-tensor-delayed", 2, {"zero": 2}),
        ("deepseek-v3-tiny", "fp32", 1, {"recompute": "full"}),
        ("llama-3-tiny", "fp8-block128", 2, {"zero": 1, "recompute": "full"}),
        ("llama-3-tiny", "fp8-tensor-delayed", 2, {"zero": 0, "recompute": "full"}),
        ("gpt-3-tiny", "fp8-block128", 1, {"recompute": "full"}),
        ("gpt-3-tiny", "fp8-block128", 1, {}),
        (WIDE, "fp32", 1, {"recompute": "full"}),
        (WIDE, "fp32", 1, {}),
    ],
)
def test_peak_memory(model: str | dict, precision: str, dp: int, strategy: dict, ranks, tmp_path: Path) -> None:
    strategy = {"micro_batch": 4, **strategy}
    job = tiny_job(
        model, precision, dp, strategy=strategy, sequence=256, global_batch=8 * dp, run={"steps": MEASURED_STEP}
    )
    compare(job, dp, ranks, tmp_path)


@pytest.mark.parametrize("model", ["llama-3-tiny", "deepseek-v3-tiny"])
def test_peak_memory_of_a_single_micro_batch_with_recompute(model: str, ranks, tmp_path: Path) -> None:
    """The peak comes late: gradients outgrow the inputs that are kept."""
    strategy = {"micro_batch": 4, "recompute": "full"}
    job = tiny_job(model, "fp8-block128", strategy=strategy, sequence=256, run={"steps": MEASURED_STEP})
    compare(job, 1, ranks, tmp_path)


def test_peak_memory_of_gathered_parameters_with_recompute(ranks, tmp_path: Path) -> None:
    strategy = {"micro_batch": 4, "zero": 3, "recompute": "full"}
    compare(flight(strategy), 2, ranks, tmp_path)


def test_peak_memory_of_many_small_micro_batches(ranks, tmp_path: Path) -> None:
    compare(flight({"micro_batch": 1, "zero": 3}), 2, ranks, tmp_path)


def flight(strategy: dict) -> Job:
    run = {"steps": MEASURED_STEP}
    return tiny_job("deepseek-v3-tiny", "fp8-block128", 2, strategy=strategy, sequence=256, global_batch=16, run=run)


def compare(job: Job, dp: int, ranks, tmp_path: Path) -> None:
    check(job, measure(job, dp, ranks, tmp_path))


def measure(job: Job, dp: int, ranks, tmp_path: Path) -> dict[str, float]:
    ranks(dp, fly, job, str(tmp_path))
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    return json.decode(lines[MEASURED_STEP - 1], type=Step).bytes


def check(job: Job, measured: dict[str, float]) -> None:
    predicted = predict_memory(job)
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.10)
    for pool in ("parameters", "gradients", "optimizer"):
        assert predicted[pool] == pytest.approx(measured[pool], rel=0.02), pool
