"""The page and the trace of a prediction: offline, escaped, whole, small for a long pipeline, and in nobody's place."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from commands import environment, greylag_here, write_job
from greylag.report.account import account
from greylag.report.assumption import OWN, assumptions, comments, limits
from greylag.report.picture import ends, whole_step
from greylag.report.prediction import render_prediction
from greylag.sim import predict
from greylag.sim.memory import CONTEXT, FRAGMENTATION, memory
from greylag.sim.pipeline import pipeline
from greylag.spec import Job, Step, load_job
from greylag.spec.cluster import Calibration, Efficiency, GemmPoint

ROOT = Path(__file__).parents[2]
DEEPSEEK = ROOT / "jobs" / "deepseek-v3_h800_pretrain.toml"
PLAIN = {"strategy.schedule": "1f1b", "strategy.recompute": "none", "strategy.recompute_modules": "[]",
         "strategy.overlap": '["dp"]', "precision": "fp8-block128"}  # fmt: skip
"""DeepSeek-V3's job in its plainest form: it has a pipeline to draw, and does not fit."""
SMALL = ("model=llama-3-8b", "strategy.ep=1", "global_batch=4096", "software=megatron-core-2025")
CASES = {
    "1f1b": (),
    "zb-v": ("strategy.schedule=zb-v", "strategy.vp=2"),
    "dualpipe": ("strategy.schedule=dualpipe",),
    "interleaved": ("strategy.schedule=interleaved", "strategy.vp=2"),
    "no pipeline": ("strategy.pp=1",),
}


def plain(*overrides: str) -> list[str]:
    """The overrides, and those of PLAIN that they leave."""
    given = dict(o.split("=", 1) for o in overrides)
    return [f"{key}={value}" for key, value in (PLAIN | given).items()]


def job_of(*overrides: str) -> Job:
    job = load_job(DEEPSEEK, plain(*overrides))
    assert not job.problems()
    return job


def page(job: Job, ranks: Sequence[int] = ()) -> str:
    step = predict(job)
    held = account(job, step.bytes, memory(job).stages, FRAGMENTATION, CONTEXT)
    return render_prediction(job, step, held, pipeline(job, step).timeline, ranks=ranks)


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_whole_and_asks_nothing_of_the_network(case: str) -> None:
    html = page(job_of(*(SMALL if case == "no pipeline" else ()), *CASES[case]))
    assert not re.search(r"<(script|link|iframe|img|object|base)\b|@import|url\(|src=|href=", html)
    assert "default-src 'none'" in html
    for title in ("Time by phase", "Time by cause", "Memory by component", "What this rests on"):
        assert f"<h2>{title}</h2>" in html
    assert ("<h2>Pipeline</h2>" in html) == (case != "no pipeline")
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        root = ElementTree.fromstring(svg)
        wide, tall = (float(x) for x in root.attrib["viewBox"].split()[2:])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
            assert w >= 0
            assert -0.1 <= x <= x + w <= wide + 0.1
            assert 0 <= y <= y + h <= tall
    assert len(html) < 6e5


def test_every_action_is_drawn_once_and_its_ends_with_numbers() -> None:
    timeline = pipeline(job_of()).timeline
    whole = whole_step(timeline, range(16))
    assert whole.count("M") == sum(len(row) for row in timeline.actions)
    drawn = ends(timeline, [0, 15])
    assert "F of stage 0, micro-batch 0:" in drawn
    assert "B of stage 0, micro-batch 119:" in drawn
    assert "micro-batch 60:" not in drawn
    assert ">rank 15</text>" in drawn
    assert ">rank 1</text>" not in drawn


def test_a_name_is_escaped() -> None:
    html = page(job_of("name=a<script>alert(1)<b>"))
    assert "<script" not in html
    assert "a&lt;script&gt;alert(1)&lt;b&gt;" in html


def test_ranks_that_are_asked_for_are_drawn() -> None:
    html = page(job_of(), ranks=[0, 15])
    assert "Drawn: 2 of 16 ranks" in html
    assert ">rank 7</text>" not in html


def test_memory_is_laid_against_the_device() -> None:
    job = job_of()
    fused = memory(job)
    held = account(job, {}, fused.stages, FRAGMENTATION, CONTEXT)
    assert len(held.stages) == 16
    assert held.fullest.total == pytest.approx(float(fused.total))
    assert held.needed == pytest.approx(float(fused.reserved) + CONTEXT)
    assert (held.excess <= 0) == bool(fused.fits(job.cluster.device))
    assert "does not fit" in page(job)
    assert "does not fit" not in page(job_of("strategy.recompute=full"))


# --- what it rests on ------------------------------------------------------------------------------------------------


def test_constants_carry_the_source_of_their_preset_or_are_the_job_files() -> None:
    groups = {group.title: group for group in assumptions(job_of())}
    assert "arXiv 2505.09343" in groups["NVIDIA H800"].source
    assert "ConnectX-7" in groups["Link between nodes"].source
    assert "arXiv 2412.19437" in groups["Framework: hai-llm"].source
    changed = {g.title: g for g in assumptions(job_of("cluster.network.gb_per_s=25", "software.grouped=0.9"))}
    assert changed["Link between nodes"].source == OWN
    assert changed["Framework: hai-llm (changed)"].source == OWN
    assert "arXiv 2505.09343" in changed["Link inside a node"].source


