"""Predictions from data sheets and from a calibration."""

import numpy as np
import pytest
from msgspec.structs import replace

from greylag.sim import predict
from greylag.sim.estimate import BETWEEN_STEPS
from greylag.sim.measured import Cost, at
from greylag.sim.operators import Operators
from greylag.spec import SpecError
from greylag.spec.cluster import Calibration, Curve, GemmPoint
from greylag.spec.load import job_from, load_preset
from greylag.spec.messages import model_parallel_messages
from greylag.spec.parts import num_parameters
from greylag.spec.work import Gemm
from jobs import tiny_job

GRID = (64, 1024)


def calibration(rate: float = 1e11) -> Calibration:
    return Calibration(
        device="test", created="2026-01-01T00:00:00+00:00", num_ranks=1, torch="2.13.0",
        gemm=[GemmPoint(m=m, n=n, k=k, seconds=2 * m * n * k / rate) for m in GRID for n in GRID for k in GRID],
        ops={}, collectives={},
    )  # fmt: skip


def job(cluster: str = "h100-8x16", **changes):
    table = {"model": "llama-3-8b", "precision": "fp8-block128", "cluster": cluster, "sequence": 8192,
             "global_batch": 512, "strategy": {"tp": 2}, **changes}  # fmt: skip
    return job_from(table, "test")


@pytest.mark.parametrize("cluster", ["a100-8x16", "h100-8x16", "h800-8x16", "h200-8x16", "b200-8x16"])
def test_every_public_cluster_gives_a_possible_step(cluster: str) -> None:
    step = predict(job(cluster))
    assert 0.02 < step.utilization < 1.0
    assert step.total_seconds > 0
    assert step.bytes["parameters"] > 0


def test_a_better_device_and_a_smaller_model_are_faster() -> None:
    assert predict(job("b200-8x16")).total_seconds < predict(job("h100-8x16")).total_seconds
    assert predict(job("h100-8x16")).total_seconds < predict(job("a100-8x16")).total_seconds


def test_pipeline_stages_leave_a_bubble() -> None:
    without, with_stages = predict(job()), predict(job(strategy={"tp": 2, "pp": 4}))
    assert "bubble" not in without.causes
    assert without.seconds["other"] == BETWEEN_STEPS
    m = 512 // (128 // 8)
    share = with_stages.seconds["other"] / with_stages.total_seconds
    assert share == pytest.approx(3 / (m + 3), rel=0.3)


def test_more_sharding_needs_less_memory_and_more_wire() -> None:
    steps = [predict(job(strategy={"tp": 2, "zero": zero})) for zero in (0, 1, 2, 3)]
    sizes = [s.total_bytes for s in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert steps[3].wire_bytes > steps[1].wire_bytes


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ({"pp": 2, "schedule": "zb-h1"}, "strategy.schedule"),
        ({"overlap": ["dp", "tp"]}, "strategy.overlap"),
        ({"recompute": "selective", "recompute_modules": ["norm"]}, "strategy.recompute"),
        ({"offload": ["optimizer"]}, "strategy.offload"),
    ],
)
def test_what_our_trainer_does_not_know_is_refused_where_it_flies(strategy: dict, key: str) -> None:
    with pytest.raises(SpecError, match=rf"{key}: .* trainer does not know it yet"):
        predict(job(strategy={"tp": 2, **strategy}))
    assert predict(job(strategy={"tp": 2, **strategy}, software="megatron-core-2025")).total_seconds > 0


def test_biases_of_experts_are_the_trainers_of_others() -> None:
    biased = {"model": {"preset": "mixtral-8x7b", "bias": True}, "strategy": {"tp": 2, "ep": 8}}
    with pytest.raises(SpecError, match=r"model\.bias: .* trainer does not know it yet"):
        predict(job(**biased))
    plain = {**biased, "model": "mixtral-8x7b"}
    with_biases, without = (predict(job(**table, software="megatron-core-2025")) for table in (biased, plain))
    assert with_biases.causes["elementwise"] > 1.2 * without.causes["elementwise"]
    assert with_biases.causes["gemm"] == without.causes["gemm"]
    assert with_biases.bytes["parameters"] > without.bytes["parameters"]


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_a_parallel_block_has_one_norm_and_half_the_tensor_parallel_traffic(model: str) -> None:
    parallel = {"model": {"preset": model, "parallel_block": True}, "strategy": {"tp": 8}}
    with pytest.raises(SpecError, match=r"model\.parallel_block: .* trainer does not know it yet"):
        predict(job(**parallel))
    table = {"software": "megatron-core-2025", "precision": "bf16"}
    jobs = [job(**parallel, **table), job(**{**parallel, "model": model}, **table)]
    assert num_parameters(jobs[1].model) - num_parameters(jobs[0].model) == 32 * 4096
    one, two = map(predict, jobs)
    if model == "llama-3-8b":  # experts have no tensor-parallel traffic of their own
        assert one.causes["tp"] == pytest.approx(two.causes["tp"] / 2, rel=0.02)  # embedding and head have theirs still
    assert one.wire_bytes < two.wire_bytes
    assert one.causes["elementwise"] < two.causes["elementwise"]
    assert one.causes["gemm"] == two.causes["gemm"]
    read = 8192 / 8 * 4096 * 2  # a micro-batch's norm, in BF16, cut along the sequence
    assert two.bytes["activations"] - one.bytes["activations"] == pytest.approx(32 * 2 * read, rel=0.05)


