"""A calibration of this machine is complete enough to predict any job that it can train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from greylag.sim import predict
from greylag.spec.calibration import load_local
from greylag.spec.load import presets
from jobs import tiny_job


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("home")
    command = [sys.executable, "-m", "greylag", "calibrate", "--ranks", "2"]
    subprocess.run(command, check=True, env={**os.environ, "GREYLAG_HOME": str(home)}, timeout=300, capture_output=True)
    return home


@pytest.mark.parametrize("precision", presets("precisions"))
@pytest.mark.parametrize("model", [name for name in presets("models") if name.endswith("-tiny")])
def test_every_tiny_job_can_be_predicted(model: str, precision: str, home: Path, monkeypatch) -> None:
    monkeypatch.setenv("GREYLAG_HOME", str(home))
    table = {"swiglu_input": "high"} if (model, precision) == ("gpt-3-tiny", "fp8-deepseek") else {}
    step = predict(tiny_job(model, precision, dp=2, precision_table=table), load_local())
    assert 0 < step.utilization < 1
    assert all(seconds >= 0 for seconds in step.seconds.values())


def test_what_was_measured_is_possible(home: Path, monkeypatch) -> None:
    monkeypatch.setenv("GREYLAG_HOME", str(home))
    calibration = load_local()
    assert calibration.num_ranks == 2
    assert 1e8 < calibration.peak < 1e13
    for name, curve in (calibration.ops | calibration.collectives).items():
        assert curve.size == sorted(curve.size), name
        assert all(seconds > 0 for seconds in curve.seconds), name
        assert curve.seconds[-1] > curve.seconds[0] / 4, name
