"""Many small runs of one study: job files from tables, several runs at once, resumed where they were killed.

Each run is `greylag train` on one rank, a run folder of its own, trained on the source of Python's standard library
but every twentieth file; when it has ended, its loss on those held-out files is evaluated at its own precision.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional as F

from greylag.model import Transformer
from greylag.spec import Job, Step
from greylag.train.data import DIVIDER, STDLIB, Corpus, find_files

HERE = Path(__file__).parent
ROOT = HERE.parent
HELDOUT = 512
"""Windows that the validation loss is the mean over."""
SHAPE = {"vocab_size": 256, "max_sequence": 2048, "norm_eps": 1e-6, "rope_theta": 10000.0, "num_heads": 4}
DENSE_2M = {"num_layers": 3, "hidden_size": 256, "ffn_hidden_size": 512, **SHAPE}


@dataclass(frozen=True, eq=False)
class Flight:
    """One run of a study."""

    study: str
    name: str
    table: dict
    """The job."""
    script: tuple[str, ...] = ()
    """A file beside this one, and arguments, to run in the place of the command line: it changes something first."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return ROOT / "runs" / self.study / self.name

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.table["run"]["steps"]

    def start(self) -> subprocess.Popen[bytes]:
        """Begin or go on."""
        job = self.folder.with_suffix(".toml")
        job.parent.mkdir(parents=True, exist_ok=True)
        job.write_text(toml(self.table))
        command = [sys.executable, "-m", "greylag", "train"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.script:
            command = [sys.executable, str(HERE / self.script[0]), *self.script[1:]]
            environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # or the launcher starts another Python
        with open(self.folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen([*command, str(job), "--folder", str(self.folder)],
                                    cwd=ROOT, env=environment, stdout=log, stderr=log)  # fmt: skip

    def result(self) -> dict | None:
        """Validation loss, skipped steps and the smoothed loss every 25 steps of a finished run; None of another.

        A run that was recorded in the study's results counts as finished, wherever its folder is.
        """
        path, validation = self.folder / "steps.jsonl", self.folder / "validation.json"
        if not validation.exists():
            return recorded(self.study).get(self.name)
        steps = {s.number: s for s in (msgspec.json.decode(line, type=Step) for line in path.read_bytes().splitlines())}
        losses = [steps[n].loss for n in range(1, self.steps + 1)]
        smooth = [sum(losses[max(0, n - 50) : n]) / min(n, 50) for n in range(25, self.steps + 1, 25)]
        return {"validation_loss": json.loads(validation.read_text()),
                "skipped_steps": sum(s.skipped for s in steps.values()),
                "train_loss_every_25": [round(x, 5) for x in smooth]}  # fmt: skip


def recorded(study: str) -> dict[str, dict]:
    """Results by the run's name, as `record` wrote them."""
    path = HERE / f"{study.removeprefix('study_')}.json"
    return json.loads(path.read_text()).get("runs", {}) if path.exists() else {}


def record(flights: list[Flight], command: str) -> dict[str, dict]:
    """Write the results of all finished runs beside this file; return them by the run's name."""
    runs = {flight.name: result for flight in flights if (result := flight.result())}
    steps, study = flights[0].steps, flights[0].study.removeprefix("study_")
    whole = {"command": command, "steps": steps, "tokens_per_step": 512, "runs": runs}
    (HERE / f"{study}.json").write_text(json.dumps(whole, indent=1).replace(",\n    ", ", ") + "\n")
    return runs


def text(part: str) -> Path:
    """The text to train on, or the held-out files: every twentieth of the standard library."""
    path = ROOT / "runs" / f"study_{part}.txt"
    if not path.exists():
        files = find_files([STDLIB])
        chosen = [file for number, file in enumerate(files) if (number % 20 == 10) == (part == "heldout")]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_bytes(DIVIDER.join(file.read_bytes() for file in chosen))
        os.replace(path.with_suffix(".part"), path)
    return path


def table(model: str, shape: dict, precision: dict, steps: int, seed: int) -> dict:
    """A job on one rank: four sequences of 128 tokens a step."""
    run = {"steps": steps, "seed": seed, "learning_rate": 5e-4, "min_learning_rate": 1e-5, "warmup_steps": 50,
           "checkpoint_every": 250, "keep_checkpoints": 1, "tensorboard": False, "store": "file",
           "data": [str(text("train"))]}  # fmt: skip
    return {"sequence": 128, "global_batch": 4, "cluster": "local-1x1", "model": {"name": model, **shape},
            "precision": {**precision, "high": "fp32"}, "strategy": {"micro_batch": 4}, "run": run}  # fmt: skip


def toml(table: dict, prefix: str = "") -> str:
    """A table as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


@torch.no_grad()
def evaluate(folder: Path) -> float:
    """Loss of a finished run on the first HELDOUT windows of a fixed shuffle of the held-out text."""
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    model = Transformer(job.model, job.precision)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings(action="ignore"):  # that no process group is there
        dcp.load(state, checkpoint_id=max((folder / "checkpoints").glob("step_*")), no_dist=True)
    model.load_state_dict(state["model"])
    corpus, total = Corpus([text("heldout")], job.sequence, seed=0), 0.0
    for first in range(0, HELDOUT, 16):
        tokens_BS = corpus.windows(first, 16)
        total += F.cross_entropy(model(tokens_BS[:, :-1]).flatten(0, 1), tokens_BS[:, 1:].flatten()).item()
    return total / (HELDOUT / 16)


def fly(flights: list[Flight], workers: int, landed: Callable[[], None]) -> None:
    """Fly what has not been flown, `workers` at once; `landed` is called after each. Exits if one failed."""
    waiting = [flight for flight in flights if flight.result() is None]
    flying: dict[Flight, subprocess.Popen[bytes]] = {}
    failed = []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("runs", total=len(flights), completed=len(flights) - len(waiting))
        while waiting or flying:
            while waiting and len(flying) < workers:
                flight = waiting.pop(0)
                flying[flight] = flight.start()
            time.sleep(1)
            for flight, process in list(flying.items()):
                if process.poll() is None:
                    continue
                del flying[flight]
                if process.returncode:
                    failed.append(f"{flight.folder}.log: exit {process.returncode}")
                else:
                    (flight.folder / "validation.json").write_text(json.dumps(evaluate(flight.folder)))
                bar.update(task, advance=1, description=flight.name)
                landed()
    if failed:
        sys.exit("a run failed; run the same command to resume\n" + "\n".join(failed))
