"""Validation looks at text that training never sees, and training does not notice that it looked."""

import copy
from pathlib import Path

import pytest
import torch
from msgspec import json
from msgspec.structs import replace

from greylag.model import Transformer
from greylag.numerics import Quantizer
from greylag.numerics.scaling import DelayedScale
from greylag.parallel import ReplicaCommit, start
from greylag.spec import Job, SpecError, Step
from greylag.spec.grid import Grid
from greylag.spec.load import job_from
from greylag.train.build import Flight, build, refuse
from greylag.train.data import Corpus, find_files
from greylag.train.folder import RunFolder
from greylag.train.hooks import ProgressHook, TensorBoardHook
from greylag.train.launch import Place, run_rank
from greylag.train.loop import Control, fly, validate
from jobs import SMALL_MOE, tiny_job


def fly_as(rank: int, world: int, job: Job, folder: str) -> None:
    run_rank(job, RunFolder(Path(folder)), Place(rank, world, rank, world, "torchrun", "0"))


def steps_of(folder: Path) -> list[Step]:
    return [json.decode(line, type=Step) for line in (folder / "steps.jsonl").read_bytes().splitlines()]


def with_run(job: Job, **changes: object) -> Job:
    changed = replace(job, run=replace(job.run, **changes))
    assert not changed.problems(), changed.problems()
    return changed


def bits(steps: list[Step]) -> list[tuple]:
    return [(s.loss, s.grad_norm, s.learning_rate, s.skipped) for s in steps]


# --- text ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Twenty windows of 32 tokens and a few more bytes: window w holds 4 w, 4 w + 1, 4 w + 2 and 4 w + 3."""
    file = tmp_path / "text.txt"
    file.write_bytes(b"".join(bytes([value]) * 8 for value in range(80)) + b"tail")
    return file


def windows_in(tokens: torch.Tensor) -> set[int]:
    return {int(value) // 4 for value in tokens[:, 1:-1].flatten()}


def test_held_out_windows_are_never_trained_on_and_each_is_evaluated_once(text: Path) -> None:
    whole = Corpus([text], sequence=32, seed=3)
    corpus, held_out = whole.split(6)
    assert (corpus.num_windows, held_out.num_windows) == (14, 6)
    assert windows_in(corpus.windows(0, 5 * 14)) == set(range(14))
    assert sorted(int(row[1]) // 4 for row in held_out.windows(0, 6)) == list(range(14, 20))
    assert corpus.fingerprint == held_out.fingerprint == whole.fingerprint


def test_targets_of_both_sides_are_apart(text: Path) -> None:
    corpus, held_out = Corpus([text], sequence=32, seed=3).split(6)
    trained = {int(t) for t in corpus.windows(0, 14)[:, 1:].flatten()}
    # The last training window's last target is the byte before the first held-out target: the first one's input.
    assert {int(t) for t in held_out.windows(0, 6)[:, 1:].flatten()} & trained == {14 * 4}


def test_nothing_held_out_is_the_order_of_before(text: Path) -> None:
    whole = Corpus([text], sequence=32, seed=3)
    assert torch.equal(whole.split(0)[0].windows(0, 50), whole.windows(0, 50))


def test_too_little_text_is_refused(text: Path) -> None:
    job = tiny_job(SMALL_MOE, run={"data": [str(text)], "validate_every": 1}, sequence=32)
    refuse(with_run(job, validation_batches=4))
    with pytest.raises(SpecError, match=r"run.data: 644 bytes are fewer than 21 sequences .*validation_batches"):
        refuse(with_run(job, validation_batches=5))
    with pytest.raises(SpecError, match=r"run.data: 644 bytes are fewer than 21 sequences"):
        Corpus([text], sequence=32, seed=0).split(20)
    own = with_run(job, validation=(str(text),))
    refuse(with_run(own, validation_batches=5))
    with pytest.raises(SpecError, match=r"run.validation: 644 bytes are fewer than 24 sequences"):
        refuse(with_run(own, validation_batches=6))
    with pytest.raises(SpecError, match=r"run.validation: 'none\.\*' matches no file"):
        refuse(with_run(own, validation=("none.*",)))


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ({"validation": ["a.txt"]}, "run.validation"),
        ({"validation_batches": 2}, "run.validation_batches"),
        ({"validate_every": -1}, "run.validate_every"),
        ({"validate_every": 2, "validation_batches": 0}, "run.validation_batches"),
        ({"validate_every": 2, "validation": ["a.txt", ""]}, "run.validation"),
    ],
    ids=repr,
)
def test_settings_without_effect_are_refused(run: dict, key: str) -> None:
    table = {"model": "llama-3-tiny", "precision": "fp32", "cluster": "local-1x1", "sequence": 64, "global_batch": 4}
    assert [f.where for f in job_from({**table, "run": run}, "bad").problems()] == [key]


