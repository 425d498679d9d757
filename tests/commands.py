"""The `greylag` command as a user runs it, on a job of a few steps that two CPU ranks fly in a second."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import json as msgspec_json

from greylag.spec import Step
from jobs import SMALL_MOE

SMALL_JOB: dict[str, Any] = {
    "model": SMALL_MOE,
    "precision": {"preset": "fp32"},
    "cluster": {
        "name": "two-cpus",
        "devices_per_node": 2,
        "device": {"name": "CPU", "kind": "cpu", "memory_gib": 4, "memory_gb_per_s": 10, "peak_tflops": {"fp32": 0.1}},
        "node": {"gb_per_s": 1, "latency_us": 10},
    },
    "sequence": 32,
    "global_batch": 2,
    "strategy": {"dp": 2},
    "run": {"steps": 2, "warmup_steps": 1, "checkpoint_every": 1, "tensorboard": False, "data": ["text.txt"]},
}
"""Its cluster has figures of its own, so that a prediction needs no calibration."""


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what launchers set."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GREYLAG_HOME")
    kept = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {**kept, **changes}


def command(*arguments: object) -> list[str]:
    """A command line of greylag."""
    return [sys.executable, "-m", "greylag", *map(str, arguments)]


def greylag(folder: Path, *arguments: object, **changes: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, with changes to the environment."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(**changes), capture_output=True, text=True, timeout=120
    )


def greylag_here(folder: Path, *arguments: object, **changes: str) -> "subprocess.CompletedProcess[str]":
    """As `greylag`, but in this process, which has torch loaded already. For commands that start no ranks."""
    from greylag.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    line = ["greylag", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", line),
        mock.patch.dict(os.environ, environment(**changes), clear=True),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())


def assert_one_line(result: "subprocess.CompletedProcess[str]", *said: str) -> None:
    """A mistake ends in one line on stderr that says these words."""
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("greylag: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for words in said:
        assert words in result.stderr, result.stderr


def write_job(folder: Path, **changes: Any) -> Path:
    """`small.toml` and its text in a folder. Tables of `changes` are merged into the job's."""
    table = {**SMALL_JOB}
    for key, value in changes.items():
        merges = isinstance(value, dict) and isinstance(table.get(key), dict)
        table[key] = {**table[key], **value} if merges else value
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    file = folder / "small.toml"
    file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in table.items()))
    return file


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def steps_of(run: Path) -> list[Step]:
    """The steps that a run wrote down, in order of writing."""
    return [msgspec_json.decode(line, type=Step) for line in (run / "steps.jsonl").read_bytes().splitlines()]
