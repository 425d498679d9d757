"""Study: a scaling law of precision from our own runs: sizes, tokens and formats from FP32 to FP4, and the best one.

Every size is trained on every number of tokens in every format, all three GEMMs of every linear layer, all operands,
blocks of 128 (and E4M3 by tensor); embedding, head and attention core stay in FP32. Both laws of `greylag.plan` are
fitted to the held-out losses, and say where the best precision lies when parameters times bits are held.
Writes `precision_law.json`, `.csv`, `.md` and `.svg` beside this file; each run is in the JSON as soon as it has ended.

Usage: precision_law.py [--workers 2] [--quick] [--recipes e4m3,e2m1]
"""

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from flight import ROOT, SHAPE, Flight, fly, table

from greylag.plan.law import Curve, fixed_compute
from greylag.plan.law_fit import Fit, fit
from greylag.plan.law_runs import counted, job_precision, read_csv
from greylag.spec import Job, SpecError
from greylag.spec.load import job_from

HERE = Path(__file__).parent
BATCH = 512
"""Tokens of a step (`flight.table`)."""
SIZES = {
    "300k": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, **SHAPE},
    "1m": {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 384, **SHAPE},
    "3m": {"num_layers": 2, "hidden_size": 384, "ffn_hidden_size": 768, **SHAPE},
}
STEPS = (400, 800, 1600)


def _blocks(format: str) -> dict:
    return {"preset": "fp8-block128", **{role: {"format": format} for role in ("input", "weight", "grad")}}


RECIPES = {
    "fp32": {"preset": "fp32"},
    "e2m1": _blocks("e2m1"),
    "e4m3": _blocks("e4m3"),
    "e3m2": _blocks("e3m2"),
    "e2m2": _blocks("e2m2"),
    "e2m3": _blocks("e2m3"),
    "e5m2": _blocks("e5m2"),
    "e4m3-tensor": {"preset": "fp8-tensor-current", "grad": {"format": "e4m3"}},
}
"""In the order in which they are flown: an interrupted study has the ends first."""


@dataclass(frozen=True)
class Grid:
    """What is flown, and where the results go."""

    study: str
    sizes: dict
    steps: tuple[int, ...]
    recipes: tuple[str, ...]
    results: Path
    """Without suffix."""

    def flights(self) -> dict[str, Flight]:
        """By name: all sizes and recipes of one number of tokens before the next."""
        return {
            (name := f"{recipe}_{size}_{steps}"): Flight(self.study, name, _job(size, recipe, steps))
            for steps in self.steps
            for recipe in self.recipes
            for size in self.sizes
        }


FULL = Grid("study_precision_law", SIZES, STEPS, tuple(RECIPES), HERE / "precision_law")
QUICK = Grid(
    "study_precision_law_quick", {size: SIZES[size] for size in ("300k", "1m")}, (20, 40), ("fp32", "e4m3", "e2m1"),
    ROOT / "runs" / "study_precision_law_quick",
)  # fmt: skip
"""Twelve runs to see that it works: what they learn is no law."""


