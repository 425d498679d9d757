"""What telemetry costs: CPU seconds of steps that are measured over those that are not, in one run of one process.

The first flight's model on one rank; every second step is due, so that a busy machine slows both alike. Prints the
ratio and what it comes to at the default cadence.

    python benchmarks/telemetry_cost.py [steps] [key=value ...]
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from greylag.parallel import ReplicaCommit, start, stop
from greylag.spec import Step, load_job
from greylag.spec.grid import Grid
from greylag.spec.job import Run
from greylag.train.build import build
from greylag.train.folder import RunFolder
from greylag.train.loop import Control, fly
from greylag.train.telemetry import TelemetryHook

JOB = Path(__file__).parent.parent / "jobs" / "first_flight.toml"
ONE_RANK = ["cluster=local-1x1", "strategy.dp=1", "strategy.zero=1"]
WARMUP = 4


class CpuClock:
    """A hook that keeps the CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def before(self, number: int) -> None:
        self.begin = time.process_time()

    def after(self, step: Step) -> None:
        self.seconds[step.number] = time.process_time() - self.begin

    def failed(self, error: BaseException) -> None:
        pass


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    torch.set_num_threads(1)
    job = load_job(JOB, [*ONE_RANK, f"run.steps={steps}", "run.checkpoint_every=0", *sys.argv[2:]])
    with tempfile.TemporaryDirectory() as folder:
        world = start(Grid.of(job.strategy), 0, torch.distributed.HashStore(), torch.device("cpu"))
        flight, run, clock = build(job, world), RunFolder(Path(folder)), CpuClock()
        fly(flight, run, ReplicaCommit(world), [TelemetryHook(flight, run, 2), clock], Control())
        stop(world)
        size = (Path(folder) / "telemetry.jsonl").stat().st_size / (steps // 2)
    steady = {number: seconds for number, seconds in clock.seconds.items() if number > WARMUP}
    due = median(seconds for number, seconds in steady.items() if number % 2 == 0)
    plain = median(seconds for number, seconds in steady.items() if number % 2)
    every = Run().telemetry_every
    print(f"load {os.getloadavg()[0]:.1f}; {len(steady)} steps of {job.model.name}, {job.tokens} tokens each")
    print(f"a step {plain:.3f} CPU s, a measured one {due:.3f}: ratio {due / plain:.3f}; {size / 1024:.0f} KiB a line")
    print(f"at the default of every {every} steps: {(due / plain - 1) / every:.2%} of the run")


if __name__ == "__main__":
    main()
