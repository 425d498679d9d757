"""Schedule: the order in which the ranks of a pipeline work off their micro-batches.

The simulator times this very list and the trainer executes it, so it lives here. A schedule is written as one row of
pieces per rank, such as "F1": a kind of work and a chunk, which is one of the stages that the rank holds. Micro-batches
are numbered afterwards, because every kind of work takes a chunk's micro-batches in turn. A row is written for as many
micro-batches as its pattern needs, and those beyond the job's are struck out. That takes all actions of a micro-batch
from all ranks, and actions wait for another micro-batch by their place in a row alone, so what could run still can.

Layers may be spread unevenly over stages: that changes seconds (`sim.timeline`), not the order.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, cast

from greylag.spec.error import SpecError
from greylag.spec.strategy import Schedule

Kind = Literal["F", "B", "I", "W"]
Direction = Literal[0, 1]
Row: TypeAlias = list[str]
"""The pieces of a rank: kind and chunk. A W has no chunk: it takes the oldest I that awaits one."""

CHUNKS: dict[Schedule, int] = {"zb-v": 2, "dualpipe-v": 2, "gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-h2": 1, "dualpipe": 1}
"""The vp that a schedule has; `interleaved` has any."""
POSTPONED: frozenset[Schedule] = frozenset({"zb-h2", "zb-v"})
"""Schedules whose ranks begin the next step as soon as each has ended its own. They need the optimizer's checks over
all ranks (gradient norm, overflow) postponed until after the update (arXiv 2401.10241, section 4)."""


class Action(NamedTuple):
    """One piece of work.

    F is forward, B backward. A schedule that splits backward has I, the gradient of the input, which the stage before
    waits for, and W, the gradient of the weights, which nobody waits for. (arXiv 2401.10241 calls I "B"; here B
    is always the whole.) In `dualpipe` and `dualpipe-v` an F directly before a B on its rank is meant to overlap it.
    """

    stage: int
    """In the model's order, virtual stages counted."""
    micro_batch: int
    kind: Kind
    direction: Direction = 0
    """1 for the micro-batches that `dualpipe` feeds in at the last rank, whose stage s is on rank pp - 1 - s."""


