"""Bad input ends in one line on stderr and exit code 2; what was there before is untouched."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import assert_one_line, environment, greylag, greylag_here, steps_of, write_job

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
"""One rank that needs no launcher, for jobs with `LONE`: half the time of a launched one."""
LONE = {"cluster": {"devices_per_node": 1}, "strategy": {"dp": 1}, "run": {"store": "file"}}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def lone_job(folder: Path, **run: object) -> Path:
    return write_job(folder, **{**LONE, "run": {**LONE["run"], **run}})


# --- without torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["show", "simulate", "train"])
def test_missing_job_file(name: str, tmp_path: Path) -> None:
    write_job(tmp_path)
    assert_one_line(greylag(tmp_path, name, "small2.toml"), "small2.toml: no such file", "did you mean small.toml?")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["show", "simulate"])
def test_problems_are_refused(name: str, tmp_path: Path) -> None:
    result = greylag_here(tmp_path, name, write_job(tmp_path, sequence=10**6))
    assert_one_line(result, "small: sequence: 1000000 is longer")


def test_a_rank_that_is_not_the_first_speaks_where_no_run_is(tmp_path: Path) -> None:
    assert_one_line(greylag_here(tmp_path, "show", "none.toml", RANK="1", WORLD_SIZE="2"), "no such file")


def test_local_without_calibration(tmp_path: Path) -> None:
    job = write_job(tmp_path, cluster="local-2x1")
    result = greylag_here(tmp_path, "simulate", job, GREYLAG_HOME=str(tmp_path / "home"))
    assert_one_line(result, "cluster 'local' has not been measured", "greylag calibrate")


EMPTY = {"device": "x", "created": "x", "num_ranks": 2, "torch": "x", "gemm": [], "ops": {}, "collectives": {}}
POINT = {"m": 1, "n": 1, "k": 1, "seconds": 1.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("\0\1\2", "cannot be read"),
        ("[]", "cannot be read"),
        ({**EMPTY, "gemm": 3}, "cannot be read"),
        (EMPTY, "gemm is not a grid"),
        ({**EMPTY, "gemm": [POINT, {**POINT, "m": 2, "n": 2}]}, "gemm is not a grid"),
        ({**EMPTY, "gemm": [{**POINT, "seconds": 0}]}, "a time is not positive"),
        ({**EMPTY, "gemm": [POINT], "ops": {"copy": {"size": [1, 2], "seconds": [1]}}}, "'copy' has 2 sizes"),
        ({**EMPTY, "gemm": [POINT], "ops": {"copy": {"size": [2, 1], "seconds": [1, 1]}}}, "do not ascend"),
        ({**EMPTY, "gemm": [POINT]}, "has no '"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_corrupt_calibration(content: object, said: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, cluster="local-2x1")
    (tmp_path / "calibration.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert_one_line(greylag_here(tmp_path, "simulate", job, GREYLAG_HOME=str(tmp_path)), said, "run `greylag calibrate")


def test_report_without_a_run(tmp_path: Path) -> None:
    assert_one_line(greylag(tmp_path, "report", "runs/none"), "no such run folder")
    (tmp_path / "empty").mkdir()
    assert_one_line(greylag_here(tmp_path, "report", "empty"), "empty/job.json: no such file")


@pytest.mark.parametrize("arguments", [("fly",), ("train",), ("show", "a.toml", "--fast"), ("report",)])
def test_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = greylag_here(tmp_path, *arguments)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    line = [sys.executable, "-X", "importtime", "-m", "greylag", "--help"]
    result = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    imported = {row.rsplit("|", 1)[-1].strip().split(".")[0] for row in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "plotly", "jinja2"}


# --- train, before any rank starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "environ", "said"),
    [
        (['run.data=["none.txt"]'], {}, "run.data: 'none.txt' matches no file"),
        (["sequence=2048", 'run.data=["small.toml"]'], {}, "bytes are fewer than one sequence of 2048"),
        ([f'run.data=["{"x" * 300}"]'], {}, "File name too long"),
        (["strategy.dp=1", "strategy.tp=2"], {}, "training knows only dp and ep so far"),
        (["cluster=h100-2x1"], {}, "torch finds none here"),
        (["model.vocab_size=100"], {}, "model.vocab_size: 100"),
        (["name=../elsewhere"], {}, "name: '../elsewhere' cannot name a run's folder"),
        ([], {"RANK": "0", "WORLD_SIZE": "3"}, "torchrun made this rank 0 of 3, the job needs 2 ranks"),
        ([], {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK: 'zero' in the environment is not a number"),
        ([], {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "srun made this rank 0 of 4"),
        ([], ALONE, "torchrun made this rank 0 of 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_train_refuses(overrides: list[str], environ: dict[str, str], said: str, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    if "cluster=h100-2x1" in overrides:
        environ = {"CUDA_VISIBLE_DEVICES": ""}
    assert_one_line(greylag_here(tmp_path, "train", job, *overrides, **environ), said)
    assert not (tmp_path / "runs").exists()


def test_other_ranks_leave_the_word_to_the_first(tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "train", write_job(tmp_path), RANK="1", WORLD_SIZE="3")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


def test_no_store(tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "train", lone_job(tmp_path, store="auto"), **ALONE)
    assert_one_line(result, "MASTER_ADDR and MASTER_PORT are not set")


def test_folder_that_cannot_be(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert_one_line(
        greylag_here(tmp_path, "train", job, "--folder", "text.txt/run"), "cannot write here: Not a directory"
    )


def test_folder_of_something_else(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / ".lock").write_text("mine")
    (tmp_path / "photos" / "cat.png").write_text("meow")
    before = snapshot(tmp_path)
    assert_one_line(
        greylag_here(tmp_path, "train", job, "--folder", "photos"), "photos: not empty and not a run folder"
    )
    assert snapshot(tmp_path) == before


# --- train, on a folder that holds a run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job of one rank that has flown two steps, and kept both checkpoints."""
    folder = tmp_path_factory.mktemp("flown")
    result = greylag(folder, "train", lone_job(folder), **ALONE)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("step 1/2")
    assert (folder / "runs" / "small" / "predicted.json").exists()
    return folder


