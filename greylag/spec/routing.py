"""Routing: over how many ranks a token's choices fall, and the bytes of what travels for it, when experts are spread.

Counts are of balanced routing: every choice that the router's limits allow is equally likely. It lives here because
`work` counts messages by it and `parallel.expert` sends them.
"""

import functools
from math import comb
from typing import Any

import numpy as np

from greylag.spec.model import MoE
from greylag.spec.precision import BLOCK, BYTES, Precision


@functools.cache
def ranks_reached(moe: MoE, ep: int) -> float:
    """On how many of `ep` ranks, which hold the experts in order, a token has experts of its choice; on average.

    A token takes `top_k` of the experts of `top_k_groups` groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    size, held = moe.num_experts // moe.num_groups, moe.num_experts // ep
    allowed = size * moe.top_k_groups
    missed = 0
    for first in range(0, moe.num_experts, held):
        ways = {(0, 0): 1}  # of choosing some groups, by their number and how many of the rank's experts are in them
        for start in range(0, moe.num_experts, size):
            mine = max(0, min(first + held, start + size) - max(first, start))
            for (groups, experts), count in list(ways.items()):
                with_it = (groups + 1, experts + mine)
                ways[with_it] = ways.get(with_it, 0) + count
        missed += sum(n * comb(allowed - x, moe.top_k) for (g, x), n in ways.items() if g == moe.top_k_groups)
    return ep - missed / (comb(moe.num_groups, moe.top_k_groups) * comb(allowed, moe.top_k))


def copies_to_nodes(moe: MoE, nodes: Any) -> Any:
    """Copies of a token that travel to other nodes, where a node's ranks share one, over its choices there.

    `nodes` may be an array. 1 on one node, and where nodes do not share the experts evenly.
    """
    known = {n: _copies(moe, n) for n in {int(n) for n in np.ravel(nodes)}}
    return np.vectorize(lambda n: known[int(n)], otypes=[float])(nodes)


def _copies(moe: MoE, nodes: int) -> float:
    return 1.0 if nodes < 2 or moe.num_experts % nodes else ranks_reached(moe, nodes) / moe.top_k


def row_bytes(precision: Precision, width: int) -> float:
    """Bytes of `width` numbers as they travel to experts: E4M3 codes with a byte of scale per 128, or `high`."""
    return width + -(-width // BLOCK) if precision.dispatch == "e4m3" else width * BYTES[precision.high]


def mark_bytes(moe: MoE, ep: int) -> int:
    """Bytes beside a token that say which of a rank's experts it chose: a bit for each."""
    return -(-moe.num_experts // ep // 8)
