"""Advice from telemetry that is known to the last digit, and TOML that a job takes."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from commands import greylag_here
from greylag.report.advise import FAMILIES, Advice, advise
from greylag.report.proposal import patterns, propose, with_precision
from greylag.spec import Job, load_job
from greylag.spec.parts import parts
from greylag.spec.precision import GEMMS
from greylag.spec.telemetry import CANDIDATES, OperandHealth, Rounding, Telemetry
from jobs import SMALL_MOE, tiny_job

FINE, COARSE = Rounding(0.026, 0.027, 0.0, 0.0), Rounding(0.053, 0.053, 0.0, 0.0)
Change = Callable[[str, str, str, str], Rounding | None]
"""(layer, role, candidate, direction) to what it does there, if not the usual."""


def telemetry(job: Job, change: Change = lambda *_: None, outliers: tuple = ()) -> list[Telemetry]:
    """Two steps in which every E4M3 candidate errs by 2.6% and E5M2 by 5.3%, but for `change`."""
    operands = []
    for part in parts(job.model):
        layer = part.name.removesuffix(".weight")
        for role in ("input", "weight", "grad") if part.is_gemm else ():
            found: dict[str, dict[str, Rounding]] = {}
            for direction in ("along_rows", "along_columns"):
                usual = {str(c): COARSE if c.format == "e5m2" else FINE for c in CANDIDATES}
                found[direction] = {name: change(layer, role, name, direction) or r for name, r in usual.items()}
            some = outliers if layer.endswith("w_down") and role == "input" else ()
            operands.append(
                OperandHealth(
                    layer=layer, role=role, shape=(64, 128), sampled_rows=64, own="float32", amax=1.0,
                    outliers=some, num_outliers=len(some), history=8, **found,
                )
            )  # fmt: skip
    return [Telemetry(step=step, operands=tuple(operands)) for step in (100, 200)]


@pytest.fixture(scope="module")
def job() -> Job:
    return tiny_job({**SMALL_MOE, "num_layers": 4}, "fp8-block128", precision_table={"swiglu_input": "e4m3"})


def families(advice: list[Advice]) -> dict[str, set[str]]:
    return {one.layer: {choice.family for choice in one.gemms.values()} for one in advice}


def sound(job: Job, text: str) -> Job:
    changed = with_precision(job, text)
    assert not changed.problems(), changed.problems()
    return changed


def test_harmless_tensors_take_the_cheapest(job: Job) -> None:
    advice = advise(job, telemetry(job), 0.03)
    assert set.union(*families(advice).values()) == {FAMILIES[0].name}
    text = propose(job, advice)
    assert text.count("[[precision.overrides]]") == 0
    precision = sound(job, text).precision
    assert (precision.grad.format, precision.grad.timing) == ("e4m3", "delayed")
    assert precision.high == "fp32"
    assert precision.swiglu_input == "e4m3"  # what is not decided here is kept


def spoilt(suffix: str, role: str, *words: str, by: Rounding) -> Change:
    """`by` where the layer ends so and the candidate has one of the words."""

    def change(layer: str, own: str, candidate: str, direction: str) -> Rounding | None:
        return by if layer.endswith(suffix) and own == role and any(w in candidate for w in words) else None

    return change


def test_an_outlier_channel_moves_a_layer_to_blocks_and_says_why(job: Job) -> None:
    flushing = Rounding(0.025, 0.4, 0.031, 0.0)
    known = telemetry(job, spoilt("w_down", "input", "tensor", "row", by=flushing), outliers=((17, 900.0),))
    advice = advise(job, known, 0.03)
    for one in advice:
        blocks = one.layer.endswith("w_down")
        assert families([one])[one.layer] == {"1x128 blocks" if blocks else FAMILIES[0].name}
    why = next(a for a in advice if a.layer == "layers.0.ffn.w_down").gemms["forward"].why
    assert "per row: input flushes 3.1% in E4M3 (channel 17 is 900x the median)" in why
    text = propose(job, advice)
    overrides = tomllib.loads(text)["precision"]["overrides"]
    assert overrides == [{"match": "*.w_down", "recipe": "fp8-block128"}]
    changed = sound(job, text)
    assert changed.precision.gemms("layers.2.ffn.experts.w_down", 4).forward.input.granularity == "1x128"
    assert changed.precision.gemms("layers.2.attention.wo", 4).forward.input.granularity == "tensor"


def test_smooth_swiglu_is_named_where_it_would_do(job: Job) -> None:
    flushing = Rounding(0.025, 0.4, 0.031, 0.0)
    known = telemetry(job, spoilt("w_down", "input", "tensor", by=flushing), outliers=((17, 900.0),))
    notes = {one.layer: one.note for one in advise(job, known, 0.03)}
    assert "Smooth-SwiGLU would let a per-tensor scale do" in notes["layers.0.ffn.w_down"]
    assert not notes["layers.0.ffn.w_gate_up"]
    smooth = replace(job, precision=replace(job.precision, smooth_swiglu=True))
    assert not any(one.note for one in advise(smooth, known, 0.03))


def test_flushed_numbers_that_no_channel_misses_do_not_count(job: Job) -> None:
    harmless = Rounding(0.026, 0.027, 0.22, 0.0)
    advice = advise(job, telemetry(job, spoilt("", "grad", "tensor", by=harmless)), 0.03)
    assert set.union(*families(advice).values()) == {FAMILIES[0].name}


def test_saturation_rules_a_delayed_scale_out(job: Job) -> None:
    beyond = Rounding(0.026, 0.027, 0.0, 0.004)
    advice = advise(job, telemetry(job, spoilt("wo", "input", "delayed", by=beyond)), 0.03)
    assert {name for name, chosen in families(advice).items() if chosen == {"per-tensor"}} == {
        f"layers.{i}.attention.wo" for i in range(4)
    }
    assert 'match = "*.wo"' in propose(job, advice)


def test_a_wider_budget_lets_e5m2_in(job: Job) -> None:
    known = telemetry(job, spoilt("", "grad", "e4m3 tensor", by=Rounding(0.2, 0.3, 0.1, 0.0)))
    assert families(advise(job, known, 0.03))["layers.0.attention.wo"] == {"per row"}
    advice = advise(job, known, 0.06)
    assert set.union(*families(advice).values()) == {FAMILIES[0].name}
    text = propose(job, advice)
    assert 'preset = "fp8-tensor-delayed"' in text
    assert sound(job, text).precision.grad.format == "e5m2"


def test_what_fits_nowhere_stays_high(job: Job) -> None:
    hopeless = spoilt("layers.1.attention.wkv_a", "grad", "e", by=Rounding(0.5, 0.5, 0.5, 0.0))
    advice = advise(job, telemetry(job, hopeless), 0.03)
    chosen = next(one for one in advice if one.layer == "layers.1.attention.wkv_a").gemms
    assert chosen["input-gradient"].recipe is None
    assert chosen["weight-gradient"].recipe is None
    assert chosen["forward"].family == FAMILIES[0].name
    assert "MX blocks of 32: grad errs by 50.00%" in chosen["input-gradient"].why
    gemms = sound(job, propose(job, advice)).precision.gemms("layers.1.attention.wkv_a", 4)
    assert [gemms.of(gemm).is_fp8 for gemm in GEMMS] == [True, False, False]


def test_nothing_fits_at_all(job: Job) -> None:
    advice = advise(job, telemetry(job, lambda *_: Rounding(0.5, 0.5, 0.5, 0.0)), 0.03)
    assert not sound(job, propose(job, advice)).precision.is_fp8


def test_gemms_of_a_layer_share_a_recipe(job: Job) -> None:
    """The weight gradient needs blocks; the forward GEMM goes along, for its input is quantized once."""

    def change(layer: str, role: str, candidate: str, direction: str) -> Rounding | None:
        down = direction == "along_columns" and role == "grad"
        return Rounding(0.2, 0.2, 0.0, 0.0) if "tensor" in candidate or ("row" in candidate and down) else None

    advice = advise(job, telemetry(job, lambda *a: change(*a) if a[1] == "grad" else None), 0.03)
    assert set.union(*families(advice).values()) == {"1x128 blocks"}
    assert "per-tensor delayed would do here, but in" in advice[0].gemms["forward"].why


def test_layers_of_a_kind_share_a_recipe_unless_each_is_asked_for(job: Job) -> None:
    known = telemetry(job, spoilt("layers.3.attention.wo", "input", "tensor", by=Rounding(0.05, 0.05, 0.0, 0.0)))
    wo = {f"layers.{i}.attention.wo" for i in range(4)}
    advice = advise(job, known, 0.03)
    assert {one.layer for one in advice if families([one])[one.layer] == {"per row"}} == wo
    text = propose(job, advice)
    assert [o["match"] for o in tomllib.loads(text)["precision"]["overrides"]] == ["*.wo"]
    alone = advise(job, known, 0.03, each_layer=True)
    assert [one.layer for one in alone if families([one])[one.layer] == {"per row"}] == ["layers.3.attention.wo"]
    assert 'match = "layers.3.attention.wo"' in propose(job, alone)


def test_one_bad_step_decides(job: Job) -> None:
    first, last = telemetry(job)
    bad = telemetry(job, spoilt("w_gate_up", "input", "tensor", by=Rounding(0.04, 0.04, 0.0, 0.0)))[0]
    assert families(advise(job, [first, last], 0.03)) != families(advise(job, [bad, last], 0.03))


def test_patterns_fit_what_they_shall_and_nothing_else(job: Job) -> None:
    every = [part.name.removesuffix(".weight") for part in parts(job.model) if part.is_gemm]
    assert patterns([n for n in every if n.startswith("layers.0.")], every) == ["layers.0.*"]
    assert patterns([n for n in every if n.endswith("w_down")], every) == ["*.w_down"]
    assert patterns(["layers.1.attention.wo"], every) == ["layers.1.attention.wo"]
    assert patterns(every, every) == ["*"]
    experts = patterns([n for n in every if "experts" in n], every)
    assert sorted(experts) == ["*.experts.w_down", "*.experts.w_gate_up"]


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Path:
    """A run folder with a job and two measured steps; telemetry's last line is torn."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    known = telemetry(job, spoilt("w_down", "input", "tensor", by=Rounding(0.05, 0.4, 0.031, 0.0)))
    (folder / "telemetry.jsonl").write_bytes(b"".join(msgspec.json.encode(t) + b"\n" for t in known) + b'{"step": 3')
    return folder