Order: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of each rank."""


@lru_cache(maxsize=256)
def order(schedule: Schedule, pp: int, vp: int, num_micro_batches: int) -> Order:
    """The actions of each of the `pp` ranks, in turn.

    Raises SpecError if the schedule cannot run with these degrees.
    """
    _check(schedule, pp, vp, num_micro_batches)
    sides = 2 if schedule == "dualpipe" else 1
    wanted = [(num_micro_batches + sides - 1 - side) // sides for side in range(sides)]
    ranks = []
    for rank in range(pp):
        homes = [_home(schedule, pp, rank, chunk) for chunk in range(max(vp, sides))]
        first = {direction: direction * wanted[0] for _, direction in homes}
        ranks.append(
            tuple(
                Action(homes[chunk][0], first[homes[chunk][1]] + m, kind, homes[chunk][1])
                for kind, chunk, m in _number(_ROWS[schedule](pp, rank, vp, wanted[0]))
                if m < wanted[homes[chunk][1]]
            )
        )
    return tuple(ranks)


def rank_of(schedule: Schedule, pp: int, vp: int, stage: int, direction: Direction = 0) -> int:
    """The rank that holds a stage (of a direction, in `dualpipe`)."""
    assert 0 <= stage < pp * vp
    if schedule == "dualpipe":
        return pp - 1 - stage if direction else stage
    turn, at = divmod(stage, pp)
    return pp - 1 - at if schedule in ("zb-v", "dualpipe-v") and turn else at


def in_flight(
    actions: Sequence[Sequence[Action]], weight: Sequence[float] = ()
) -> list[dict[tuple[int, Direction], int]]:
    """By rank, how many micro-batches' activations each of its stages holds when the rank holds the most.

    One is held from its F until its B or W. `weight` by stage says what one counts for (its bytes); without it all
    count the same. The key is (stage, direction).
    """
    most = []
    for row in actions:
        held: Counter[tuple[int, Direction]] = Counter({(a.stage, a.direction): 0 for a in row})
        peak, now, at_peak = 0.0, 0.0, dict(held)
        for a in row:
            if a.kind == "I":
                continue
            change = 1 if a.kind == "F" else -1
            held[a.stage, a.direction] += change
            now += change * (weight[a.stage] if weight else 1.0)
            if now > peak:
                peak, at_peak = now, dict(held)
        most.append(at_peak)
    return most


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Order:
    """1F1B over stages of one chunk."""
    return order("1f1b", num_stages, 1, num_micro_batches)


def _check(schedule: Schedule, pp: int, vp: int, num_micro_batches: int) -> None:
    if min(pp, vp, num_micro_batches) < 1:
        raise SpecError(f"a pipeline of {pp} x {vp} stages and {num_micro_batches} micro-batches: all must be positive")
    if vp != CHUNKS.get(schedule, vp):
        raise SpecError(f"strategy.vp = {vp}: {schedule} has {CHUNKS[schedule]} stages per rank; set vp to that")
    if schedule == "dualpipe" and (pp % 2 or num_micro_batches < 2):
        raise SpecError(
            f"dualpipe with pp {pp} and {num_micro_batches} micro-batches: it runs from both ends; take an even pp and "
            "at least 2 micro-batches"
        )


def _home(schedule: Schedule, pp: int, rank: int, chunk: int) -> tuple[int, Direction]:
    """(stage, direction) of a rank's chunk. Chunk 0 of `dualpipe` is the one that is fed from the nearer end."""
    if schedule == "dualpipe":
        return (rank, 0) if (rank < pp // 2) == (chunk == 0) else (pp - 1 - rank, 1)
    if schedule in ("zb-v", "dualpipe-v") and chunk:
        return 2 * pp - 1 - rank, 0
    return chunk * pp + rank, 0


def _number(row: Row) -> list[tuple[Kind, int, int]]:
    """(kind, chunk, micro-batch) of a row: forwards and backwards of a chunk in turn, a W the oldest that awaits it."""
    begun: Counter[tuple[bool, int]] = Counter()
    awaiting: deque[tuple[int, int]] = deque()
    numbered: list[tuple[Kind, int, int]] = []
    for piece in row:
        kind = cast(Kind, piece[0])
        if kind == "W":
            numbered.append((kind, *awaiting.popleft()))
            continue
        chunk = int(piece[1:])
        number = begun[kind == "F", chunk]
        begun[kind == "F", chunk] += 1
        numbered.append((kind, chunk, number))
        if kind == "I":
            awaiting.append((chunk, number))
    assert not awaiting, "a weight gradient is missing"
    return numbered


def _gpipe(pp: int, rank: int, vp: int, n: int) -> Row:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards. Holds every micro-batch."""
    return ["F0"] * n + ["B0"] * n


def _1f1b(pp: int, rank: int, vp: int, n: int) -> Row:
    """1F1B (PipeDream-Flush; arXiv 2104.04473, figure 4 top). Stage s never holds more than pp - s micro-batches."""
    ahead, n = pp - rank - 1, max(n, pp)
    return ["F0"] * ahead + ["F0", "B0"] * (n - ahead) + ["B0"] * ahead


def _interleaved(pp: int, rank: int, vp: int, n: int) -> Row:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2 and figure 4 bottom).

    A rank takes pp micro-batches through its first chunk, then the same through its second, and so on.
    """
    n = -(-n // pp) * pp
    chunks = [k // pp % vp for k in range(n * vp)]
    forwards = [f"F{chunk}" for chunk in chunks]
    backwards = [f"B{vp - 1 - chunk}" for chunk in chunks]
    ahead = min(n * vp, 2 * (pp - rank - 1) + (vp - 1) * pp)
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return forwards[:ahead] + steady + backwards[n * vp - ahead :]


def _zero_bubble(ahead: int, delay: int, n: int) -> Row:
    """`ahead` forwards, then a forward and an input gradient by turns, W `delay` micro-batches behind."""
    row = ["F0"] * ahead
    for i in range(n):
        row += ["F0"] * (ahead + i < n) + ["I0"] + ["W"] * (i >= delay)
    return row + ["W"] * delay


def _zb_h1(pp: int, rank: int, vp: int, n: int) -> Row:
    """ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B with the later stages' weight gradients put off.

    Every rank then holds up to pp micro-batches, which is what the first rank of 1F1B holds.
    """
    return _zero_bubble(pp - rank - 1, rank, max(n, pp))


def _zb_h2(pp: int, rank: int, vp: int, n: int) -> Row:
    """ZB-H2 (arXiv 2401.10241, section 2.2): more forwards fill the warm-up; up to 2 pp - 1 micro-batches are held."""
    return _zero_bubble(2 * (pp - rank - 1), 2 * rank, max(n, 2 * pp))


def _zb_v(pp: int, rank: int, vp: int, n: int) -> Row:
    """ZB-V (arXiv 2401.10241, section 6; 2405.15362): two chunks per rank, the second on the way back.

    It holds up to 2 pp half-rank chunks, 1F1B's memory, on every rank.
    """
    left, n = pp - rank, max(n, 2 * pp)
    row = ["F0"] * (2 * left - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W"] * left
    row += ["F0", "I0", "W", "F1", "I1", "W"] * (n - 2 * pp + rank + 1)
    row += ["I0", "W", "F1", "I1", "W"] * (left - 1)
    return row + ["I0", "I1"] * rank + ["I0", "W"] * left + ["W"] * (2 * rank)


def _bidirectional(half: int, place: int, n: int) -> Row:
    """DualPipe (arXiv 2412.19437, section 3.2.1 and figure 5).

    `place` counts a rank from its end of the pipeline, 0, to the middle (the fold), half - 1; n are micro-batches of a
    direction. The phases are those of the authors' code (github.com/deepseek-ai/DualPipe).
    """
    out, n = half - place - 1, max(n, 2 * half)
    row = ["F0"] * (2 * out) + ["F0", "F1"] * (place + 1) + ["I1", "W", "F1"] * out
    row += ["F0", "B1", "F1", "B0"] * (n - 2 * half + place + 1)
    row += ["B1", "F1", "B0"] * out
    row += [f"{'B' if i <= place else 'I'}{(i + 1) % 2}" for i in range(2 * (place + 1))]
    return row + ["W", "I0"] * out + ["W"] * (place + 1)


def _dualpipe(pp: int, rank: int, vp: int, n: int) -> Row:
    return _bidirectional(pp // 2, min(rank, pp - 1 - rank), n)


def _dualpipe_v(pp: int, rank: int, vp: int, n: int) -> Row:
    """DualPipeV: DualPipe's upper half alone, the model folded so that one copy of the parameters is enough."""
    return _bidirectional(pp, rank, n)


_ROWS: dict[Schedule, Callable[[int, int, int, int], Row]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}
"""From pp, rank, vp and micro-batches (of a direction) to the rank's row, of that many micro-batches or more."""