def test_every_constant_of_the_device_is_told_once() -> None:
    for overrides in ((), ("cluster.device.efficiency.gemm=0.6",), ("cluster=b200-8x256",)):
        told = [
            c for g in assumptions(job_of(*overrides)) if g.title.startswith("What the device") for c in g.constants
        ]
        assert len(told) == len(Efficiency.__struct_fields__)
    sources = {g.source for g in assumptions(job_of("cluster.device.efficiency.gemm=0.6"))}
    assert OWN in sources


def test_what_is_extrapolated_is_said() -> None:
    step = replace(predict(job_of()), remarks=("extrapolates: some",))
    assert "Extrapolates: some." in limits(job_of(), step)
    assert any("equal loads" in said for said in limits(job_of(), step))
    assert not any("equal loads" in said for said in limits(job_of(*SMALL), step))
    sizes = [GemmPoint(m=size, n=size, k=size, seconds=1.0) for size in (64, 1024)]
    calibration = Calibration(device="x", created="x", num_ranks=2, torch="x", gemm=sizes, ops={}, collectives={})
    said = limits(load_job(ROOT / "jobs" / "first_flight.toml", ["model.ffn_hidden_size=2048"]), step, calibration)
    assert any("with n up to 4,096 lie beyond the calibration, which went up to 1,024" in one for one in said)


def test_comments_belong_to_the_table_below_them() -> None:
    found = comments("clusters", "h800")
    assert found[""].startswith("Node size: 8 GPUs")
    assert "SMs" in found["device"]
    assert "NVLink" in found["node"]
    assert "NVLink reduced" not in found["network"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_phases_causes_and_components(tmp_path: Path) -> None:
    result = greylag_here(tmp_path, "simulate", DEEPSEEK, *plain(), COLUMNS="100")
    assert result.returncode == 0
    for word in ("backward", "spent on", "gemm", "bubble", "gradients", "moments", "fragmentation", "does not fit"):
        assert word in result.stdout
    told = " ".join(result.stdout.split())
    assert re.search(r"The peak comes at: \w", told)
    assert re.search(r"query, key, value [\d.]+ GiB.* makes it fit", told)
    fits = greylag_here(tmp_path, "simulate", DEEPSEEK, *plain("strategy.recompute=full")).stdout
    assert "does not fit" not in fits
    assert "makes it fit" not in fits


def test_trace_and_page_are_written_and_left_alone(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for name in ("t.json", "t.json.gz"):
        result = greylag_here(tmp_path, "simulate", job, "--trace", name, "--out", f"{name}.html")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.split()[-2:] == [name, f"{name}.html"]
    plain, packed = (tmp_path / "t.json").read_bytes(), (tmp_path / "t.json.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    counter = [e["args"]["bytes"] for e in json.loads(plain)["traceEvents"] if e["ph"] == "C"]
    assert max(counter) > counter[-1] > 0
    again = greylag_here(tmp_path, "simulate", job, "--trace", "t.json")
    assert again.returncode == 2
    assert "t.json: exists already and is left as it is" in again.stderr
    assert again.stdout == ""
    (tmp_path / "t.json").write_text("old")
    assert greylag_here(tmp_path, "simulate", job, "--trace", "t.json", "--force").returncode == 0
    assert (tmp_path / "t.json").read_bytes() == plain
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", "0"), "--ranks: nothing is written"),
        (("--force",), "--force: nothing is written"),
        (("--trace", "t.txt"), "t.txt: ends in none of .json, .json.gz"),
        (("--out", "t.pdf"), "t.pdf: ends in none of .html"),
        (("--trace", "none/t.json"), "its folder is not there"),
        (("--trace", "t.json", "--ranks", "1"), "--ranks: 1 is no place in a pipeline of 1; they are 0 to 0"),
        (("--trace", "t.json", "--ranks", "a"), "--ranks: 'a' is no number"),
        (("--trace", "t.json", "--ranks", "1-0"), "--ranks: '1-0' names none"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = greylag_here(tmp_path, "simulate", write_job(tmp_path), *options)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert said in result.stderr
    assert not list(tmp_path.glob("t.*"))


# --- the notebook ----------------------------------------------------------------------------------------------------


def test_three_lines_give_a_table() -> None:
    code = (
        "import sys, greylag\nassert not {'numpy', 'msgspec'} & set(sys.modules)\n"
        "from greylag import load_job, predict\n"
        f"step = predict(load_job({str(ROOT / 'jobs' / 'llama-3-8b_h100_pretrain.toml')!r}))\n"
        "print(repr(step))\nprint(step._repr_html_())\nassert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    table = result.stdout.split("<table>")[0].splitlines()
    assert re.fullmatch(r"predicted step +[\d.]+ m?s", table[0])
    assert {row.split()[0] for row in table[1:]} >= {"forward", "backward", "gemm", "tokens", "memory", "activations"}
    ElementTree.fromstring("<table>" + result.stdout.split("<table>")[1])


def test_a_step_of_nothing_prints_too() -> None:
    empty = Step(source="measured", number=7, seconds={}, tokens=0, flops=0.0)
    assert str(empty).startswith("measured step 7")
