"""Where the calibration of this machine lies: `calibration.json` under the user's data folder.

`GREYLAG_HOME` moves it. It belongs to the machine and not to a project, so every job on `local` reads the same one.
"""

import os
from itertools import pairwise, product
from math import inf
from pathlib import Path

import msgspec

from greylag.spec.cluster import Calibration
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.load import job_from


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
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        raise SpecError("cluster 'local' has not been measured on this machine: run `greylag calibrate`") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: cannot be read: {error}; run `greylag calibrate` again") from None
    fault = _fault(calibration)
    if fault:
        raise SpecError(f"{path}: {fault}; run `greylag calibrate` again")
    return calibration


def _fault(calibration: Calibration) -> str | None:
    """What makes a calibration unusable, or None."""
    sizes = [{getattr(point, dim) for point in calibration.gemm} for dim in ("m", "n", "k")]
    shapes = {(point.m, point.n, point.k) for point in calibration.gemm}
    if not shapes or shapes != set(product(*sizes)) or min(map(min, shapes)) < 1:
        return "gemm is not a grid of shapes"
    if not all(0 < point.seconds < inf for point in calibration.gemm):
        return "gemm: a time is not positive"
    for name, curve in (calibration.ops | calibration.collectives).items():
        if not curve.size or len(curve.size) != len(curve.seconds):
            return f"'{name}' has {len(curve.size)} sizes and {len(curve.seconds)} times"
        if not all(0 <= a < b < inf for a, b in pairwise((0.0, *curve.size))):
            return f"'{name}': its sizes do not ascend"
        if not all(0 < seconds < inf for seconds in curve.seconds):
            return f"'{name}': a time is not positive"
    return None


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


def reference_job(num_ranks: int) -> Job:
    """The small dense job of which a calibration measures whole steps.

    Operators in a row cost more than each alone: memory is allocated, caches are cold, Python goes from one to the
    next, ranks wait for each other. The simulator takes the ratio by phase from this job to any other.
    """
    table = {
        "model": "llama-3-tiny",
        "precision": {"preset": "fp8-block128", "high": "fp32"},
        "cluster": f"local-{num_ranks}x1",
        "sequence": 256,
        "global_batch": 8 * num_ranks,
        "strategy": {"dp": num_ranks, "micro_batch": 4, "zero": 3 if num_ranks > 1 else 1},
    }
    return job_from(table, "reference")
