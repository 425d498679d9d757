"""A run's audit: real runs agree with their job, and whatever departs from it is found."""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from msgspec import json
from msgspec.structs import replace

from commands import greylag_here
from greylag.numerics import Quantizer
from greylag.numerics.quantize import Quantized, plain
from greylag.report.audit import Row, compare, read_audits
from greylag.spec import Job
from greylag.spec.audit import Audit, MessageSeen
from greylag.spec.messages import data_parallel_messages
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from jobs import SMALL_MOE, tiny_job

DENSE = {"preset": "llama-3-tiny", "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256}


def fly(rank: int, world: int, job: Job, folder: str, spoil: str = "") -> None:
    if rank == 0:
        (Path(folder) / "job.json").write_bytes(json.encode(job))
    with mock.patch.object(Quantizer, "quantize", SPOILS.get(spoil, Quantizer.quantize)):
        run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def quantize_nothing(self, gemm, role, x_MK, *args, **kwargs) -> Quantized:
    """Claims to be what was asked for, and holds the tensor as it was."""
    q = HONEST(self, gemm, role, x_MK.clone(), *args, **kwargs)
    return replace_values(q, x_MK) if q.scale_inv is not None and role == "weight" else q


def replace_values(q: Quantized, x: torch.Tensor) -> Quantized:
    return Quantized(q.shape, q.tile, q.scale_inv, values=x.detach().float().clone(), fmt=q.fmt)


def quantize_by_tensor(self, gemm, role, x_MK, *args, **kwargs) -> Quantized:
    """One scale for all, put in every tile's place."""
    q = HONEST(self, gemm, role, x_MK, *args, **kwargs)
    if q.scale_inv is not None and role == "grad":
        unit = q.scale_inv.max()
        values = (q.dequantize() / unit).to(torch.float8_e4m3fn).float() * unit
        q = Quantized(q.shape, q.tile, torch.full_like(q.scale_inv, unit), values=values, fmt=q.fmt)
    return q


def quantize_high(self, gemm, role, x_MK, *args, **kwargs) -> Quantized:
    """Leaves the weight gradient in high precision."""
    return plain(x_MK.detach()) if gemm == "weight-gradient" else HONEST(self, gemm, role, x_MK, *args, **kwargs)


HONEST = Quantizer.quantize
SPOILS = {"raw": quantize_nothing, "tensor": quantize_by_tensor, "high": quantize_high}


def small(precision: str, model: dict = SMALL_MOE, dp: int = 1, **changes) -> Job:
    run = {"steps": 2, "telemetry_every": 0, **changes.pop("run", {})}
    return tiny_job(model, precision, dp=dp, run=run, global_batch=2, sequence=32, **changes)


def rows_of(folder: Path) -> list[Row]:
    job, audits = read_audits(folder)
    return compare(job, audits[-1])


def faults(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.fault]


@pytest.fixture(scope="module")
def flown(ranks, tmp_path_factory) -> Path:
    """A run in fp8-block128 on one rank, that the tests below tamper with."""
    folder = tmp_path_factory.mktemp("flown")
    ranks(1, fly, small("fp8-block128"), str(folder))
    return folder


HIGH_FIRST = {"overrides": [{"match": "layers.0.*"}, {"match": "*.wo", "gemms": ["weight-gradient"]}]}
CASES = {
    "dense block128": (small("fp8-block128", DENSE), 1),
    "delayed, two ranks, ZeRO-3": (small("fp8-tensor-delayed", dp=2, strategy={"zero": 3}), 2),
    "mxfp8": (small("mxfp8", DENSE), 1),
    "row": (small("fp8-row"), 1),
    "block128 with FP32 scales": (small("fp8-block128-fp32"), 1),
    "overrides, two replicas": (
        small("fp8-block128", dp=2, strategy={"replicas": 2}, precision_table=HIGH_FIRST),
        2,
    ),
    "stochastic gradients, hybrid": (
        small("fp8-block128-hybrid", DENSE, precision_table={"grad": {"rounding": "stochastic"}}),
        1,
    ),
    "deepseek, two ranks, ZeRO-3, EP": (small("fp8-deepseek", dp=2, strategy={"zero": 3, "ep": 2}), 2),
}


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "-"))
def test_a_run_does_what_its_job_says(case: str, ranks, tmp_path: Path) -> None:
    job, world = CASES[case]
    ranks(world, fly, job, str(tmp_path))
    rows = rows_of(tmp_path)
    assert not faults(rows), faults(rows)
    assert sum(row.section == "gemms" for row in rows) == 3 * sum(row.section == "caches" for row in rows)
    if case.startswith("overrides"):
        used = {(row.where, row.what): row.used for row in rows if row.section == "gemms"}
        assert used["layers.0.ffn.w_down", "forward"] == "FP32 x FP32 -> float32"
        assert used["layers.1.attention.wo", "weight-gradient"] == "FP32 x FP32 -> float32"
        assert used["layers.1.attention.wo", "forward"] == "E4M3 1x128 pow2 x E4M3 128x128 pow2 -> float32"
    if world == 2:
        used = {row.where: row.used for row in rows if row.section == "messages"}
        told = used["all_gather"] if "deepseek" in case else " ".join(used.values())
        assert f"MiB in {'uint8' if 'deepseek' in case else 'float32'}" in told


