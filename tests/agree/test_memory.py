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
    ],
)
def test_peak_memory(model: str, precision: str, dp: int, strategy: dict, ranks, tmp_path: Path) -> None:
    strategy = {"micro_batch": 4, **strategy}
    job = tiny_job(
        model, precision, dp, strategy=strategy, sequence=256, global_batch=8 * dp, run={"steps": MEASURED_STEP}
    )
    ranks(dp, fly, job, str(tmp_path))
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    measured = json.decode(lines[MEASURED_STEP - 1], type=Step).bytes
    predicted = predict_memory(job)
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.10)
    for pool in ("parameters", "gradients", "optimizer"):
        assert predicted[pool] == pytest.approx(measured[pool], rel=0.02), pool
