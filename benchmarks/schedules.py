"""Pipeline schedules: bubble rates against those of the zero-bubble paper, and how fast orders are timed.

    python benchmarks/schedules.py [--truth FOLDER]

FOLDER holds `zero_bubble.json` with the paper's bubble rates. They are set against this repository's orders, timed for
the forward, input-gradient, weight-gradient and transfer times that the paper's authors profiled on A100s: arXiv
2401.10241 and github.com/sail-sg/zero-bubble-pipeline-parallelism, megatron/core/pipeline_parallel/efficiency.py.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np

from greylag.sim.fill import fill
from greylag.sim.span import paths, span
from greylag.sim.timeline import graph, graph_of, simulate
from greylag.sim.trace import trace
from greylag.spec.schedule import CHUNKS, order
from greylag.spec.strategy import Schedule

MODELS = {
    "1.5B": (8, 3, 2304, 24),
    "6.2B": (8, 4, 4096, 32),
    "14.6B": (16, 3, 5120, 40),
    "28.3B": (32, 2, 6144, 48),
}
"""By model: stages, chunks per rank when interleaved, hidden size, heads."""
MICROSECONDS = {
    "1.5B/m24": (18522, 18086, 9337, 601),
    "1.5B/m32": (18513, 18086, 9331, 626),
    "1.5B/m64": (18546, 18097, 9321, 762),
    "6.2B/m24": (29718, 29444, 19927, 527),
    "6.2B/m32": (29802, 29428, 19530, 577),
    "6.2B/m64": (29935, 29621, 19388, 535),
    "14.6B/m48": (11347, 11248, 8132, 377),
    "14.6B/m64": (11307, 11254, 8101, 379),
    "14.6B/m128": (11325, 11308, 8109, 378),
    "28.3B/m96": (10419, 10207, 7715, 408),
    "28.3B/m128": (10408, 10204, 7703, 408),
    "28.3B/m256": (10402, 10248, 7698, 460),
}
"""By model and micro-batches: F, I, W and transfer."""
COLUMNS = ("1f1b", "1f1b-interleaved", "zb-h1", "zb-h2", "zb-2p")


def rates(case: str) -> dict[str, float]:
    """Our bubble rate by the paper's name of the schedule."""
    model, m = case.split("/m")[0], int(case.split("/m")[1])
    pp, vp, hidden, heads = MODELS[model]
    f, i, w, transfer = MICROSECONDS[case]
    share = 32 * hidden / (34 * hidden + 5 * heads * 1024)  # bytes that W needs, of those that F keeps (the paper's)
    timelines = {name: simulate(graph(name, pp, 1, m), f, i, w, transfer) for name in ("1f1b", "zb-h1", "zb-h2")}
    timelines["1f1b-interleaved"] = simulate(graph("interleaved", pp, vp, m), f / vp, i / vp, w / vp, transfer)
    placed = fill("zb-h2", pp, 1, m, f, i, w, transfer, share=share)
    timelines["zb-2p"] = simulate(graph_of(placed), f, i, w, transfer)
    return {name: 1 - m * (f + i + w) / timeline.period for name, timeline in timelines.items()}


def compare(folder: Path) -> None:
    published = json.loads((folder / "zero_bubble.json").read_text())["bubble_rates"]
    off: dict[str, list[float]] = {name: [] for name in COLUMNS}
    print("bubble rate, ours / the paper's\n" + f"{'case':12}" + "".join(f"{name:>18}" for name in COLUMNS))
    for case, theirs in published.items():
        ours = rates(case)
        print(f"{case:12}" + "".join(f"{ours[name]:>9.4f} / {theirs[name]:.4f}" for name in COLUMNS))
        for name in COLUMNS:
            off[name].append(abs(ours[name] - theirs[name]))
    print(f"{'worst':12}" + "".join(f"{max(values):>18.4f}" for values in off.values()))


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work(*arguments)
    return time.process_time() - began


def speed(pp: int = 16, m: int = 120, candidates: int = 100_000) -> None:
    print(f"\nCPU ms, {pp} ranks x {m} micro-batches: order, graph and paths are made once")
    columns = ("order", "graph", "timeline", "trace", "paths", "spans/s")
    print(f"{'schedule':12}" + "".join(f"{name:>11}" for name in columns))
    rng = np.random.default_rng(0)
    for schedule in get_args(Schedule):
        vp = CHUNKS.get(schedule, 4)
        f, i, w = rng.uniform(1, 2, (3, candidates, pp * vp))
        shape = (schedule, pp, vp, m)
        times = [seconds(order, *shape), seconds(graph, *shape)]
        times.append(seconds(simulate, graph(*shape), f[0], i[0], w[0], 0.1))
        times.append(seconds(trace, simulate(graph(*shape), f[0], i[0], w[0], 0.1)))
        times.append(seconds(paths, *shape))
        rate = candidates / seconds(span, *shape, f, i, w, 0.1)
        print(f"{schedule:12}" + "".join(f"{1e3 * t:>11.1f}" for t in times) + f"{rate:>11,.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, help="folder with zero_bubble.json")
    arguments = parser.parse_args()
    if arguments.truth:
        compare(arguments.truth)
    speed()
