"""Checkpoints: torch's distributed checkpoint (DCP), made atomic, verified, and written beside training.

A checkpoint is written to `step_N.part` by a thread. When every rank has written its files and their checksums, the
first rank renames the folder to `step_N`: that rename is the commit. A rank killed at any moment leaves at most a
`.part`, which nobody reads. Replica 0 writes; every replica reads. Between steps training goes on, since the state
is copied first.
"""

import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from greylag.parallel import World
from greylag.spec import SpecError

_NAME = re.compile(r"step_(\d+)")


class Checkpointer:
    """Saves and restores model, optimizer and the facts of a step, for the ranks of one replica."""

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._prepare(_sweep, folder)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any], step: int) -> None:
        """Begin to save the state after `step`. Waits for the save before it. Raises SpecError if that failed."""
        self.wait()
        if self.world.replica:
            return
        state = _copy({**_state(model, optimizer), "facts": {**facts, "step": step}})
        part = self.folder / f"step_{step:08d}.part"
        self._prepare(_renew, part)
        self._thread = threading.Thread(target=self._write, args=(state, part), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save that is going on is committed. Raises SpecError if it could not be."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise SpecError(f"{self.folder}: checkpoint not saved: {_reason(error)}; the one before it is intact")

    def _write(self, state: dict[str, Any], part: Path) -> None:
        try:
            dcp.save(state, storage_writer=FileSystemWriter(part, overwrite=True), process_group=self.world.saver)
            self._agree(_attempt(_seal, part, dist.get_rank()))
            if self.world.is_first:
                os.replace(part, part.with_suffix(""))
                _sync_folder(self.folder)
                for old in checkpoints(self.folder)[: -self.keep]:
                    _retire(old)
        except (Exception, CheckpointException) as error:
            self._error = error
            if self.world.is_first:
                shutil.rmtree(part, ignore_errors=True)  # a full disk has no room for halves

    def _prepare(self, action: Callable[..., None], folder: Path) -> None:
        """Let the first rank make a folder ready while the others wait. Raises SpecError on all if it cannot."""
        try:
            self._agree(_attempt(action, folder) if self.world.is_first else None)
        except OSError as error:
            raise SpecError(f"{error}; make room for checkpoints there and run again") from None

    def _agree(self, fault: str | None) -> None:
        """Tell every rank of the replica of each other's fault. Raises OSError with the first."""
        faults: list[str | None] = [None] * self.world.grid.replica_world
        dist.all_gather_object(faults, fault, group=self.world.saver)
        if any(faults):
            raise OSError(next(f for f in faults if f))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Restore the newest checkpoint into model and optimizer; return its facts, or None where there is none.

        Raises SpecError, on every rank, if its files are damaged or belong to another model.
        """
        found = checkpoints(self.folder)
        if not found:
            return None
        newest = found[-1]
        advice = (
            f"remove {newest} to resume from the one before" if len(found) > 1 else f"remove {newest} to start over"
        )
        try:
            self._agree(verify(newest, dist.get_rank(), self.world.grid.replica_world))
        except OSError as error:
            raise SpecError(f"{error}; {advice}") from None
        try:
            state = {**_state(model, optimizer), "facts": _facts(newest)}
            dcp.load(state, storage_reader=FileSystemReader(newest), process_group=self.world.saver)
        except (Exception, CheckpointException) as error:
            raise SpecError(f"{newest}: cannot be loaded: {_reason(error)}; {advice}") from None
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return state["facts"]


def checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def verify(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, or None. Sums up every `shares`-th file, from `share`."""
    sealed: dict[Path, tuple[int, int]] = {}
    for seal in sorted(checkpoint.glob("*.seal")):
        try:
            files = msgspec.json.decode(seal.read_bytes(), type=dict[str, tuple[int, int]])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return f"{seal}: checkpoint is damaged"
        sealed |= {checkpoint / name: facts for name, facts in files.items()}
    loose = [file for file in (checkpoint / ".metadata", *sorted(checkpoint.glob("*.distcp"))) if file not in sealed]
    if loose:
        return f"{loose[0]}: checkpoint is incomplete (no seal names this file)"
    for file, (size, checksum) in sorted(sealed.items())[share::shares]:
        try:
            whole = file.stat().st_size == size and _checksum(file) == checksum
        except OSError as error:
            return f"{file}: checkpoint file cannot be read: {error.strerror}"
        if not whole:
            return f"{file}: checkpoint is damaged (size or checksum differs)"
    return None


def _facts(checkpoint: Path) -> dict[str, Any]:
    """The names of the facts that a checkpoint holds, to be filled by loading."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    return {name.split(".", 1)[1]: None for name in metadata.state_dict_metadata if name.startswith("facts.")}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _copy(x: Any) -> Any:
    """A deep copy whose tensors share no memory with the original."""
    if isinstance(x, dict):
        return {k: _copy(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_copy(v) for v in x]
    if isinstance(x, DTensor | torch.Tensor):
        return x.detach().clone()
    return x


def _seal(part: Path, rank: int) -> None:
    """Write down size and checksum of this rank's files; the first rank answers for the metadata too."""
    files = sorted(part.glob(f"__{rank}_*.distcp")) + ([part / ".metadata"] if rank == 0 else [])
    facts = {file.name: (file.stat().st_size, _checksum(file)) for file in files}
    seal = part / f"rank_{rank}.seal"
    temporary = seal.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, seal)


def _attempt(action: Callable[..., None], *arguments: Any) -> str | None:
    """Do it; return what went wrong, or None."""
    try:
        action(*arguments)
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return None


def _sweep(folder: Path) -> None:
    """Make the folder of checkpoints, and remove what a killed run left half written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob("*.part"):
        shutil.rmtree(part, ignore_errors=True)


def _retire(old: Path) -> None:
    """Remove a checkpoint that is not to be kept; killed on the way, it is a `.part` and no checkpoint any more."""
    part = old.with_suffix(".part")
    os.replace(old, part)
    shutil.rmtree(part, ignore_errors=True)


def _renew(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()


def _checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """The first line that says something, of an error or of those that DCP wraps."""
    failures = getattr(error, "failures", None)
    if failures:
        return _reason(next(iter(failures.values()))[0])
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