@pytest.fixture
def run(flown: Path, tmp_path: Path) -> Path:
    """A copy of the flown run to be damaged."""
    shutil.copytree(flown, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / "small"


def resume(run: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    folder = run.parent.parent
    return greylag(folder, "train", folder / "small.toml", *overrides, **ALONE)


def resume_here(run: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    folder = run.parent.parent
    return greylag_here(folder, "train", folder / "small.toml", *overrides, **ALONE)


def test_a_finished_run_is_left_as_it_is(run: Path) -> None:
    before = steps_of(run)
    result = resume(run)
    assert (result.returncode, result.stderr) == (0, "")
    assert steps_of(run) == before


def test_locked_folder(run: Path) -> None:
    before = snapshot(run)
    with open(run / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_one_line(resume_here(run), "another run is writing to this folder")
    assert snapshot(run) == before


def test_folder_of_another_job(run: Path) -> None:
    before = snapshot(run)
    assert_one_line(
        resume_here(run, "run.learning_rate=1e-2"), "another job (differs in run.learning_rate)", "--folder"
    )
    assert snapshot(run) == before


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"{}", b"", b"[" * 5000])
def test_damaged_job_json(content: bytes, run: Path) -> None:
    (run / "job.json").write_bytes(content)
    before = snapshot(run)
    assert_one_line(resume_here(run), "job.json: cannot be read")
    assert_one_line(greylag_here(run, "report", run), "job.json: not a Job")
    assert snapshot(run) == before


def test_job_json_is_a_folder(run: Path) -> None:
    (run / "job.json").unlink()
    (run / "job.json").mkdir()
    assert_one_line(resume_here(run), "job.json: cannot be read")
    assert_one_line(greylag_here(run, "report", run), "job.json: cannot be read (Is a directory)")


def test_changed_data(run: Path) -> None:
    with open(run.parent.parent / "text.txt", "ab") as text:
        text.write(b"more")
    assert_one_line(resume(run, "run.steps=3"), "run.data: the text differs")
    assert [s.number for s in steps_of(run)] == [1, 2]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoint_and_the_advice_on_it(run: Path) -> None:
    newest = run / "checkpoints" / "step_00000002"
    (newest / "rank_0.seal").write_text('{"__0_0.distcp": 3}')
    before = snapshot(run / "checkpoints")
    assert_one_line(resume(run, "run.steps=3"), f"remove {newest.relative_to(run.parent.parent)} to resume")
    assert snapshot(run / "checkpoints") == before
    shutil.rmtree(newest)
    assert resume(run).returncode == 0
    steps = steps_of(run)
    assert [s.number for s in steps] == [1, 2, 2]
    assert steps[1].loss == steps[2].loss


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("__0_0.distcp", flip, "__0_0.distcp: checkpoint is damaged"),
        ("__0_0.distcp", lambda file: os.truncate(file, 1000), "__0_0.distcp: checkpoint is damaged"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp: checkpoint file cannot be read: No such file"),
        ("rank_0.seal", Path.unlink, ".metadata: checkpoint is incomplete"),
        ("rank_0.seal", lambda file: file.write_bytes(b"\xff"), "rank_0.seal: checkpoint is damaged"),
        ("rank_0.seal", lambda file: file.write_bytes(b"[]"), "rank_0.seal: checkpoint is damaged"),
        (".metadata", Path.unlink, ".metadata: checkpoint file cannot be read: No such file"),
        (".metadata", lambda file: file.write_bytes(b"garbage"), ".metadata: checkpoint is damaged"),
    ],
)
def test_what_is_wrong_with_a_checkpoint(name: str, damage: Callable[[Path], object], said: str, run: Path) -> None:
    from greylag.train.checkpoint import verify

    newest = run / "checkpoints" / "step_00000002"
    assert verify(newest) is None
    damage(newest / name)
    assert said in (verify(newest) or "")


def test_damage_that_one_rank_alone_sees(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    result = greylag(tmp_path, "train", job)
    assert (result.returncode, result.stderr) == (0, "")
    newest = tmp_path / "runs" / "small" / "checkpoints" / "step_00000002"
    flip(newest / "__1_0.distcp")
    assert_one_line(greylag(tmp_path, "train", job, "run.steps=3"), "__1_0.distcp: checkpoint is damaged")


def test_torn_line_does_not_swallow_the_next_step(run: Path) -> None:
    from greylag.spec import load_job
    from greylag.train.folder import RunFolder

    steps = steps_of(run)
    whole = (run / "steps.jsonl").read_bytes()
    (run / "steps.jsonl").write_bytes(whole + whole[:40])
    folder = RunFolder(run)
    folder.claim(load_job(run.parent.parent / "small.toml"))
    folder.append(steps[0])
    lines = (run / "steps.jsonl").read_bytes().splitlines()
    assert len(lines) == 4
    assert lines[3] == lines[0]


# --- report, on a folder that holds a run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("steps.jsonl", b"", "holds no measured step"),
        ("steps.jsonl", b"\xff\xfe\n\0\n", "no line is a Step"),
        ("steps.jsonl", b'{"x": ' + b"[" * 5000 + b"\n" * 3, "holds no measured step"),
        ("steps.jsonl", None, "steps.jsonl: no such file"),
        ("predicted.json", b"{", "predicted.json: not a Step"),
        ("predicted.json", b'{"x": ' + b"[" * 5000, "predicted.json: not a Step"),
    ],
)
def test_report_on_a_damaged_record(name: str, content: bytes | None, said: str, run: Path) -> None:
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    assert_one_line(greylag_here(run, "report", run), said)
    assert not (run / "report.html").exists()


