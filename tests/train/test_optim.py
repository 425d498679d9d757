"""AdamW with narrow moments: one step against FP64, a training against FP32 moments, and resuming bit for bit."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec import json
from msgspec.structs import replace
from torch import nn

from greylag.numerics.optim_state import Stored, restore, storage
from greylag.parallel import ReplicaCommit, start, stop
from greylag.spec import Job, Step
from greylag.spec.grid import Grid
from greylag.spec.job import Run
from greylag.spec.load import load_preset
from greylag.train.build import build
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from greylag.train.loop import Control, take_step
from greylag.train.optim import NarrowAdamW, adamw
from jobs import SMALL_MOE, tiny_job

NARROW = [("bf16", "bf16"), ("e4m3", "e5m2"), ("e4m3", "e4m3-root")]
each_pair = pytest.mark.parametrize("moments", NARROW, ids="-".join)


def fly(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def steps_of(folder: Path) -> list[Step]:
    return [json.decode(line, type=Step) for line in (folder / "steps.jsonl").read_bytes().splitlines()]


def job_with(moments: tuple[str, str], dp: int = 1, precision: str = "fp32", **changes) -> Job:
    table = {"first_moment": moments[0], "second_moment": moments[1]}
    return tiny_job(SMALL_MOE, precision, dp, precision_table=table, **changes)


class Bench(nn.Module):
    """A matrix of which one row never has a gradient, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(7, 200, generator=torch.Generator().manual_seed(1)))
        self.vector = nn.Parameter(torch.ones(5))

    def draw(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.matrix.grad = torch.randn(7, 200, generator=generator) * 10.0 ** -torch.arange(7.0).unsqueeze(1)
        self.matrix.grad[3] = 0.0
        self.matrix.grad[:, 5] = 1e-12
        self.vector.grad = torch.randn(5, generator=generator)


def made(moments: tuple[str, str], run: Run) -> tuple[Bench, torch.optim.Optimizer]:
    model = Bench()
    p = replace(load_preset("precision", "fp32"), first_moment=moments[0], second_moment=moments[1])
    return model, adamw(model, run, p)


def moment(optimizer: torch.optim.Optimizer, p: nn.Parameter, key: str, how) -> torch.Tensor:
    state = optimizer.state[p]
    return restore(Stored(state[key], state.get(f"{key}_scale")), how).double()


@each_pair
def test_one_step_equals_fp64(moments: tuple[str, str]) -> None:
    run = Run()
    model, optimizer = made(moments, run)
    p, first, second = model.matrix, storage(moments[0], run.beta1, 2), storage(moments[1], run.beta2, 2)
    m = v = torch.zeros(7, 200, dtype=torch.float64)
    for number in range(1, 6):
        model.draw(number)
        before, g = p.detach().double(), p.grad.double()
        optimizer.step()
        m, v = run.beta1 * m + (1 - run.beta1) * g, run.beta2 * v + (1 - run.beta2) * g**2
        unit = (v / (1 - run.beta2**number)).sqrt() + run.eps
        moved = before * (1 - run.learning_rate * run.weight_decay)
        moved -= run.learning_rate * m / (1 - run.beta1**number) / unit
        torch.testing.assert_close(p.detach().double(), moved, rtol=1.3e-7, atol=1e-9)
        spacing = 2.0**-8 if moments[0] == "bf16" else 2.0**-3
        rest_m, rest_v = moment(optimizer, p, "exp_avg", first), moment(optimizer, p, "exp_avg_sq", second)
        least_m = m.abs().amax(1, keepdim=True) * 2.0**-17  # E4M3's numbers below the normal ones, of 448
        assert ((rest_m - m).abs() <= m.abs() * spacing + least_m).all()
        assert ((rest_v - v).abs() <= 2.3 * v * spacing + v.amax(1, keepdim=True) * 2.0**-31).all()
        m, v = rest_m, rest_v


def test_fp32_moments_are_torchs() -> None:
    _, optimizer = made(("fp32", "fp32"), Run())
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]


