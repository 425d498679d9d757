"""The page's section on FP8 health: the audit's verdict, and charts that stay readable for many layers."""

from pathlib import Path

import msgspec
import pytest

from greylag.report.health import health
from greylag.report.record import read_record
from greylag.report.run import render
from greylag.spec import Step
from greylag.spec.audit import Audit
from greylag.spec.parts import parts
from greylag.spec.telemetry import OperandHealth, Rounding, Telemetry
from jobs import SMALL_MOE, tiny_job

JOB = tiny_job({**SMALL_MOE, "num_layers": 5}, "fp8-block128")
AUDIT = Audit(step=2, device="cpu", torch="2", time=0.0, products=(), caches=(), states=(), messages=())


def operand(layer: str, role: str, step: int, flushed: float = 0.0) -> OperandHealth:
    return OperandHealth(
        layer=layer, role=role, shape=(64, 128), sampled_rows=64, own="e4m3 1x128", amax=float(step),
        dynamic_range=9.0, block_amax=(0.1, 0.2, 0.5, 0.8, 1.0), rounding=Rounding(0.026, 0.03, flushed, 0.0),
        outliers=((17, 900.0),) if flushed else (), num_outliers=3 if flushed else 0,
    )  # fmt: skip


def write(folder: Path, telemetry: list[Telemetry], audits: list[Audit]) -> None:
    step = Step(source="measured", number=1, seconds={"forward": 1.0}, tokens=1, flops=1.0, loss=1.0)
    for name, structs in (("steps", [step]), ("telemetry", telemetry), ("audit", audits)):
        if structs:
            (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in structs))
    (folder / "job.json").write_bytes(msgspec.json.encode(JOB))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = [part.name.removesuffix(".weight") for part in parts(JOB.model) if part.is_gemm]
    steps = [
        Telemetry(
            step=n,
            operands=tuple(
                operand(name, role, n, 0.04 if name.endswith("4.ffn.shared.w_down") and role == "input" else 0.0)
                for name in names
                for role in ("input", "weight", "grad")
            ),
        )
        for n in (300, 100, 200, 300)
    ]
    write(tmp_path, steps, [AUDIT])
    return tmp_path


def test_the_section_has_every_kind_once(folder: Path) -> None:
    record = read_record(folder)
    assert [step.step for step in record.telemetry] == [100, 200, 300]
    section = health(record)
    assert "attention.wo" in section.kinds
    assert len(section.kinds) == len(set(section.kinds)) == 11
    assert section.step == 300
    worst = section.worst[0]
    assert (worst.layer, worst.role) == ("layers.4.ffn.shared.w_down", "input")


def test_a_failed_audit_is_told_with_its_rows(folder: Path) -> None:
    section = health(read_record(folder))
    assert section.is_sound is False
    assert section.num_faults > len(section.faults) > 0
    html = render(read_record(folder))
    assert "departed from" in html
    assert "more: greylag audit" in html


def test_the_page_offers_the_kinds(folder: Path) -> None:
    html = render(read_record(folder))
    assert '<option>ffn.shared.w_down</option>' in html  # fmt: skip
    assert "4.00%" in html
    assert "no. 17: 900" in html
    for name in ("amax", "block_amax", "shares"):
        assert f'id="{name}"' in html


def test_a_run_without_either_says_so(tmp_path: Path) -> None:
    write(tmp_path, [], [])
    html = render(read_record(tmp_path))
    assert "This run was not audited." in html
    assert "No step was measured" in html
    assert '<select id="kind"' not in html
