"""What a CUDA device cannot do of a job is told before the job starts, with the rule that it breaks."""

from typing import Any

import pytest

from greylag.train.device import cuda_faults
from jobs import tiny_job

HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)


def faults(precision: str, capability: tuple[int, int] = HOPPER, model: Any = "llama-3-tiny", **changes: Any) -> str:
    return "\n".join(cuda_faults(tiny_job(model, precision, **changes), capability))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8-block128", "fp8-block128-fp32", "fp8-tensor-delayed"])
def test_a_hopper_takes_these(precision: str) -> None:
    assert faults(precision) == ""


def test_experts_in_blocks_suit_a_hopper() -> None:
    assert faults("fp8-block128", model="deepseek-v3-tiny") == ""


@pytest.mark.parametrize(
    ("precision", "changes", "words"),
    [
        ("fp8-block128", {"capability": AMPERE}, "FP8 needs compute capability 8.9, this is 8.0"),
        ("mxfp8", {}, "1x32 scales have no kernel on CUDA yet"),
        ("fp8-row", {}, "row scales have no kernel on CUDA yet"),
        ("fp8-tensor-current", {"sequence": 60, "strategy": {"micro_batch": 1}},
         "tokens of a micro-batch 60 must be a multiple of 16"),
        ("fp8-tensor-current", {"model": "deepseek-v3-tiny"}, "an expert's tokens are seldom a multiple of 16"),
        ("fp8-tensor-current", {"model": {"preset": "llama-3-tiny", "ffn_hidden_size": 500}},
         "must be a multiple of 16"),
        ("fp8-deepseek", {"precision_table": {"high": "fp32"}}, "the fused attention of CUDA takes BF16"),
        ("fp8-block128", {"precision_table": {"grad": {"format": "e3m2"}}}, "E3M2 is emulated, on CPUs only"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_named_with_the_rule(precision: str, changes: dict[str, Any], words: str) -> None:
    assert words in faults(precision, **changes)


def test_a_rule_is_told_once() -> None:
    assert len(faults("mxfp8").splitlines()) == 1
    assert faults("fp8-block128", ADA) == ""
