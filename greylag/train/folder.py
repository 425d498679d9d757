"""The run folder: `job.json`, `steps.jsonl`, `ranks.jsonl`, `findings.jsonl`, `audit.jsonl`, `telemetry.jsonl`,
`predicted.json`, checkpoints. One run, one folder.

Landing and the report read it and nothing else. A lock keeps a second run out while one is going on.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO

import msgspec

from greylag.spec import Finding, Job, SpecError, Step
from greylag.spec.audit import Audit
from greylag.spec.ranks import Ranks
from greylag.spec.telemetry import Telemetry

STEPS, RANKS, FINDINGS = "steps.jsonl", "ranks.jsonl", "findings.jsonl"
_NAMES = {Step: STEPS, Ranks: RANKS, Finding: FINDINGS, Audit: "audit.jsonl", Telemetry: "telemetry.jsonl"}
_BEFORE_JOB = {".lock", "job.json.part"}
"""What a run that was killed at once leaves in its folder."""
STORE = ".store_"
"""Begins the name of a file store, through which ranks may meet before the first of them claims the folder."""
_MAY_CHANGE = ("steps", "checkpoint_every", "keep_checkpoints", "tensorboard", "telemetry_every")


class RunFolder:
    """A run's folder on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def lock(self) -> int:
        """Handle of the lock of a claimed folder: whoever inherits it holds the lock too."""
        assert self._lock, "not claimed"
        return self._lock.fileno()

    def claim(self, job: Job) -> None:
        """Make the folder this job's, and lock it until the process ends.

        Raises SpecError if another run is writing to it, if it belongs to another job, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.path.iterdir()}
            strange = {name for name in names - _BEFORE_JOB if not name.startswith(STORE)}
            if "job.json" not in names and strange:
                raise SpecError(f"{self.path}: not empty and not a run folder (no job.json); choose another --folder")
            self._lock = open(self.path / ".lock", "a")  # noqa: SIM115 (held until the process ends)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if "job.json" in names:
                self._check_owner(job)
            for name in _NAMES.values():
                _end_line(self.path / name)
        except BlockingIOError:
            raise SpecError(
                f"{self.path}: another run is writing to this folder; stop it or choose another --folder"
            ) from None
        except OSError as error:
            raise SpecError(f"{self.path}: cannot write here: {error.strerror}; choose another --folder") from None
        write_whole(self.path / "job.json", msgspec.json.format(msgspec.json.encode(job)))

    def _check_owner(self, job: Job) -> None:
        old = self.job()
        if _identity(old) != _identity(job):
            changed = ", ".join(_differences(msgspec.to_builtins(_identity(old)), msgspec.to_builtins(_identity(job))))
            raise SpecError(
                f"{self.path / 'job.json'}: it holds another job (differs in {changed}); choose another --folder"
            )

    def job(self) -> Job:
        """The job of this folder. Raises SpecError if it cannot be read."""
        path = self.path / "job.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Job)
        except FileNotFoundError:
            raise SpecError(f"{self.path}: not a run folder (no job.json)") from None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SpecError(f"{path}: cannot be read: {error}; restore it or choose another --folder") from None

    def append(self, record: Step | Ranks | Finding | Audit | Telemetry) -> None:
        """Add a line to the file of its kind, whole or not at all. Raises SpecError if it cannot."""
        path = self.path / _NAMES[type(record)]
        line = msgspec.json.encode(record) + b"\n"
        try:
            with open(path, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    while line:  # a disk that fills up takes a part of it first
                        line = line[file.write(line) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise SpecError(f"{path}: cannot be written: {error.strerror}; free some space and run again") from None


def _end_line(path: Path) -> None:
    """End a line that a killed run left torn, so that the next record does not run on in it."""
    if path.exists():
        with open(path, "r+b") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                file.write(b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part. Raises SpecError if it cannot."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise SpecError(f"{path}: cannot be written: {error.strerror}; free some space and run again") from None


def _identity(job: Job) -> Job:
    """The job without what a resumed run may change."""
    defaults = {name: getattr(type(job.run)(), name) for name in _MAY_CHANGE}
    defaults["validate_every"] = min(1, job.run.validate_every)  # whether, and not how often: that splits the text
    memory = msgspec.structs.replace(job.cluster.device, memory_gib=1.0)
    return msgspec.structs.replace(
        job,
        run=msgspec.structs.replace(job.run, **defaults),
        strategy=msgspec.structs.replace(job.strategy, recompute="none"),
        cluster=msgspec.structs.replace(job.cluster, device=memory),
    )


def _differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    found = []
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}")
    return sorted(found)
