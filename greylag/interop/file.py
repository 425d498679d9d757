"""File: which dialect a file speaks, by its name, and its import."""

from collections.abc import Mapping
from pathlib import Path

from greylag.interop.huggingface import import_config
from greylag.interop.jobfile import Imported
from greylag.interop.megatron import import_script, import_yaml
from greylag.interop.torchtitan import import_toml
from greylag.spec.error import SpecError

MOST_BYTES = 1 << 20
"""No launch script is longer; a file beyond it is something else."""


def import_file(path: Path, cluster: str | None = None, variables: Mapping[str, str] | None = None) -> Imported:
    """A file of another framework as a job: .json, .toml, .yaml, else a script.

    `variables` in capitals are set for a script; others are arguments by their name, which win over the file's.

    Raises SpecError, in one line with the file's name, if it cannot be read or says no job that can run.
    """
    given = variables or {}
    if path.suffix == ".json":
        if given or cluster:
            raise SpecError(f"{path}: says a model alone; leave out --cluster and what stands behind the file")
        return import_config(path)
    text = _read(path)
    try:
        if path.suffix == ".toml":
            return import_toml(text, path, cluster, given)
        if path.suffix in (".yaml", ".yml"):
            return import_yaml(text, path, cluster, given)
        return import_script(text, path, cluster, given)
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply to be a configuration") from None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SpecError(f"{path}: more than {MOST_BYTES} bytes; give a launch script or a configuration")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; give a launch script or a configuration") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not text in UTF-8; give a launch script or a configuration") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; give a launch script or a configuration") from None
    if "\0" in text:
        raise SpecError(f"{path}: holds a zero byte; give a launch script or a configuration")
    return text
