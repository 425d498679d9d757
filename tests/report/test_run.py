"""The page of a run: offline, escaped, and unmoved by what killed runs leave behind."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from greylag.report import RunRecord, read_record
from greylag.report.curve import Curve, smooth, thin
from greylag.report.run import render, strategy_sentence, write_report
from greylag.report.summary import role_sizes, summarize
from greylag.spec import Finding, Job, SpecError, Step, num_active_parameters, num_parameters
from greylag.spec.cluster import Cluster, Device
from greylag.spec.model import Model, MoE
from greylag.spec.precision import Operand, Precision
from greylag.spec.step import PHASES
from greylag.spec.strategy import Strategy

E4M3 = Operand(format="e4m3", granularity="1x128")
JOB = Job(
    name="flight <b>",
    model=Model(
        name="tiny",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        vocab_size=512,
        ffn_hidden_size=128,
        max_sequence=64,
        moe=MoE(num_experts=8, top_k=2, ffn_hidden_size=32, num_dense_layers=1),
    ),
    precision=Precision(
        name="block", input=E4M3, weight=Operand(format="e4m3", granularity="128x128"), grad=E4M3, high="fp32"
    ),
    cluster=Cluster(name="here", device=Device(name="cpu", kind="cpu", memory_gib=8.0), devices_per_node=2),
    strategy=Strategy(dp=2, zero=3, micro_batch=2),
    sequence=64,
    global_batch=8,
)
INJECTED = "<script>alert('taken')</script>"


def step(number: int, time: float = 1.0, **fields: object) -> Step:
    seconds = {"data": 0.1 * time, "forward": 0.3 * time, "backward": 0.6 * time}
    known = {"source": "measured", "seconds": seconds, "tokens": 512, "flops": 1e9, "loss": 3.0, "grad_norm": 1.0}
    return Step(number=number, **{**known, **fields})  # type: ignore[arg-type]


def record(steps: list[Step], predicted: Step | None = None, findings: list[Finding] | None = None) -> RunRecord:
    return RunRecord(job=JOB, steps=steps, predicted=predicted, findings=findings or [], folder="run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(JOB))
    write_lines(tmp_path / "steps.jsonl", [step(n, bytes={"parameters": 1e6}) for n in range(1, 11)])
    (tmp_path / "predicted.json").write_bytes(msgspec.json.encode(step(0, 0.9, source="predicted")))
    write_lines(
        tmp_path / "findings.jsonl", [Finding(level="error", what=INJECTED, evidence=INJECTED, advice=INJECTED)]
    )
    return tmp_path


def write_lines(path: Path, structs: list[Step] | list[Finding]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in structs))


class Elements(HTMLParser):
    """Every tag with its attributes, and the text of style elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.styles = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "style":
            self.styles += data


