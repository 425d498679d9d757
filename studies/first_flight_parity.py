"""Study: FP8 block128 against FP32 on the first-flight model, same data and seed.

Flies the job once per recipe, both at once (a killed study resumes: each run is a run folder), compares the smoothed
losses and writes `first_flight_parity.json` and `.svg` beside this file.

Usage: first_flight_parity.py [steps] [seed ...]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec

from greylag.spec import Step

HERE = Path(__file__).parent
ROOT = HERE.parent
WINDOW = 50
"""Steps that the smoothed loss is the mean of."""
RECIPES = ("fp32", "fp8-block128")


def start(recipe: str, steps: int, seed: int) -> subprocess.Popen[bytes]:
    """Begin or go on with one run, on one rank, so that both recipes fly at once."""
    settings = [f"run.steps={steps}", f"precision.preset={recipe}", f"run.seed={seed}", "run.tensorboard=false"]
    alone = ["strategy.dp=1", "strategy.zero=1", "cluster=local-1x1"]
    command = [sys.executable, "-m", "greylag", "train", "jobs/first_flight.toml", *settings, *alone]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--folder", str(folder_of(recipe, steps, seed))], cwd=ROOT, env=environment)


def folder_of(recipe: str, steps: int, seed: int) -> Path:
    """The run folder of one run of the study."""
    return ROOT / "runs" / f"study_first_flight_{recipe}_{steps}_{seed}"


def losses_of(folder: Path, steps: int) -> list[float]:
    """Losses of a finished run, by step."""
    losses: dict[int, float] = {}
    for line in (folder / "steps.jsonl").read_bytes().splitlines():
        step = msgspec.json.decode(line, type=Step)
        assert step.loss is not None
        losses[step.number] = step.loss
    return [losses[n] for n in range(1, steps + 1)]


def fly(steps: int, seed: int) -> dict[str, list[float]]:
    """Losses of both recipes."""
    runs = [start(recipe, steps, seed) for recipe in RECIPES]
    codes = [run.wait() for run in runs]
    if any(codes):
        sys.exit("a run failed; what it said stands above. Run the same command to resume.")
    return {recipe: losses_of(folder_of(recipe, steps, seed), steps) for recipe in RECIPES}


def smoothed(losses: list[float]) -> list[float]:
    """Mean of the last WINDOW losses at each step."""
    return [sum(losses[max(0, n - WINDOW) : n]) / min(n, WINDOW) for n in range(1, len(losses) + 1)]


def plot(rows: list[dict], path: Path) -> None:
    """The smoothed losses of both recipes, and their relative difference below."""
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained")
    for row in rows:
        high, low = smoothed(row["fp32"]), smoothed(row["fp8-block128"])
        steps = range(1, len(high) + 1)
        first = row is rows[0]
        above.plot(steps, high, color="0.6", linewidth=3, label="FP32" if first else None)
        above.plot(steps, low, color="tab:blue", linewidth=1, label="FP8 block128" if first else None)
        below.plot(steps, [100 * (b / a - 1) for a, b in zip(high, low, strict=True)], color="tab:blue", linewidth=1)
    above.set_ylabel(f"loss, mean of the last {WINDOW} steps")
    above.legend()
    below.axhline(0, color="0.8", linewidth=1)
    below.set_ylabel("FP8 / FP32 - 1, %")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    seeds = [int(s) for s in sys.argv[2:]] or [0]
    rows: list[dict] = [{"seed": seed, **fly(steps, seed)} for seed in seeds]
    for row in rows:
        row["difference"] = smoothed(row["fp8-block128"])[-1] / smoothed(row["fp32"])[-1] - 1
        print(f"seed {row['seed']}: smoothed loss FP32 {smoothed(row['fp32'])[-1]:.5f}, "
              f"FP8 {smoothed(row['fp8-block128'])[-1]:.5f}, difference {row['difference']:+.3%}")  # fmt: skip
    record = {"command": f"python studies/first_flight_parity.py {steps} {' '.join(map(str, seeds))}", "window": WINDOW,
              "rows": rows}  # fmt: skip
    (HERE / "first_flight_parity.json").write_text(json.dumps(record) + "\n")
    plot(rows, HERE / "first_flight_parity.svg")


if __name__ == "__main__":
    main()
