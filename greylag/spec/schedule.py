"""Schedule: the order in which a pipeline stage works off its micro-batches.

The simulator times this very list and the trainer will execute it.
"""

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One piece of work of a stage: F forward, B backward (input and weight gradient together)."""

    stage: int
    micro_batch: int
    kind: Literal["F", "B"]


def one_f_one_b(num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """1F1B (PipeDream-Flush; Megatron-LM, arXiv 2104.04473, figure 4): one list of actions per stage.

    Stage s runs `num_stages - s - 1` forwards ahead, then alternates one forward and one backward, so that it
    never holds more than `num_stages - s` micro-batches.
    """
    order = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage - 1, num_micro_batches)
        actions = [Action(stage, m, "F") for m in range(ahead)]
        for m in range(num_micro_batches - ahead):
            actions += [Action(stage, ahead + m, "F"), Action(stage, m, "B")]
        actions += [Action(stage, m, "B") for m in range(num_micro_batches - ahead, num_micro_batches)]
        order.append(actions)
    return order
