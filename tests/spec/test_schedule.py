"""1F1B: every action once, in an order that can run, with a bounded number of micro-batches held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greylag.sim.timeline import makespan
from greylag.spec.schedule import Action, one_f_one_b


@given(st.integers(1, 6), st.integers(1, 12))
def test_every_action_once_and_few_held(stages: int, micro_batches: int) -> None:
    for stage, actions in enumerate(one_f_one_b(stages, micro_batches)):
        assert sorted(actions) == sorted(Action(stage, m, k) for m in range(micro_batches) for k in "FB")
        held = most = 0
        for action in actions:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
            assert held >= 0
        assert most <= min(stages - stage, micro_batches)


@given(st.integers(1, 6), st.integers(1, 12))
def test_makespan_is_the_published_formula(stages: int, micro_batches: int) -> None:
    """(m + p - 1)(f + b) where transfers cost nothing (arXiv 2104.04473, section 2.2)."""
    span = makespan(one_f_one_b(stages, micro_batches), 1.0, 2.0, 0.0)
    assert span == pytest.approx(3.0 * (micro_batches + stages - 1))


def test_transfers_cost_time() -> None:
    order = one_f_one_b(4, 8)
    assert makespan(order, 1.0, 2.0, 0.1) > makespan(order, 1.0, 2.0, 0.0)
