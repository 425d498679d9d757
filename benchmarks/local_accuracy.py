"""Predicted against measured: step time and peak memory of a dozen small jobs, on this machine, by our own trainer.

The machine is calibrated before every few jobs, so that predictions and flights meet under the same load; each job then
flies its steps. Prints a line per job, and whether the prediction ranks them right. With `--phases` a table per job.

    python benchmarks/local_accuracy.py [--rounds 1] [--steps 25] [--only NAME] [--phases] [--out FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.progress import track

from greylag.spec import Step
from truth_rows.score import spearman

ROOT = Path(__file__).parent.parent
BASE = ROOT / "jobs" / "first_flight.toml"
WARM_UP = 5
PER_CALIBRATION = 4
"""Jobs between two calibrations: a shared machine is another one after a few minutes."""

JOBS: dict[str, tuple[str, ...]] = {
    "first flight": (),
    "fp32": ("precision.preset=fp32",),
    "scale per tensor": ("precision.preset=fp8-tensor-delayed",),
    "zero 1": ("strategy.zero=1",),
    "two replicas": ("strategy.zero=1", "strategy.replicas=2"),
    "recompute": ("strategy.recompute=full",),
    "micro-batch 1": ("strategy.micro_batch=1",),
    "micro-batch 8, recompute": ("strategy.micro_batch=8", "strategy.recompute=full"),
    "sequence 512": ("sequence=512", "strategy.micro_batch=2", "global_batch=8"),
    "dense": ("model.preset=llama-3-tiny",),
    "dense, fp32, zero 2": ("model.preset=llama-3-tiny", "precision.preset=fp32", "strategy.zero=2"),
    "gpt": ("model.preset=gpt-3-tiny", "model.num_layers=4", "model.hidden_size=256", "model.ffn_hidden_size=1024"),
    "mixtral": ("model.preset=mixtral-tiny", "model.num_layers=4", "model.hidden_size=256"),
    "experts over ranks": ("strategy.ep=2",),
}
"""Changes to the first flight: model, precision, shards, replicas, micro-batch, sequence, recompute, experts."""


@dataclass(frozen=True)
class Flight:
    """A job as predicted and as flown."""

    name: str
    predicted: Step
    steps: list[Step]

    @property
    def seconds(self) -> float:
        """Median of the steps after the warm-up."""
        return median(step.total_seconds for step in self.steps[WARM_UP:])

    @property
    def time_error(self) -> float:
        """Relative, of the step."""
        return self.predicted.total_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """Relative, of the peak."""
        return self.predicted.total_bytes / next(s.total_bytes for s in self.steps if s.bytes) - 1

    def line(self) -> str:
        """One row of the table."""
        times = f"{self.predicted.total_seconds:11.3f}{self.seconds:11.3f}{self.time_error:+9.1%}"
        return f"{self.name:26}{times}{self.memory_error:+9.1%}"

    def phases(self) -> str:
        """Seconds by phase."""
        rows = (
            f"    {phase:12}{seconds:10.4f}{median(s.seconds[phase] for s in self.steps[WARM_UP:]):10.4f}"
            for phase, seconds in self.predicted.seconds.items()
        )
        return "\n".join(rows)


def greylag(home: Path, *arguments: str) -> None:
    """Run a command with its calibration under `home`."""
    command = [sys.executable, "-m", "greylag", *arguments]
    environment = {**os.environ, "GREYLAG_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")


def fly(home: Path, number: int, name: str, steps: int) -> Flight:
    """Fly a job and read what was predicted of it before it took off."""
    folder = home / f"run{number}"
    settings = [f"run.steps={steps}", "run.warmup_steps=2", "run.checkpoint_every=0", "run.tensorboard=false"]
    greylag(home, "train", str(BASE), *settings, *JOBS[name], "--folder", str(folder))
    predicted = msgspec.json.decode((folder / "predicted.json").read_bytes(), type=Step)
    lines = (folder / "steps.jsonl").read_bytes().splitlines()
    return Flight(name, predicted, [msgspec.json.decode(line, type=Step) for line in lines])


def main() -> None:
    """Calibrate, fly, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", action="append", choices=list(JOBS))
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    names = [name for _ in range(chosen.rounds) for name in chosen.only or JOBS]
    flights: list[Flight] = []
    print(f"{'':26}{'predicted':>11}{'measured s':>11}{'time':>9}{'memory':>9}")
    with tempfile.TemporaryDirectory() as home:
        for number, name in enumerate(track(names, "flying", transient=True)):
            if number % PER_CALIBRATION == 0:
                greylag(Path(home), "calibrate", "--ranks", "2")
            flights.append(fly(Path(home), number, name, chosen.steps))
            print(flights[-1].line(), flush=True)
            if chosen.phases:
                print(flights[-1].phases())
    predicted, measured = [f.predicted.total_seconds for f in flights], [f.seconds for f in flights]
    times, memories = [abs(f.time_error) for f in flights], [abs(f.memory_error) for f in flights]
    print(f"{len(flights)} flights: step time {median(times):.1%} off in the median, {max(times):.1%} at worst; "
          f"peak memory {median(memories):.1%}, {max(memories):.1%}; "
          f"Spearman {spearman(predicted, measured):.2f}")  # fmt: skip
    if chosen.out:
        rows = [{"job": f.name, "predicted": f.predicted.total_seconds, "measured": f.seconds} for f in flights]
        chosen.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
