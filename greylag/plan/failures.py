"""Failures: what stops a job, by class, counted over node-days. Presets hold what was published, `fit` what was seen.

A rate is a count over an exposure, so that it never comes without an interval. It belongs to a device: a node of four
devices fails half as often as one of eight.
"""

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from greylag.plan.poisson import count_interval
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.load import PRESETS, presets
from greylag.spec.quantity import DAY
from greylag.spec.step import Step

Kind = Literal["hardware", "network", "software", "unknown", "corruption", "slow"]
"""What failures have in common is what they ask for. `hardware`, `network` and `unknown` stop the job and take a node;
`software` stops it and takes none; `corruption` is noticed late, and undoes what was trained since; `slow` stops
nothing, but all wait for that node until it is found."""
KINDS: tuple[Kind, ...] = get_args(Kind)
End = Literal["low", "middle", "high"]

WORDS: tuple[tuple[Kind, str], ...] = (
    ("corruption", "silent|corrupt|digest|bit flip|checksum"),
    ("slow", "slow|straggler|throttl"),
    ("network", r"network|links?\b|switch|cable|infiniband|roce\b|nics?\b|ports?\b"),
    ("software", "exception|traceback|bug|assert|out of memory|version|not finite|inf or nan"),
    ("hardware", r"gpu|nvlink|device|hbm|ecc\b|xid|node|host|power|thermal|disk|memory"),
)
"""How `fit` tells the class of a finding: the first row of which a word begins in its text. None: unknown."""


class Rates(NamedTuple):
    """Failures per second of a device, or of a whole job."""

    node: float
    """That stop the job and take a node."""
    software: float
    corruption: float
    slow: float

    def times(self, factor: float) -> "Rates":
        """All of them, times a factor."""
        return Rates(*(rate * factor for rate in self))


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Failures that were counted, and over how many node-days."""

    name: str
    node_days: float
    source: str = ""
    """Who counted them, for a report."""
    devices_per_node: int = 8
    """Of the nodes that were counted."""
    causes: dict[Kind, dict[str, int]] = {}
    """How many, by class and cause."""

    @property
    def count(self) -> int:
        """Failures of every class."""
        return sum(self.counts.values())

    @property
    def counts(self) -> dict[Kind, int]:
        """By class."""
        return {kind: sum(self.causes.get(kind, {}).values()) for kind in KINDS}

    @property
    def device_seconds(self) -> float:
        """The exposure."""
        return self.node_days * self.devices_per_node * DAY

    def rates(self, end: End = "middle") -> Rates:
        """Failures per second and device: as counted, or at an end of the interval of all of them together.

        At an end the classes keep their shares. Where nothing was counted, the upper end is of an unknown class.
        """
        counts = {kind: float(number) for kind, number in self.counts.items()}
        if end != "middle":
            low, high = count_interval(self.count)
            mean = low if end == "low" else high
            if self.count:
                counts = {kind: number * mean / self.count for kind, number in counts.items()}
            else:
                counts["unknown"] = mean
        taking = counts["hardware"] + counts["network"] + counts["unknown"]
        per_device = 1 / self.device_seconds
        return Rates(taking, counts["software"], counts["corruption"], counts["slow"]).times(per_device)

    def mttf(self, num_devices: int, end: End = "middle") -> float:
        """Mean seconds between the failures of a job of so many devices; infinite where none was counted.

        `end` is that of the rate: the high one gives the least time.
        """
        rate = sum(self.rates(end)) * num_devices
        return 1 / rate if rate else float("inf")

    def mttf_interval(self, num_devices: int) -> tuple[float, float]:
        """Between what the mean seconds lie."""
        return self.mttf(num_devices, "high"), self.mttf(num_devices, "low")


def load_failures(name: str) -> Failures:
    """A preset by its name, or a TOML file of the same keys. Raises SpecError if there is none, or it does not fit."""
    path = Path(name) if name.endswith(".toml") else PRESETS / "failures" / f"{name}.toml"
    known = presets("failures")
    if not name.endswith(".toml") and name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}; or give a TOML file"
        raise SpecError(f"no preset {name!r} of failures; {hint}")
    try:
        table = {"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}
        failures = msgspec.convert(table, Failures)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; give the path of a TOML file") from None
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {error}; see the presets in {PRESETS / 'failures'}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}; mend it") from None
    return sound(failures, str(path))


def sound(failures: Failures, where: str) -> Failures:
    """The failures, if they can be. Raises SpecError if an exposure is not positive or a count is negative."""
    if not 0 < failures.node_days < float("inf"):
        raise SpecError(f"{where}: node_days is {failures.node_days}; give the node-days that were counted over")
    if failures.devices_per_node < 1:
        raise SpecError(f"{where}: devices_per_node is {failures.devices_per_node}; give 1 or more")
    for kind, causes in failures.causes.items():
        for cause, count in causes.items():
            if count < 0:
                raise SpecError(f"{where}: causes.{kind}: {cause!r} is {count}; a count is 0 or more")
    return failures


def kind_of(finding: Finding) -> Kind:
    """The class of failure that a finding tells of, by its words (`WORDS`)."""
    text = f"{finding.what} {finding.where} {finding.evidence} ".lower()
    return next((kind for kind, words in WORDS if re.search(rf"\b(?:{words})", text)), "unknown")


def is_failure(finding: Finding) -> bool:
    """Whether a finding counts as one: errors, which end a run, and warnings of a slow node or of corruption.

    A step that was not applied is a warning and no failure: the run went on.
    """
    return finding.level == "error" or (finding.level == "warning" and kind_of(finding) in ("slow", "corruption"))


def count_restarts(steps: Iterable[Step]) -> int:
    """How often a run was taken up again: measured steps, in the order of writing, whose number does not rise.

    A run that was stopped right after a checkpoint repeats no step, and is not seen.
    """
    numbers = [step.number for step in steps if step.source == "measured"]
    return sum(later <= earlier for earlier, later in pairwise(numbers))


def fit(
    runs: Sequence[Sequence[Finding]],
    device_hours: float,
    restarts: int = 0,
    devices_per_node: int = 8,
    name: str = "fitted",
) -> Failures:
    """Rates of your own: the findings of one or more runs, over all their device-hours.

    The ranks of a job tell of one failure together: findings of the same run, step and class count once, and those
    that name no step each for itself. `restarts` are those of the same runs (`count_restarts`); what the findings do
    not explain of them is of an unknown class, planned stops among it. Raises SpecError if there are no device-hours.
    """
    if not 0 < device_hours < float("inf"):
        raise SpecError(f"device_hours: {device_hours}; give the device-hours of the runs, all together")
    counts: Counter[tuple[Kind, str]] = Counter()
    for findings in runs:
        seen: set[tuple[int, Kind]] = set()
        for finding in filter(is_failure, findings):
            kind = kind_of(finding)
            if finding.step is None or (finding.step, kind) not in seen:
                counts[kind, finding.what] += 1
            if finding.step is not None:
                seen.add((finding.step, kind))
    stops = sum(number for (kind, _), number in counts.items() if kind != "slow")
    causes: dict[Kind, dict[str, int]] = {}
    for (kind, what), number in counts.items():
        causes.setdefault(kind, {})[what] = number
    if restarts > stops:
        causes.setdefault("unknown", {})["restart that no finding explains"] = restarts - stops
    node_days = device_hours / devices_per_node / 24
    return sound(Failures(name=name, node_days=node_days, devices_per_node=devices_per_node, causes=causes), name)
