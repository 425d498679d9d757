"""In flight: micro-batches whose activations a rank holds at once, in closed form, by schedule.

`spec.schedule` lists the very actions; a search asks for a hundred thousand counts of micro-batches. The number of
micro-batches may be a numpy array; the pipeline's degrees are numbers.
"""

import numpy as np

from greylag.spec.holdings import Number
from greylag.spec.strategy import Strategy


def in_flight(strategy: Strategy, rank: int, micro_batches: Number) -> list[Number]:
    """Of each chunk of the rank at place `rank`, in the order of `spec.holdings.chunks`.

    1F1B runs pp - rank ahead (arXiv 2104.04473, section 2.2.1), interleaved 2 (pp - rank - 1) + (vp - 1) pp chunks and
    then one (the same, 2.2.2). ZB-H1 holds what 1F1B holds, ZB-H2 up to 2 (pp - rank) - 1, ZB-V 2 pp of its half-long
    chunks, most of them of the one that it runs first (arXiv 2401.10241, section 2 and 6). DualPipe holds pp + 1, of
    the stage nearer to the end it is fed from more (arXiv 2412.19437, table 2); folded, each stage is half as long.
    """
    s, m = strategy, micro_batches
    if s.pp == 1:
        return [np.minimum(m, 1)]
    ahead = s.pp - rank
    if s.schedule == "interleaved":
        return _interleaved(s, ahead, m)
    if s.schedule in ("zb-v", "dualpipe-v"):
        return [np.minimum(m, s.pp + ahead - (s.schedule == "zb-v")), np.minimum(m, rank + 1)]
    if s.schedule == "dualpipe":
        place = min(rank, ahead - 1)
        both = [np.minimum(m / 2, s.pp - place), np.minimum(m / 2, place + 1)]
        return both if rank < s.pp // 2 else both[::-1]
    most = {"gpipe": m, "zb-h2": 2 * ahead - 1}.get(s.schedule, ahead)
    return [np.minimum(m, most)]


def _interleaved(s: Strategy, ahead: int, m: Number) -> list[Number]:
    """Micro-batches pass in groups of pp (or of all, if fewer) through one chunk after another."""
    total = np.minimum(m * s.vp, 2 * (ahead - 1) + (s.vp - 1) * s.pp + 1)
    group = np.minimum(m, s.pp)
    rounds, rest = total // (group * s.vp), total % (group * s.vp)
    return [np.minimum(m, rounds * group + np.clip(rest - n * group, 0, group)) for n in range(s.vp)]
