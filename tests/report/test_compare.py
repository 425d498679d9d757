"""Made-up runs in which one thing is wrong: the comparison finds phase and rank, and its rules name the cause."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from commands import greylag_here, write_job
from greylag.report.case import Case
from greylag.report.compare import Laid, lay, verdict
from greylag.report.explain import explain
from greylag.report.ranks import alone, read_ranks, tabulate
from greylag.report.record import read_record
from greylag.report.summary import steady
from greylag.sim import predict
from greylag.spec import Finding, Job, SpecError, Step, load_job
from greylag.spec.grid import Grid
from greylag.spec.ranks import Ranks
from greylag.spec.step import PHASES
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


def lines(ranks: list[list[Step]]) -> list[Ranks]:
    """What the trainer writes of these ranks' steps."""

    def row(steps: tuple[Step, ...], field: str) -> dict[str, list[float]]:
        return {p: [getattr(s, field).get(p, 0.0) for s in steps] for p in PHASES if p in getattr(steps[0], field)}

    return [
        Ranks(step=steps[0].number, seconds=row(steps, "seconds"), waits=row(steps, "waits"))
        for steps in zip(*ranks, strict=True)
    ]


def found_in(job: Job, ranks: list[list[Step]], step: Step | None = None) -> list[Finding]:
    counted = [steady(steps) for steps in ranks]
    times = alone(counted[0]) if len(ranks) == 1 else tabulate(lines(counted), Grid.of(job.strategy))
    found = explain(Case(job, step or predicted(), ranks[0], times))
    assert all(f.evidence and f.advice and "\n" not in str(f) for f in found)
    return found


def said(job: Job, ranks: list[list[Step]], step: Step | None = None) -> list[str]:
    return [f.what for f in found_in(job, ranks, step)]


def strategy(job: Job, **fields: object) -> Job:
    return replace(job, strategy=replace(job.strategy, **fields))


def on_cuda(job: Job) -> Job:
    device = replace(job.cluster.device, kind="cuda", memory_gib=1.0)
    return replace(job, cluster=replace(job.cluster, name="some", device=device))


def test_a_run_as_predicted_needs_no_explanation() -> None:
    assert said(JOB, [run()]) == []
    assert said(JOB, [run(forward=0.5, backward=0.5)]) == []
    assert said(strategy(JOB, dp=2), [run(), run(seed=1)]) == []


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
    (only,) = said(JOB, [run(**times)])
    assert only.startswith(words)


def test_two_causes_are_both_named_the_larger_first() -> None:
    both = {"forward": 1.4, "backward": 1.4, "other": 8.0}
    assert [w.split(":")[0].split(",")[0] for w in said(JOB, [run(**both)])] == [
        "compute is slower than predicted",
        "host overhead",
    ]
    assert said(JOB, [run(**{**both, "other": 40.0})])[0].startswith("host overhead")


def test_a_slow_rank_is_told_from_a_slow_link_by_the_steps_of_others() -> None:
    ranks = [run(seed=rank, reduce=6.0) for rank in range(4)]
    ranks[2] = run(seed=2, forward=1.3, backward=1.3)
    job = strategy(JOB, dp=4)
    (only,) = found_in(job, ranks)
    assert only.what.startswith("a slow rank: rank 2 computes +30")
    assert (only.rank, only.where) == (2, "forward, backward")
    assert "other ranks wait up to 2" in only.evidence
    assert "most of it in reduce" in only.evidence
    assert said(job, [run(seed=rank, reduce=6.0) for rank in range(4)])[0].startswith("a slow link: reduce takes 24")


def waiting(steps: list[Step], **waits: float) -> list[Step]:
    """Steps of which each phase goes by in collectives for so many seconds longer, and for a tenth of it anyway."""
    changed = []
    for s in steps:
        idle = {p: waits.get(p, 0.0) + 0.1 * s.seconds[p] for p in ("forward", "backward")}
        longer = {p: x + waits.get(p, 0.0) for p, x in s.seconds.items()}
        changed.append(replace(s, seconds=longer, waits=idle))
    return changed


