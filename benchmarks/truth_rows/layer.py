"""One MoE layer alone (NVIDIA/Megatron-LM, tests/functional_tests/test_cases/common/moe_perf): forward and backward.

A Job is a whole step of a whole model, so that none of these rows is one.
"""

from greylag.spec.job import Job
from truth_rows.row import Dialect, Memory, Raw, Untold


def _job(raw: Raw, models: Raw) -> Job:
    raise Untold("one layer without attention, embedding and optimizer: no step of a job")


def _seconds(raw: Raw, models: Raw) -> float | None:
    return float(raw["measured"]["layer_fwd_ms"] + raw["measured"]["layer_bwd_ms"]) / 1e3


def _memory(raw: Raw) -> Memory | None:
    return Memory(raw["measured"]["max_allocated_bytes"], "allocated")


DIALECT = Dialect(
    "moe_layer", _job, _seconds, _memory, lambda raw: "megatron-core-2026", lambda raw: raw["model"]["name"]
)
