"""`greylag calibrate --cluster`: what it refuses, and the cluster file that a job then takes."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from greylag import calibration
from greylag.calibration import Request, as_toml, calibrate_accelerators, framework_speed
from greylag.sim import predict
from greylag.sim.fit import Fitted, fit
from greylag.spec import SpecError, load_job
from greylag.spec.load import load_preset
from greylag.spec.measurement import GemmSample, Measurements, MoveSample

JOB = """
model = "llama-3-8b"
precision = "bf16"
cluster = {cluster}
software = "megatron-core-2025"
sequence = 4096
global_batch = 64
"""


def measured(step: float | None = None) -> Measurements:
    gemms = [
        GemmSample(m=m, n=4096, k=k, dtype="bf16", seconds=2.0 * m * 4096 * k / 6e14)
        for m in (2048, 4096, 8192)
        for k in (2048, 8192)
    ]
    return Measurements(
        device="card at hand", source="trace r0.json", gemms=gemms, moves=[MoveSample(bytes=1e9, seconds=4e-4)],
        step=step, busy=2.0, unread={"mystery_kernel": 0.5},
    )  # fmt: skip


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(cluster='"h100-8x2"'))
    return path


@pytest.fixture
def fitted() -> Fitted:
    return fit(load_preset("cluster", "h100-8x2"), measured())


def test_the_cluster_file_is_the_fitted_cluster(tmp_path: Path, job_file: Path, fitted: Fitted) -> None:
    (tmp_path / "ours.toml").write_text(as_toml("h100-8x2", fitted, measured()))
    job_file.write_text(JOB.format(cluster='"ours.toml"'))
    cluster = load_job(job_file).cluster
    assert cluster == replace(fitted.cluster, name="ours")
    assert predict(load_job(job_file)).total_seconds > 0


def test_a_traced_step_gives_the_frameworks_speed(job_file: Path, fitted: Fitted) -> None:
    job = load_job(job_file)
    ours = replace(job, cluster=replace(job.cluster, device=fitted.cluster.device))
    slower = 1.1 * predict(ours).total_seconds
    speed = framework_speed(job, fitted, measured(slower))
    assert speed < job.software.speed
    explained = replace(ours, software=replace(job.software, speed=speed))
    assert predict(explained).total_seconds == pytest.approx(slower, rel=1e-3)


def test_a_step_of_another_job_is_refused(job_file: Path, fitted: Fitted) -> None:
    job = load_job(job_file)
    with pytest.raises(SpecError, match="is it the job that was traced"):
        framework_speed(job, fitted, measured(1e-3))
    with pytest.raises(SpecError, match=r"trace r0\.json: holds no steps"):
        framework_speed(job, fitted, measured(None))


def test_it_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    calibrate_accelerators(Request("h100-8x2", tmp_path / "ours.toml", 8), lambda ranks, kind: measured())
    said = capsys.readouterr().out
    assert all(word in said for word in ("card at hand", "NVIDIA H100 80GB HBM3", "gemm_ramp", "mystery_kernel", "25"))
    assert (tmp_path / "ours.toml").read_text().startswith("# card at hand: constants of its own kernels")


def test_the_line_for_the_job_names_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Though the job has changed it, as one does that was calibrated before."""
    text = JOB.format(cluster='"h100-8x2"').replace(
        '"megatron-core-2025"', '{ preset = "megatron-core-2025", speed = 1.0 }'
    )
    path = tmp_path / "job.toml"
    path.write_text(text)
    usual = predict(load_job(path)).total_seconds
    monkeypatch.setattr(calibration, "read_profile", lambda paths: measured(usual))
    calibrate_accelerators(Request("h100-8x2", tmp_path / "ours.toml", traces=(Path("r0.json"),), job=path))
    line = capsys.readouterr().out.splitlines()[-1].split(": ", 1)[1]
    path.write_text(text.replace('software = { preset = "megatron-core-2025", speed = 1.0 }', line))
    assert load_job(path).software.speed != 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preset": "local-2x1"}, "calibrated by `greylag calibrate` alone"),
        ({"preset": "h1000"}, "no preset 'h1000'"),
        ({"out": None}, "--out is missing"),
        ({"out": "x.json"}, "ends in none of .toml"),
        ({"out": "there.toml"}, "exists already"),
        ({"out": "local-2.toml"}, "'local' is the name"),
        ({"traces": (Path("t.json"),), "ranks": 2}, "--ranks: has no effect on traces"),
        ({"job": "job.toml"}, "--job: is the job that was traced"),
        ({"job": "here.toml", "traces": (Path("t.json"),)}, "runs on this machine's CPUs"),
    ],
)
def test_what_is_amiss_is_said_before_anything_is_measured(tmp_path: Path, changes: dict, said: str) -> None:
    (tmp_path / "there.toml").write_text("")
    (tmp_path / "job.toml").write_text(JOB.format(cluster='"h100-8x2"'))
    (tmp_path / "here.toml").write_text(JOB.format(cluster='"local-2x1"'))
    places = {key: tmp_path / value for key, value in changes.items() if key in ("out", "job") and value}
    with pytest.raises(SpecError, match=said):
        calibrate_accelerators(Request(**{"preset": "h100-8x2", "out": tmp_path / "o.toml", **changes, **places}))
    assert not (tmp_path / "o.toml").exists()


def test_fitted_constants_are_shares(fitted: Fitted) -> None:
    assert fitted.after["gemm"] == pytest.approx(6e14 / 989.5e12, rel=0.1)
    assert np.all(np.abs(fitted.errors["GEMM"]) < 0.1)