def test_a_slow_rank_is_told_by_who_waits_where_all_steps_are_as_long() -> None:
    """As with sharded weights, which ranks gather in forward and backward. It is slow in backward alone."""
    job = strategy(JOB, dp=4, zero=3)
    ranks = [waiting(run(seed=rank), backward=0.24) for rank in range(4)]
    ranks[1] = waiting(run(seed=1, backward=1.4))
    assert ranks[0][9].total_seconds == pytest.approx(ranks[1][9].total_seconds, rel=0.1)
    (only,) = found_in(job, ranks)
    assert only.what.startswith("a slow rank: rank 1 computes +2")
    assert (only.rank, only.where) == (1, "backward")
    assert "other ranks wait up to 2" in only.evidence
    assert "most of it in backward" in only.evidence


def test_a_slow_replica_and_a_slow_node_are_named_as_such() -> None:
    """On devices waiting inside of forward and backward is not known: ranks of a replica look alike."""
    job = strategy(JOB, dp=8, replicas=4)
    slow = {"forward": 1.4, "backward": 1.4}
    found = said(job, [run(seed=r, **(slow if r in (4, 5) else {"reduce": 8.0})) for r in range(8)])
    assert found == ["a slow replica: all ranks of replica 2 compute longer than the others"]
    nodes = replace(strategy(JOB, dp=8), cluster=replace(JOB.cluster, devices_per_node=2, num_nodes=4))
    found = said(nodes, [run(seed=r, **(slow if r in (2, 3, 7) else {"reduce": 8.0})) for r in range(8)])
    assert found[0] == "a slow node: all ranks of node 1 compute longer than the others"
    assert found[1].startswith("a slow rank: rank 7 computes +")
    assert len(found) == 2


def test_a_slow_link_inside_one_replica_is_no_waiting_for_a_rank() -> None:
    """Its ranks wait alike; those of the other replica wait for them in reduce."""
    job = strategy(JOB, dp=4, replicas=2, zero=3)
    ranks = [waiting(run(seed=r), backward=0.3) if r >= 2 else waiting(run(seed=r, reduce=7.0)) for r in range(4)]
    assert not [f for f in said(job, ranks) if f.startswith("a slow rank")]
    case = Case(job, predicted(), ranks[0], tabulate(lines(ranks), Grid.of(job.strategy)))
    at = PHASES.index("backward")
    assert (case.excesses[2:, at] > 0.25).all()
    assert (case.excesses[:2] < 0.1).all()


def test_a_rank_that_comes_late_to_the_step_is_the_loops_fault() -> None:
    job = strategy(JOB, dp=4)
    ranks = [run(seed=0), *(run(seed=rank, reduce=8.0) for rank in (1, 2, 3))]
    assert said(job, ranks) == ["host overhead: the others wait 350 ms a step for rank 0, whose phases are no longer"]


def test_a_rank_whose_data_comes_late_is_named() -> None:
    job = strategy(JOB, dp=4)
    ranks = [run(seed=rank, reduce=6.0) for rank in range(4)]
    ranks[3] = run(seed=3, data=26.0)
    (only,) = said(job, ranks)
    assert only.startswith("host overhead: a step waits 25")
    assert only.endswith("longer for data on rank 3")


def test_of_two_ranks_the_slow_one_is_named_and_its_peer_is_as_predicted() -> None:
    (only,) = said(strategy(JOB, dp=2), [run(forward=1.2, backward=1.2), run(seed=1, reduce=4.6)])
    assert only.startswith("a slow rank: rank 0 computes +2")


def test_a_rank_that_changes_is_imbalance_and_not_a_slow_rank() -> None:
    rng = np.random.default_rng(5)
    ranks = [run(seed=rank) for rank in range(4)]
    for n in range(40):
        victim = int(rng.integers(4))
        s = ranks[victim][n]
        ranks[victim][n] = replace(s, seconds={**s.seconds, "forward": 2 * s.seconds["forward"]})
    for job, cause in ((strategy(JOB, dp=4, ep=4), "experts get"), (strategy(JOB, dp=4), "sequences cost")):
        found = said(job, ranks)
        assert [f for f in found if f.startswith("imbalance: the slowest rank changes") and cause in f]
        assert not [f for f in found if f.startswith("a slow rank")]


def test_ranks_of_one_stage_are_an_uneven_cut() -> None:
    job = strategy(JOB, dp=2, pp=2)
    found = said(job, [run(seed=r, **({"forward": 1.4, "backward": 1.4} if r >= 2 else {})) for r in range(4)])
    assert found[0].startswith("imbalance: all ranks of pipeline stage 1")
    assert not [f for f in found if f.startswith("a slow rank")]


def test_recompute_that_the_job_asks_for_and_the_run_lacks() -> None:
    full = strategy(JOB, recompute="full")
    assert said(full, [run(backward=0.5)])[0].startswith(
        "recompute: backward is off by about one forward, as if it does not"
    )
    assert not [f for f in said(full, [run(backward=1.5)]) if f.startswith("recompute")]


def test_more_bytes_on_the_wire_are_not_the_links_fault() -> None:
    (only,) = said(JOB, [run(reduce=4.0, wire=2e6)])
    assert only == "a rank sends more than the job says"


def test_communication_inside_forward_shows_there_first() -> None:
    step = predicted(causes={"gemm": 0.5, "ep": 0.3})
    (only,) = said(JOB, [run(forward=1.6, backward=1.2)], step)
    assert only.startswith("a slow link")
    assert "tp, cp, ep" in only
    assert said(JOB, [run(forward=1.4, backward=1.4)], step)[0].startswith("compute is slower")


def test_launches_show_in_forward_on_a_device() -> None:
    ranks = [run(forward=1.7, backward=1.05)]
    assert said(on_cuda(JOB), ranks) == [
        "host overhead: forward is slower than backward by more than compute would make it"
    ]
    graphs = replace(on_cuda(JOB), software=replace(JOB.software, graphs=True))
    assert said(graphs, ranks) == []


def test_a_full_device_is_memory_pressure() -> None:
    job = on_cuda(JOB)
    bytes_ = 0.95 * job.cluster.device.memory / sum(POOLS.values())
    step = predicted(bytes={pool: bytes_ * size for pool, size in POOLS.items()})
    assert said(job, [run(bytes_=bytes_)], step)[0].startswith("memory pressure")


def test_long_steps_where_checkpoints_are_saved_and_elsewhere() -> None:
    job = replace(JOB, run=replace(JOB.run, checkpoint_every=10))
    steps = run()
    for n in (10, 20, 30):
        steps[n - 1] = replace(steps[n - 1], seconds={**SECONDS, "other": 3.0})
    assert said(job, [steps]) == ["3 of 37 steps take over 1.50 times the median, all where checkpoints are saved"]
    assert "checkpoints" not in said(JOB, [steps])[0]


def test_a_run_that_grows_slower() -> None:
    steps = [replace(s, seconds={p: x * (1 + n / 100) for p, x in s.seconds.items()}) for n, s in enumerate(run())]
    assert "the run grows slower as it goes on" in said(JOB, [steps])


# --- folders ---------------------------------------------------------------------------------------------------------


