"""A section of a job may be a TOML file of its own, beside the job."""

from pathlib import Path

import pytest

from greylag.spec import SpecError, load_job

CLUSTER = """
preset = "h100-8x2"
[device]
name = "card at hand"
spread = 0.06
[device.efficiency]
gemm = 0.61
"""


def job_file(folder: Path, cluster: str) -> Path:
    path = folder / "job.toml"
    path.write_text(
        f'model = "llama-3-8b"\nprecision = "bf16"\ncluster = {cluster}\nsequence = 4096\nglobal_batch = 64\n'
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ours.toml").write_text(CLUSTER)
    return tmp_path


def test_a_cluster_file_beside_the_job(folder: Path) -> None:
    cluster = load_job(job_file(folder, '"ours.toml"')).cluster
    assert (cluster.name, cluster.num_devices, cluster.device.name) == ("ours", 16, "card at hand")
    assert (cluster.device.efficiency.gemm, cluster.device.spread) == (0.61, 0.06)
    assert cluster.device.peak("fp8") == 1979e12  # the preset's data sheet


def test_its_size_can_be_changed(folder: Path) -> None:
    cluster = load_job(job_file(folder, '{ preset = "ours.toml", num_nodes = 32 }')).cluster
    assert (cluster.name, cluster.num_devices, cluster.device.efficiency.gemm) == ("ours", 256, 0.61)
    assert load_job(job_file(folder, '"ours.toml"'), ["cluster.num_nodes=4"]).cluster.num_devices == 32


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ours.toml", None, r"ours\.toml: no such file; did you mean"),
        ("own.toml", 'preset = "h1000-8x2"', r"no preset 'h1000'"),
        ("own.toml", 'preset = "ours.toml"', r"no preset 'ours\.toml'"),
        ("own.toml", "preset = [", r"own\.toml: not valid TOML"),
        ("own.toml", CLUSTER + "gem = 1.0", r"unknown key 'cluster\.device\.efficiency\.gem'.*gemm"),
        ("local-x.toml", CLUSTER, r"local-x\.toml: 'local' is the name"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    (tmp_path / "our.toml").write_text(CLUSTER)
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=said):
        load_job(job_file(tmp_path, f'"{name}"'))