def test_report_to_a_place_that_is_none(run: Path) -> None:
    assert_one_line(greylag_here(run, "report", run, "--out", run / "job.json" / "x.html"), "cannot be written")


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 32 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk(small_disk: Path, flown: Path) -> None:
    """Room for one checkpoint of 12 MB and half of another."""
    job = lone_job(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(14 << 20))
    result = greylag(small_disk, "train", job, **ALONE)
    run = small_disk / "runs" / "small"
    assert result.returncode == 2
    assert result.stderr.startswith("greylag: runs/small/checkpoints: checkpoint not saved")
    assert result.stderr.count("\n") == 1
    assert "the one before it is intact" in result.stderr
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_00000001"]
    ballast.unlink()
    assert greylag(small_disk, "train", job, **ALONE).returncode == 0
    assert steps_of(run)[-1].loss == steps_of(flown / "runs" / "small")[-1].loss


def test_disk_without_any_room(small_disk: Path) -> None:
    job = lone_job(small_disk)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    assert_one_line(greylag_here(small_disk, "train", job, **ALONE), "No space left on device", "free some space")


def test_record_is_whole_or_not_there(small_disk: Path, flown: Path) -> None:
    from greylag.spec import SpecError
    from greylag.train.folder import RunFolder

    folder, step = RunFolder(small_disk), steps_of(flown / "runs" / "small")[0]
    folder.append(step)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    size = (small_disk / "steps.jsonl").stat().st_size
    room = 4096 // size - 1  # in the page that the file has already
    for _ in range(room):
        folder.append(step)
    with pytest.raises(SpecError, match=r"steps.jsonl: cannot be written: No space left on device"):
        folder.append(step)
    assert steps_of(small_disk) == [step] * (1 + room)
