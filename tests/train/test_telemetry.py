"""Telemetry of real runs: it says what the run did, and the run does not notice."""

from pathlib import Path

import pytest
from msgspec import json

from greylag.report.advise import advise, read_telemetry
from greylag.report.proposal import propose, with_precision
from greylag.spec import Job, Step
from greylag.spec.parts import parts
from greylag.spec.telemetry import Telemetry
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from jobs import SMALL_MOE, tiny_job


def fly(rank: int, world: int, job: Job, folder: str) -> None:
    if rank == 0:
        (Path(folder) / "job.json").write_bytes(json.encode(job))
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def small(precision: str, every: int, dp: int = 1, **changes) -> Job:
    run = {"steps": 4, "telemetry_every": every}
    return tiny_job(SMALL_MOE, precision, dp=dp, run=run, global_batch=2, sequence=32, **changes)


def steps_of(folder: Path) -> list[Step]:
    return [json.decode(line, type=Step) for line in (folder / "steps.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def measured(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    ranks(2, fly, small("fp8-tensor-delayed", 1, 2, strategy={"zero": 3}), str(folder))
    return folder


def test_every_operand_of_every_layer_is_measured(measured: Path) -> None:
    job, steps, _ = read_telemetry(measured)
    assert [step.step for step in steps] == [1, 2, 4]  # the third step's memory is measured
    layers = [part.name.removesuffix(".weight") for part in parts(job.model) if part.is_gemm]
    for step in steps:
        assert {(o.layer, o.role) for o in step.operands} == {
            (n, r) for n in layers for r in ("input", "weight", "grad")
        }
        for operand in step.operands:
            assert operand.amax > 0
            assert 0 < operand.dynamic_range < 60
            assert operand.block_amax[0] <= operand.block_amax[2] <= operand.block_amax[-1]
            high = operand.layer.endswith(("wq_a", "wkv_a"))  # class B
            assert (operand.rounding is None) == high
            assert operand.own == "float32" if high else operand.own in ("e4m3 tensor", "e5m2 tensor")


def test_the_runs_own_rounding_is_the_candidates(measured: Path, ranks, tmp_path: Path) -> None:
    _, steps, _ = read_telemetry(measured)
    for operand in steps[-1].operands:
        if operand.rounding and operand.sampled_rows == operand.shape[0]:
            fmt = operand.own.split()[0]
            assert operand.history == 3
            assert operand.along_rows[f"{fmt} tensor fp32 delayed"] == operand.rounding
    ranks(1, fly, small("fp8-block128", 2), str(tmp_path))
    _, steps, _ = read_telemetry(tmp_path)
    assert [step.step for step in steps] == [2, 4]
    for operand in steps[-1].operands:
        if operand.rounding and operand.role != "weight":
            assert operand.along_rows["e4m3 1x128 pow2 current"] == operand.rounding
            assert sum(operand.scale_exponents.values()) == operand.shape[0] * -(-operand.shape[1] // 128)
        assert operand.history == 1  # of the steps that were measured


def test_the_run_does_not_notice(measured: Path, ranks, tmp_path: Path) -> None:
    ranks(2, fly, small("fp8-tensor-delayed", 0, 2, strategy={"zero": 3}), str(tmp_path))
    assert [s.loss for s in steps_of(tmp_path)] == [s.loss for s in steps_of(measured)]
    assert [s.grad_norm for s in steps_of(tmp_path)] == [s.grad_norm for s in steps_of(measured)]
    assert not (tmp_path / "telemetry.jsonl").exists()


def test_advice_on_a_real_run_is_a_sound_job(measured: Path) -> None:
    job, steps, _ = read_telemetry(measured)
    advice = advise(job, steps, 0.03)
    assert len(advice) == sum(part.is_gemm for part in parts(job.model))
    assert not with_precision(job, propose(job, advice)).problems()


def test_a_line_is_read_as_it_was_written(measured: Path) -> None:
    for line in (measured / "telemetry.jsonl").read_bytes().splitlines():
        assert json.encode(json.decode(line, type=Telemetry)) == line


def test_a_weight_gathered_as_codes_is_measured_by_its_own_rows(ranks, tmp_path: Path) -> None:
    job = small("fp8-tensor-current", 1, 2, strategy={"zero": 3}, precision_table={"parameter_gather": "fp8"})
    ranks(2, fly, job, str(tmp_path))
    sizes = {part.name.removesuffix(".weight"): part.size for part in parts(job.model) if part.is_gemm}
    seen = [o for o in read_telemetry(tmp_path)[1][0].operands if o.role == "weight" and o.rounding]
    assert seen
    for operand in seen:
        assert operand.shape[0] * operand.shape[1] == sizes[operand.layer] // 2