def test_bytes_of_state() -> None:
    for moments, bytes_ in zip(NARROW, (4.0, 2.0625, 2.0625), strict=True):
        model = nn.Linear(1024, 512)
        p = replace(load_preset("precision", "fp32"), first_moment=moments[0], second_moment=moments[1])
        optimizer = adamw(model, Run(), p)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        stored = sum(x.untyped_storage().nbytes() for key, x in state.items() if key != "step")
        assert stored == bytes_ * model.weight.numel()


@each_pair
def test_a_weight_whose_gradient_is_gone_comes_to_rest(moments: tuple[str, str]) -> None:
    """Its mean of squares, being larger at rest than its mean of gradients squared, never makes it run away."""
    run = Run(weight_decay=0.0, learning_rate=1e-3)
    model, optimizer = made(moments, run)
    for number in range(1, 400):
        model.draw(number)
        if number > 20:
            model.matrix.grad[:, ::3] = 0.0
        before = model.matrix.detach().clone()
        optimizer.step()
        moved = (model.matrix.detach() - before).abs()
        assert moved.max() <= 3 * run.learning_rate
    # 380 steps on, m is 0.9**380 of what it was: nothing. At first the same step as before it went.
    assert moved[:, ::3].max() <= 1e-3 * run.learning_rate


@each_pair
def test_state_survives_its_dict(moments: tuple[str, str]) -> None:
    model, optimizer = made(moments, Run())
    model.draw(1)
    optimizer.step()
    other, copy = made(moments, Run())
    other.load_state_dict(model.state_dict())
    copy.load_state_dict(deepcopy(optimizer.state_dict()))
    assert isinstance(copy, NarrowAdamW)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == copy.state[q].keys()
        for key, x in optimizer.state[p].items():
            y = copy.state[q][key]
            assert x.dtype == y.dtype
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
    for number in (2, 3):
        for each, mover in ((model, optimizer), (other, copy)):
            each.draw(number)
            mover.step()
    assert torch.equal(model.matrix, other.matrix)


def fly_each(rank: int, world: int, jobs: list[Job], folder: str) -> list[list[float]]:
    """The losses of each job."""
    store = dist.FileStore(f"{folder}/store{world}", world)
    here = start(Grid.of(jobs[0].strategy), rank, store, torch.device("cpu"))
    commit, losses = ReplicaCommit(here), []
    for job in jobs:
        flight, run = build(job, here), RunFolder(Path(folder))
        numbers = range(1, job.run.steps + 1)
        losses.append([take_step(flight, n, commit, Control(), 0.0, run)[0].loss for n in numbers])
    stop(here)
    return losses


def test_training_is_close_to_fp32_moments(ranks, tmp_path: Path) -> None:
    """And the noise of an element is its own, whoever holds it: two ranks round as one does."""
    every = [job_with(moments, run={"steps": 20}) for moments in (("fp32", "fp32"), *NARROW)]
    shorter = replace(every[2], run=replace(every[2].run, steps=6))
    full, *narrow, alone = ranks(1, fly_each, [*every, shorter], str(tmp_path))[0]
    for moments, losses in zip(NARROW, narrow, strict=True):
        assert losses == pytest.approx(full, rel=5e-4 if moments[0] == "bf16" else 1e-2)
        assert losses != full
        assert losses[-1] < losses[0] - 0.8
    job = job_with(NARROW[1], 2, strategy={"zero": 3}, run={"steps": 6})
    (shared,) = ranks(2, fly_each, [job], str(tmp_path))[0]
    assert shared == pytest.approx(alone, rel=2e-5)


@pytest.mark.parametrize(("moments", "strategy"), [
    (NARROW[0], {"zero": 3}),
    (NARROW[1], {"zero": 0}),
    (NARROW[2], {"zero": 3}),
])  # fmt: skip
def test_resume_is_bit_identical(moments: tuple[str, str], strategy: dict, ranks, tmp_path: Path) -> None:
    job = job_with(moments, 2, strategy=strategy, run={"steps": 2, "checkpoint_every": 1})
    ranks(2, fly, job, str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000002")
    ranks(2, fly, job, str(tmp_path))
    steps = [(s.number, s.loss, s.grad_norm) for s in steps_of(tmp_path)]
    assert [number for number, *_ in steps] == [1, 2, 2]
    assert steps[2] == steps[1]