def test_an_audited_run_passes_on_the_command_line(flown: Path, tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "audit", flown)
    assert result.returncode == 0, result.stderr
    assert "layers.1.ffn.experts.w_gate_up"[:20] in result.stdout
    assert "did what 'fp8-block128" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("raw", "weight holds values that e4m3 does not have: it was not quantized"),
        ("tensor", "grad has scales by"),
        ("high", "grad is fp32, not e4m3"),
    ],
)
def test_a_layer_that_does_not_quantize_is_found(spoil: str, said: str, ranks, tmp_path: Path) -> None:
    ranks(1, fly, small("fp8-block128", DENSE), str(tmp_path), spoil)
    assert any(said in row.fault for row in rows_of(tmp_path)), faults(rows_of(tmp_path))
    result = greylag_here(tmp_path, "audit", tmp_path)
    assert result.returncode == 1
    assert said in result.stderr


def edited(flown: Path, folder: Path, change) -> "functools.partial":
    """Copy the run with its audit changed; the command on it."""
    audit = json.decode((flown / "audit.jsonl").read_bytes(), type=Audit)
    (folder / "job.json").write_bytes((flown / "job.json").read_bytes())
    (folder / "audit.jsonl").write_bytes(json.encode(change(audit)) + b"\n")
    return greylag_here(folder, "audit", folder)


TAMPERED = {
    "a product less": (lambda a: replace(a, products=a.products[1:]), "forward: missing"),
    "a cache less": (lambda a: replace(a, caches=a.caches[1:]), "input: missing"),
    "no state": (lambda a: replace(a, states=()), "exp_avg matrices: missing"),
    "a wider result": (
        lambda a: replace(a, products=(replace(a.products[0], dtype="bfloat16"), *a.products[1:])),
        "result in bfloat16",
    ),
    "another multiply": (
        lambda a: replace(a, products=(replace(a.products[0], op="mm bfloat16 x bfloat16"), *a.products[1:])),
        "torch was asked for mm bfloat16 x bfloat16",
    ),
    "a wider cache": (
        lambda a: replace(a, caches=(*a.caches[:-1], replace(a.caches[-1], bytes_per_element=4.0))),
        "takes 4 bytes an element, not 1.01",
    ),
    "BF16 moments": (
        lambda a: replace(a, states=tuple(replace(s, dtype="bfloat16") for s in a.states if s.what == "exp_avg")),
        "bfloat16, not float32",
    ),
    "a layer nobody has": (
        lambda a: replace(a, products=(*a.products, replace(a.products[0], layer="layers.7.ffn.w_up"))),
        "nobody asked for it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED, ids=lambda name: name.replace(" ", "-"))
def test_an_altered_audit_fails(name: str, flown: Path, tmp_path: Path) -> None:
    change, said = TAMPERED[name]
    result = edited(flown, tmp_path, change)
    assert result.returncode == 1
    assert said in result.stderr


def test_an_altered_job_fails(flown: Path, tmp_path: Path) -> None:
    job = json.decode((flown / "job.json").read_bytes(), type=Job)
    for precision in (
        replace(job.precision, scale="fp32"),
        replace(job.precision, grad=replace(job.precision.grad, format="e5m2")),
        replace(job.precision, most_sensitive="B"),
        replace(job.precision, first_layers_high=1),
        replace(job.precision, attention_output="e5m6"),
        replace(job.precision, first_moment="bf16"),
    ):
        (tmp_path / "job.json").write_bytes(json.encode(replace(job, precision=precision)))
        (tmp_path / "audit.jsonl").write_bytes((flown / "audit.jsonl").read_bytes())
        assert greylag_here(tmp_path, "audit", tmp_path).returncode == 1, precision


SENT = {
    "all": ((), ""),
    "in BF16": (("all_gather", "bfloat16", 1.0), "went as bfloat16"),
    "half of it": (("all_gather", "float32", 0.5), "sent, not"),
    "gradients in BF16": (("reduce_scatter", "bfloat16", 1.0), "went as bfloat16"),
    "nothing": (("reduce_scatter", "float32", 0.0), "0 B sent, not"),
    "something more": (("all_to_all", "uint8", 1.0), "sent, not 0 B"),
}


@pytest.mark.parametrize("case", SENT, ids=lambda name: name.replace(" ", "-"))
def test_messages_are_compared_by_dtype_and_bytes(case: str) -> None:
    job, change, said = small("fp32", dp=2, strategy={"zero": 3}), *SENT[case]
    sent: dict[tuple[str, str], float] = {("all_to_all", "uint8"): 1e6} if case == "something more" else {}
    for message in data_parallel_messages(job):
        dtype, share = change[1:] if change[:1] == (message.collective,) else ("float32", 1.0)
        key = (message.collective, dtype)
        sent[key] = sent.get(key, 0.0) + share * message.times * message.bytes
    messages = tuple(MessageSeen(collective=c, dtype=d, bytes=int(n), count=1) for (c, d), n in sent.items())
    audit = Audit(step=2, device="cpu", torch="2", time=0, products=(), caches=(), states=(), messages=messages)
    found = [row.fault for row in compare(job, audit) if row.section == "messages" and row.fault]
    assert bool(found) == bool(said)
    assert not said or said in found[0]


def test_a_folder_without_an_audit(flown: Path, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes((flown / "job.json").read_bytes())
    result = greylag_here(tmp_path, "audit", tmp_path)
    assert result.returncode == 2
    assert "this run has not been audited" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_resumed_run_is_audited_again(ranks, tmp_path: Path) -> None:
    for steps in (2, 4):
        ranks(1, fly, small("fp8-tensor-delayed", DENSE, run={"steps": steps}), str(tmp_path))
    job, audits = read_audits(tmp_path)
    assert [audit.step for audit in audits] == [2, 4]  # the third step's memory is measured
    assert not faults(compare(job, audits[1]))
