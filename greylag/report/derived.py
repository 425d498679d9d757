"""Derived: files that a command makes from others, such as a page or a trace.

One appears whole or not at all. It stands in nobody's place unless the user says so: what lies there may be another
job's, or have cost an hour.
"""

import contextlib
import os
from pathlib import Path

from greylag.spec.error import SpecError


def check_place(path: Path, force: bool, endings: tuple[str, ...]) -> None:
    """Refuse a place before any work is done for it.

    Raises SpecError if a file is there and `force` is not given, if its folder is not, or if its name has none of the
    `endings`.
    """
    if not path.name.endswith(endings):
        raise SpecError(f"{path}: ends in none of {', '.join(endings)}; give it such a name")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "its folder is not there"
        raise SpecError(f"{path}: {what}; choose another place")
    if path.exists() and not force:
        raise SpecError(f"{path}: exists already and is left as it is; choose another place, or give --force")


def write_derived(path: Path, content: bytes) -> None:
    """Write a file whole, over one that is there. Raises SpecError if it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise SpecError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
