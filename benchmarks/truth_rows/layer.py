"""One MoE layer alone (NVIDIA/Megatron-LM, tests/functional_tests/test_cases/common/moe_perf): forward and backward.

A Job is a whole step of a whole model, so that none of these rows is one.
"""

from greylag.spec.job import Job
from truth_rows.row import Dialect, Raw, UntoldError, peak


def _job(raw: Raw, models: Raw) -> Job:
    raise UntoldError("one layer without attention, embedding and optimizer: no step of a job")


def _seconds(raw: Raw, models: Raw) -> float | None:
    return float(raw["measured"]["layer_fwd_ms"] + raw["measured"]["layer_bwd_ms"]) / 1e3


DIALECT = Dialect("moe_layer", _job, _seconds, lambda raw: "megatron-core-2026", peak("max_allocated_bytes"))
