"""Seconds of a layer: what frameworks do otherwise costs what its passes and messages say."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from greylag.sim.estimate import estimate, layer_times
from greylag.sim.layer import LayerTime
from greylag.sim.links import Links
from greylag.sim.operators import BACKWARD_OF_ATTENTION, Operators
from greylag.spec import Job
from greylag.spec.load import job_from

MEGATRON = {"name": "megatron", "parameters": "bf16", "activations": "fused", "graphs": True}


def job_of(
    model: str | dict = "gpt-3-175b", strategy: dict | None = None, cluster: str = "a100-8x1", **facts: Any
) -> Job:
    table = {"sequence": 2048, "global_batch": 64, "model": model, "precision": "bf16", "cluster": cluster}
    job = job_from({**table, "software": {**MEGATRON, **facts}, "strategy": strategy or {"tp": 8}}, name="test")
    assert not job.problems(), job.problems()
    return job


def first(job: Job) -> LayerTime:
    return layer_times(job).layers[0]


def spent(job: Job, cause: str) -> list[float]:
    time = first(job)
    return [float(time.spent[when].get(cause, 0.0)) for when in ("forward", "input_gradient")]


def test_without_sequence_parallelism_sums_are_all_reduced() -> None:
    """Two of the activations in forward, in the open; two in backward, of which a share shows."""
    job = job_of(strategy={"tp": 8, "sequence_parallel": False}, exposed=0.25)
    once = float(Links(job.cluster).reduce(2048 * job.model.hidden_size * 2, 8))
    assert spent(job, "tp") == pytest.approx([2 * once, 2 * 0.25 * once])


def test_without_sequence_parallelism_norms_are_whole() -> None:
    cut, whole = job_of(), job_of(strategy={"tp": 8, "sequence_parallel": False})
    operators, rows = Operators(cut.cluster, cut.software), 2048 * cut.model.hidden_size * 2 * 7 / 8
    grown = [a - b for a, b in zip(spent(whole, "elementwise"), spent(cut, "elementwise"), strict=True)]
    assert grown == pytest.approx([(4 + 6) * rows / operators.bandwidth, (6 + 2) * rows / operators.bandwidth])
    ends = [(layer_times(job).embedding, layer_times(job).head) for job in (cut, whole)]
    for a, b in zip(*ends, strict=True):
        assert a.seconds("forward") != b.seconds("forward")


def test_one_rank_knows_no_difference() -> None:
    """In an array, a candidate without tensor parallelism costs the same both ways."""
    tp = np.array([1, 2, 8])
    both = [replace(job_of(), strategy=replace(job_of().strategy, tp=tp, sequence_parallel=p)) for p in (True, False)]
    cut, whole = (estimate(replace(job, strategy=replace(job.strategy, dp=8 // tp))).seconds for job in both)
    assert cut[0] == pytest.approx(whole[0])
    assert np.all(cut[1:] != whole[1:])
    for n, degree in enumerate(tp):
        alone = job_of(strategy={"tp": int(degree), "sequence_parallel": False} if degree > 1 else {"tp": 1})
        assert float(np.squeeze(estimate(alone).seconds)) == pytest.approx(whole[n])


def test_unfused_attention_passes_over_its_scores() -> None:
    """Products over every pair, and passes between them: four bytes a score, five more with dropout."""
    flash, unfused = job_of(), job_of(attention="unfused")
    scores, operators = 2048 * 2048 * 96 // 8, Operators(flash.cluster, flash.software)
    assert spent(unfused, "attention")[0] > 2 * spent(flash, "attention")[0]
    less = spent(job_of(attention="unfused", dropout=True), "attention")
    kernel, more = flash.cluster.device.efficiency.kernel, 5 * scores / operators.bandwidth
    for a, b in zip(less, spent(unfused, "attention"), strict=True):
        assert a - b == pytest.approx(more + kernel)
    products = operators.gemms(
        *([np.array(x) for x in ((2048 * 12, 2048 * 12), (2048, 128), (128, 2048))]), ["bf16"] * 2, 1, [2, 2]
    ).sum()
    passes = float(operators.move(4 * scores, 1))
    assert spent(unfused, "attention")[0] == pytest.approx(float(products) + passes)


def test_selective_recompute_repeats_the_attention_that_runs() -> None:
    again = {"tp": 8, "recompute": "selective", "recompute_modules": ["attention"]}
    job = job_of(strategy=again, attention="unfused", dropout=True)
    assert float(first(job).again) == pytest.approx(spent(job, "attention")[0])


def test_dropout_reads_and_writes_a_mask() -> None:
    job, plain = job_of(dropout=True), job_of()
    elements = 2048 * plain.model.hidden_size / 8 / Operators(plain.cluster, plain.software).bandwidth
    grown = [a - b for a, b in zip(spent(job, "elementwise"), spent(plain, "elementwise"), strict=True)]
    assert grown == pytest.approx([2 * elements, 2 * 5 * elements])


def test_experts_without_a_gate_take_two_products() -> None:
    gated = job_of("mixtral-8x7b", {"ep": 8})
    plain = replace(gated, model=replace(gated.model, activation="relu2"))
    assert 0.6 < spent(plain, "gemm")[0] / spent(gated, "gemm")[0] < 0.8
    wider = replace(gated.model.moe, num_shared_experts=1, shared_width=4096)
    assert spent(replace(gated, model=replace(gated.model, moe=wider)), "gemm")[0] > spent(gated, "gemm")[0]


@pytest.mark.parametrize(("head", "published"), [(64, 497), (256, 756)])
def test_narrow_heads_wait_for_exponentials(head: int, published: float) -> None:
    """FlashAttention-3 on an H100, forward, not causal, 16k tokens: 648 TFLOP/s at 128 (arXiv 2407.08608, figure 5)."""
    job = job_of(cluster="h100-8x1")
    operators = Operators(job.cluster, job.software)
    usual, other = (operators.attention(1e15, 2 * dim) for dim in (128, head))
    assert usual / other == pytest.approx(published / 648, rel=0.05)
    assert operators.attention(1e15, 2 * head, backward=True) < BACKWARD_OF_ATTENTION * 2 * other


def test_a_device_of_unknown_exponentials_takes_all_heads_alike() -> None:
    job = job_of()
    device = replace(job.cluster.device, flops_per_exponential=None)
    operators = Operators(replace(job.cluster, device=device), job.software)
    assert operators.attention(1e12, 128) == operators.attention(1e12, 256)
