"""Hooks that show a run while it goes on: a progress line on the terminal, scalars for TensorBoard."""

import contextlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from greylag.spec import Step

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def scaled(value: float) -> str:
    """A number with an SI prefix: 1234567 -> `1.23 M`."""
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


class ProgressHook:
    """A bar with loss, tokens/s, FLOP/s and utilization; on anything but a terminal a line now and then."""

    def __init__(self, steps: int, console: Console | None = None, every: int = 10) -> None:
        self.console = console or Console()
        self.steps, self.every = steps, every
        self._bar: Progress | None = None
        self._validation = ""
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("starting", total=steps)
            self._bar.start()

    def before(self, number: int) -> None:
        """Nothing to show yet."""

    def after(self, step: Step) -> None:
        """Show a step."""
        used = f"  {step.utilization:.0%} of peak" if step.utilization else ""
        loss = "n/a" if step.loss is None else f"{step.loss:.4f}"
        validated = step.validation_loss is not None
        if validated or not self._bar:  # a bar goes on showing the last one
            self._validation = f"  validation {step.validation_loss:.4f}" if validated else ""
        text = (
            f"loss {loss}{self._validation}  {step.total_seconds:.2f} s  {scaled(step.tokens_per_second)}tok/s  "
            f"{scaled(step.flops_per_second)}FLOP/s{used}{'  skipped' if step.skipped else ''}"
        )
        if self._bar:
            self._bar.update(self._task, completed=step.number, description=text)
            if step.number == self.steps:
                self.close()
        elif validated or step.number % self.every == 0 or step.number in (1, self.steps):
            self.console.print(f"step {step.number:>{len(str(self.steps))}}/{self.steps}  {text}", highlight=False)

    def failed(self, error: BaseException) -> None:
        """Leave the terminal to the error."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class TensorBoardHook:
    """Scalars of each step as a TensorBoard event file in `folder/tensorboard`.

    Written at once and not through a queue, so that a full disk costs the scalars and not the run.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._events: Any = None
        with contextlib.suppress(OSError):
            (folder / "tensorboard").mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / "tensorboard" / "events"))

    def before(self, number: int) -> None:
        """Nothing to write yet."""

    def after(self, step: Step) -> None:
        """Write a step."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = {
            "train/loss": step.loss,
            "validation/loss": step.validation_loss,
            "train/grad_norm": step.grad_norm,
            "train/learning_rate": step.learning_rate,
            "speed/step_seconds": step.total_seconds,
            "speed/tokens_per_second": step.tokens_per_second,
            "speed/flops_per_second": step.flops_per_second,
            "speed/utilization": step.utilization,
            **{f"seconds/{phase}": seconds for phase, seconds in step.seconds.items()},
        }
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None]
        event = Event(wall_time=step.time, step=step.number, summary=Summary(value=scalars))
        with contextlib.suppress(OSError):
            if self._events:
                self._events.write_event(event)
                self._events.flush()

    def failed(self, error: BaseException) -> None:
        """Keep what was written."""

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            if self._events:
                self._events.close()