def test_page_asks_nothing_of_the_network(folder: Path) -> None:
    html = write_report(folder).read_text(encoding="utf-8")
    elements = Elements(html)
    for tag, attributes in elements.tags:
        assert tag not in ("link", "iframe", "img", "object", "base")
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in elements.styles
    assert "url(" not in elements.styles
    policy = next(a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert html.count("plotly.js v") == 1
    assert len(html) < 6e6


def test_what_a_file_says_is_escaped(folder: Path) -> None:
    html = write_report(folder).read_text(encoding="utf-8")
    assert INJECTED not in html
    assert html.count("&lt;script&gt;alert(&#39;taken&#39;)&lt;/script&gt;") == 3
    assert "flight <b>" not in html
    assert "<h1>flight &lt;b&gt;</h1>" in html


def test_page_is_a_pure_function_written_whole(folder: Path) -> None:
    page = write_report(folder)
    assert page == folder / "report.html"
    assert page.read_text(encoding="utf-8") == render(read_record(folder)) == render(read_record(folder))
    assert write_report(folder, folder / "other.html").name == "other.html"
    assert not list(folder.glob(".*"))
    with pytest.raises(SpecError, match="cannot be written"):
        write_report(folder, folder / "nowhere" / "report.html")


def test_every_section_and_chart_is_there(folder: Path) -> None:
    html = write_report(folder).read_text(encoding="utf-8")
    for title in ("Loss", "Gradient norm", "Step time by phase", "Throughput", "Memory by pool", "Findings"):
        assert f"<h2>{title}</h2>" in html
    for name in ("loss", "grad_norm", "phases", "step_time", "throughput", "pools"):
        assert f'id="{name}"' in html
    assert "No learning rate was recorded." in html
    assert "the first 3 are left out as warm-up" in html
    assert "off by <b>−10.0%</b>" in html


def test_torn_last_line_is_ignored(folder: Path) -> None:
    with (folder / "steps.jsonl").open("ab") as file:
        file.write(b'{"source":"measured","number":11,"sec')
    read = read_record(folder)
    assert [s.number for s in read.steps] == list(range(1, 11))
    assert len(read.findings) == 1


def test_torn_line_in_the_middle_becomes_a_finding(folder: Path) -> None:
    with (folder / "steps.jsonl").open("ab") as file:
        file.write(b'{"source":"mea' + msgspec.json.encode(step(11)) + b"\n" + msgspec.json.encode(step(12)) + b"\n")
    read = read_record(folder)
    assert [s.number for s in read.steps] == [*range(1, 11), 12]
    assert read.findings[-1].where == "steps.jsonl"
    assert "line 11" in read.findings[-1].evidence


def test_last_step_with_a_number_wins(folder: Path) -> None:
    write_lines(folder / "steps.jsonl", [step(1), step(2), step(3), step(2, loss=7.0), step(3, loss=8.0)])
    assert [(s.number, s.loss) for s in read_record(folder).steps] == [(1, 3.0), (2, 7.0), (3, 8.0)]


def test_a_run_without_prediction_and_findings(folder: Path) -> None:
    (folder / "predicted.json").unlink()
    (folder / "findings.jsonl").unlink()
    html = write_report(folder).read_text(encoding="utf-8")
    assert "This run has no prediction" in html
    assert "No findings." in html
    assert "off by <b>" not in html


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("job.json", None, "job.json: no such file; give a run folder"),
        ("job.json", b"{", "job.json: not a Job"),
        ("job.json", b'{"name": "x"}', "job.json: not a Job"),
        ("job.json", b'{"name": "\xff"}', "job.json: not a Job"),
        ("steps.jsonl", None, "steps.jsonl: no such file"),
        ("steps.jsonl", b"", "steps.jsonl: holds no measured step"),
        ("steps.jsonl", b'{"source":"mea', "steps.jsonl: holds no measured step"),
        ("steps.jsonl", b"a\nb\nc\n", "steps.jsonl: no line is a Step"),
        ("predicted.json", b"[]", "predicted.json: not a Step"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(folder: Path, name: str, content: bytes | None, says: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(SpecError, match=re.escape(says)) as error:
        write_report(folder)
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such run folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "steps",
    [
        [step(1)],
        [step(1, loss=None, grad_norm=None, skipped=True)],
        [step(1, loss=float("nan")), step(2, loss=float("inf"), grad_norm=float("inf"))],
        [step(1, seconds={})],
        [step(n, seconds={"forward": 60.0 if n == 1 else 0.01}, skipped=n % 2 == 0) for n in range(1, 40)],
        [step(4000 + n, learning_rate=0.0, grad_norm=0.0) for n in range(3)],
    ],
)
def test_odd_runs_render(steps: list[Step]) -> None:
    html = render(record(steps))
    assert "NaN" not in html.split("<body>")[1]
    assert "Memory was neither measured nor predicted." in html


def test_a_long_run_stays_small() -> None:
    html = render(record([step(n, loss=float(n % 97), skipped=n % 3 == 0) for n in range(1, 20_001)]))
    assert len(html) < 6e6
    assert "6,666, 100 of them marked" in html


def test_thinning_keeps_spikes_and_gaps() -> None:
    ys: list[float | None] = [1.0] * 100_000
    ys[54_321] = 9.0
    ys[70_000:80_000] = [None] * 10_000
    thinned = thin(Curve(list(range(100_000)), ys))
    assert len(thinned.xs) <= 2000
    assert thinned.xs == sorted(set(thinned.xs))
    assert thinned.ys[thinned.xs.index(54_321)] == 9.0
    assert None in thinned.ys


def test_smoothing_is_unbiased_and_bridges_gaps() -> None:
    assert smooth([4.0] * 5, span=9) == pytest.approx([4.0] * 5)
    assert smooth([None, 2.0, None], span=9) == [None, pytest.approx(2.0), pytest.approx(2.0)]


def test_medians_leave_out_the_warm_up_of_all_but_short_runs() -> None:
    steps = [step(1, 90.0), step(2, 80.0), step(3), step(4), step(5, 3.0), step(6)]
    summary = summarize(record(steps, predicted=step(0, 0.75, source="predicted", bytes={"gradients": 5.0})))
    assert summary.step_time.measured == pytest.approx(1.0)
    assert summary.step_time.error == pytest.approx(-0.25)
    assert [row.what for row in summary.phases] == list(PHASES)
    assert (summary.memory.measured, summary.memory.predicted, summary.memory.error) == (None, 5.0, None)
    assert summary.utilization.measured is None
    assert summarize(record(steps[:5])).step_time.measured == pytest.approx(3.0)


def test_peak_memory_is_of_the_fullest_step() -> None:
    steps = [step(1, bytes={"parameters": 9.0}), step(2, bytes={"parameters": 4.0, "activations": 8.0}), step(3)]
    summary = summarize(record(steps))
    assert summary.memory.measured == 12.0
    assert [row.measured for row in summary.pools] == [4.0, 0.0, 0.0, 8.0]


def test_roles_add_up_to_the_model() -> None:
    rows = role_sizes(JOB)
    assert sum(row.total for row in rows) == num_parameters(JOB.model)
    assert sum(row.active for row in rows) == num_active_parameters(JOB.model)
    assert all(row.active == row.total for row in rows if row.role != "expert")


def test_strategy_in_words() -> None:
    assert strategy_sentence(JOB) == (
        "2 ranks: dp 2; ZeRO-3: optimizer state, gradients and parameters are sharded over 2 ranks. "
        "8 × 64 = 512 tokens per step, in 2 micro-batches of 2 sequences per rank."
    )
