"""Study: outliers in SwiGLU's output (`injected.py`) break per-tensor FP8; smoothing and block scales hold.

Writes `outliers.json`, `outliers.md` and `outliers.svg` beside this file.

Usage: outliers.py [--workers 2]
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from flight import DENSE_2M, Flight, fly, record, table
from injected import inject

HERE = Path(__file__).parent
STEPS = 1000
RECIPES = {
    "fp32": {"preset": "fp32"},
    "tensor, current": {"preset": "fp8-tensor-current"},
    "tensor, current, smooth": {"preset": "fp8-tensor-current", "smooth_swiglu": True},
    "block128": {"preset": "fp8-block128"},
    "tensor, delayed": {"preset": "fp8-tensor-delayed"},
    "tensor, delayed, smooth": {"preset": "fp8-tensor-delayed", "smooth_swiglu": True},
    "block128, smooth": {"preset": "fp8-block128", "smooth_swiglu": True},
    "mxfp8": {"preset": "mxfp8"},
}


def flight(recipe: str) -> Flight:
    """One run."""
    job = table("dense-2m", DENSE_2M, RECIPES[recipe], STEPS, seed=0)
    return Flight("study_outliers", recipe.replace(", ", "_"), job, ("injected.py",))


def write() -> None:
    """Write what is known so far."""
    runs = record([flight(recipe) for recipe in RECIPES], "python studies/outliers.py")
    rows = {recipe: runs[name] for recipe in RECIPES if (name := flight(recipe).name) in runs}
    if "fp32" not in rows:
        return
    high = rows["fp32"]["validation_loss"]
    lines = ["| recipe | validation loss | against FP32 | skipped steps |", "|---|---|---|---|"]
    figure, panel = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for recipe, row in rows.items():
        loss, curve = row["validation_loss"], row["train_loss_every_25"]
        lines.append(f"| {recipe} | {loss:.4f} | {loss / high - 1:+.2%} | {row['skipped_steps']} |")
        panel.plot(range(25, STEPS + 1, 25), curve, label=f"{recipe} {loss / high - 1:+.2%}",
                   linestyle="--" if "smooth" in recipe else "-", linewidth=3 if recipe == "fp32" else 1.2,
                   color="0.7" if recipe == "fp32" else None)  # fmt: skip
    panel.set_ylabel("loss, mean of the last 50 steps")
    panel.set_xlabel("step")
    panel.legend(fontsize=8, title="validation loss against FP32", title_fontsize=8)
    figure.savefig(HERE / "outliers.svg", metadata={"Date": None})
    plt.close(figure)
    (HERE / "outliers.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    inject()
    fly([flight(recipe) for recipe in RECIPES], parser.parse_args().workers, write)
    write()
    print((HERE / "outliers.md").read_text())


if __name__ == "__main__":
    main()
