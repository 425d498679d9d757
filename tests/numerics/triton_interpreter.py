"""Kernels without a GPU: run by triton's interpreter, in a process of their own, or compiled for one on paper.

The interpreter must be chosen before triton is imported, and then holds for the whole process. So a module of tests is
run once more in a child with the interpreter on, and each test marked `on_device` reports in the parent what it came to
there. With a CUDA device there is no child: the tests run on it.
"""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

in_parent = pytest.mark.skipif(INTERPRETED, reason="is no matter of the interpreter")


def matrix(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Normal, with magnitudes spread over powers of two between rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randn(shape[0], 1, generator=generator), torch.randn(shape[1], generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(spread * (rows + columns))


def on(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the device of the kernels."""
    return [t.to(DEVICE) for t in tensors]


def on_device(test: Callable) -> Callable:
    """Run a test of kernels where they can run, or report what came of it there."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        if INTERPRETED or DEVICE == "cuda":
            test(*arguments, **named)
            return
        path, name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)").split("::", 1)
        failure = _outcomes(path)[name]
        assert failure is None, failure

    return run


@functools.cache
def _outcomes(path: str) -> dict[str, str | None]:
    """What failed of each test of a module under the interpreter; None where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", path, "-p", "no:cacheprovider", f"--junitxml={report}"]
        child = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert report.exists(), child.stdout + child.stderr
        cases = ElementTree.parse(report).iter("testcase")
        return {case.attrib["name"]: _failure(case) for case in cases}


def _failure(case: ElementTree.Element) -> str | None:
    return next((node.text for node in case if node.tag in ("failure", "error", "skipped")), None)


def mend() -> None:
    """Round the interpreter's casts to FP8 and BF16 to nearest even, and saturate FP8, as NVIDIA's conversions do.

    Its own take ties away from zero, lose a carry and do not saturate (triton-lang/triton#8322). Casts from FP8 and
    dots, in FP32, are replaced for speed alone.
    """
    import ml_dtypes
    import numpy as np
    from triton.runtime import interpreter

    theirs = interpreter._convert_float
    dtypes = {
        "fp8e4nv": (ml_dtypes.float8_e4m3fn, 448.0, np.uint8),
        "fp8e5": (ml_dtypes.float8_e5m2, 57344.0, np.uint8),
        "bf16": (ml_dtypes.bfloat16, np.inf, np.uint16),
        "fp16": (np.float16, np.inf, np.uint16),
        "fp32": (np.float32, np.inf, np.uint32),
    }

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name not in dtypes or target.name not in dtypes:
            return theirs(numbers, source, target, rounding)
        dtype, largest, bits = dtypes[target.name]
        x = np.frombuffer(numbers.tobytes(), dtype=dtypes[source.name][0]).astype(np.float32)
        return np.clip(x, -largest, largest).astype(dtype).view(bits).reshape(numbers.shape)

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        x, y = (np.ascontiguousarray(t.data).view(dtypes[t.dtype.name][0]).astype(np.float32) for t in (a, b))
        return interpreter.TensorHandle(x @ y + d.data, d.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


@contextlib.contextmanager
def compiled_for(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Launches within compile for a compute capability and go no further; what was compiled is in the list."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    number = 10 * capability[0] + capability[1]

    class Paper:
        """A driver of a device that is not there."""

        def get_current_device(self) -> int:
            return number  # what is compiled is kept by device

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", number, 32)

    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        compiled.append(launch(self, *arguments, grid=grid, warmup=True, **named))

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_active", Paper())
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled
