"""Recomputing a layer's forward in backward changes no bit, and is noted nowhere a second time.

All of this needs `if self.training` in DelayedScale.observe, Quantizer.quantize and Router.forward.
"""

from pathlib import Path

import pytest
import torch
from msgspec import json
from msgspec.structs import replace

from greylag.model import Transformer
from greylag.model.rope import angles
from greylag.numerics import Quantizer
from greylag.spec import Job, SpecError, Step
from greylag.train.folder import RunFolder
from greylag.train.launch import Place, run_rank
from jobs import SMALL_MOE, tiny_job


def fly(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def steps_of(folder: Path) -> list[Step]:
    return [json.decode(line, type=Step) for line in (folder / "steps.jsonl").read_bytes().splitlines()]


def recomputed(job: Job) -> Job:
    return replace(job, strategy=replace(job.strategy, recompute="full"))


@pytest.mark.parametrize(
    ("model", "precision", "zero"),
    [
        ("llama-3-tiny", "fp32", 3),
        ("gpt-3-tiny", "fp8-block128", 0),
        ("llama-3-tiny", "fp8-tensor-delayed", 3),
        (SMALL_MOE, "fp32", 0),
        (SMALL_MOE, "fp8-block128", 3),
        (SMALL_MOE, "fp8-tensor-delayed", 1),
        (SMALL_MOE, "fp8-tensor-delayed", 3),
    ],
    ids=lambda x: "moe" if isinstance(x, dict) else str(x),
)
def test_losses_keep_their_bits(model: str | dict, precision: str, zero: int, ranks, tmp_path: Path) -> None:
    job = tiny_job(model, precision, dp=2, strategy={"zero": zero})
    ranks(2, fly, job, str(tmp_path / "none"))
    ranks(2, fly, recomputed(job), str(tmp_path / "full"))
    plain, steps = steps_of(tmp_path / "none"), steps_of(tmp_path / "full")
    assert [(s.loss, s.grad_norm) for s in steps] == [(s.loss, s.grad_norm) for s in plain]
    for before, after in zip(plain[1:], steps[1:], strict=True):  # parameters are not gathered a third time
        assert after.wire_bytes == pytest.approx(before.wire_bytes, rel=0.01)


def one_pass(job: Job, spoilt: bool) -> tuple[Transformer, int]:
    """A model after forward and backward, and how often its first norm has run."""
    model = Transformer(job.model, job.precision, recompute=job.strategy.recompute == "full")
    model.initialize(0)
    if spoilt:
        with torch.no_grad():
            model.layers[0].ffn.w_down.weight[0, 0] = float("inf")
    runs = []
    model.layers[0].attention_norm.register_forward_hook(lambda *_: runs.append(model.layers[0].training))
    model(torch.arange(128).view(2, 64)).square().mean().backward()
    assert all(module.training for module in model.modules())
    return model, len(runs)


@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "inf"])
@pytest.mark.parametrize("precision", ["fp32", "fp8-block128", "fp8-tensor-delayed"])
def test_histories_loads_and_counts_are_of_one_pass(precision: str, spoilt: bool) -> None:
    job = tiny_job(SMALL_MOE, precision, precision_table={"amax_history": 4} if "delayed" in precision else {})
    (plain, once), (model, twice) = one_pass(job, spoilt), one_pass(recomputed(job), spoilt)
    assert (once, twice) == (1, 2)
    noted = dict(plain.named_buffers())
    for name, value in model.named_buffers():
        assert torch.equal(value, noted[name]), name
    assert plain.layers[1].ffn.router.load.sum() == 128 * job.model.moe.top_k
    counted = any(m.nonfinite for m in model.modules() if isinstance(m, Quantizer))
    assert counted == (spoilt and job.precision.is_fp8)
    if not spoilt:
        for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(weight.grad, other.grad), name


def test_a_layer_keeps_its_input_alone() -> None:
    job = recomputed(tiny_job(SMALL_MOE, "fp8-block128"))
    model = Transformer(job.model, job.precision, recompute=True)
    x = torch.randn(2, 64, job.model.hidden_size, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    cos, sin = angles(64, job.model.mla.qk_rope_head_dim, job.model.rope_theta)
    own = {t.untyped_storage().data_ptr() for t in (cos, sin)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.layers[1](x, cos, sin)
    assert sum(size for place, size in kept.items() if place not in own) == x.untyped_storage().nbytes()


def test_without_gradients_a_layer_runs_once() -> None:
    job = recomputed(tiny_job(SMALL_MOE))
    model = Transformer(job.model, job.precision, recompute=True)
    model.eval()
    with torch.no_grad():
        assert not model(torch.arange(64).view(1, 64)).requires_grad


def test_a_resumed_run_may_recompute(tmp_path: Path) -> None:
    job = tiny_job(SMALL_MOE)
    RunFolder(tmp_path).claim(job)
    RunFolder(tmp_path).claim(recomputed(job))
    with pytest.raises(SpecError, match=r"differs in strategy.micro_batch"):
        RunFolder(tmp_path).claim(replace(job, strategy=replace(job.strategy, micro_batch=2)))
