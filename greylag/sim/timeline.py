"""Timeline: when each action of a pipeline schedule runs, given what one forward and one backward take.

It executes the very action lists of `spec.schedule`: an action starts when its stage is free and what it waits for
has arrived.
"""

from greylag.spec.schedule import Action


def makespan(order: list[list[Action]], forward: float, backward: float, transfer: float) -> float:
    """Seconds from the first action to the end of the last, all stages alike."""
    last = len(order) - 1
    done: dict[Action, float] = {}
    free = [0.0] * len(order)
    position = [0] * len(order)
    remaining = sum(map(len, order))
    while remaining:
        before = remaining
        for stage, actions in enumerate(order):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                ready = _ready(action, last, done, transfer)
                if ready is None:
                    break
                free[stage] = max(free[stage], ready) + (forward if action.kind == "F" else backward)
                done[action] = free[stage]
                position[stage] += 1
                remaining -= 1
        assert remaining < before, "the schedule waits for itself"
    return max(free)


def _ready(action: Action, last: int, done: dict[Action, float], transfer: float) -> float | None:
    """When an action's input is there; None if what makes it has not been placed yet."""
    stage, micro_batch, kind = action
    if kind == "F":
        if stage == 0:
            return 0.0
        source, delay = Action(stage - 1, micro_batch, "F"), transfer
    elif stage == last:
        source, delay = Action(stage, micro_batch, "F"), 0.0
    else:
        source, delay = Action(stage + 1, micro_batch, "B"), transfer
    return done[source] + delay if source in done else None
