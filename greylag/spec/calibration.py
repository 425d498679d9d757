"""Where the calibration of this machine lies: `calibration.json` under the user's data folder.

`GREYLAG_HOME` moves it. It belongs to the machine and not to a project, so every job on `local` reads the same one.
"""

import os
from pathlib import Path

import msgspec

from greylag.spec.cluster import Calibration
from greylag.spec.error import SpecError


def local_path() -> Path:
    """The file of this machine's calibration."""
    home = os.environ.get("GREYLAG_HOME")
    if home:
        return Path(home) / "calibration.json"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "greylag" / "calibration.json"


def load_local() -> Calibration:
    """This machine's calibration. Raises SpecError if there is none, or it cannot be read."""
    path = local_path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        raise SpecError("cluster 'local' has not been measured on this machine: run `greylag calibrate`") from None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SpecError(f"{path}: cannot be read: {error}; run `greylag calibrate` again") from None


def save_local(calibration: Calibration) -> Path:
    """Write this machine's calibration; returns where. Raises SpecError if it cannot be written."""
    path = local_path()
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
        part.replace(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error.strerror}; set GREYLAG_HOME to a folder that can") from None
    return path
