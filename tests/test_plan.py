"""`greylag plan`: what each question prints, and what it refuses in one line."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from commands import assert_one_line, greylag_here
from greylag.plan.kumar import Bits
from greylag.plan.law import law_named
from greylag.spec import Finding, Step, load_job

ROOT = Path(__file__).parent.parent
A100 = ("demand", "--params", "8e9", "--tokens", "1e12", "--utilization", "0.4", "--device", "a100")
JOB = str(ROOT / "jobs" / "llama-3-8b_h100_pretrain.toml")


def said(*arguments: str) -> str:
    result = greylag_here(ROOT, "plan", *arguments)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.split())


def test_days_of_a_known_model_at_a_stated_utilization() -> None:
    text = said("demand", "--model", "deepseek-v3", "--utilization", "0.359", "--devices", "5000", "--price", "2")
    assert "3.40e24 FLOPs" in text
    assert "│ 22 │" in text
    assert "989.5 TFLOP/s" in text


def test_days_of_a_job_at_the_predicted_utilization() -> None:
    text = said("demand", JOB, "--tokens", "15e12", "--devices", "256", "--devices", "384")
    assert "counted from dimensions" in text
    assert "nine in ten runs like it" in text
    assert text.count("NVIDIA H100") >= 2


def test_the_known_models_and_their_trend(tmp_path: Path) -> None:
    text = said("demand", "--known", "--out", str(tmp_path / "trend.html"))
    assert "GPT-3 175B" in text
    assert "times a year" in text
    assert "<html" in (tmp_path / "trend.html").read_text()


def test_a_law_answers_and_spends_a_budget(tmp_path: Path) -> None:
    assert "loss (nats per token)" in said("precision", "--params", "8e9", "--tokens", "15e12", "--weights", "8")
    assert "E4M3" in said("precision", "--law", "sun", "--params", "1e9", "--tokens", "1e11", "--format", "e4m3")
    figure = tmp_path / "f.html"
    assert "7.0 bits" in said("precision", "--budget", "1e22", "--out", str(figure))
    assert "plotly" in figure.read_text().lower()


def test_policies_side_by_side_with_simulated_runs() -> None:
    text = said("goodput", "--devices", "16384", "--trials", "50", "--days", "54", "--price", "2")
    assert all(policy in text for policy in ("restart", "spares", "eject", "skip"))
    assert "Simulated: 50 runs of 54.0 days" in text
    assert "100,000" in said("goodput", "--scale")


def test_a_prediction_by_a_fit_takes_what_the_fit_held(tmp_path: Path) -> None:
    law = law_named("kumar")
    lines = ["parameters,tokens,weights,activations,kv,loss"]
    lines += [
        f"{n},{d},{b},{b},8,{law.loss(n, d, Bits(b, b, 8.0)):.6f}"
        for n in (3e7, 1e8, 2e8) for d in (2e9, 8e9, 2e10) for b in (4.0, 6.0, 8.0, 12.0)
    ]  # fmt: skip
    (tmp_path / "r.csv").write_text("\n".join(lines))
    asked = ("--params", "1e8", "--tokens", "1e10", "--weights", "8", "--activations", "8")
    assert "Extrapolates: kv" not in said("precision", "--fit", str(tmp_path / "r.csv"), *asked)


def test_rates_of_runs_of_ones_own(tmp_path: Path) -> None:
    """16 nodes for 100 hours, stopped once by a device and taken up again."""
    job = load_job(JOB)
    hour = Step(source="measured", seconds={"forward": 3600.0}, tokens=1, flops=1.0)
    steps = [replace(hour, number=number) for number in [*range(1, 51), *range(50, 100)]]
    found = Finding(level="error", what="a GPU fell off the bus", where="rank 3", step=50)
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    for name, records in {"steps": steps, "findings": [found]}.items():
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_bytes(lines)
    text = said("goodput", "--devices", "128", "--failures-from", str(tmp_path), "--policy", "restart")
    assert "1 runs of your own: one every 99.0 h" in text
    with_other = greylag_here(ROOT, "plan", "goodput", "--failures-from", str(tmp_path), "--failures", "llama-3")
    assert_one_line(with_other, "--failures: no effect beside --failures-from")


def test_the_page_of_a_job(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = said(JOB, "--tokens", "15e12", "--report", str(page), "--price", "2", "--watts", "1300", "--pue", "1.2")
    assert "Strategy: " in text
    assert str(page) in text.replace(" ", "")
    html = page.read_text()
    assert "7.72e23" in html
    assert "None" not in html
    assert greylag_here(ROOT, "plan", JOB, "--tokens", "15e12", "--report", str(page)).returncode == 2  # it lies there


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((JOB,), ("--tokens is missing",)),
        (("nowhere.toml", "--tokens", "1e9"), ("nowhere.toml: no such file",)),
        (("demand",), ("nothing says what is trained",)),
        (("demand", JOB, "--model", "gpt-3", "--tokens", "1e9"), ("JOB and --model", "give one")),
        (("demand", "--model", "deepseek-v33", "--utilization", "0.4"), ("deepseek-v33", "did you mean")),
        (("demand", "--model", "deepseek-v3"), ("--utilization is missing",)),
        (("demand", "--model", "deepseek-v3", "--utilization", "1.4"), ("1.4",)),
        (("demand", "--params", "8e9", "--utilization", "0.4"), ("--tokens is missing",)),
        (("demand", "--known", "--tokens", "1e9"), ("--tokens: no effect beside --known",)),
        (("demand", "--known", "--price", "2", "--pue", "1.1"), ("--price and --pue: no effect",)),
        (("demand", JOB, "--tokens", "1e9", "--utilization", "0.4", "--device", "a100"), ("--device: no effect",)),
        (
            (
                "demand",
                "--params",
                "8e9",
                "--tokens",
                "1e12",
                "--utilization",
                "0.4",
                "--device",
                "a100",
                "--dtype",
                "fp8",
            ),
            ("no fp8 peak",),
        ),
        ((str(ROOT / "jobs" / "first_flight.toml"), "--tokens", "1e9"), ("a plan needs a cluster of accelerators",)),
        (("precision", "--budget", "1e24", "--weights", "4"), ("--weights: no effect",)),
        (("precision", "--fit", "x.csv", "--budget", "1e24"), ("--budget: no effect beside a fit",)),
        (("goodput", "--policy", "restart", "--spares", "3"), ("--spares: no effect beside --policy restart",)),
        (("goodput", "--scale", "--days", "3", "--trials", "5"), ("--days and --trials: no effect beside --scale",)),
        (("goodput", "--scale", "--policy", "eject", "--replica-nodes", "100000"), ("cannot be followed",)),
        (("goodput", "--price", "-1"), ("price: -1",)),
        (("goodput", "--devices", "10000000", "--repair-hours", "100000"), ("nodes would be in repair",)),
        (("demand", "--model", "gpt-3-175b", "--utilization", "0.4", "--pue", "1.2"), ("pue",)),
        (("demand", JOB, "--tokens", "1e9", "--devices", "100000"), ("no strategy fits", "global_batch")),
        (("precision",), ("--params and --tokens, or --budget",)),
        (("precision", "--law", "moore", "--params", "1e9", "--tokens", "1e9"), ("'moore'", "kumar or sun")),
        (("precision", "--params", "1e9", "--tokens", "1e9", "--format", "e4m3"), ("--format", "sun")),
        (("precision", "--fit", "nowhere.csv"), ("nowhere.csv",)),
        (("goodput", "--policy", "pray"), ("--policy pray",)),
        (("goodput", "--failures", "llama-4"), ("llama-4", "did you mean")),
        (("goodput", "--checkpoint-minutes", "often"), ("--checkpoint-minutes often",)),
        (("goodput", "--devices", "1001"), ("1,001", "nodes")),
    ],
)
def test_what_is_amiss_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_one_line(greylag_here(ROOT, "plan", *arguments), *words)