@pytest.mark.parametrize("nodes", [16, 32])
@pytest.mark.parametrize(("layers", "rounds"), [(None, 4), (8, 3.25)])
def test_gathering_in_pieces_costs_each_rank_a_launch_for_each_weight(nodes: int, layers: int, rounds: float) -> None:
    """In forward, recompute, backward and of the gradients."""
    strategy = {"zero": 3, "micro_batch": 1, "overlap": [], "recompute": "full", "recompute_layers": layers}
    table = {"cluster": f"a100-8x{nodes}", "precision": "bf16", "strategy": strategy}
    pieces, layered = (
        predict(replace(flown, software=replace(flown.software, gathers=gathers))).causes["dp"]
        for flown in [job(**table, software="deepspeed-2021")]
        for gathers in ("pieces", "layers")
    )
    launch = load_preset("cluster", "a100").device.efficiency.launch_us * 1e-6
    ranks, weights = 8 * nodes, 32 * 4
    launches = 512 / ranks * rounds * weights * ranks
    assert 1 < (pieces - layered) / (launches * launch) < 1.5  # calls have their latency too


def test_interleaved_stages_hide_gradients_behind_turns_of_all() -> None:
    strategy = {"tp": 8, "pp": 4, "zero": 1, "overlap": ["dp"]}
    table = {"model": "llama-3-70b", "global_batch": 32, "software": "megatron-core-2024"}
    turns = predict(job(**table, strategy={**strategy, "vp": 4, "schedule": "interleaved"}))
    assert turns.causes["dp"] < 0.9 * predict(job(**table, strategy=strategy)).causes["dp"]


def test_a_last_wave_is_cut_along_the_contracted_dim() -> None:
    cluster = load_preset("cluster", "h100-8x16")
    operators = Operators(cluster, load_preset("software", "megatron-core-2025"))
    e, sms = cluster.device.efficiency, cluster.device.num_sms

    def waves(tiles: int) -> float:
        """Of a product of so many tiles of 128 rows, beside one that fills the device."""
        rows = np.array([[128 * tiles], [128 * sms]])
        one, full = operators.gemms(rows, np.array([[256], [256]]), np.array([[8192], [8192]]), ["bf16"] * 2, 1, [2, 2])
        return float((one[0] - e.kernel) / (full[0] - e.kernel))

    assert waves(2 * sms) == pytest.approx(2)
    assert 1 < waves(sms + 1) < 1.25
    full = e.gemm_ramp / (8192 + e.gemm_ramp)
    assert waves(sms + sms // 2) == pytest.approx(1.5 + full / 2)


def test_gathers_show_in_forward_and_scatters_in_backward() -> None:
    hidden, shown = (
        predict(job(software="megatron-bridge-26.06", strategy={"tp": 2, "overlap": overlap})).seconds
        for overlap in (["dp"], [])
    )
    assert shown["forward"] > hidden["forward"]
    assert shown["backward"] > hidden["backward"]
    assert shown["reduce"] == 0
    whole = predict(job(software="megatron-bridge-26.06", strategy={"tp": 2, "zero": 0})).seconds
    assert whole["reduce"] > 0


def test_overlap_never_costs_time() -> None:
    """Also where next to nothing hides."""
    software = {"preset": "megatron-core-2025", "exposed": 0.99}
    for zero in (0, 1, 3):
        with_it, without = (
            predict(job(software=software, strategy={"tp": 2, "zero": zero, "overlap": overlap}))
            for overlap in (["dp"], [])
        )
        assert with_it.total_seconds <= without.total_seconds


def test_what_is_not_public_is_named() -> None:
    with pytest.raises(SpecError, match=r"mtt-s5000.*public"):
        predict(job("mtt-s5000-8x16", precision="bf16"))


def test_local_needs_a_calibration() -> None:
    with pytest.raises(SpecError, match="greylag calibrate"):
        predict(tiny_job())


def test_gemm_rates_come_from_the_measured_shapes() -> None:
    cost = Cost(calibration(2e10))
    for shape in ((64, 64, 64), (200, 300, 400), (9999, 10, 1024)):
        gemm = Gemm("x", "ffn", *shape)
        assert cost.gemm(gemm) == pytest.approx(gemm.flops / 2e10)


def test_curves_interpolate_and_extend_by_rate() -> None:
    curve = Curve(size=[10.0, 20.0], seconds=[1.0, 3.0])
    assert at(curve, 15) == pytest.approx(2.0)
    assert at(curve, 5) == 1.0
    assert at(curve, 40) == pytest.approx(6.0)


def test_a_missing_curve_asks_for_a_new_calibration() -> None:
    with pytest.raises(SpecError, match="greylag calibrate"):
        predict(tiny_job(), calibration())


def test_recompute_runs_the_layers_forward_again_and_keeps_inputs_alone() -> None:
    plain, again = predict(job()), predict(job(strategy={"tp": 2, "recompute": "full"}))
    assert again.seconds["forward"] == plain.seconds["forward"]
    extra = again.seconds["backward"] - plain.seconds["backward"]
    assert 0.85 * plain.seconds["forward"] < extra < plain.seconds["forward"]  # all but embedding, head and loss
    assert again.flops == plain.flops
    assert again.bytes["activations"] < plain.bytes["activations"]
    assert again.bytes == {**plain.bytes, "activations": again.bytes["activations"]}
    messages = model_parallel_messages(job(), 8192)
    sent = sum(m.sent(gloo=False) for m in messages if m.phase == "forward")
    assert again.wire_bytes - plain.wire_bytes == pytest.approx(sent * job().num_micro_batches)
