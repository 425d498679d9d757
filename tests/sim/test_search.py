"""The search: its rules are those of `Job.problems`, its figures those of one prediction, its advice works."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from greylag.interop.jobfile import to_toml
from greylag.sim import predict
from greylag.sim.candidates import ALLOW, Recompute, pinned, plans, points, recomputes, runs, space_of
from greylag.sim.remedies import remedies
from greylag.sim.search import Found, job_table, search
from greylag.sim.sweep import Group, Plan, Sweep, fits, sweep
from greylag.spec import Job, SpecError, load_job
from greylag.spec.load import job_from, load_preset

ROOT = Path(__file__).parents[2]
DENSE = {"model": "llama-3-8b", "cluster": "h100-8x4", "global_batch": 96}
EXPERTS = {"model": "mixtral-8x7b", "cluster": "h100-8x6", "global_batch": 96}
LATENT = {"model": "deepseek-v3", "cluster": "h800-8x40", "global_batch": 1280, "precision": "fp8-deepseek"}
KINDS = (DENSE, EXPERTS, LATENT)


def job_of(table: dict[str, Any], **changes: Any) -> Job:
    base = {"precision": "bf16", "sequence": 4096, "software": "megatron-core-2025"}
    return job_from({**base, **table, **changes}, name="searched")


def swept(table: dict[str, Any], *fix: str, limit: int | None = None, **changes: Any) -> tuple[Job, Sweep]:
    job = job_of(table, **changes)
    return job, sweep(job, space_of(job, pinned(fix)), [job.precision], limit)


@pytest.fixture(scope="module", params=KINDS, ids=lambda table: table["model"])
def case(request: pytest.FixtureRequest) -> tuple[Job, Sweep]:
    return swept(request.param, limit=20_000)


def sample(found: Sweep, count: int) -> list[int]:
    return np.random.default_rng(0).choice(len(found.seconds), count, replace=False).tolist()


def test_every_candidate_can_run(case: tuple[Job, Sweep]) -> None:
    job, found = case
    assert len(found.seconds) > 300
    for row in sample(found, 100):
        assert not found.job(job, row).problems(), found.job(job, row)


def test_the_figures_are_those_of_one_prediction(case: tuple[Job, Sweep]) -> None:
    job, found = case
    for row in sample(found, 40):
        step = predict(found.job(job, row))
        assert found.seconds[row] == pytest.approx(step.total_seconds, rel=1e-9)
        assert found.bytes[row] == pytest.approx(step.total_bytes, rel=1e-9)
        assert bool(fits(job, step.total_bytes))


@pytest.mark.parametrize("table", KINDS, ids=lambda table: table["model"])
def test_points_left_out_have_problems_and_others_have_none(table: dict[str, Any]) -> None:
    """The raw grid, with values that divide nothing among them."""
    job = job_of(table)
    degrees = {"tp": (1, 2, 3, 8, 16), "cp": (1, 2, 3, 5), "ep": (1, 2, 3, 8), "etp": (1, 2, 5), "zero": (0, 1, 3)}
    if not job.model.moe:
        degrees |= {"ep": (1,), "etp": (1,)}
    rows = list(itertools.product(*degrees.values(), (1, 2, 7), (1, 2, 4, 5), (1, 2)))
    chosen = [rows[i] for i in np.random.default_rng(1).choice(len(rows), min(len(rows), 500), replace=False)]
    tp, cp, ep, etp, zero, batch, pp, replicas = np.array(chosen).T
    dp = job.cluster.num_devices // (tp * cp * pp)
    base = {"tp": tp, "cp": cp, "zero": zero, "micro_batch": batch, "pp": pp, "dp": dp}
    base |= {"ep": ep, "etp": etp} if job.model.moe else {}
    sound = np.array([
        bool(runs(replace(job, strategy=replace(job.strategy, replicas=int(replicas[n]),
                                                **{k: np.array([v[n]]) for k, v in base.items()})))[0])
        for n in range(len(chosen))
    ])  # fmt: skip
    assert 0 < sound.sum() < len(sound)
    for n, ok in enumerate(sound):
        values = {name: int(column[n]) for name, column in base.items()}
        one = replace(job, strategy=replace(job.strategy, replicas=int(replicas[n]), **values))
        assert ok == (not one.problems()), (one.strategy, one.problems())


def test_plans_left_out_have_problems_and_others_have_none() -> None:
    job = job_of(DENSE)
    fix = [f"vp={list(range(1, 9))}", "stage_layers=[[8, 8, 8, 8], [9, 8, 8, 7], [9, 8, 8, 8], [16, 16], []]"]
    space = space_of(job, pinned(fix), ALLOW)
    for pp in (2, 3, 4, 32):
        sound, wrong = plans(job, space, pp)
        alone = 0
        every = itertools.product(space.schedule, space.vp or (), space.stage_layers or ())
        for schedule, vp, layers in every:
            strategy = replace(job.strategy, pp=pp, dp=1, vp=vp, schedule=schedule, stage_layers=layers)
            cluster = replace(job.cluster, devices_per_node=1, num_nodes=pp)
            faults = replace(job, strategy=strategy, cluster=cluster).problems()
            assert (Plan(schedule, vp, layers) in sound) == (not faults), (strategy, faults)
            alone += bool(faults)
        assert alone == wrong
        assert sound or pp == 3


def test_every_way_to_compute_again_can_run() -> None:
    for table in KINDS:
        job = job_of(table)
        for kind, modules in recomputes(job):
            strategy = replace(job.strategy, recompute=kind, recompute_modules=modules)
            assert not replace(job, strategy=strategy).problems()


def test_nothing_of_the_space_is_lost() -> None:
    """Against a search by hand with the scalar predictor."""
    job = job_of(DENSE)
    fix = ["tp=[1, 2, 4]", "cp=1", "pp=[1, 2]", "micro_batch=[1, 2]", "zero=[1, 3]", 'recompute=["none", "full"]']
    found = sweep(job, space_of(job, pinned([*fix, "schedule=1f1b", "stage_layers=[]"])), [job.precision])
    by_hand = []
    for tp, pp, batch, zero, again in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 3), ("none", "full")):
        dp = 32 // tp // pp
        changes = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": batch, "zero": zero, "recompute": again}
        one = replace(job, strategy=replace(job.strategy, **changes))
        assert not one.problems() or 96 % (dp * batch)
        if not one.problems() and fits(job, predict(one).total_bytes):
            by_hand.append(predict(one).total_seconds)
    assert sorted(found.seconds) == pytest.approx(sorted(by_hand))


def test_counts_add_up_and_the_order_is_always_the_same() -> None:
    _, once = swept(DENSE, limit=5000)
    _, again = swept(DENSE, limit=5000)
    assert np.array_equal(once.seconds, again.seconds)
    assert np.array_equal(once.columns, again.columns)
    job, whole = swept(DENSE)
    assert once.num_tried + once.num_left_out == whole.num_tried
    assert once.num_tried <= 5000 + len(space_of(job, {}).pp) * 1000
    assert whole.num_unfit == whole.num_tried - len(whole.seconds) > 0


@pytest.fixture(scope="module")
def found() -> Found:
    return search(job_of(EXPERTS, strategy={"overlap": ["dp", "pp"]}), limit=30_000, top=4)


def test_the_winner_is_the_fastest_and_the_front_is_sound(found: Found) -> None:
    assert found.best[0].seconds == found.front[0].seconds == min(c.seconds for c in found.front)
    for faster, leaner in itertools.pairwise(found.front):
        assert faster.seconds <= leaner.seconds
        assert faster.bytes > leaner.bytes
    assert [c.seconds for c in found.best] == sorted(c.seconds for c in found.best)
    shapes = {(s.pp, s.tp, s.cp, s.ep, s.etp, s.schedule, s.vp) for s in (c.job.strategy for c in found.best)}
    assert len(shapes) == len(found.best) == 4


def test_runners_up_lose_by_their_causes(found: Found) -> None:
    winner = found.best[0]
    assert winner.loses == {}
    for candidate in found.best[1:]:
        if "dualpipe" not in {candidate.job.strategy.schedule, winner.job.strategy.schedule}:
            more = candidate.seconds - winner.seconds
            assert sum(candidate.loses.values()) == pytest.approx(more, abs=1e-3 * winner.seconds)


def test_each_choice_is_the_best_other_value(found: Found) -> None:
    assert {"tp", "pp", "schedule", "recompute", "zero"} <= {choice.axis for choice in found.choices}
    for choice in found.choices:
        assert choice.seconds >= 0
        assert choice.value != choice.other
    tp = next(choice for choice in found.choices if choice.axis == "tp")
    rows = [min(s for s in row if s is not None) for row in found.heat.seconds if any(row)]
    others = [s for n, s in zip(found.heat.tp, rows, strict=False) if n != tp.value]
    assert tp.seconds == pytest.approx(min(others) - found.best[0].seconds)


def test_heat_holds_the_winner(found: Found) -> None:
    s = found.best[0].job.strategy
    cell = found.heat.seconds[found.heat.tp.index(s.tp)][found.heat.pp.index(s.pp)]
    assert cell == found.best[0].seconds
    assert all(cell is None or cell >= found.best[0].seconds for row in found.heat.seconds for cell in row)


def test_the_report_names_what_it_found(found: Found) -> None:
    text = str(found)
    assert f"{found.num_tried:,} strategies tried" in text
    assert "rather than" in text
    assert text.count("loses") == 3


def test_precisions_are_tried_beside_each_other() -> None:
    recipes = [load_preset("precision", name) for name in ("bf16", "fp8-tensor-delayed")]
    found = search(job_of(DENSE), fix=["pp=1"], precisions=recipes)
    assert "precision" in {choice.axis for choice in found.choices}
    assert found.best[0].job.precision.name == "fp8-tensor-delayed"


def test_the_winner_is_a_job_file(found: Found, tmp_path: Path) -> None:
    winner = found.best[0].job
    file = tmp_path / "searched.toml"
    file.write_text(to_toml(job_table(winner)))
    assert load_job(file) == winner
    assert 'model = "mixtral-8x7b"' in file.read_text()


def test_a_changed_model_is_written_out(tmp_path: Path) -> None:
    job = job_of({**DENSE, "model": {"preset": "llama-3-8b", "num_layers": 24}}, strategy={"tp": 2})
    file = tmp_path / "searched.toml"
    file.write_text(to_toml(job_table(job)))
    assert load_job(file) == job


TOO_LARGE = {"model": "llama-3-70b", "cluster": "h100-8x8", "global_batch": 128, "strategy": {"tp": 4, "pp": 2}}


def test_a_job_that_fits_needs_no_remedy() -> None:
    assert remedies(job_of(DENSE, strategy={"tp": 4, "zero": 3})) == []


def test_remedies_name_the_part_and_changes_that_work() -> None:
    job = job_of(TOO_LARGE)
    fault, *changes = remedies(job)
    assert fault.level == "error"
    assert "stage 0 of 2" in fault.what
    assert "GiB" in fault.evidence
    assert len(changes) == 3
    for change in changes:
        words = [w.strip("'") for w in change.advice.removeprefix("set ").split(" strategy.")]
        settings = [w if w.startswith("strategy.") else f"strategy.{w}" for w in words]
        mended = apply(job, settings)
        assert not mended.problems()
        assert fits(mended, sum(predict(mended).bytes.values()))


def apply(job: Job, settings: list[str]) -> Job:
    """The job with settings as a user would give them; dp takes what is left."""
    pins = pinned([s for s in settings if "=" in s])
    values = {name: value[0] for name, value in pins.items()}
    s = replace(job.strategy, **values)
    return replace(job, strategy=replace(s, dp=job.cluster.num_devices // (s.pp * s.tp * s.cp)))


def test_the_fewest_changes_come_first() -> None:
    _, *changes = remedies(job_of(TOO_LARGE))
    counts = [change.what.count("->") + change.what.count("recompute ") for change in changes]
    assert counts == sorted(counts)


def test_too_few_devices_are_told() -> None:
    job = job_of({"model": "llama-3-405b", "cluster": "h100-8x1", "global_batch": 64})
    found = search(job)
    assert found.best == found.front == ()
    assert found.num_unfit == found.num_tried > 0
    fault, advice = found.findings
    assert fault.level == "error"
    assert "nodes" in advice.advice or "nodes" in advice.what
    assert "nothing fits" in str(found)


def test_pins_that_hide_what_fits_are_told_by_remedies() -> None:
    found = search(job_of(TOO_LARGE), fix=["zero=0", "recompute=none", "tp=2", "pp=2"])
    assert not found.best
    assert any("zero" in finding.advice for finding in found.findings)


@pytest.mark.parametrize(
    ("fix", "says"),
    [("tq=8", "no axis"), ("tp=0", "whole number"), ("tp=true", "whole number"), ("zero=4", "whole number"),
     ("schedule=1f2b", "1f1b"), ("recompute=some", "selective"), ("ep=2", "no experts"), ("stage_layers=4", "a list"),
     ("tp=[]", "whole number"), ("recompute_modules=['nrm']", "a list"), ("tp=7", "combinations")],
)  # fmt: skip
def test_pins_that_cannot_be_are_refused(fix: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        search(job_of(DENSE), fix=[fix])


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(SpecError, match="--allow magic"):
        search(job_of(DENSE), allow=["magic"])
    with pytest.raises(SpecError, match="accelerators"):
        search(job_of({**DENSE, "cluster": "local-2x1"}))
    with pytest.raises(SpecError, match="max_sequence"):
        search(job_of(DENSE, sequence=16384))


def test_pins_are_kept() -> None:
    found = search(job_of(DENSE), fix=["strategy.tp=2", "pp=[2, 4]", 'recompute_modules=["norm"]', "dp=[4]"])
    for candidate in (*found.best, *found.front):
        s = candidate.job.strategy
        assert (s.tp, s.dp, s.recompute_modules) == (2, 4, ("norm",))
        assert s.pp in (2, 4)


def test_allow_widens_the_space() -> None:
    job = job_of(DENSE)
    narrow, wide = space_of(job, {}), space_of(job, {}, ALLOW)
    assert max(narrow.tp) == 8 < max(wide.tp)
    assert set(wide.schedule) - set(narrow.schedule) == {"gpipe"}
    assert sum(len(points(job, wide, pp)) for pp in (16, 32)) > sum(len(points(job, narrow, pp)) for pp in (16, 32))


def test_greylags_own_layers_are_counted_as_predicted() -> None:
    job, found = swept(DENSE, software="greylag")
    assert len(found.seconds)
    for row in sample(found, 5):
        one = found.job(job, row)
        assert (one.strategy.tp, one.strategy.pp, one.strategy.cp) == (1, 1, 1)
        assert found.bytes[row] == pytest.approx(predict(one).total_bytes)


def test_dualpipe_needs_two_micro_batches() -> None:
    job = job_of({**DENSE, "global_batch": 16})
    group = Group(job.precision, 2, Recompute("none", ()), Plan("dualpipe", 1, ()))
    some = points(job, space_of(job, pinned(["tp=1", "cp=1", "zero=1"]), ALLOW), 2)
    assert (group.jobs(job, some).num_micro_batches >= 2).all()
    found = sweep(job, space_of(job, pinned(["schedule=dualpipe", "pp=2"]), ALLOW), [job.precision])
    assert min(found.job(job, row).num_micro_batches for row in range(len(found.seconds))) >= 2
    with pytest.raises(SpecError, match="none of the"):
        search(job, fix=["tp=1", "cp=1", "pp=2", "schedule=dualpipe", "micro_batch=1"], allow=ALLOW)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "greylag", *arguments], cwd=cwd, capture_output=True, text=True)


def test_the_command_writes_the_winner_once(tmp_path: Path) -> None:
    out = tmp_path / "winner.toml"
    arguments = ["search", "jobs/llama-3-8b_h100_pretrain.toml", "software=megatron-core-2025", "--fix", "pp=1",
                 "--out", str(out)]  # fmt: skip
    first = run(*arguments, cwd=ROOT)
    assert first.returncode == 0, first.stderr
    assert "winner:" in first.stdout
    assert not load_job(out).problems()
    again = run(*arguments, cwd=ROOT)
    assert again.returncode == 2
    assert "exists already" in again.stderr
