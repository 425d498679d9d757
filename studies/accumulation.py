"""Study: what an H100's FP8 accumulation loses with the length of the sum, and what promotion every 128 buys.

The tensor core is modelled to the bit by `mmaemu` (H100 PCIe; split-K off). Operands are E4M3 codes of normal numbers,
of both signs and of one sign. Errors are relative to the exact product; of both signs, to its largest element.
Writes `accumulation.json` and `accumulation.svg` beside this file; about a minute on one core.

Usage: accumulation.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import mmaemu
import torch

from greylag.numerics.formats import E4M3, encode

HERE = Path(__file__).parent
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
INTERVALS = (128, 256, 512)
KINDS = {"one sign": True, "both signs": False}


def codes(rows: int, length: int, seed: int, one_sign: bool) -> torch.Tensor:
    """E4M3 codes of normal numbers, 16 in deviation."""
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) * 16
    return encode(x.abs() if one_sign else x, E4M3)


def hopper(a: torch.Tensor, b: torch.Tensor, fast: bool) -> torch.Tensor:
    """The tensor core's sum."""
    return mmaemu.accumulate(a, b, use_fast_accum=fast, profile="hopper", splitk=1)


def promoted(a: torch.Tensor, b: torch.Tensor, every: int) -> torch.Tensor:
    """Fast sums of `every` products, added in FP32."""
    parts = [hopper(x, y, True) for x, y in zip(a.split(every, 1), b.split(every, 1), strict=True)]
    return torch.stack(parts).sum(0)


def errors(length: int, one_sign: bool) -> dict[str, float]:
    """Largest error of each way to add."""
    a, b = codes(32, length, 0, one_sign), codes(64, length, 1, one_sign)
    exact = a.double() @ b.double().t()
    ways = {"fast accumulation": hopper(a, b, True), "use_fast_accum=False": hopper(a, b, False)}
    ways |= {f"promoted every {every}": promoted(a, b, every) for every in INTERVALS if every <= length}
    ways["FP32"] = a.float() @ b.float().t()
    size = exact.abs() if one_sign else exact.abs().max()
    return {name: ((y.double() - exact).abs() / size).max().item() for name, y in ways.items()}


def main() -> None:
    rows = {kind: {length: errors(length, sign) for length in LENGTHS} for kind, sign in KINDS.items()}
    record = {"command": "python studies/accumulation.py", "profile": "mmaemu hopper (H100 PCIe)", "errors": rows}
    (HERE / "accumulation.json").write_text(json.dumps(record, indent=1) + "\n")
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(9, 4), layout="constrained")
    for panel, (kind, table) in zip(panels, rows.items(), strict=True):
        for name in table[LENGTHS[-1]]:
            lengths = [k for k in LENGTHS if name in table[k]]
            style = "-" if "promoted" not in name else "--"
            panel.plot(lengths, [table[k][name] for k in lengths], style, marker="o", markersize=3, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(kind)
        panel.set_xlabel("K, products in a sum")
    panels[0].axhline(2.0**-4, color="0.8", linewidth=1)
    panels[0].annotate("E4M3's own rounding, at most", (LENGTHS[0], 2.0**-4), fontsize=7, va="bottom", color="0.5")
    panels[0].set_ylabel("largest relative error")
    panels[1].legend(fontsize=7)
    figure.savefig(HERE / "accumulation.svg", metadata={"Date": None})
    for kind, table in rows.items():
        print(kind, {name: f"{value:.1e}" for name, value in table[4096].items()}, "at K = 4096")


if __name__ == "__main__":
    main()