def test_the_command_overwrites_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precision.toml").write_text("mine")
    result = greylag_here(tmp_path, "advise", run, "--out", "precision.toml")
    assert (result.returncode, result.stdout) == (2, "")
    assert "precision.toml: exists already" in result.stderr
    assert (tmp_path / "precision.toml").read_text() == "mine"


def test_lines_that_cannot_be_read_are_told(run: Path, tmp_path: Path) -> None:
    file = run / "telemetry.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([whole[0], b'{"step": 150, "opera\n', whole[1]]))
    result = greylag_here(tmp_path, "advise", run)
    assert result.returncode == 0
    assert "telemetry.jsonl: 1 of 3 lines cannot be read and are left out" in result.stderr
    assert "2 steps, 100 to 200" in result.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "holds no whole line"), (b'{"step": 5, "operands": []}\n', "no layer of"), (b"{}\n{}\n", "no line is a")],
    ids=["empty", "no rows", "something else"],
)
def test_telemetry_that_says_nothing(run: Path, tmp_path: Path, content: bytes, said: str) -> None:
    (run / "telemetry.jsonl").write_bytes(content)
    result = greylag_here(tmp_path, "advise", run)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr


def test_the_command_writes_what_a_job_file_takes(run: Path, tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "advise", run, "--out", "precision.toml", COLUMNS="200")
    assert result.returncode == 0, result.stderr
    assert "input errs by 5.00% in E4M3" in " ".join(result.stdout.split())
    written = (tmp_path / "precision.toml").read_text()
    model = '[model]\npreset = "deepseek-v3-tiny"\nnum_layers = 4\n'
    rest = 'cluster = "local-1x1"\nsequence = 64\nglobal_batch = 4\n'
    (tmp_path / "job.toml").write_text(rest + model + written)
    loaded = load_job(tmp_path / "job.toml")
    assert not loaded.problems()
    assert loaded.precision.gemms("layers.0.ffn.w_down", 4).forward.name == "fp8-row"
    printed = greylag_here(tmp_path, "advise", run)
    assert written in printed.stdout


@pytest.mark.parametrize(("content", "said"), [(None, "set run.telemetry_every"), (b"{", "holds no whole line")])
def test_a_folder_without_telemetry(content: bytes | None, said: str, job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    if content is not None:
        (tmp_path / "telemetry.jsonl").write_bytes(content)
    result = greylag_here(tmp_path, "advise", tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
