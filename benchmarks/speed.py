"""How fast the simulator is: CPU time on one core, best of several, beside the bound that each figure must keep.

    python benchmarks/speed.py [--repeat 5] [--whole]

Exit code 1 if a bound is missed. A search is timed twice: the first time it also finds the longest paths of every
schedule that it meets (`sim.span`), which are kept for the process; its rate is that of a later one. `--whole` searches
all of DeepSeek-V3's space and not an even part of it.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from greylag.sim import predict
from greylag.sim.candidates import space_of
from greylag.sim.pipeline import pipeline
from greylag.sim.sweep import sweep
from greylag.sim.timeline import graph, simulate
from greylag.sim.trace import trace
from greylag.spec import Job, load_job
from greylag.spec.load import job_from

ROOT = Path(__file__).parents[1]
ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
V3 = ROOT / "jobs" / "deepseek-v3_h800_pretrain.toml"
ONE = (
    "from greylag.spec import load_job; from greylag.sim import predict; "
    "predict(load_job('jobs/deepseek-v3_h800_pretrain.toml'))"
)


def cpu(work: Callable[[], object], repeat: int) -> float:
    """CPU seconds, the least of some calls."""
    best = float("inf")
    for _ in range(repeat):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def shell(repeat: int) -> float:
    """CPU seconds of a new Python that imports greylag and predicts once, the least of some."""
    best = float("inf")
    for _ in range(repeat):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", ONE], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def figure(what: str, value: float, bound: float, unit: str, *, at_least: bool = False) -> bool:
    """Print a figure; whether it keeps its bound."""
    kept = value >= bound if at_least else value <= bound
    sign, verdict = ">=" if at_least else "<=", "" if kept else "  MISSED"
    print(f"{what:58}{value:>12,.3g} {unit:14}{sign} {bound:,.0f}{verdict}", flush=True)
    return kept


def searches(job: Job, what: str, bound: float, limit: int | None, repeat: int) -> bool:
    """Whether the rate of a search, memory filter included, keeps its bound; its first call is told apart."""
    space = space_of(job, {})
    call = partial(sweep, job, space, [job.precision], limit)
    began = time.process_time()
    found = call()
    first = time.process_time() - began
    whole = cpu(call, repeat)
    count = found.num_tried
    print(f"{what}: {count:,} candidates, {found.num_unfit:,} do not fit, {found.num_left_out:,} left out")
    print(f"  the first time {first:.2f} s of CPU, {count / first:,.0f} a second; later {whole:.2f} s")
    return figure(f"  strategies a second, {what}", count / whole, bound, "/s", at_least=True)


def grows(job: Job) -> None:
    """Time and memory of searches over ever more of a space."""
    space = space_of(job, {})
    for limit in (250_000, 500_000, 1_000_000, 2_000_000):
        began = time.process_time()
        count = sweep(job, space, [job.precision], limit).num_tried
        took, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"  {count:>10,} candidates: {1e6 * took / count:5.1f} us each, {peak:,.0f} MiB at the most so far")


def main(repeat: int, whole: bool) -> int:
    v3 = load_job(V3)
    dense, experts = (
        job_from({"precision": "bf16", "software": "megatron-core-2025", **table}, name="speed")
        for table in (
            {"model": "llama-3-70b", "cluster": "h100-8x128", "sequence": 8192, "global_batch": 2048},
            {"model": "deepseek-v3", "cluster": "h100-8x1280", "sequence": 4096, "global_batch": 15360},
        )
    )
    predict(v3)
    kept = [figure("one prediction, DeepSeek-V3 on 2,048", 1e3 * cpu(lambda: predict(v3), 20 * repeat), 5, "ms")]
    pp16 = graph("1f1b", 16, 1, 120)
    seconds = 1e3 * cpu(lambda: simulate(pp16, 1.0, 1.0, 1.0, 0.1), repeat)
    kept.append(figure("exact timeline, PP16 x 120 micro-batches, 1F1B", seconds, 50, "ms"))
    job = load_job(V3, ["strategy.schedule=dualpipe-v", "strategy.vp=2"])
    timed = pipeline(job)
    seconds = cpu(lambda: trace(timed.timeline, activation=timed.activation, resting=timed.resting), repeat)
    kept.append(figure("trace of 16 ranks, DeepSeek-V3, DualPipeV, 120 a rank", seconds, 2, "s"))
    kept.append(figure("import and one prediction, from the shell", 1e3 * shell(repeat), 500, "ms"))
    kept.append(searches(dense, "Llama 3 70B on 1,024 H100", 100_000, None, repeat))
    limit = None if whole else 500_000
    kept.append(searches(experts, "DeepSeek-V3 on 10,240 H100", 30_000, limit, 1 if whole else repeat))
    print("DeepSeek-V3 on 10,240 H100, over ever more of the space:")
    grows(experts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    kept.append(figure("memory of this process at the most", peak, 1024, "MiB"))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="the best of so many")
    parser.add_argument("--whole", action="store_true", help="all of DeepSeek-V3's space")
    arguments = parser.parse_args()
    if not ONE_CORE.items() <= os.environ.items():  # numpy reads them when it is imported: begin anew
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_CORE})
    sys.exit(main(arguments.repeat, arguments.whole))
