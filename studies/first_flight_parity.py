"""Study: FP8 block128 against FP32 on the first-flight model, same data and seed.

Flies the job once per recipe (a killed study resumes: each run is a run folder), then compares the smoothed losses
and writes `first_flight_parity.json` and `.svg` beside this file. Usage: first_flight_parity.py [steps] [seed ...]
"""

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from greylag.spec import Step

HERE = Path(__file__).parent
ROOT = HERE.parent
WINDOW = 50
"""Steps that the smoothed loss is the mean of."""
RECIPES = ("fp32", "fp8-block128")


def fly(recipe: str, steps: int, seed: int) -> list[float]:
    """Losses of one run, by step."""
    folder = ROOT / "runs" / f"study_first_flight_{recipe}_{steps}_{seed}"
    settings = [f"run.steps={steps}", f"precision.preset={recipe}", f"run.seed={seed}", "run.tensorboard=false"]
    command = [sys.executable, "-m", "greylag", "train", "jobs/first_flight.toml", *settings, "--folder", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    losses: dict[int, float] = {}
    for line in (folder / "steps.jsonl").read_bytes().splitlines():
        step = msgspec.json.decode(line, type=Step)
        assert step.loss is not None
        losses[step.number] = step.loss
    return [losses[n] for n in range(1, steps + 1)]


def smoothed(losses: list[float]) -> list[float]:
    """Mean of the last WINDOW losses at each step."""
    return [sum(losses[max(0, n - WINDOW) : n]) / min(n, WINDOW) for n in range(1, len(losses) + 1)]


def plot(rows: list[dict], path: Path) -> None:
    """Loss of both recipes, and their relative difference, as an SVG without dependencies."""
    curves = [(r["seed"], smoothed(r["fp32"]), smoothed(r["fp8-block128"])) for r in rows]
    width, height, left = 760, 360, 60
    top = max(max(a) for _, a, _ in curves)
    low = min(min(a) for _, a, _ in curves)
    steps = len(curves[0][1])

    def line(values: list[float], lo: float, hi: float, y0: float, h: float, style: str) -> str:
        points = " ".join(
            f"{left + (width - left - 10) * i / (steps - 1):.1f},{y0 + h * (1 - (v - lo) / (hi - lo)):.1f}"
            for i, v in enumerate(values)
        )
        return f'<polyline fill="none" points="{points}" {style}/>'

    differences = [[100 * (b / a - 1) for a, b in zip(x, y, strict=True)] for _, x, y in curves]
    span = max(0.5, max(abs(v) for d in differences for v in d[WINDOW:]))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 170}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18">loss, mean of the last {WINDOW} steps: FP32 grey, FP8 block128 blue; {steps} steps</text>',
        f'<text x="4" y="40">{top:.2f}</text><text x="4" y="{height}">{low:.2f}</text>',
        f'<text x="{left}" y="{height + 25}">FP8 / FP32 - 1, percent</text>',
        f'<text x="4" y="{height + 45}">+{span:.2f}</text><text x="4" y="{height + 160}">-{span:.2f}</text>',
        f'<line x1="{left}" x2="{width - 10}" y1="{height + 100}" y2="{height + 100}" stroke="#bbb"/>',
    ]
    for (_, a, b), d in zip(curves, differences, strict=True):
        out.append(line(a, low, top, 30, height - 40, 'stroke="#888" stroke-width="3"'))
        out.append(line(b, low, top, 30, height - 40, 'stroke="#1f6feb" stroke-width="1.2"'))
        clipped = [max(-span, min(span, v)) for v in d]
        out.append(line(clipped, -span, span, height + 40, 120, 'stroke="#1f6feb" stroke-width="1.2"'))
    path.write_text("\n".join([*out, "</svg>\n"]))


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    seeds = [int(s) for s in sys.argv[2:]] or [0]
    rows = [{"seed": seed, **{recipe: fly(recipe, steps, seed) for recipe in RECIPES}} for seed in seeds]
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
