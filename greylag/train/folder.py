"""The run folder: `job.json`, `steps.jsonl`, `findings.jsonl`, `predicted.json`, checkpoints. One run, one folder.

Landing and the report read it and nothing else. A lock keeps a second run out while one is going on.
"""

import fcntl
import os
from pathlib import Path
from typing import IO

import msgspec

from greylag.spec import Finding, Job, SpecError, Step

_MAY_CHANGE = ("steps", "checkpoint_every", "keep_checkpoints", "tensorboard")


class RunFolder:
    """A run's folder on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def claim(self, job: Job) -> None:
        """Make the folder this job's, and lock it until the process ends.

        Raises SpecError if another run is writing to it, if it belongs to another job, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 (held until the process ends)
        except OSError as error:
            raise SpecError(f"{self.path}: cannot write here: {error.strerror}; choose another --folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(
                f"{self.path}: another run is writing to this folder; stop it or choose another --folder"
            ) from None
        self._check_owner(job)
        write_whole(self.path / "job.json", msgspec.json.format(msgspec.json.encode(job)))

    def _check_owner(self, job: Job) -> None:
        path = self.path / "job.json"
        if not path.exists():
            if any(p.name != ".lock" for p in self.path.iterdir()):
                raise SpecError(f"{self.path}: not empty and not a run folder (no job.json); choose another --folder")
            return
        old = self.job()
        if _identity(old) != _identity(job):
            changed = ", ".join(_differences(msgspec.to_builtins(_identity(old)), msgspec.to_builtins(_identity(job))))
            raise SpecError(f"{path}: the folder holds another job (differs in {changed}); choose another --folder")

    def job(self) -> Job:
        """The job of this folder. Raises SpecError if it cannot be read."""
        path = self.path / "job.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Job)
        except OSError:
            raise SpecError(f"{self.path}: not a run folder (no job.json)") from None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise SpecError(f"{path}: cannot be read: {error}; restore it or choose another --folder") from None

    def append(self, record: Step | Finding) -> None:
        """Add a line to the steps or findings, whole or not at all."""
        name = "steps.jsonl" if isinstance(record, Step) else "findings.jsonl"
        line = msgspec.json.encode(record) + b"\n"
        with open(self.path / name, "ab") as file:
            size = file.tell()
            try:
                file.write(line)
                file.flush()
            except OSError as error:
                os.truncate(self.path / name, size)
                raise SpecError(
                    f"{self.path / name}: cannot be written: {error.strerror}; free some space and run again"
                ) from None


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
        part.unlink(missing_ok=True)
        raise SpecError(f"{path}: cannot be written: {error.strerror}; free some space and run again") from None


def _identity(job: Job) -> Job:
    """The job without what a resumed run may change."""
    defaults = {name: getattr(type(job.run)(), name) for name in _MAY_CHANGE}
    memory = msgspec.structs.replace(job.cluster.device, memory_gib=1.0)
    return msgspec.structs.replace(
        job,
        run=msgspec.structs.replace(job.run, **defaults),
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
