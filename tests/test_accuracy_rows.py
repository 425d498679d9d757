"""Published runs as Jobs: told faithfully, compared soundly, and unknown to the simulator."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

import accuracy
import rows as published
from greylag.spec.parts import num_parameters
from truth_rows import fit as fitting
from truth_rows import flops, row, score
from truth_rows.dims import dense_layers

ROOT = Path(__file__).parents[1]

ROWS = published.rows()
TOLD = [r for r in ROWS if r.job]


def of(group):
    return [r for r in TOLD if r.group == group]


# Rows that a Job says, of all but formula values. Fewer mean that a dialect was lost; raise them when one learns more.
@pytest.mark.parametrize(
    ("group", "told", "all_rows"),
    [
        ("simumax_b200", 18, 18),
        ("simumax_a100", 22, 22),
        ("megatron_bridge", 129, 183),
        ("dgxc", 240, 269),
        ("mosaic", 150, 150),
        ("torchtitan", 30, 30),
        ("megatron_papers", 38, 44),
        ("reports", 30, 31),
        ("megatron_functional", 282, 314),
        ("zero_bubble", 34, 34),
        ("moe_layer", 0, 9),
    ],
)
def test_rows_are_told(group, told, all_rows):
    assert sum(r.group == group for r in ROWS) == all_rows
    assert len(of(group)) >= told


def test_told_jobs_are_sound_and_others_say_why():
    for r in ROWS:
        assert bool(r.job) != bool(r.why_not), r.id
        assert r.generation, r.id
    for r in TOLD:
        assert not r.job.problems(), r.id
        assert r.job.strategy.world == r.job.cluster.num_devices, r.id
        gpus = r.raw["hardware"]["num_gpus"]
        assert r.group == "megatron_functional" or r.job.cluster.num_devices == gpus, r.id


def test_ids_are_unique():
    assert len({r.id for r in ROWS}) == len(ROWS)


def test_every_timed_row_has_seconds():
    untimed = {r.group for r in TOLD if r.seconds is None}
    assert untimed <= {"megatron_functional"}
    assert all(r.seconds > 0 for r in TOLD if r.seconds is not None)


def test_mpt_has_the_printed_parameters():
    for r in of("mosaic"):
        assert num_parameters(r.job.model) == r.raw["model"]["params"], r.id


def test_megatron_bridge_has_the_printed_flops():
    """Of all but GPT-OSS, whose convention the source changed and never met."""
    for r in of("megatron_bridge"):
        if r.family == "gpt-oss-120b":
            continue
        printed = r.raw["measured"]["model_tflops_per_gpu"] * 1e12 * r.raw["hardware"]["num_gpus"] * r.seconds
        counted = flops.causal(r.job.model, r.job.sequence, r.job.global_batch)
        assert counted == pytest.approx(printed, rel=0.025), r.id


def test_sc21_days_agree_with_its_flops():
    for r in of("megatron_papers"):
        days = r.raw["measured"].get("days_300B_tokens")
        if days:
            assert 300e9 / r.job.tokens * r.seconds / 86400 == pytest.approx(days, rel=0.015), r.id


def test_conventions_meet_tables_that_print_both():
    checked = 0
    for r in TOLD:
        m, t, gpus = r.raw["model"], r.raw["measured"], r.raw["hardware"]["num_gpus"]
        if r.id.startswith("megascale/t2") or (r.id.startswith("korthikanti") and "mfu_pct" in t):
            count = flops.megatron_model(m["layers"], m["hidden"], m["vocab"], r.job.sequence, r.job.global_batch)
            assert count / (t["mfu_pct"] / 100 * 312e12 * gpus) == pytest.approx(r.seconds, rel=0.015), r.id
        elif r.id.startswith("megatron-jan2021"):
            count = flops.megatron_2021(m["layers"], m["hidden"], m["vocab"], r.job.sequence, r.job.global_batch)
            assert count / (t["tflops_per_gpu"] * 1e12 * gpus) == pytest.approx(r.seconds, rel=1e-3), r.id
        else:
            continue
        checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*7|t*7mL", (7, 7)),
        ("Et*3|(tt|)*6mL", (3, 2, 2, 2, 2, 2, 2, 0)),
        ("Et|(tt|)*6tmL", (1, 2, 2, 2, 2, 2, 2, 1)),
        ("Et|(tt|)*30L", (1, *[2] * 30, 0)),
        ("Et*4|(t*4|)*14tmL", (4, *[4] * 14, 1)),
    ],
)
def test_layout_of_stages(layout, stages):
    assert row.layout_stages(layout) == stages


def test_stages_balanced_with_embedding_and_loss():
    assert row.balanced_stages(126, 128) == (0, *[1] * 126, 0)
    assert row.balanced_stages(126, 63) == ()
    assert row.balanced_stages(94, 32) == (2, *[3] * 30, 2)
    assert row.balanced_stages(61, 16) == ()


def test_dense_layers_of_a_frequency():
    assert dense_layers("([0]*3+[1]*58)") == 3
    assert dense_layers(None) == 0


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("llama31_405b", "llama-3-405b"),
        ("Llama 3.1 405B", "llama-3-405b"),
        ("llama3_70b", "llama-3-70b"),
        ("Llama 2 70B", "llama-2-70b"),
        ("GPT-3 175B", "gpt-175b"),
        ("gpt3_175b", "gpt-175b"),
        ("DeepSeek-V3", "deepseek-v3"),
        ("nemotron4_15b", "nemotron-4-15b"),
        ("GPT-3.6B", "gpt-3.6b"),
    ],
)
def test_families(spelt, name):
    assert row.family(spelt) == name


def test_unknown_release_is_told_as_its_neighbour():
    assert row.generation("nemo", "25.03") == "nemo-25.02"
    assert row.generation("nemo", "20.01") == "nemo-24.09"


def test_another_folder_is_read(tmp_path):
    """A new release, an unknown report and a row without its keys: none of them stops the others."""
    for name in ("models", "nvidia_dgxc", "large_scale_reports"):
        table = json.loads((published.TRUTH / f"{name}.json").read_text())
        if name == "nvidia_dgxc":
            table["rows"] = table["rows"][:2]
            table["rows"][0]["software"]["release_tags"] = ["v25.09"]
            del table["rows"][1]["parallel"]["pp"]
        elif name == "large_scale_reports":
            table["rows"] = table["rows"][:1]
            table["rows"][0]["id"] = "somebody/else"
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    report, first, second = published.rows(tmp_path)
    assert "no rules for 'somebody'" in report.why_not
    assert first.job
    assert first.generation == "nemo-25.05"
    assert "KeyError 'pp'" in second.why_not


def test_formula_values_are_left_out():
    assert not any("fig1-memory" in r.id for r in ROWS)


def test_the_simulator_knows_no_row():
    """No string of its code, docstrings apart, names a model, a framework or where the rows lie."""
    said = []
    for path in sorted((ROOT / "greylag" / "sim").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        said += [node.value.lower() for node in strings if id(node) not in prose]
    assert said
    names = {r.family for r in TOLD if r.group != "megatron_functional"} | {r.generation for r in ROWS}
    assert [name for name in sorted(names | {"benchmarks", "truth"}) if any(name in text for text in said)] == []


def test_errors_of():
    found = score.Errors.of([0.1, -0.2, 0.3, -0.4])
    assert (found.count, found.worst) == (4, 0.4)
    assert (found.mean, found.median, found.bias) == pytest.approx((0.25, 0.25, -0.05))
    assert found.p90 == pytest.approx(0.37)
    assert score.Errors.of([]) is None


def test_spearman():
    assert score.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert score.spearman([1, 2, 3], [3, 2, 1]) == -1
    assert score.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.948683)
    assert score.spearman([1, 1, 1], [1, 2, 3]) == 1


def test_sets_differ_in_strategy_alone():
    timed = [score.Prediction(r, None, "", 1.0) for r in TOLD if r.seconds]
    sets = score.strategy_sets(timed)
    assert len(sets) > 10
    for found in sets:
        assert len({p.row.job.strategy for p in found}) == len(found) >= score.SMALLEST_SET
        assert len({(p.row.job.global_batch, p.row.job.precision, p.row.generation) for p in found}) == 1


def test_ratios_of_schedules_are_to_1f1b():
    """A prediction that is off by one factor has them right; one that takes all schedules for alike has not."""
    timed = [r for r in of("zero_bubble") if r.seconds]
    factor = score.schedule_errors([score.Prediction(r, None, "", 2 * r.seconds) for r in timed])
    alike = score.schedule_errors([score.Prediction(r, None, "", 1.0) for r in timed])
    assert factor.count == alike.count > 20
    assert factor.worst == pytest.approx(0)
    assert alike.mean > 0.05


def toy(job):
    """Seconds of a step by two constants of the device and one of the software."""
    device, software = job.cluster.device, job.software
    work = 6e9 * job.tokens / job.strategy.world / (device.peak("bf16") * device.efficiency.gemm) / software.speed
    return work * (1 + job.sequence / 1e5 / device.efficiency.attention)


def test_fit_finds_the_constants_that_made_the_times():
    device = of("mosaic")[0].job.cluster.device
    true = replace(device, efficiency=replace(device.efficiency, gemm=0.95, attention=0.35))
    some = [r for r in of("mosaic") if r.job.cluster.device == device]
    made = [
        dataclasses.replace(r, seconds=toy(replace(r.job, cluster=replace(r.job.cluster, device=true)))) for r in some
    ]
    before = max(abs(toy(r.job) / r.seconds - 1) for r in made)
    best = fitting.fit(made, toy)
    after = {r.id: toy(best.job(r)) / r.seconds - 1 for r in made}
    assert before > 0.15
    assert max(map(abs, after.values())) < 0.01
    apart = fitting.left_out(made, best)
    assert max(abs(apart[r.id] / r.seconds - 1) for r in made) < 0.02
    assert "[device.efficiency]" in fitting.as_toml(best)


def test_model_left_out_does_not_teach():
    """A model whose times are all wrong is predicted by the others, which are right."""
    some = [r for r in of("mosaic") if r.job.cluster.device == of("mosaic")[0].job.cluster.device]
    odd = some[0].family
    made = [dataclasses.replace(r, seconds=toy(r.job) * (3 if r.family == odd else 1)) for r in some]
    best = fitting.fit(made, toy)
    apart = fitting.left_out(made, best)
    assert all(apart[r.id] == pytest.approx(toy(r.job), rel=0.02) for r in made if r.family == odd)


def test_accuracy_prints_and_writes(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    accuracy.main(["--group", "zero_bubble", "--group", "moe_layer", "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == sum(r.group in ("zero_bubble", "moe_layer") for r in ROWS)
    for line in lines:
        assert bool(line["why_not"]) == (line["predicted_seconds"] is None)
        if line["time_error"] is not None:
            assert line["time_error"] == pytest.approx(line["predicted_seconds"] / line["measured_seconds"] - 1)
    assert "not told (moe_layer)" in capsys.readouterr().out


def test_no_rows_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no rows"):
        accuracy.main(["--group", "nobody"])


def test_recipe_is_that_of_the_release():
    """DeepSeek-V3 on GB200: whole-iteration graphs and experts' overlap came with 26.06."""
    by_release = {
        r.raw["release"]: r.job for r in of("megatron_bridge") if r.id.split("/")[2:4] == ["DeepSeekV3", "DGX-GB200"]
    }
    older, newer = by_release["NeMo 26.04"], by_release["NeMo 26.06"]
    assert older.software.graphs
    assert older.strategy.recompute_modules == ("mlp",)
    assert "ep" not in older.strategy.overlap
    assert newer.strategy.recompute_modules == ("mla_up",)
    assert "ep" in newer.strategy.overlap
    assert older.strategy.stage_layers == (*[4] * 15, 1)
