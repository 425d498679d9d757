"""The page of a search: whole, without scripts, and with what the search found."""

import re
from pathlib import Path

import pytest
from test_plan_page import whole

from commands import greylag_here
from greylag.report.search import render_search
from greylag.sim.search import Found, search
from greylag.spec.load import load_job

JOB = Path(__file__).parents[2] / "jobs" / "llama-3-8b_h100_pretrain.toml"
SMALL = {"fix": ["cp=1", "recompute=none", "micro_batch=[1, 2]", "schedule=['1f1b', 'zb-h1']", "zero=[1, 3]"]}


@pytest.fixture(scope="module")
def found() -> Found:
    return search(load_job(JOB, ["software=megatron-core-2026"]), **SMALL)


def test_the_page_holds_what_was_found(found: Found) -> None:
    html = render_search(found)
    text = whole(html)
    assert "script" not in html
    assert f"{found.num_tried:,} strategies tried" in text
    for candidate in (*found.best, found.front[-1]):
        assert candidate.job.strategy.brief in text
    for choice in found.choices:
        assert f" {choice.axis} " in text


def test_the_heat_map_has_a_cell_for_each_pair_and_frames_the_best(found: Found) -> None:
    html = render_search(found)
    heat = html[html.index('<table class="heat">') :].split("</table>")[0]
    cells = re.findall(r"<td( class=\"best\")? style=\"[^\"]*measured\) ([\d.]+)%[^\"]*\">([^<]*)</td>", heat)
    assert len(cells) == len(found.heat.tp) * len(found.heat.pp)
    flat = [s for row in found.heat.seconds for s in row]
    assert [text == "–" for _, _, text in cells] == [s is None for s in flat]
    framed = [n for n, (best, _, _) in enumerate(cells) if best]
    assert framed == [flat.index(found.best[0].seconds)]
    shares = [float(share) for _, share, _ in cells]
    assert max(shares) == shares[framed[0]] == 60
    order = sorted((s, -share) for s, share in zip(flat, shares, strict=True) if s is not None)
    assert [share for _, share in order] == sorted(share for _, share in order)


def test_the_command_writes_it_once(tmp_path: Path) -> None:
    page = tmp_path / "found.html"
    words = ("search", JOB, "software=megatron-core-2026", "--limit", "500", "--report", page)
    assert greylag_here(tmp_path, *words).returncode == 0
    assert "<h1>llama-3-8b_h100_pretrain</h1>" in page.read_text()
    again = greylag_here(tmp_path, *words)
    assert again.returncode == 2
    assert "exists already and is left as it is" in again.stderr
    assert greylag_here(tmp_path, *words, "--force").returncode == 0
    alone = greylag_here(tmp_path, *words[:-2], "--force")
    assert alone.returncode == 2
    assert "--force: no page is written" in alone.stderr


def test_nothing_fits() -> None:
    job = load_job(JOB, ["software=megatron-core-2026", "cluster=h100-8x1", "global_batch=8", "model=llama-3-405b"])
    html = render_search(search(job, fix=["tp=8", "pp=1"]))
    assert "Nothing fits" in whole(html)
