"""Fixtures of the whole suite."""

from collections.abc import Callable

import pytest
import torch

from ranks import run_ranks

torch.set_num_threads(1)  # the matrices are small, and on a busy machine threads cost more than they give


@pytest.fixture(scope="session")
def ranks() -> Callable:
    """`ranks(world, function, *arguments)`: call it in real processes; results by rank."""
    return run_ranks
