"""Record: what a run folder says about its run, read once and held as plain facts.

It lives here because the report is the reader of run folders; who wrote them (trainer, simulator, guard, or
somebody else's loop) does not matter. Nothing is computed here: medians and curves are `summary` and `curve`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from greylag.spec.audit import Audit
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.ranks import Ranks
from greylag.spec.step import Step
from greylag.spec.telemetry import Telemetry

JOB, STEPS, PREDICTED, FINDINGS = "job.json", "steps.jsonl", "predicted.json", "findings.jsonl"
AUDIT, TELEMETRY = "audit.jsonl", "telemetry.jsonl"

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the decoder raises on bytes that are no record; RecursionError where brackets nest a thousand deep."""

T = TypeVar("T", Job, Step, Ranks, Finding, Audit, Telemetry)


@dataclass(frozen=True)
class RunRecord:
    """One run. `steps` are measured, ascending by number, one per number."""

    job: Job
    steps: list[Step]
    predicted: Step | None
    findings: list[Finding]
    folder: str
    """The folder's name."""
    audits: Sequence[Audit] = ()
    """In the order of writing."""
    telemetry: Sequence[Telemetry] = ()
    """Ascending by step, one per step."""


def read_record(folder: Path) -> RunRecord:
    """Read a run folder.

    Of steps with the same number (a resumed run repeats some) the last written wins. A torn last line is what
    a killed run leaves and is ignored; an unreadable line before it becomes a finding. Raises SpecError where
    there is no run to report: no folder, no job, no step, or a file that is something else.
    """
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such run folder; give the folder that holds {JOB} and {STEPS}")
    job = _job(folder)
    lines, unread_steps = read_lines(folder / STEPS, Step)
    steps = {step.number: step for step in lines if step.source == "measured"}
    if not steps:
        raise SpecError(f"{folder / STEPS}: holds no measured step; report a run that has finished at least one")
    predicted = None
    if (folder / PREDICTED).exists():
        predicted = read_one(folder / PREDICTED, Step, "predict the job again, or remove the file")
    findings, unread_findings = _lines_if_there(folder / FINDINGS, Finding)
    audits, unread_audits = _lines_if_there(folder / AUDIT, Audit)
    telemetry, unread_telemetry = _lines_if_there(folder / TELEMETRY, Telemetry)
    measured = {line.step: line for line in telemetry}
    return RunRecord(
        job=job,
        steps=[steps[number] for number in sorted(steps)],
        predicted=predicted,
        findings=findings + unread_steps + unread_findings + unread_audits + unread_telemetry,
        folder=folder.resolve().name,
        audits=audits,
        telemetry=[measured[number] for number in sorted(measured)],
    )


def _lines_if_there(path: Path, kind: type[T]) -> tuple[list[T], list[Finding]]:
    return read_lines(path, kind) if path.exists() else ([], [])


def _bytes(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; {advice}") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); {advice}") from None


def _job(folder: Path) -> Job:
    return read_one(folder / JOB, Job, f"give a run folder: it holds {JOB}")


def sound_job(folder: Path) -> Job:
    """The job of a run folder, for who computes with it. Raises SpecError if it has none, or one that cannot be."""
    job = _job(folder)
    problems = job.problems()
    if problems:
        raise SpecError(f"{folder / JOB}: {problems[0]}; it was changed since the run: restore it")
    return job


def read_one(path: Path, kind: type[T], advice: str) -> T:
    """One struct from a file. Raises SpecError if it is not there or something else."""
    try:
        return msgspec.json.decode(_bytes(path, advice), type=kind)
    except UNREADABLE as error:
        raise SpecError(f"{path}: not a {kind.__name__} ({error}); {advice}") from None


def read_lines(path: Path, kind: type[T], most: int = 0) -> tuple[list[T], list[Finding]]:
    """One struct per line, of the last `most` if given, and a finding if lines could not be read.

    A last one without an end is torn, and no fault. Raises SpecError if the file cannot be read or no line of it can.
    """
    decoder = msgspec.json.Decoder(kind)
    whole = _bytes(path, "report a run that has written it")
    lines = [line for line in whole.split(b"\n") if line.strip()][-most:]
    good: list[T] = []
    bad: list[tuple[int, Exception]] = []
    for number, line in enumerate(lines, 1):
        try:
            good.append(decoder.decode(line))
        except UNREADABLE as error:
            bad.append((number, error))
    if bad and not good and len(lines) > 1:
        raise SpecError(
            f"{path}: no line is a {kind.__name__} (line {bad[0][0]}: {bad[0][1]}); give the file of one run"
        )
    if bad and bad[-1][0] == len(lines) and not whole.endswith(b"\n"):
        bad.pop()
    if not bad:
        return good, []
    unread = Finding(
        level="warning",
        what=f"{len(bad)} of {len(lines)} lines cannot be read and are left out",
        where=path.name,
        evidence=f"line {bad[0][0]}: {bad[0][1]}",
        advice="such a line is torn when a run is killed while writing and then resumed; what it held is lost",
    )
    return good, [unread]