def test_a_resumed_run_may_evaluate_more_often_but_not_split_the_text_otherwise(tmp_path: Path) -> None:
    job = tiny_job(SMALL_MOE, run={"validate_every": 10})
    RunFolder(tmp_path).claim(job)
    RunFolder(tmp_path).claim(with_run(job, validate_every=3))
    for changes in ({"validate_every": 0}, {"validation_batches": 2}, {"validation": ("python-stdlib",)}):
        with pytest.raises(SpecError, match=rf"differs in run.{next(iter(changes))}"):
            RunFolder(tmp_path).claim(with_run(job, **changes))


# --- training -----------------------------------------------------------------------------------------------------


def test_a_model_in_eval_mode_leaves_no_trace() -> None:
    """Needs `if self.training` in DelayedScale.observe, Quantizer.quantize and Router.forward."""
    job = tiny_job(SMALL_MOE, "fp8-tensor-delayed", precision_table={"amax_history": 4})
    model = Transformer(job.model, job.precision)
    model.initialize(0)
    tokens = torch.randint(0, 256, (2, 64))
    model(tokens).square().mean().backward()
    for module in model.modules():
        if isinstance(module, DelayedScale):
            module.roll()
    noted = copy.deepcopy(dict(model.named_buffers()))
    assert any(name.endswith("load") and value.any() for name, value in noted.items())
    model.eval()
    with torch.no_grad():
        model.layers[0].ffn.w_down.weight[0, 0] = float("inf")
        model(tokens)
    assert all(torch.equal(value, noted[name]) for name, value in model.named_buffers())
    model.train()
    with torch.no_grad():
        model(tokens)
    assert any(m.nonfinite for m in model.modules() if isinstance(m, Quantizer))


@pytest.mark.parametrize(
    ("model", "precision", "dp", "strategy"),
    [
        ("llama-3-tiny", "fp32", 1, {}),
        (SMALL_MOE, "fp8-tensor-delayed", 2, {"replicas": 2}),
        (SMALL_MOE, "fp8-block128", 2, {"zero": 1}),
        (SMALL_MOE, "fp8-tensor-delayed", 2, {"zero": 3}),
    ],
    ids=lambda x: "moe" if x is SMALL_MOE else str(x),
)
def test_training_keeps_its_bits(
    model: str | dict, precision: str, dp: int, strategy: dict, ranks, tmp_path: Path
) -> None:
    """FP8 with delayed scales and experts need the same lines as the test of eval mode."""
    without = tiny_job(model, precision, dp, strategy=strategy, run={"steps": 5})
    files = [str(path) for path in find_files(["python-stdlib"]) if path.name == "argparse.py"]
    validated = with_run(without, validate_every=2, validation=tuple(files), validation_batches=2)
    ranks(dp, fly_as, without, str(tmp_path / "without"))
    ranks(dp, fly_as, validated, str(tmp_path / "with"))
    plain, steps = steps_of(tmp_path / "without"), steps_of(tmp_path / "with")
    assert bits(steps) == bits(plain)
    assert [s.number for s in steps if s.validation_loss is not None] == [2, 4, 5]
    assert not any(s.validation_loss for s in plain)
    assert steps[-1].validation_loss < steps[1].validation_loss
    for before, after in zip(plain[1:], steps[1:], strict=True):  # parameters rest as shards, to be gathered again
        assert after.wire_bytes == pytest.approx(before.wire_bytes, rel=0.01)


