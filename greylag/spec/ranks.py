"""Ranks: what one step took on every rank of a job.

The trainer writes some steps' as lines of `ranks.jsonl`; a loop of another kind may write them too. `report.compare`
tells from them which rank the others wait for. It speaks of phases as a Step does.
"""

import msgspec


class Ranks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step. Lists have a figure for each rank of the job, in order."""

    step: int
    seconds: dict[str, list[float]]
    """By phase, keys of `PHASES`; one that is left out took none."""
    waits: dict[str, list[float]] = {}
    """As `Step.waits`; empty where they are not known."""
