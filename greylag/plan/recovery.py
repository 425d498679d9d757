"""Recovery: how a job meets a failure. Its nodes and spares, its times, and what each policy makes of them.

Four policies, from the plain one to the one that nobody ships. Each says for each class of failure how long the job
stands, whether it goes back to a checkpoint, and what is missing until a node is back; the closed form (`goodput`) and
the simulation (`campaign`) read the same answer. All times are seconds.
"""

from typing import Literal, NamedTuple, get_args

import msgspec

from greylag.plan.failures import Failures, Rates
from greylag.spec.error import SpecError
from greylag.spec.fault import positive
from greylag.spec.quantity import DAY, HOUR, MINUTE

Policy = Literal["restart", "spares", "eject", "skip"]
"""`restart`: the whole job restarts from its last checkpoint, with a node from a pool that never runs out.
`spares`: the same, with one of so many hot spares; when they are used up the job waits for the first repair.
`eject`: the replica with the failed node drops out and the others go on from the same step, with less capacity until
the node is replaced. `skip`: so does that node's part of its replica alone."""
POLICIES: tuple[Policy, ...] = get_args(Policy)


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The devices of a job, and what stands beside it."""

    num_devices: int
    """That train when nothing has failed, spares not counted."""
    devices_per_node: int = 8
    spares: int = 0
    """Nodes that stand by. `restart` has no use for them."""
    repair: float = DAY
    """Until a node that was taken is back as a spare. Assumed: a day. Its mean is all that matters."""
    replica_nodes: int = 16
    """Nodes of one data-parallel replica: what `eject` loses. Llama 3 405B on 16,384 GPUs had tp 8 x pp 16 = 16 nodes
    (arXiv 2407.21783, table 4)."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return self.num_devices // self.devices_per_node

    @property
    def held(self) -> int:
        """Devices that are paid for: the job's and the spares'."""
        return self.num_devices + self.spares * self.devices_per_node


class Recovery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that failures and checkpoints take.

    The defaults sum up to the stall of 10 minutes that a synchronous job had on 100,000 GPUs, and of 3 minutes for the
    other replicas when one drops out (FT-HSDP, arXiv 2602.00277, abstract).
    """

    detect: float = 2 * MINUTE
    """From a failure to the decision to restart. How the 10 minutes split is assumed."""
    restart: float = 8 * MINUTE
    """From that to the first new step, with nodes at hand: stop, start, form groups, read the checkpoint."""
    interval: float = 10 * MINUTE
    """Training between two checkpoints."""
    save: float = 5.0
    """The part of a checkpoint that blocks training. Assumed: Llama 3's 405B parameters with moments, 6.5 TB at 16
    bytes each, at the 2 TB/s that its storage sustained (arXiv 2407.21783, section 3.3.1), take 3.2 s."""
    eject: float = 3 * MINUTE
    """`eject` and `skip`: from a failure to the next step of the others, detection included."""
    notice: float = HOUR
    """From silent corruption to when it is noticed. Assumed; nobody publishes it."""
    slow_found: float = 72 * MINUTE
    """From when a node is slow to when it is found. 72 minutes is the mean time that fail-slow lasts in jobs of 512
    GPUs and more (Greyhound, USENIX ATC 2025, second hand)."""
    slowdown: float = 1.34
    """How much longer a step takes with a slow node: the mean delay of such jobs (Greyhound, arXiv 2410.12588)."""


class Response(NamedTuple):
    """What a policy makes of each class. Stalls are seconds in which no device trains."""

    node_stall: float
    node_rolls_back: bool
    """Whether the job goes back to its last checkpoint where a node is lost, as it always does for software."""
    software_stall: float
    """So long stands the whole job too where a node is lost while it restarts: it restarts again."""
    corruption_stall: float
    """After the corruption was noticed. The whole job goes back to before it, under every policy."""
    slow_stall: float
    """After the slow node was found. A stop that is planned costs no recomputing: a checkpoint is written first."""
    idle: float
    """Share of the job's capacity that is missing with each node that is."""
    waits: bool
    """Whether the job stands still when a node is missing and no spare is left."""


def respond(policy: Policy, fleet: Fleet, recovery: Recovery) -> Response:
    """A policy's response. Raises SpecError where the fleet or the recovery cannot be."""
    _check(policy, fleet, recovery)
    whole = policy in ("restart", "spares")
    nodes_lost = {"eject": fleet.replica_nodes, "skip": 1}.get(policy, 0)
    return Response(
        node_stall=recovery.detect + recovery.restart if whole else recovery.eject,
        node_rolls_back=whole,
        software_stall=recovery.detect + recovery.restart,
        corruption_stall=recovery.restart,
        slow_stall=recovery.save + recovery.restart if whole else recovery.eject,
        idle=min(1.0, nodes_lost / fleet.num_nodes),
        waits=policy == "spares",
    )


def job_rates(failures: Failures, fleet: Fleet, end: Literal["low", "middle", "high"] = "middle") -> Rates:
    """Failures per second of the whole job."""
    return failures.rates(end).times(fleet.num_devices)


def _check(policy: Policy, fleet: Fleet, recovery: Recovery) -> None:
    faults = [
        *positive("fleet.", fleet, ("spares", "repair")),
        *positive("recovery.", recovery, ("detect", "restart", "save", "eject", "notice", "slow_found")),
    ]
    if faults:
        raise SpecError(str(faults[0]))
    if policy not in POLICIES:
        raise SpecError(f"policy: {policy!r} is none of {', '.join(POLICIES)}; choose one")
    if fleet.num_devices % fleet.devices_per_node:
        raise SpecError(
            f"fleet.num_devices: {fleet.num_devices:,} devices are no whole number of nodes of "
            f"{fleet.devices_per_node}; change one of them"
        )
    if policy == "eject" and fleet.replica_nodes >= fleet.num_nodes:
        raise SpecError(
            f"fleet.replica_nodes: a replica of {fleet.replica_nodes:,} nodes is the whole job of {fleet.num_nodes:,}; "
            "ejecting needs two replicas or more: lower it, or choose another policy"
        )
    if recovery.slowdown < 1:
        raise SpecError(f"recovery.slowdown: {recovery.slowdown} would be faster; give 1 or more")
