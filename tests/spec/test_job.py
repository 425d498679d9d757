"""`problems()` names the key of whatever does not go together in a job, and changes nothing."""

from typing import Any

import msgspec
import pytest

from greylag.spec.load import job_from
from tables import BASE, merged

DENSE, MOE, H100 = "llama-3-tiny", "deepseek-v3-tiny", "h100-8x1"
TENSOR = {"format": "e4m3", "granularity": "tensor"}
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": {"dp": 1, "tp": 3}, "cluster": "local-3x1"}, "strategy.tp"),
    ({"model": {"preset": "llama-3-8b", "num_heads": 24, "head_dim": 128, "num_kv_heads": 6}, "cluster": H100,
      "strategy": {"tp": 8, "dp": 1}}, "strategy.tp"),
    ({"strategy": {"dp": 1, "pp": 6}, "cluster": "local-6x1"}, "strategy.pp"),
    ({"strategy": {"dp": 4}}, "strategy"),
    ({"model": DENSE, "strategy": {"ep": 2}}, "strategy.ep"),
    ({"strategy": {"ep": 3, "dp": 3}, "cluster": "local-3x1", "global_batch": 3}, "strategy.ep"),
    ({"strategy": {"ep": 4}}, "strategy.ep"),
    ({"strategy": {"micro_batch": 3}}, "global_batch"),
    ({"global_batch": 3}, "global_batch"),
    ({"strategy": {"dp": 2, "replicas": 3}}, "strategy.replicas"),
    ({"strategy": {"replicas": 0}}, "strategy.replicas"),
    ({"strategy": {"micro_batch": 0}}, "strategy.micro_batch"),
    ({"strategy": {"dp": 0}}, "strategy.dp"),
    ({"strategy": {"dp": -1}}, "strategy.dp"),
    ({"strategy": {"tp": -2}}, "strategy.tp"),
    ({"strategy": {"dp": 2**62, "tp": 2**62}}, "strategy"),
    ({"cluster": "local-0x1"}, "cluster.devices_per_node"),
    ({"cluster": "local-2x0"}, "cluster.num_nodes"),
    ({"cluster": {"device": {"memory_gib": float("nan")}}}, "cluster.device.memory_gib"),
    ({"cluster": {"device": {"memory_gib": 0}}}, "cluster.device.memory_gib"),
    ({"cluster": {"device": {"memory_gb_per_s": 20.0}}}, "cluster.device.memory_gb_per_s"),
    ({"cluster": {"device": {"peak_tflops": {"fp32": 1.0}}}}, "cluster.device.peak_tflops"),
    ({"cluster": {"node": {"gb_per_s": 1.0, "latency_us": 1.0}}}, "cluster.node"),
    ({"cluster": {"preset": "h100-2x1", "node": {"gb_per_s": 0}}}, "cluster.node.gb_per_s"),
    ({"cluster": {"preset": "h100-2x1", "network": {"latency_us": -1}}}, "cluster.network.latency_us"),
    ({"cluster": {"preset": "h100-2x1", "device": {"peak_tflops": {"fp4": 1.0}}}}, "cluster.device.peak_tflops"),
    ({"cluster": {"preset": "h100-2x1", "device": {"peak_tflops": {"fp8": -1.0}}}}, "cluster.device.peak_tflops.fp8"),
    ({"cluster": {"preset": "h100-2x1", "name": "local-h100"}}, "cluster.name"),
    ({"strategy": {"vp": 2}}, "strategy.vp"),
    ({"strategy": {"schedule": "zb-h1"}}, "strategy.schedule"),
    ({"strategy": {"dp": 1, "pp": 2, "vp": 2}}, "strategy.vp"),
    ({"strategy": {"dp": 1, "pp": 2, "schedule": "interleaved"}}, "strategy.schedule"),
    ({"strategy": {"dp": 1, "pp": 2, "schedule": "zb-v"}}, "strategy.vp"),
    ({"strategy": {"dp": 1, "pp": 2, "stage_layers": [1, 2, 1]}}, "strategy.stage_layers"),
    ({"strategy": {"dp": 1, "pp": 2, "stage_layers": [9, 9]}}, "strategy.stage_layers"),
    ({"strategy": {"dp": 1, "pp": 3, "schedule": "dualpipe"}, "cluster": "local-3x1"}, "strategy.pp"),
    ({"strategy": {"dp": 1, "pp": 2, "schedule": "dualpipe"}, "global_batch": 1}, "global_batch"),
    ({"strategy": {"recompute": "selective"}}, "strategy.recompute_modules"),
    ({"strategy": {"recompute_modules": ["norm"]}}, "strategy.recompute_modules"),
    ({"strategy": {"recompute_layers": 1}}, "strategy.recompute_layers"),
    ({"model": DENSE, "strategy": {"etp": 1}}, "strategy.etp"),
    ({"software": {"preset": "greylag", "speed": 0}}, "software.speed"),
    ({"sequence": 4096}, "sequence"),
    ({"sequence": 0}, "sequence"),
    ({"global_batch": -4}, "global_batch"),
    ({"strategy": {"dp": 1, "cp": 2}, "sequence": 66}, "strategy.cp"),
    ({"model": {"num_layers": 0}}, "model.num_layers"),
    ({"model": {"num_heads": 0}}, "model.num_heads"),
    ({"model": {"preset": DENSE, "num_heads": 0, "num_kv_heads": 0}}, "model.num_heads"),
    ({"model": {"preset": DENSE, "num_heads": 3, "head_dim": 64, "num_kv_heads": 2}}, "model.num_kv_heads"),
    ({"model": {"preset": "gpt-3-tiny", "num_heads": 3}}, "model.num_heads"),
    ({"model": {"preset": "gpt-3-tiny", "rope_theta": 5e5}}, "model.rope_theta"),
    ({"model": {"preset": DENSE, "head_dim": 33}}, "model.head_dim"),
    ({"model": {"norm_eps": float("inf")}}, "model.norm_eps"),
    ({"model": {"num_kv_heads": 4}}, "model.mla"),
    ({"model": {"position": "learned"}}, "model.position"),
    ({"model": {"bias": True}}, "model.mla"),
    ({"model": {"moe": {"num_shared_experts": 0, "shared_width": 64}}}, "model.moe.shared_width"),
    ({"strategy": {"sequence_parallel": False}}, "strategy.sequence_parallel"),
    ({"software": {"preset": "greylag", "attention": "unfused"}}, "software.attention"),
    ({"software": {"preset": "greylag", "loss": "parallel"}}, "software.loss"),
    ({"model": {"mla": {"v_head_dim": -1}}}, "model.mla.v_head_dim"),
    ({"model": {"moe": {"top_k": 9}}}, "model.moe.top_k"),
    ({"model": {"moe": {"top_k": 5}}}, "model.moe.top_k"),
    ({"model": {"moe": {"num_groups": 3}}}, "model.moe.num_groups"),
    ({"model": {"moe": {"num_groups": 0}}}, "model.moe.num_groups"),
    ({"model": {"moe": {"top_k_groups": 5}}}, "model.moe.top_k_groups"),
    ({"model": {"moe": {"num_dense_layers": 5}}}, "model.moe.num_dense_layers"),
    ({"model": {"moe": {"num_experts": 0}}}, "model.moe.num_experts"),
    ({"precision": {"input": {"granularity": "128x128"}}}, "precision"),
    ({"precision": {"input": TENSOR}}, "precision"),
    ({"precision": {"input": {"timing": "delayed"}}}, "precision.input"),
    ({"precision": {"input": {"format": "bf16"}}}, "precision.input"),
    ({"precision": {"preset": "bf16", "grad": TENSOR}}, "precision"),
    ({"precision": {"preset": "bf16", "weight": {"format": "fp32"}}}, "precision"),
    ({"precision": {"preset": "bf16", "grad": {"granularity": "1x128"}}}, "precision.grad"),
    ({"precision": {"preset": "bf16", "scale": "fp32"}}, "precision.scale"),
    ({"precision": {"amax_history": 16}}, "precision.amax_history"),
    ({"precision": {"margin": 1}}, "precision.margin"),
    ({"precision": {"preset": "fp8-tensor-delayed", "margin": -1}}, "precision.margin"),
    ({"precision": {"preset": "fp8-tensor-delayed", "amax_history": 0}}, "precision.amax_history"),
    ({"run": {"beta1": 1.0}}, "run.beta1"),
    ({"run": {"beta2": 1.5}}, "run.beta2"),
    ({"run": {"beta1": -0.1}}, "run.beta1"),
    ({"run": {"eps": 0}}, "run.eps"),
    ({"run": {"clip_norm": float("inf")}}, "run.clip_norm"),
    ({"run": {"learning_rate": float("nan")}}, "run.learning_rate"),
    ({"run": {"learning_rate": 1e-5}}, "run.min_learning_rate"),
    ({"run": {"warmup_steps": 5}}, "run.warmup_steps"),
    ({"run": {"steps": 0, "warmup_steps": 0}}, "run.steps"),
    ({"run": {"seed": -1}}, "run.seed"),
    ({"run": {"weight_decay": -0.1}}, "run.weight_decay"),
    ({"run": {"checkpoint_every": -1}}, "run.checkpoint_every"),
    ({"run": {"keep_checkpoints": 0}}, "run.keep_checkpoints"),
    ({"run": {"data": []}}, "run.data"),
    ({"run": {"data": [""]}}, "run.data"),
    *(({"name": name}, "name") for name in ("", ".", "..", "../x", "/tmp/x", "a/b", "a\\b", "a\nb", "a\0b")),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "key"), PROBLEMS, ids=repr)
def test_problem_names_the_key(changes: dict, key: str) -> None:
    table = merged(changes)
    job = job_from(table, name="bad")
    before = msgspec.to_builtins(job)
    findings = job.problems()
    assert key in [f.where for f in findings], findings
    for finding in findings:
        assert finding.level == "error"
        assert finding.advice
        assert "\n" not in str(finding)
    assert job.problems() == findings
    assert repr(msgspec.to_builtins(job)) == repr(before)


def test_data_parallel_degree_is_filled_in() -> None:
    job = job_from({**BASE, "cluster": "h100-8x2", "strategy": {"tp": 4}, "global_batch": 8}, name="filled")
    assert job.strategy.dp == 4
    assert not job.problems()
