"""Data: text files as one string of bytes, cut into windows, in an order that a seed and a step number decide.

The tokenizer is the byte: token = byte value, vocabulary 256, files divided by byte 0. Because the order is a
function of (seed, position), a resumed run needs no state to read on where it stopped, and any number of ranks
reads the same global batches.
"""

import copy
import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from greylag.spec import SpecError

STDLIB = "python-stdlib"
DIVIDER = b"\0"


class Corpus:
    """All bytes of a list of files, and a shuffled order of windows over them."""

    def __init__(
        self, files: Sequence[Path], sequence: int, seed: int, at_least: int = 1, key: str = "run.data"
    ) -> None:
        """Read the files, which `key` of the job names.

        Raises SpecError if one cannot be read or all together are shorter than `at_least` windows.
        """
        try:
            contents = [file.read_bytes() for file in files]
        except OSError as error:
            raise SpecError(f"{error.filename}: cannot be read: {error.strerror}; check {key}") from None
        text = DIVIDER.join(contents)
        self.tokens = np.frombuffer(text, dtype=np.uint8)
        self.sequence, self.seed = sequence, seed
        self.num_windows = (len(self.tokens) - 1) // sequence
        _require_length(len(self.tokens), sequence, at_least, key)
        self.fingerprint = hashlib.sha256(text).hexdigest()
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0))

    def split(self, held_out: int) -> tuple["Corpus", "Corpus"]:
        """All windows but the last `held_out` of the text, and those: no target of one is a target of the other.

        Raises SpecError if that leaves no window.
        """
        _require_length(len(self.tokens), self.sequence, held_out + 1, "run.data")
        cut = (self.num_windows - held_out) * self.sequence
        return self._over(self.tokens[: cut + 1]), self._over(self.tokens[cut:])

    def _over(self, tokens: np.ndarray) -> "Corpus":
        part = copy.copy(self)
        part.tokens, part.num_windows = tokens, (len(tokens) - 1) // self.sequence
        part._epoch = (-1, np.empty(0))
        return part

    def windows(self, first: int, count: int) -> Tensor:
        """Windows number `first` to `first + count` of the endless order: (count, sequence + 1) tokens, int64.

        Each epoch is a permutation of all windows, drawn from (seed, epoch).
        """
        rows = np.empty((count, self.sequence + 1), dtype=np.int64)
        for row in range(count):
            epoch, place = divmod(first + row, self.num_windows)
            start = int(self._order(epoch)[place]) * self.sequence
            rows[row] = self.tokens[start : start + self.sequence + 1]
        return torch.from_numpy(rows)

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch = (epoch, generator.permutation(self.num_windows))
        return self._epoch[1]


def find_files(data: Sequence[str], key: str = "run.data") -> list[Path]:
    """The files that `run.data` (or another `key`) names, in order. Raises SpecError for a name that matches none."""
    files: list[Path] = []
    for name in data:
        try:
            found = _standard_library() if name == STDLIB else _matches(name)
        except (OSError, ValueError) as error:  # a name too long for the system, or with a null byte in it
            raise SpecError(f"{key}: {name!r:.200} cannot be looked up: {error}; correct it") from None
        if not found:
            raise SpecError(f"{key}: {name!r} matches no file; give a file, a folder, a pattern or '{STDLIB}'")
        files += found
    return files


def require_text(data: Sequence[str], sequence: int, at_least: int = 1, key: str = "run.data") -> None:
    """Raise SpecError if `key` of the job names a file that is not there, or less text than `at_least` windows."""
    files = find_files(data, key)
    try:
        _require_length(sum(file.stat().st_size for file in files) + len(files) - 1, sequence, at_least, key)
    except OSError as error:
        raise SpecError(f"{error.filename}: cannot be read: {error.strerror}; check {key}") from None


def _require_length(size: int, sequence: int, at_least: int, key: str) -> None:
    if size <= at_least * sequence:
        needed = "one sequence" if at_least == 1 else f"{at_least:,} sequences"
        advice = "give more text" if at_least == 1 else "give more text or lower run.validation_batches"
        raise SpecError(f"{key}: {size} bytes are fewer than {needed} of {sequence} + 1; {advice}")


def _matches(name: str) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    pattern = f"{glob.escape(name)}/**/*" if path.is_dir() else name
    return sorted(p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file())


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    return sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