def _job(size: str, recipe: str, steps: int) -> dict:
    job = table(size, SIZES[size], RECIPES[recipe], steps, seed=0)
    job["run"] |= {"warmup_steps": min(50, steps // 8), "telemetry_every": 0}
    return job


def recorded(grid: Grid) -> dict[str, dict]:
    """What the JSON beside this file holds, by run: those need not be flown again."""
    path = grid.results.with_suffix(".json")
    return json.loads(path.read_text())["runs"] if path.exists() else {}


def write(grid: Grid) -> list[dict]:
    """Write the results of all runs that have ended, those recorded before among them; returns them."""
    rows, before = {}, recorded(grid)
    for name, flight in grid.flights().items():
        result = flight.result()
        if name in before:
            rows[name] = before[name]
        elif result:
            job: Job = job_from(flight.table, name)
            exponent, mantissa, block = job_precision(job, "sun")
            weights, activations, kv = job_precision(job, "kumar")
            rows[name] = {
                "parameters": counted(job.model), "tokens": flight.steps * BATCH, "exponent": exponent,
                "mantissa": mantissa, "block": round(block), "weights": weights, "activations": activations, "kv": kv,
                "loss": result["validation_loss"], **result,
            }  # fmt: skip
    command = "python studies/precision_law.py" + (" --quick" if grid is QUICK else "")
    whole = {"command": command, "tokens_per_step": BATCH, "runs": rows}
    text = json.dumps(whole, indent=1).replace(",\n    ", ", ")
    part = grid.results.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(grid.results.with_suffix(".json"))
    columns = ["parameters", "tokens", "exponent", "mantissa", "block", "weights", "activations", "kv", "loss"]
    with open(grid.results.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, ["run", *columns], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"run": name, **row} for name, row in rows.items())
    return [{"run": name, **row} for name, row in rows.items()]


def conclude(grid: Grid, rows: list[dict]) -> str:
    """Fit both laws, write table and figure; returns the table."""
    lines = [*_losses(grid, rows), ""]
    fits: dict[str, Fit] = {}
    product = 8 * sorted({row["parameters"] for row in rows})[len({row["parameters"] for row in rows}) // 2]
    tokens = sorted({row["tokens"] for row in rows})[len({row["tokens"] for row in rows}) // 2]
    curves: dict[str, Curve] = {}
    for law in ("kumar", "sun"):
        try:
            fits[law] = fit(read_csv(grid.results.with_suffix(".csv"), law))
        except SpecError as error:
            lines.append(f"{law}: {error}\n")
            continue
        curves[law] = fixed_compute(fits[law].law, product, tokens)
        lines += [*_constants(law, fits[law]), "", _sweet_spot(fits[law], curves[law]), ""]
    text = "\n".join(lines)
    grid.results.with_suffix(".md").write_text(text)
    plot(grid, rows, fits, curves)
    return text


def _losses(grid: Grid, rows: list[dict]) -> list[str]:
    """Held-out loss by format against FP32, a column a size and number of tokens."""
    at = {row["run"]: row["validation_loss"] for row in rows}
    columns = [(size, steps) for size in grid.sizes for steps in grid.steps]
    lines = ["| format | " + " | ".join(f"{size}, {steps * BATCH:,} tokens" for size, steps in columns) + " |",
             "|---|" + "---|" * len(columns)]  # fmt: skip
    for recipe in grid.recipes:
        cells = []
        for size, steps in columns:
            mine, high = (at.get(f"{name}_{size}_{steps}") for name in (recipe, "fp32"))
            against = f" ({mine / high - 1:+.2%})" if mine and high and recipe != "fp32" else ""
            cells.append(f"{mine:.4f}{against}" if mine else "")
        lines.append(f"| {recipe} | " + " | ".join(cells) + " |")
    return lines


def _constants(law: str, found: Fit) -> list[str]:
    lines = [f"| {law}, {found.num_runs} runs, noise {found.noise:.2%} | value | 95% interval |", "|---|---|---|"]
    for c in found.constants:
        value = f"{c.value:.4g}" if c.is_determined else "not determined"
        lines.append(f"| {c.name} | {value} | {c.low:.3g} to {c.high:.3g} |")
    return lines


def _sweet_spot(found: Fit, curve: Curve) -> str:
    """Where loss is least at fixed compute, and in which interval, from the fit to resampled residuals."""
    spots = [fixed_compute(law, curve.product, curve.tokens).best.bits for law in found.resampled(100)]
    low, high = np.quantile(spots, [0.025, 0.975])
    formats = min((c for c in curve.choices if c.bits <= 16), key=lambda c: c.loss)
    return (
        f"By {curve.law}'s law, parameters times bits held at {curve.product:,.0f} and {curve.tokens:,.0f} tokens: "
        f"best at {curve.best.bits:.1f} bits ({low:.1f} to {high:.1f}); of what can be chosen, {formats.name}."
        + "".join(f" But {remark}." for remark in curve.remarks)
    )


def plot(grid: Grid, rows: list[dict], fits: dict[str, Fit], curves: dict[str, Curve]) -> None:
    """Left: loss over bits against FP32, and what the laws make of it; right: both at fixed compute."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    high = {(r["parameters"], r["tokens"]): r["validation_loss"] for r in rows if r["run"].startswith("fp32")}
    sizes = sorted({parameters for parameters, _ in high})
    for row in rows:
        base = high.get((row["parameters"], row["tokens"]))
        if base and not row["run"].startswith("fp32"):
            colour = f"C{sizes.index(row['parameters'])}"
            left.scatter(row["weights"], 100 * (row["validation_loss"] / base - 1), color=colour, s=14)
    tokens = sorted({row["tokens"] for row in rows})
    tokens = tokens[len(tokens) // 2]
    for number, parameters in enumerate(sizes):
        for law, style in (("kumar", "-"), ("sun", ":")):
            if law in fits:
                made, bits = fits[law].law, np.geomspace(4, 16, 60)
                loss = made.loss(parameters, tokens, made.at_bits(bits))
                top = made.loss(parameters, tokens, made.at_bits(32.0))
                label = f"{law}, {parameters / 1e6:.1f} M, {tokens / 1e6:.1f} M tokens"
                left.plot(bits, 100 * (loss / top - 1), color=f"C{number}", linestyle=style, linewidth=1, label=label)
    left.set_xlabel("bits")
    left.set_ylabel("held-out loss against FP32, %")
    left.legend(fontsize=7)
    for law, curve in curves.items():
        right.plot(curve.bits, curve.loss, label=f"{law}: best at {curve.best.bits:.1f} bits")
        right.scatter([c.bits for c in curve.choices], [c.loss for c in curve.choices], s=14)
    right.set_xscale("log", base=2)
    right.set_xlabel("bits, parameters times bits held")
    right.set_ylabel("held-out loss by the fitted law")
    if curves:
        right.legend(fontsize=8)
    figure.savefig(grid.results.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="twelve short runs, to see that it works")
    parser.add_argument("--recipes", type=lambda s: set(s.split(",")), help="fly these only")
    options = parser.parse_args()
    grid = QUICK if options.quick else FULL
    flights = [f for f in grid.flights().values() if not options.recipes or f.name.split("_")[0] in options.recipes]
    flights = [f for f in flights if f.name not in recorded(grid)]
    fly(flights, options.workers, lambda: write(grid) and None)
    print(conclude(grid, write(grid)))


if __name__ == "__main__":
    main()
