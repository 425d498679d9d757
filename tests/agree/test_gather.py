"""Weights gathered as FP8 codes, on real ranks: the run's bits, the codes, bytes and dtype on the wire, peak memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import json
from msgspec.structs import replace

from greylag.numerics.weight import QuantizedWeight
from greylag.parallel import ReplicaCommit, World, start, stop
from greylag.report.audit import AUDIT, compare
from greylag.sim import predict_memory
from greylag.spec import Job, Step
from greylag.spec.audit import Audit
from greylag.spec.grid import Grid
from greylag.spec.messages import data_parallel_messages
from greylag.spec.parts import parts
from greylag.train.build import Flight, build
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from greylag.train.loop import MEASURED_STEP, Control, take_step
from greylag.train.observers import quantizers
from jobs import SMALL_MOE, tiny_job


def job_of(precision: str, dp: int, zero: int, gather: str, **changes: Any) -> Job:
    table = {"parameter_gather": gather, **({"amax_history": 4} if "delayed" in precision else {})}
    model = changes.pop("model", SMALL_MOE)
    strategy = {"zero": zero if dp > 1 else 1, **changes.pop("strategy", {})}
    table |= changes.pop("precision_table", {})
    return tiny_job(
        model,
        precision,
        dp,
        strategy=strategy,
        precision_table=table,
        **{"global_batch": 2 * dp, "sequence": 32, **changes},
    )


def world_of(rank: int, world: int, folder: str) -> World:
    store = dist.FileStore(f"{folder}/store{world}", world)
    return start(Grid(replica=1, pp=1, dp=world, cp=1, tp=1), rank, store, torch.device("cpu"))


def steps(flight: Flight, count: int, folder: str) -> list[Step]:
    commit, run = ReplicaCommit(flight.world), RunFolder(Path(folder))
    return [take_step(flight, number, commit, Control(), 0.0, run)[0] for number in range(1, count + 1)]


def check_codes(flight: Flight) -> int:
    """Whether every gathered weight is what its quantizer makes of the whole FP32 weight, bit for bit; how many."""
    model, job = flight.model, flight.job
    found, names = quantizers(model), [part.name for part in parts(job.model) if part.is_gemm]
    whole = {name: p.full_tensor() for name, p in model.named_parameters() if name in names}
    with torch.no_grad():
        model(flight.corpus.windows(0, 1)[:, :-1])
    count = 0
    for layer in model.layers:
        layer.unshard()
    for name in names:
        w = model.get_parameter(name)
        if not isinstance(w, QuantizedWeight):
            assert job.precision.gathered(name.removesuffix(".weight"), job.model.num_layers) == "fp32"
            continue
        count += 1
        quantizer = found[name.removesuffix(".weight")]
        for mine, theirs in zip(w.operands(), quantizer.weights("input-gradient", whole[name]), strict=True):
            assert torch.equal(mine.dequantize().view(torch.int32), theirs.dequantize().view(torch.int32)), name
            if theirs.scale_inv is not None:
                assert torch.equal(mine.scale_inv, theirs.scale_inv), name
                assert torch.equal(mine.codes.view(torch.uint8), theirs.encoded().view(torch.uint8)), name
    model.reshard()
    for layer in model.layers:
        layer.reshard()
    return count


def fly(rank: int, world: int, jobs: list[Job], folder: str) -> list[tuple[list[Step], int]]:
    """Two steps of each job; then how many weights were gathered as operands."""
    here, results = world_of(rank, world, folder), []
    for job in jobs:
        flight = build(job, here)
        done = steps(flight, 2, folder)
        results.append((done, check_codes(flight) if world > 1 and job.precision.parameter_gather != "fp32" else 0))
    stop(here)
    return results


def bits(done: list[Step]) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in done]


@pytest.mark.parametrize(("precision", "world", "levels"), [
    ("fp8-block128", 2, (1, 2, 3)),
    ("fp8-block128-fp32", 3, (3,)),  # rows of a block on several ranks, and shards that FSDP2 pads
    ("fp8-tensor-delayed", 2, (3,)),
    ("fp8-tensor-current", 3, (1,)),
])  # fmt: skip
def test_same_bits(precision: str, world: int, levels: tuple[int, ...], ranks, tmp_path: Path) -> None:
    """As with the same weights gathered in FP32; as on one rank but for the order in which gradients are summed."""
    jobs = [job_of(precision, world, zero, gather) for zero in levels for gather in ("fp32", "fp8")]
    results = ranks(world, fly, jobs, str(tmp_path))[0]
    alone = replace(job_of(precision, 1, 0, "fp8"), global_batch=2 * world)
    ((one, _),) = ranks(1, fly, [alone], str(tmp_path))[0]
    for (wide, _), (codes, count) in zip(results[::2], results[1::2], strict=True):
        assert bits(codes) == bits(wide)
        assert count == 12
        assert codes[0].loss == pytest.approx(one[0].loss, rel=1e-6)
        if precision == "fp8-block128":  # else a gradient near 0 changes sign, and with it AdamW's first step
            assert codes[1].loss == pytest.approx(one[1].loss, rel=2e-5)
    for job, (done, _) in zip(jobs, results, strict=True):
        expected = sum(message.sent(gloo=True) for message in data_parallel_messages(job))
        assert done[1].wire_bytes == pytest.approx(expected, rel=0.01)
        assert done[1].wire_bytes >= expected


def test_bf16(ranks, tmp_path: Path) -> None:
    """Weights of BF16 layers, alone and beside those of FP8 layers."""
    cases = [("bf16", "bf16", {}), ("fp8-block128", "fp8", {"first_layers_high": 1})]
    jobs = [
        job_of(precision, 2, 3, gather, precision_table={"high": "bf16", **table})
        for precision, narrow, table in cases
        for gather in ("fp32", narrow)
    ]
    results = ranks(2, fly, jobs, str(tmp_path))[0]
    for (wide, _), (narrow, count) in zip(results[::2], results[1::2], strict=True):
        assert bits(narrow) == bits(wide)
        assert count == 16
        assert narrow[1].wire_bytes < 0.85 * wide[1].wire_bytes


@pytest.mark.parametrize(("precision", "table", "forms"), [
    ("fp8-block128", {}, {"wqkv": "fp8", "w_down": "fp8"}),
    ("fp8-block128", {"smooth_swiglu": True}, {"wqkv": "fp8", "w_down": "fp32"}),
    ("fp8-block128", {"high": "bf16", "first_layers_high": 3}, {"wqkv": "bf16", "w_down": "bf16"}),
    ("fp8-block128", {"overrides": [{"match": "*.wqkv", "gemms": ["input-gradient"]}]}, {"wqkv": "fp32"}),
    ("fp8-block128", {"overrides": [{"match": "*.wqkv", "gemms": ["weight-gradient"]}]}, {"wqkv": "fp8"}),
    ("fp8-row", {}, {"wqkv": "fp32"}),
    ("mxfp8", {}, {"wqkv": "fp32"}),
    ("fp8-tensor-delayed", {}, {"wqkv": "fp8"}),
])  # fmt: skip
def test_what_may_travel_as_codes(precision: str, table: dict, forms: dict[str, str]) -> None:
    job = tiny_job("llama-3-tiny", precision, precision_table={"high": "fp32", **table})
    p = replace(job.precision, parameter_gather="fp8")
    names = {"wqkv": "layers.0.attention.wqkv", "w_down": "layers.0.ffn.w_down"}
    assert {name: p.gathered(names[name], job.model.num_layers) for name in forms} == forms
    faults = [str(f) for f in replace(job, precision=p).problems()]
    if precision in ("fp8-row", "mxfp8"):
        assert len(faults) == 1
        assert "precision.parameter_gather: fp8 has no effect" in faults[0]
    else:
        assert not faults


def run(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def test_resume_audit_and_memory(ranks, tmp_path: Path) -> None:
    """One run of the whole trainer, with BF16 moments: its audit, its peak bytes, and its bits after a resume."""
    job = job_of(
        "fp8-block128", 2, 3, "fp8", model="deepseek-v3-tiny", strategy={"micro_batch": 4}, sequence=128,
        global_batch=8, precision_table={"first_moment": "bf16", "second_moment": "bf16"},
        run={"steps": MEASURED_STEP, "checkpoint_every": 1, "keep_checkpoints": 2},
    )  # fmt: skip
    ranks(2, run, job, str(tmp_path))
    steps = [json.decode(line, type=Step) for line in (tmp_path / "steps.jsonl").read_bytes().splitlines()]
    predicted, measured = predict_memory(job), steps[MEASURED_STEP - 1].bytes
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()), rel=0.10)
    for pool in ("parameters", "gradients", "optimizer"):
        assert predicted[pool] == pytest.approx(measured[pool], rel=0.02), pool
    audit, *_ = [json.decode(line, type=Audit) for line in (tmp_path / AUDIT).read_bytes().splitlines()]
    assert [row for row in compare(job, audit) if row.fault] == []
    sent = {(m.collective, m.dtype): m.bytes for m in audit.messages}
    assert sent["all_gather", "uint8"] > 4 * sent["all_gather", "float32"]
    (tmp_path / "checkpoints" / "step_00000003").rename(tmp_path / "gone")
    ranks(2, run, job, str(tmp_path))
    again = [json.decode(line, type=Step) for line in (tmp_path / "steps.jsonl").read_bytes().splitlines()][3:]
    assert [s.number for s in again] == [3]
    assert bits(again) == bits(steps[2:])
