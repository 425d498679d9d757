"""The same job under torchrun, under srun and by itself gives the same bits.

srun is tried where a Slurm cluster answers (`tests/slurm.sh` brings up one of a single node); elsewhere that lane says
so and is skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import json

from greylag.spec import Step

JOB = """
precision = {preset = "fp8-block128", high = "fp32"}
cluster = "local-2x1"
sequence = 64
global_batch = 4
[model]
preset = "deepseek-v3-tiny"
num_layers = 2
hidden_size = 128
ffn_hidden_size = 256
moe = {ffn_hidden_size = 128}
[run]
steps = 3
warmup_steps = 1
checkpoint_every = 0
"""
BIN = Path(sys.executable).parent


def slurm_answers() -> bool:
    if not shutil.which("sinfo"):
        return False
    return "idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout


def losses(folder: Path) -> list[float | None]:
    return [json.decode(line, type=Step).loss for line in (folder / "steps.jsonl").read_bytes().splitlines()]


def fly(folder: Path, *launcher: str) -> list[float | None]:
    job = folder.parent / "job.toml"
    job.write_text(JOB)
    command = [*launcher, str(BIN / "greylag"), "train", str(job), "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=200, capture_output=True)
    return losses(folder)


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory) -> list[float | None]:
    return fly(tmp_path_factory.mktemp("self") / "run")


def test_torchrun(by_itself, tmp_path: Path) -> None:
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
    assert fly(tmp_path / "run", *launcher) == by_itself
    assert len(by_itself) == 3


@pytest.mark.skipif(not slurm_answers(), reason="no Slurm cluster answers; run tests/slurm.sh to bring one up")
def test_srun(by_itself, tmp_path: Path) -> None:
    assert fly(tmp_path / "run", "srun", "-n2") == by_itself
