"""Finding: one thing that somebody should know, with its evidence and what to do about it.

`Job.problems()` returns them before a run, the trainer and the guard write them during one
(`findings.jsonl`), the report shows them after.
"""

from typing import Literal

import msgspec

Level = Literal["info", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding. `rank` and `step` are None where it belongs to the whole job or run."""

    level: Level
    what: str
    """One line: what is wrong or worth knowing."""
    where: str = ""
    """The key of the job file, the module, or the file that it is about."""
    evidence: str = ""
    """The figures it rests on."""
    advice: str = ""
    """What to do."""
    rank: int | None = None
    node: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        tail = f" ({self.evidence})" if self.evidence else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{place}{self.what}{tail}{advice}"
