"""Tokens travel to their experts and back, whoever is chosen, as bytes, and as many as `spec.messages` counts."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from greylag.parallel import AllToAll, start, stop
from greylag.spec.grid import Grid
from greylag.spec.messages import expert_messages
from jobs import tiny_job

WIDTH = 256
"""Of the tiny model."""


def choices(case: str, rank: int, num_experts: int) -> torch.Tensor:
    """Chosen experts (T, A) of one rank's tokens."""
    draw = torch.Generator().manual_seed(rank)
    if case == "random":
        return torch.rand(50 + 7 * rank, num_experts, generator=draw).topk(2).indices
    if case == "all to the last rank":
        return torch.tensor([[num_experts - 1, num_experts - 2]]).expand(40, 2)
    if case == "one token":
        return torch.tensor([[0, num_experts - 1]])
    assert case == "one choice"
    return torch.rand(50, num_experts, generator=draw).topk(1).indices


CASES = ("random", "all to the last rank", "one token", "one choice")


def fly(rank: int, world_size: int, form: str) -> dict:
    """For each case: whether all came and went right, bytes handed to the group and dtypes, choices of all ranks."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    world = start(Grid(1, 1, world_size, 1, 1, world_size), rank, store, torch.device("cpu"))
    exchange = AllToAll(world, 2 * world_size, form)
    seen = {}
    for case in CASES:
        chosen = choices(case, rank, 2 * world_size)
        x = torch.randint(-8, 9, (chosen.shape[0], WIDTH)).float().requires_grad_()  # E4M3 holds them, and products
        weights = torch.randint(1, 3, chosen.shape).float()
        messages = []
        whole = dist.all_to_all_single

        def count(output, input, *arguments, messages=messages, whole=whole, **keywords):
            messages.append((str(input.dtype), input.nbytes, output.nbytes))
            return whole(output, input, *arguments, **keywords)

        def compute(x_RD, row_C, expert_C, rank=rank):
            return x_RD[row_C] * (1 + 2 * rank + expert_C).unsqueeze(1)

        with mock.patch.object(dist, "all_to_all_single", count):
            y = exchange.visit(x, chosen, compute)
            (y * weights.unsqueeze(2)).sum().backward()
        there = torch.equal(y, x.detach().unsqueeze(1) * (1 + chosen).unsqueeze(2))
        back = torch.equal(x.grad, (weights * (1 + chosen)).sum(1, keepdim=True).expand(-1, WIDTH))
        seen[case] = (there, back, messages)
    stop(world)
    return seen


@pytest.mark.parametrize(("ranks_", "form"), [(2, "e4m3"), (3, "high")])
def test_every_token_meets_its_experts(ranks_: int, form: str, ranks) -> None:
    model = {"preset": "deepseek-v3-tiny", "moe": {"num_experts": 2 * ranks_, "num_groups": 1, "top_k_groups": 1}}
    how = {"precision_table": {"dispatch": form}, "strategy": {"ep": ranks_}, "global_batch": ranks_}
    job = tiny_job(model, dp=ranks_, **how)
    for rank, seen in enumerate(ranks(ranks_, fly, form)):
        for case, (there, back, messages) in seen.items():
            assert there, (case, rank)
            assert back, (case, rank)
            chosen = choices(case, rank, 2 * ranks_)
            rows = sum(len(set((token // 2).tolist())) for token in chosen)
            counted = [m.bytes for m in expert_messages(job, rows, chosen.numel())]
            # What the rank's own tokens cause: it sends them and their gradients, and receives what comes back.
            ours = [received if number in (2, 4) else sent for number, (_, sent, received) in enumerate(messages)]
            assert ours == counted, (case, rank)
            dtypes = [dtype.removeprefix("torch.") for dtype, _, _ in messages]
            assert dtypes == ["int64", "uint8", "float32", "uint8", "float32"], (case, rank)
