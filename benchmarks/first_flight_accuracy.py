"""Predicted against measured: step time and peak memory of the first flight, on this machine, in one run.

Each round calibrates, predicts, and flies 50 steps, so that machine and prediction meet under the same load. Prints a
table per round and, last, the median round. Usage: first_flight_accuracy.py [rounds] [key=value ...]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from greylag.spec import Step

ROOT = Path(__file__).parent.parent
JOB = ROOT / "jobs" / "first_flight.toml"
STEPS, WARM_UP = 55, 5


def greylag(home: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "greylag", *arguments]
    environment = {**os.environ, "GREYLAG_HOME": str(home)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def fly(home: Path, overrides: list[str]) -> tuple[Step, list[Step]]:
    """Calibrate, then fly; the prediction and the steps after the warm-up."""
    folder = home / "run"
    greylag(home, "calibrate", "--ranks", "2")
    settings = [f"run.steps={STEPS}", "run.checkpoint_every=0", "run.tensorboard=false", *overrides]
    greylag(home, "train", str(JOB), *settings, "--folder", str(folder))
    predicted = msgspec.json.decode((folder / "predicted.json").read_bytes(), type=Step)
    lines = (folder / "steps.jsonl").read_bytes().splitlines()
    return predicted, [msgspec.json.decode(line, type=Step) for line in lines]


def compare(predicted: Step, steps: list[Step]) -> tuple[float, float]:
    """Print one round; relative errors of step time and peak memory."""
    steady = steps[WARM_UP:]
    print(f"{'phase':12}{'predicted s':>13}{'measured s':>13}")
    for phase, seconds in predicted.seconds.items():
        print(f"{phase:12}{seconds:13.4f}{median(s.seconds[phase] for s in steady):13.4f}")
    measured = median(s.total_seconds for s in steady)
    time_error = predicted.total_seconds / measured - 1
    print(f"{'step':12}{predicted.total_seconds:13.4f}{measured:13.4f}{time_error:+9.1%}")
    bytes_measured = next(s.total_bytes for s in steps if s.bytes)
    memory_error = predicted.total_bytes / bytes_measured - 1
    print(f"{'peak MiB':12}{predicted.total_bytes / 2**20:13.1f}{bytes_measured / 2**20:13.1f}{memory_error:+9.1%}\n")
    return time_error, memory_error


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    errors = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as home:
            print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            errors.append(compare(*fly(Path(home), sys.argv[2:])))
    times, memories = zip(*errors, strict=True)
    print(f"median over {rounds} rounds of |error|: step time {median(map(abs, times)):.1%}, "
          f"peak memory {median(map(abs, memories)):.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
