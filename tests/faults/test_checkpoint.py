"""Kill a rank while it writes a checkpoint, or press Ctrl-C: the run goes on from a committed step, bit for bit."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import command, environment, greylag, greylag_here, steps_of, write_job
from greylag.spec import SpecError, load_job
from greylag.train.checkpoint import checkpoints, verify
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank

STEPS = 20
RUN = {"steps": STEPS, "warmup_steps": 1, "checkpoint_every": 1, "keep_checkpoints": 2}


def fly(rank: int, world: int, folder: str) -> None:
    os.chdir(folder)
    run_rank(load_job("small.toml"), RunFolder(Path("runs/small")), Place(rank, world, rank, world, "torchrun", "0"))


@pytest.fixture(scope="module")
def undisturbed(ranks: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    """What each step of the job gives if nobody disturbs it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "runs" / "small").mkdir(parents=True)
    write_job(folder, run={**RUN, "checkpoint_every": 0})
    ranks(2, fly, str(folder))
    return outcome(folder)


def outcome(folder: Path) -> list[tuple]:
    """Number, loss and gradient norm of each step, as last written."""
    run = folder / "runs" / "small"
    written = steps_of(run) if (run / "steps.jsonl").exists() else []
    steps = {s.number: (s.number, s.loss, s.grad_norm) for s in written}
    return [steps[number] for number in sorted(steps)]


def newest(folder: Path) -> int:
    """The step of the newest committed checkpoint, 0 where there is none."""
    return max((int(c.name.removeprefix("step_")) for c in checkpoints(folder)), default=0)


def start(folder: Path, job: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("train", job),
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(launcher: "subprocess.Popen[str]") -> dict[int, int]:
    """Process ids of the launcher's ranks, by rank."""
    found = {}
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(v.removeprefix(b"RANK=")): int(pid) for v in variables if v.startswith(b"RANK=")}
    return found


def wait_for(launcher: "subprocess.Popen[str]", met: Callable[[], object], pause: float = 0.0) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


@pytest.fixture
def started() -> Iterator[list]:
    """Launchers to be ended with the test."""
    launchers: list[subprocess.Popen[str]] = []
    yield launchers
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(30)


def files_of(part: Path) -> set[str]:
    try:
        return {p.name for p in part.iterdir()}
    except OSError:
        return set()


MOMENTS: dict[str, tuple[int, set[str], float]] = {
    "begun": (0, set(), 0.0),
    "while written": (1, {"__1_0.distcp"}, 0.01),
    "between files and seals": (0, {".metadata"}, 0.0),
    "before or after the rename": (0, {"rank_0.seal", "rank_1.seal"}, 0.002),
}
"""By name: which rank is killed, once which files are in the `.part`, and seconds to wait then at most."""


def test_killed_while_writing(undisturbed: list[tuple], tmp_path: Path, started: list) -> None:
    dice = random.Random(20)
    job = write_job(tmp_path, run=RUN)
    folder = tmp_path / "runs" / "small" / "checkpoints"
    resumed = 0
    for rank, written, delay in MOMENTS.values():
        launcher = start(tmp_path, job)
        started.append(launcher)
        wait_for(launcher, lambda before=resumed: newest(folder) > before, 0.001)
        wait_for(launcher, lambda names=written: any(names <= files_of(part) for part in folder.glob("*.part")))
        time.sleep(dice.uniform(0, delay))
        os.kill(ranks_of(launcher)[rank], signal.SIGKILL)
        _, said = launcher.communicate(timeout=40)
        assert launcher.returncode == 1, said
        assert "greylag: a rank ended with code" in said
        assert [verify(c) for c in checkpoints(folder)] == [None] * len(checkpoints(folder))
        assert newest(folder) > resumed
        resumed = newest(folder)
    result = greylag(tmp_path, "train", job)
    assert (result.returncode, result.stderr) == (0, "")
    assert outcome(tmp_path) == undisturbed
    assert [c.name for c in checkpoints(folder)] == [f"step_{n:08d}" for n in (STEPS - 1, STEPS)]
    assert not list(folder.glob("*.part"))


def test_interrupted(undisturbed: list[tuple], tmp_path: Path, started: list) -> None:
    """Ctrl-C in the middle, then another while the ranks are starting: each saves where it stands."""
    job = write_job(tmp_path, run={**RUN, "checkpoint_every": 0})
    run = tmp_path / "runs" / "small"

    def interrupt(met: Callable[["subprocess.Popen[str]"], bool]) -> int:
        launcher = start(tmp_path, job)
        started.append(launcher)
        wait_for(launcher, lambda: met(launcher), 0.005)
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 130, said
        assert said == "greylag: runs/small: saved; run the same command again to resume\n"
        assert newest(run / "checkpoints") == outcome(tmp_path)[-1][0]
        return newest(run / "checkpoints")

    middle = interrupt(lambda launcher: (run / "steps.jsonl").exists() and len(outcome(tmp_path)) >= 4)
    assert 4 <= middle < STEPS
    assert interrupt(lambda launcher: len(ranks_of(launcher)) == 2) == middle + 1
    result = greylag(tmp_path, "train", job)
    assert (result.returncode, result.stderr) == (0, "")
    assert outcome(tmp_path) == undisturbed


def test_launcher_killed(tmp_path: Path, started: list) -> None:
    """Its ranks fly on, and keep the folder locked as long as they do."""
    job = write_job(tmp_path, run={**RUN, "steps": 60, "checkpoint_every": 0})
    launcher = start(tmp_path, job)
    started.append(launcher)
    wait_for(launcher, lambda: len(ranks_of(launcher)) == 2, 0.005)
    orphans = ranks_of(launcher).values()
    launcher.kill()
    launcher.wait()
    result = greylag_here(tmp_path, "train", job)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    assert result.returncode == 2
    assert "another run is writing to this folder" in result.stderr


def fly_apart(rank: int, world: int, folder: str, steps: int) -> str:
    """Fly from a folder of the rank's own into a shared one; what went wrong."""
    os.chdir(f"{folder}/{rank}")
    job = load_job("small.toml", [f"run.steps={steps}"])
    try:
        run_rank(job, RunFolder(Path("../run")), Place(rank, world, rank, world, "torchrun", "0"))
    except SpecError as error:
        return str(error)
    return ""


def test_fault_of_one_rank_reaches_all(ranks: Callable, tmp_path: Path) -> None:
    for name in ("run", "0", "1"):
        (tmp_path / name).mkdir()
    for name in ("0", "1"):
        write_job(tmp_path / name, run={"checkpoint_every": 0})
    assert ranks(2, fly_apart, str(tmp_path), 2) == ["", ""]
    (tmp_path / "1" / "text.txt").write_bytes(b"other text" * 400)
    first, second = ranks(2, fly_apart, str(tmp_path), 3)
    assert first == second
    assert "run.data: the text differs" in first