def write(folder: Path, job: Job, ranks: list[list[Step]], step: Step | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    for name, records in {"steps.jsonl": ranks[0], "ranks.jsonl": lines(ranks) if len(ranks) > 1 else []}.items():
        if records:
            (folder / name).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    if step:
        (folder / "predicted.json").write_bytes(msgspec.json.encode(step))
    return folder


def laid(folder: Path) -> Laid:
    record = read_record(folder)
    assert record.predicted
    return lay(record, record.predicted, read_ranks(folder, record))


def test_the_largest_excess_is_named_by_phase_and_rank(tmp_path: Path) -> None:
    job = strategy(JOB, dp=4)
    ranks = [run(seed=rank, reduce=4.6) for rank in range(4)]
    ranks[3] = run(seed=3, backward=1.3)
    found = laid(write(tmp_path, job, ranks, predicted()))
    assert found.largest is not None
    assert (found.largest.phase, found.largest.rank) == ("backward", 3)
    assert found.largest.seconds == pytest.approx(0.18, rel=0.05)
    assert verdict(found)[0].startswith("Largest excess: backward on rank 3, 18")
    assert verdict(found)[0].endswith("more than on others.")
    assert (len(found.summary.steady), found.summary.warm_up, len(found.ranks.numbers)) == (37, 3, 37)


def test_ranks_that_are_alike_are_not_named(tmp_path: Path) -> None:
    (line, *_) = verdict(
        laid(write(tmp_path, strategy(JOB, dp=2), [run(backward=1.2), run(seed=2, backward=1.2)], predicted()))
    )
    assert line.startswith("Largest excess: backward, 12")
    assert line.endswith("on no rank much more than on others.")


def test_lines_of_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, strategy(JOB, dp=4), [run(), run()], predicted())
    with pytest.raises(SpecError, match=r"ranks\.jsonl: step 1, data: of 2 ranks, and the job has 4"):
        laid(folder)


def test_of_steps_that_a_resumed_run_repeats_the_last_line_counts(tmp_path: Path) -> None:
    job = strategy(JOB, dp=2)
    folder = write(tmp_path, job, [run(20), run(20)], predicted())
    again = lines([run(20, forward=2.0), run(20, seed=1, forward=2.0)])
    with (folder / "ranks.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in again[10:]) + b'{"step": 21, "sec')
    times = laid(folder).ranks
    assert times.numbers == list(range(4, 21))
    forward = times.seconds[:, :, PHASES.index("forward")]
    assert (forward[:7] < 0.4).all()
    assert (forward[7:] > 0.5).all()


def test_what_ranks_did_in_the_warm_up_alone_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, strategy(JOB, dp=2), [run(), run()], predicted())
    (folder / "ranks.jsonl").write_bytes(msgspec.json.encode(lines([run(), run()])[1]) + b"\n")
    assert laid(folder).ranks.num_ranks == 1


def test_memory_of_the_measured_step_is_laid_beside(tmp_path: Path) -> None:
    found = laid(write(tmp_path, JOB, [run(bytes_=1.5)], predicted()))
    assert found.summary.memory.measured == pytest.approx(1.5 * sum(POOLS.values()))
    assert found.summary.memory.predicted == pytest.approx(sum(POOLS.values()))


def test_the_command_reads_a_run_as_the_trainer_writes_it(tmp_path: Path) -> None:
    """With the prediction of the very job, of which reduce takes ten times as long."""
    job = load_job(write_job(tmp_path))
    step = predict(job)
    slow = {**step.seconds, "reduce": step.seconds["reduce"] + 0.5 * step.total_seconds}
    steps = [replace(step, source="measured", number=n, seconds=slow, causes={}) for n in range(1, 9)]
    folder = write(tmp_path / "run", job, [steps], None)
    for prediction, words in ((None, "predicted anew"), (step, "predicted.json")):
        write(folder, job, [steps], prediction)
        result = greylag_here(tmp_path, "compare", folder)
        assert (result.returncode, result.stderr) == (0, "")
        told = " ".join(result.stdout.split())
        assert words in told
        assert "Largest excess: reduce on rank 0" in told
        assert "- cluster.node: a slow link, or a rank that others wait for" in told
        assert "rank 0, the only one measured here" in told
    write(folder, job, [steps], replace(step, seconds=slow))
    assert "predicted anew" in greylag_here(tmp_path, "compare", folder, "--fresh").stdout
    assert "No phase takes longer" in greylag_here(tmp_path, "compare", folder).stdout


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "compare", tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
