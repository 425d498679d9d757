"""CPU seconds of a simulated campaign: 60 days on 100,000 accelerators, 1,000 trials of each policy, on one core.

python benchmarks/goodput.py [devices] [days] [trials]
"""

import sys
import time

import numpy as np

from greylag.plan.campaign import simulate
from greylag.plan.failures import load_failures
from greylag.plan.goodput import goodput
from greylag.plan.recovery import POLICIES, Fleet, Recovery


def main(devices: int = 100_000, days: float = 60.0, trials: int = 1000) -> None:
    failures, recovery = load_failures("meta-rsc-1"), Recovery()
    fleet = Fleet(num_devices=devices, spares=120)
    for policy in POLICIES:
        exact = goodput(failures, fleet, recovery, policy)
        begin = time.process_time()
        result = simulate(failures, fleet, recovery, policy, days, np.random.default_rng(1), trials)
        took = time.process_time() - begin
        print(
            f"{policy:8} {took:6.2f} s  {result.failures:,.0f} failures a trial  "
            f"simulated {result.goodput:.4f} +- {result.error:.4f}, closed form {exact.goodput:.4f}"
        )


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, float, int), sys.argv[1:], strict=False)))
