"""Study: the amax of tensors and of their blocks, for every role, while small models train; and what the advice says.

The talk that this package follows shows per-tensor amax within a narrow band, so that one scale a tensor is safe, and
per-block amax down to 0, so that block scales must be chosen from the tensor at hand. Two models train in block-scaled
FP8 with telemetry every 50 steps. For each role the figure shows, over steps, the band of amax over all layers, and
the smallest and the median amax of their 1x128 blocks. Writes `amax.json`, `amax.svg` and `amax_advice.txt`.

Usage: amax.py [--workers 2]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import matplotlib.pyplot as plt
import msgspec
from flight import Flight, fly, table
from parity import MODELS

from greylag.spec.precision import OperandRole
from greylag.spec.telemetry import Telemetry

HERE = Path(__file__).parent
STEPS = 1000
NAMES = ("dense-2m", "moe-2m")


def flight(model: str) -> Flight:
    """One run."""
    job = table(model, MODELS[model], {"preset": "fp8-block128"}, STEPS, seed=0)
    job["run"]["telemetry_every"] = 50
    return Flight("study_amax", model, job)


def bands(model: str) -> dict[str, list[dict[str, float]]]:
    """By role, for each observed step: the extremes over layers of amax, and of their blocks' smallest and median."""
    lines = (flight(model).folder / "telemetry.jsonl").read_bytes().splitlines()
    found: dict[str, list[dict[str, float]]] = {role: [] for role in get_args(OperandRole)}
    for line in lines:
        seen = msgspec.json.decode(line, type=Telemetry)
        for role, rows in found.items():
            mine = [o for o in seen.operands if o.role == role and o.amax > 0]
            blocks = [o.block_amax for o in mine if o.block_amax]
            rows.append({
                "step": seen.step, "smallest": min(o.amax for o in mine), "largest": max(o.amax for o in mine),
                "block_smallest": min(b[0] for b in blocks),
                "block_median": sorted(b[2] for b in blocks)[len(blocks) // 2],
            })  # fmt: skip
    return found


def plot(everything: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """A panel for each model and role."""
    roles = get_args(OperandRole)
    figure, panels = plt.subplots(
        len(everything), len(roles), sharex=True, figsize=(11, 6), layout="constrained", squeeze=False
    )
    for row, (model, found) in zip(panels, everything.items(), strict=True):
        for panel, role in zip(row, roles, strict=True):
            steps = [r["step"] for r in found[role]]
            low, high = ([r[key] for r in found[role]] for key in ("smallest", "largest"))
            panel.fill_between(steps, low, high, alpha=0.3, label="amax of tensors, all layers")
            panel.plot(steps, [r["block_median"] for r in found[role]], color="tab:orange", label="block amax, median")
            panel.plot(steps, [r["block_smallest"] for r in found[role]], color="tab:red", label="block amax, smallest")
            panel.set_yscale("log", base=2)
            panel.set_title(f"{model}: {role}", fontsize=9)
    panels[0][0].legend(fontsize=7)
    panels[-1][1].set_xlabel("step")
    figure.savefig(HERE / "amax.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    fly([flight(name) for name in NAMES], parser.parse_args().workers, lambda: None)
    everything = {name: bands(name) for name in NAMES}
    plot(everything)
    record = {"command": "python studies/amax.py", "steps": STEPS, "bands": everything}
    (HERE / "amax.json").write_text(json.dumps(record) + "\n")
    advice = []
    for name in NAMES:
        command = [sys.executable, "-m", "greylag", "advise", str(flight(name).folder)]
        advice.append(f"$ greylag advise runs/study_amax/{name}\n{subprocess.check_output(command, text=True)}")
    (HERE / "amax_advice.txt").write_text("\n".join(advice))
    print("\n".join(advice))


if __name__ == "__main__":
    main()