def test_held_out_text_and_resumption(ranks, tmp_path: Path) -> None:
    job = tiny_job(SMALL_MOE, "fp8-tensor-delayed", run={"steps": 6, "validate_every": 3, "checkpoint_every": 3})
    ranks(1, fly_as, job, str(tmp_path / "straight"))
    ranks(1, fly_as, with_run(job, validate_every=100), str(tmp_path / "seldom"))
    straight, seldom = steps_of(tmp_path / "straight"), steps_of(tmp_path / "seldom")
    assert bits(straight) == bits(seldom)
    assert [s.number for s in seldom if s.validation_loss is not None] == [6]
    assert seldom[-1].validation_loss == straight[-1].validation_loss
    sorted((tmp_path / "straight" / "checkpoints").glob("step_*"))[-1].rename(tmp_path / "gone")
    ranks(1, fly_as, job, str(tmp_path / "straight"))
    again = steps_of(tmp_path / "straight")[6:]
    assert bits(again) == bits(straight[3:])
    assert [s.validation_loss for s in again] == [s.validation_loss for s in straight[3:]]


def test_other_validation_text_is_refused_on_resuming(ranks, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(256)) * 8)
    job = tiny_job(SMALL_MOE, run={"steps": 1, "validate_every": 1, "validation": [str(file)], "warmup_steps": 1})
    ranks(1, fly_as, job, str(tmp_path / "run"))
    file.write_bytes(bytes(range(255)) * 9)
    with pytest.raises(AssertionError, match=r"run.validation: the text differs"):
        ranks(1, fly_as, with_run(job, steps=2), str(tmp_path / "run"))


class Listener:
    """A hook that evaluates once more by hand, in one forward per sequence."""

    def __init__(self, flight: Flight) -> None:
        self.flight, self.losses = flight, []

    def before(self, number: int) -> None: ...

    def after(self, step: Step) -> None:
        model, text, job = self.flight.model, self.flight.validation, self.flight.job
        assert text is not None
        model.eval()
        with torch.no_grad():
            rows = text.windows(0, job.validation_sequences)
            each = [torch.nn.functional.cross_entropy(model(row[None, :-1])[0], row[1:]).item() for row in rows]
        model.train()
        self.losses.append((step.validation_loss, sum(each) / len(each)))

    def failed(self, error: BaseException) -> None: ...


def listen(rank: int, world: int, job: Job, folder: str) -> list[tuple[float, float]]:
    store = torch.distributed.TCPStore("127.0.0.1", int(__import__("os").environ["MASTER_PORT"]), is_master=rank == 0)
    here = start(Grid.of(job.strategy), rank, store, torch.device("cpu"))
    flight = build(job, here)
    hook = Listener(flight)
    fly(flight, RunFolder(Path(folder)), ReplicaCommit(here), [hook], Control())
    assert validate(flight) == hook.losses[-1][0]
    return hook.losses


@pytest.mark.parametrize("dp", [1, 2])
def test_the_loss_is_the_mean_over_all_held_out_sequences(dp: int, ranks, tmp_path: Path) -> None:
    run = {"steps": 2, "validate_every": 1, "validation_batches": 3}
    job = tiny_job(SMALL_MOE, dp=dp, strategy={"zero": 3 if dp > 1 else 1}, run=run)
    by_rank = ranks(dp, listen, job, str(tmp_path))
    assert len({tuple(loss for loss, _ in losses) for losses in by_rank}) == 1
    for loss, expected in by_rank[0]:
        assert loss == pytest.approx(expected, rel=1e-6)


# --- shown --------------------------------------------------------------------------------------------------------


def test_hooks_show_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shown = Step(source="measured", number=7, seconds={"forward": 1.0}, tokens=1, flops=1.0, loss=2.0)
    hook = ProgressHook(9)
    hook.after(shown)
    assert not capsys.readouterr().out
    hook.after(replace(shown, validation_loss=1.23456))
    assert "loss 2.0000  validation 1.2346  1.00 s" in capsys.readouterr().out
    board = TensorBoardHook(tmp_path)
    board.after(replace(shown, validation_loss=1.5))
    board.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"validation/loss" in events.read_bytes()
