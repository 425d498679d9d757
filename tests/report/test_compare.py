"""Made-up runs in which one thing is wrong: the comparison finds phase and rank, and its rules name the cause."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from commands import greylag_here, write_job
from greylag.report.compare import Laid, lay, read_ranks, verdict
from greylag.report.explain import Case, explain
from greylag.report.record import read_record
from greylag.sim import predict
from greylag.spec import Job, SpecError, Step, load_job
from jobs import SMALL_MOE, tiny_job

JOB = tiny_job(SMALL_MOE, "fp32")
SECONDS = {"data": 0.01, "forward": 0.3, "backward": 0.6, "reduce": 0.05, "optimizer": 0.02, "other": 0.02}
POOLS = {"parameters": 1e6, "gradients": 1e6, "optimizer": 2e6, "activations": 4e6}


def predicted(**fields: object) -> Step:
    known = Step(source="predicted", seconds=SECONDS, bytes=POOLS, wire_bytes=1e6, tokens=512, flops=1e9)
    return replace(known, **fields)


def run(num: int = 40, seed: int = 0, bytes_: float = 1.0, wire: float = 1e6, **times: float) -> list[Step]:
    """Steps as predicted but for noise of one percent; each phase in `times` takes so many times its seconds."""
    rng = np.random.default_rng(seed)
    steps = []
    for n in range(1, num + 1):
        seconds = {p: s * times.get(p, 1.0) * rng.uniform(0.99, 1.01) for p, s in SECONDS.items()}
        held = {pool: bytes_ * size for pool, size in POOLS.items()} if n == 3 else {}
        steps.append(
            Step(source="measured", number=n, seconds=seconds, bytes=held, wire_bytes=wire, tokens=512, flops=1e9)
        )
    return steps


def said(job: Job, ranks: dict[int, list[Step]], step: Step | None = None) -> list[str]:
    found = explain(Case(job, step or predicted(), ranks))
    assert all(f.evidence and f.advice and "\n" not in str(f) for f in found)
    return [f.what for f in found]


def strategy(job: Job, **fields: object) -> Job:
    return replace(job, strategy=replace(job.strategy, **fields))


def on_cuda(job: Job) -> Job:
    device = replace(job.cluster.device, kind="cuda", memory_gib=1.0)
    return replace(job, cluster=replace(job.cluster, name="some", device=device))


def test_a_run_as_predicted_needs_no_explanation() -> None:
    assert said(JOB, {0: run()}) == []
    assert said(JOB, {0: run(forward=0.5, backward=0.5)}) == []
    assert said(JOB, {0: run(), 1: run(seed=1)}) == []


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"reduce": 4.0}, "a slow link, or a rank that others wait for"),
        ({"data": 20.0}, "host overhead: a step waits"),
        ({"other": 8.0}, "host overhead: 1"),
        ({"backward": 1.5}, "recompute: backward is off by about one forward, as if it computes"),
        ({"forward": 1.4, "backward": 1.4}, "compute is slower than predicted"),
        ({"bytes_": 1.5}, "the run holds more memory than predicted"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_one_cause_is_named_and_no_other(times: dict[str, float], words: str) -> None:
    (only,) = said(JOB, {0: run(**times)})
    assert only.startswith(words)


def test_two_causes_are_both_named_the_larger_first() -> None:
    both = {"forward": 1.4, "backward": 1.4, "other": 8.0}
    assert [w.split(":")[0].split(",")[0] for w in said(JOB, {0: run(**both)})] == [
        "compute is slower than predicted",
        "host overhead",
    ]
    assert said(JOB, {0: run(**{**both, "other": 40.0})})[0].startswith("host overhead")


def test_a_slow_rank_is_told_from_a_slow_link_by_the_steps_of_others() -> None:
    waiting = {rank: run(seed=rank, reduce=6.0) for rank in (0, 1)}
    slow = run(seed=2, forward=1.3, backward=1.3)
    job = strategy(JOB, dp=4)
    found = explain(Case(job, predicted(), {**waiting, 2: slow, 3: run(seed=3, reduce=6.0)}))
    assert found[0].what.startswith("a slow rank: rank 2 computes +30")
    assert found[0].rank == 2
    assert "other ranks wait up to 2" in found[0].evidence
    assert not [f for f in found if "slow link" in f.what]
    assert said(job, {rank: run(seed=rank, reduce=6.0) for rank in range(4)}) == [
        "a slow link: reduce takes 250 ms longer"
    ]


def test_a_rank_that_changes_is_imbalance_and_not_a_slow_rank() -> None:
    rng = np.random.default_rng(5)
    ranks = {rank: run(seed=rank) for rank in range(4)}
    for n in range(40):
        victim = int(rng.integers(4))
        s = ranks[victim][n]
        ranks[victim][n] = replace(s, seconds={**s.seconds, "forward": 2 * s.seconds["forward"]})
    found = said(strategy(JOB, dp=4), ranks)
    assert [f for f in found if f.startswith("imbalance: the slowest rank changes")]
    assert not [f for f in found if f.startswith("a slow rank")]


def test_ranks_of_one_stage_are_an_uneven_cut() -> None:
    job = strategy(JOB, dp=2, pp=2)
    ranks = {rank: run(seed=rank, **({"forward": 1.4, "backward": 1.4} if rank >= 2 else {})) for rank in range(4)}
    found = said(job, ranks)
    assert found[0].startswith("imbalance: all measured ranks of pipeline stage 1")
    assert not [f for f in found if f.startswith("a slow rank")]


def test_recompute_that_the_job_asks_for_and_the_run_lacks() -> None:
    full = strategy(JOB, recompute="full")
    assert said(full, {0: run(backward=0.5)})[0].startswith(
        "recompute: backward is off by about one forward, as if it does not"
    )
    assert not [f for f in said(full, {0: run(backward=1.5)}) if f.startswith("recompute")]


def test_more_bytes_on_the_wire_are_not_the_links_fault() -> None:
    (only,) = said(JOB, {0: run(reduce=4.0, wire=2e6)})
    assert only == "a rank sends more than the job says"


def test_communication_inside_forward_shows_there_first() -> None:
    step = predicted(causes={"gemm": 0.5, "ep": 0.3})
    (only,) = said(JOB, {0: run(forward=1.6, backward=1.2)}, step)
    assert only.startswith("a slow link")
    assert "tp, cp, ep" in only
    assert said(JOB, {0: run(forward=1.4, backward=1.4)}, step)[0].startswith("compute is slower")


def test_launches_show_in_forward_on_a_device() -> None:
    ranks = {0: run(forward=1.7, backward=1.05)}
    assert said(on_cuda(JOB), ranks) == [
        "host overhead: forward is slower than backward by more than compute would make it"
    ]
    graphs = replace(on_cuda(JOB), software=replace(JOB.software, graphs=True))
    assert said(graphs, ranks) == []


def test_a_full_device_is_memory_pressure() -> None:
    job = on_cuda(JOB)
    bytes_ = 0.95 * job.cluster.device.memory / sum(POOLS.values())
    step = predicted(bytes={pool: bytes_ * size for pool, size in POOLS.items()})
    assert said(job, {0: run(bytes_=bytes_)}, step)[0].startswith("memory pressure")


def test_long_steps_where_checkpoints_are_saved_and_elsewhere() -> None:
    job = replace(JOB, run=replace(JOB.run, checkpoint_every=10))
    steps = run()
    for n in (10, 20, 30):
        steps[n - 1] = replace(steps[n - 1], seconds={**SECONDS, "other": 3.0})
    assert said(job, {0: steps}) == ["3 of 37 steps take over 1.50 times the median, all where checkpoints are saved"]
    assert "checkpoints" not in said(JOB, {0: steps})[0]


def test_a_run_that_grows_slower() -> None:
    steps = [replace(s, seconds={p: x * (1 + n / 100) for p, x in s.seconds.items()}) for n, s in enumerate(run())]
    assert "the run grows slower as it goes on" in said(JOB, {0: steps})


# --- folders ---------------------------------------------------------------------------------------------------------


def write(folder: Path, job: Job, ranks: dict[int, list[Step]], step: Step | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    for rank, steps in ranks.items():
        name = f"steps_rank_{rank}.jsonl" if rank else "steps.jsonl"
        (folder / name).write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in steps))
    if step:
        (folder / "predicted.json").write_bytes(msgspec.json.encode(step))
    return folder


def laid(folder: Path) -> Laid:
    record = read_record(folder)
    assert record.predicted
    return lay(record, record.predicted, read_ranks(folder, record))


def test_the_largest_excess_is_named_by_phase_and_rank(tmp_path: Path) -> None:
    job = strategy(JOB, dp=4)
    folder = write(tmp_path, job, {0: run(), 3: run(seed=1, backward=1.3), 2: run(seed=2)}, predicted())
    found = laid(folder)
    assert found.largest is not None
    assert (found.largest.phase, found.largest.rank) == ("backward", 3)
    assert found.largest.seconds == pytest.approx(0.18, rel=0.05)
    assert verdict(found)[0].startswith("Largest excess: backward on rank 3, 18")
    assert (len(found.summary.steady), found.summary.warm_up) == (37, 3)


def test_ranks_that_the_job_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, JOB, {0: run(), 99: run()}, predicted())
    with pytest.raises(SpecError, match=r"steps_rank_99\.jsonl: the job has ranks 0 to"):
        laid(folder)


def test_memory_of_the_measured_step_is_laid_beside(tmp_path: Path) -> None:
    found = laid(write(tmp_path, JOB, {0: run(bytes_=1.5)}, predicted()))
    assert found.summary.memory.measured == pytest.approx(1.5 * sum(POOLS.values()))
    assert found.summary.memory.predicted == pytest.approx(sum(POOLS.values()))


def test_the_command_reads_a_run_as_the_trainer_writes_it(tmp_path: Path) -> None:
    """With the prediction of the very job, of which reduce takes ten times as long."""
    job = load_job(write_job(tmp_path))
    step = predict(job)
    slow = {**step.seconds, "reduce": step.seconds["reduce"] + 0.5 * step.total_seconds}
    steps = [replace(step, source="measured", number=n, seconds=slow, causes={}) for n in range(1, 9)]
    folder = write(tmp_path / "run", job, {0: steps}, None)
    for prediction, words in ((None, "predicted anew"), (step, "predicted.json")):
        write(folder, job, {0: steps}, prediction)
        result = greylag_here(tmp_path, "compare", folder)
        assert (result.returncode, result.stderr) == (0, "")
        told = " ".join(result.stdout.split())
        assert words in told
        assert "Largest excess: reduce on rank 0" in told
        assert "- cluster.node: a slow link, or a rank that others wait for" in told
        assert "rank 0, the only one measured here" in told
    write(folder, job, {0: steps}, replace(step, seconds=slow))
    assert "predicted anew" in greylag_here(tmp_path, "compare", folder, "--fresh").stdout
    assert "No phase takes longer" in greylag_here(tmp_path, "compare", folder).stdout


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "compare", tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
