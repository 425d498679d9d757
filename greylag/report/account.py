"""Account: the bytes of a rank by component and stage, as the terminal and the page lay them out.

The report knows no simulator, so what it takes is given by shape: the stages of `sim.memory.Memory` satisfy
the protocol. Greylag's own layers have an account by pool, which becomes one of a single, average stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from greylag.spec.job import Job


class StageBytes(Protocol):
    """What stands on a rank of one stage when it holds the most."""

    @property
    def components(self) -> Mapping[str, Any]:
        """Bytes by component."""

    @property
    def moment(self) -> str:
        """When that is."""


SMALLEST = 0.01
"""Components below this share of a stage are added up for the reader."""


@dataclass(frozen=True)
class Held:
    """A rank of one stage, or of an average one."""

    name: str
    moment: str
    """Empty where it is not known."""
    components: dict[str, float]
    """Bytes, largest first, without those that are nothing."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.components.values())

    @property
    def largest(self) -> dict[str, float]:
        """The components, with those below `SMALLEST` in one."""
        shown = {name: size for name, size in self.components.items() if size >= SMALLEST * self.total}
        smaller = len(self.components) - len(shown)
        return shown | ({f"{smaller} smaller ones": self.total - sum(shown.values())} if smaller else {})


@dataclass(frozen=True)
class Account:
    """All stages, and what the device has beside them."""

    stages: tuple[Held, ...]
    reserve: float
    """Share that the allocator holds beyond what is allocated; 0 where it is not modelled."""
    outside: float
    """Bytes that the driver and the communication library take outside the allocator."""
    device: float

    @property
    def fullest(self) -> Held:
        """The stage that decides."""
        return max(self.stages, key=lambda held: held.total)

    @property
    def beside(self) -> dict[str, float]:
        """Bytes of the device that its ranks take beside what is allocated, without those that are nothing."""
        sizes = {"lost to fragmentation": self.reserve * self.fullest.total, "driver and communication": self.outside}
        return {name: size for name, size in sizes.items() if size}

    @property
    def needed(self) -> float:
        """Bytes of the device that the fullest stage's ranks take, all told."""
        return self.fullest.total + sum(self.beside.values())

    @property
    def excess(self) -> float:
        """Bytes too many; negative is room."""
        return self.needed - self.device


def account(
    job: Job,
    pools: Mapping[str, float],
    stages: Sequence[StageBytes] = (),
    reserve: float = 0.0,
    outside: float = 0.0,
) -> Account:
    """The account of a job: of its stages where layers are fused, else of the `pools` of an average stage's rank.

    `reserve` is the share that an allocator holds beyond what is allocated, `outside` what a device's driver takes.
    """
    s = job.strategy
    noun = "rank" if s.vp > 1 or s.schedule == "dualpipe" else "stage"  # such a rank holds several stages
    held = tuple(
        Held(f"{noun} {number}" if s.pp > 1 else "a rank", stage.moment, _sorted(stage.components))
        for number, stage in enumerate(stages)
    )
    average = Held("a rank of an average stage" if s.pp > 1 else "a rank", "", _sorted(pools))
    return Account(held or (average,), reserve, outside, job.cluster.device.memory)


def _sorted(sizes: Mapping[str, Any]) -> dict[str, float]:
    known = [(name, float(size)) for name, size in sizes.items() if float(size)]
    return dict(sorted(known, key=lambda item: -item[1]))
