"""Study: the final validation loss of every recipe against FP32, dense and mixture of experts, over seeds.

Recipes of a seed see the same windows in the same order from the same weights. Two controls tell how far runs part by
themselves: FP32 again, from weights that are off by one part in 10^6 (`fp32-perturbed`), and by as much as a cast to
E4M3 would move them, once (`fp32-rounded`).
Writes `parity.json`, `parity.md` and `parity.svg` beside this file.

Usage: parity.py [--workers 2] [--only MODEL] [--recipes a,b]
"""

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from flight import DENSE_2M, SHAPE, Flight, fly, record, table

HERE = Path(__file__).parent
STEPS = 1000
MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 128, "num_shared_experts": 1, "num_dense_layers": 1,
       "scoring": "sigmoid", "normalize_top_k": True, "bias_update_rate": 0.001}  # fmt: skip
MODELS = {
    "dense-2m": DENSE_2M,
    "moe-2m": {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 384, "moe": MOE, **SHAPE},
    "dense-10m": {"num_layers": 6, "hidden_size": 384, "ffn_hidden_size": 1024, **SHAPE},
}
SEEDS = {"dense-2m": (0, 1, 2), "moe-2m": (0, 1, 2), "dense-10m": (0,)}
RECIPES = (
    "fp32", "fp8-block128", "fp32-perturbed", "fp32-rounded", "fp8-deepseek", "fp8-tensor-delayed",
    "fp8-tensor-current", "mxfp8", "fp8-row", "fp8-block128-hybrid", "fp8-block128-fp32", "mxfp8-floor",
    "fp8-row-gw-hp",
)  # fmt: skip
"""In the order in which they are flown: what must hold comes first."""
RECIPES_OF = {"dense-10m": ("fp32", "fp8-block128")}
MORE_SEEDS = {"moe-2m": tuple(range(3, 12))}
"""Flown by two recipes only: runs with experts part further, as a token's route may flip."""
WITH_MORE = ("fp32", "fp8-block128")
CONTROLS = {"fp32-perturbed": "1e-6", "fp32-rounded": "0.026"}
"""By what share weights are off; 2.6% is the root mean square of E4M3's rounding error."""


def flight(model: str, recipe: str, seed: int) -> Flight:
    """One run."""
    share = CONTROLS.get(recipe)
    job = table(model, MODELS[model], {"preset": "fp32" if share else recipe}, STEPS, seed)
    return Flight("study_parity", f"{model}_{recipe}_{seed}", job, ("perturbed.py", share) if share else ())


def plan(only: str | None = None, recipes: set[str] | None = None) -> list[tuple[str, str, int]]:
    """(model, recipe, seed) of every run, in order."""
    runs = [
        (model, recipe, seed)
        for recipe in RECIPES
        for model in MODELS
        for seed in SEEDS[model] + (MORE_SEEDS.get(model, ()) if recipe in WITH_MORE else ())
        if recipe in RECIPES_OF.get(model, RECIPES)
    ]
    return [r for r in runs if (only is None or r[0] == only) and (recipes is None or r[1] in recipes)]


def differences(rows: list[dict], model: str, recipe: str) -> list[float]:
    """Relative differences of the final validation loss to FP32's of the same seed."""
    high = {r["seed"]: r["validation_loss"] for r in rows if r["model"] == model and r["recipe"] == "fp32"}
    mine = [r for r in rows if r["model"] == model and r["recipe"] == recipe]
    return [r["validation_loss"] / high[r["seed"]] - 1 for r in mine if r["seed"] in high]


def write() -> None:
    """Write what is known so far."""
    runs = record([flight(*run) for run in plan()], "python studies/parity.py")
    rows = [
        {"model": m, "recipe": r, "seed": s, **runs[name]}
        for m, r, s in plan()
        if (name := flight(m, r, s).name) in runs
    ]
    lines = ["| model | recipe | seeds | validation loss | against FP32: mean | its error | by seed |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for model in MODELS:
        for recipe in RECIPES:
            mine = [r["validation_loss"] for r in rows if r["model"] == model and r["recipe"] == recipe]
            apart = differences(rows, model, recipe)
            if mine and apart:
                each = ", ".join(f"{d:+.2%}" for d in apart)
                error = f"{statistics.stdev(apart) / len(apart) ** 0.5:.3%}" if len(apart) > 1 else ""
                lines.append(f"| {model} | {recipe} | {len(mine)} | {statistics.mean(mine):.4f} | "
                             f"{statistics.mean(apart):+.3%} | {error} | {each} |")  # fmt: skip
    (HERE / "parity.md").write_text("\n".join(lines) + "\n")
    if rows:
        plot(rows, HERE / "parity.svg")


def plot(rows: list[dict], path: Path) -> None:
    """The difference of each recipe to FP32: a point a seed, a bar the mean, a panel a model."""
    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    recipes = [r for r in RECIPES if r != "fp32"]
    figure, panels = plt.subplots(
        1, len(models), sharey=True, squeeze=False, figsize=(4 * len(models), 4.5), layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        panel.axvspan(-0.25, 0.25, color="0.92")
        panel.axvline(0, color="0.6", linewidth=1)
        for y, recipe in enumerate(recipes):
            apart = [100 * d for d in differences(rows, model, recipe)]
            panel.scatter(apart, [y] * len(apart), color="0.5" if recipe in CONTROLS else "tab:blue", s=18)
            if apart:
                panel.scatter([statistics.mean(apart)], [y], marker="|", color="black", s=120)
        panel.set_title(model)
        panel.set_xlabel("validation loss against FP32, %")
        panel.set_yticks(range(len(recipes)), recipes)
    panels[0][0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--recipes", type=lambda s: set(s.split(",")))
    options = parser.parse_args()
    fly([flight(*run) for run in plan(options.only, options.recipes)], options.workers, write)
    write()
    print((HERE / "parity.md").read_text())


if __name__ == "__main__":
    main()
