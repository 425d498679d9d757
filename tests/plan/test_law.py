"""The two scaling laws of precision: what their papers say, what one asks of them, and what is printed."""

import io

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from greylag.plan.kumar import Bits, Kumar, Term
from greylag.plan.law import answer, asked_precision, cost, fixed_compute, law_named, optimum, overtraining
from greylag.plan.reach import Range, outside
from greylag.plan.sun import CHANNEL, Layout, Sun, layout
from greylag.report.law import print_law_answer, print_optimum
from greylag.report.law_chart import render_fixed_compute
from greylag.spec import SpecError

KUMAR, SUN = Kumar(), Sun()
LAWS = pytest.mark.parametrize("law", [KUMAR, SUN], ids=["kumar", "sun"])
FIGURE = {32: (220, 3.2298), 16: (440, 3.1402), 12: (587, 3.1135), 8: (880, 3.0909), 7: (1006, 3.0890),
          6: (1173, 3.0922), 5: (1408, 3.1080), 4: (1760, 3.1710)}  # fmt: skip
"""By bits: million parameters at N P = 7.04e9, and the loss at 16B tokens, from Table 2 with its offsets."""


def shown(print_it, *what) -> str:
    text = io.StringIO()
    print_it(*what, console=Console(file=text, width=160))
    return text.getvalue()


@pytest.mark.parametrize("bits", FIGURE)
def test_kumars_figure_at_fixed_compute(bits):
    millions, loss = FIGURE[bits]
    row = next(c for c in fixed_compute(KUMAR).choices if c.bits == bits)
    assert round(row.parameters / 1e6) == millions
    assert f"{row.loss:.4f}" == f"{loss:.4f}"


def test_kumars_best_precision_needs_the_offsets():
    assert round(fixed_compute(KUMAR).best.bits, 1) == 7.0
    bare = replace(KUMAR, terms=tuple(term._replace(offset=0.0) for term in KUMAR.terms))
    assert fixed_compute(bare).best.bits == pytest.approx(3.45, abs=0.025)  # 3.469; on a grid of 0.05 bits 3.45
    grid = np.arange(60, 640) / 20
    assert grid[np.argmin(bare.loss(7.04e9 / grid, 16e9, Bits.all(grid)))] == 3.45


def test_kumars_terms_multiply():
    eight = KUMAR.effective(1e9, Bits(8, 16, 16)) / KUMAR.effective(1e9, Bits.all(16))
    assert eight == pytest.approx((1 - np.exp(-8 / 2.6745 + 0.3037)) / (1 - np.exp(-16 / 2.6745 + 0.3037)))


def test_kumars_penalty_of_quantizing_after_training():
    expected = 0.0598 * 1e12**0.5068 / 1e9**0.3439 * np.exp(-4 / 0.5907)
    assert KUMAR.post_penalty(1e9, 1e12, 4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_beyond_kumars_critical_tokens_training_hurts_the_quantized_model(bits):
    critical = float(KUMAR.post_critical_tokens(1e9, bits))
    tokens = critical * np.array([0.9, 1.0, 1.1])
    after = KUMAR.loss(1e9, tokens, Bits.all(32)) + KUMAR.post_penalty(1e9, tokens, bits)
    assert after.argmin() == 1
    assert (np.diff(KUMAR.loss(1e9, tokens, Bits.all(32))) < 0).all()


@pytest.mark.parametrize(("format", "tera"), [("bf16", 1730), ("e4m3", 27), ("e2m1", 0.4)])
def test_suns_critical_tokens_of_a_billion_parameters(format, tera):
    critical = SUN.critical_tokens(1e9, layout(format, 128))
    assert critical == pytest.approx(tera * 1e12, rel=0.02)
    assert SUN.loss(1e9, critical * np.array([0.9, 1.0, 1.1]), layout(format, 128)).argmin() == 1


@pytest.mark.parametrize(
    ("format", "size", "loss"),
    [("e4m3", 880e6, 2.8065), ("e3m2", 1173e6, 2.7726), ("e2m1", 1760e6, 2.7384), ("e3m0", 1760e6, 2.8314)],
)
def test_sun_at_kumars_setting_finds_fp4_worse_only_as_e3m0(format, size, loss):
    assert SUN.loss(size, 16e9, layout(format)) == pytest.approx(loss, abs=6e-5)


@pytest.mark.parametrize(("bits", "best"), [(4, "e2m1"), (8, "e4m3"), (16, "e8m7")])
def test_suns_best_split_of_bits(bits, best):
    losses = {f"e{e}m{bits - 1 - e}": SUN.loss(1e9, 1e11, Layout(e, bits - 1 - e)) for e in range(1, bits)}
    assert min(losses, key=losses.get) == best
    assert SUN.loss(1e9, 1e11, SUN.at_bits(bits)) <= losses[best]


@pytest.mark.parametrize("budget", [1e21, 1e24, 1e27, 1e31])
def test_suns_best_precision_lies_between_4_and_8_bits(budget):
    assert 4 <= optimum(SUN, budget).best.bits <= 8


@pytest.mark.parametrize("budget", [1e20, 1e24, 1e28])
def test_kumars_best_precision_does_not_depend_on_the_budget(budget):
    assert optimum(KUMAR, budget).best.bits == pytest.approx(7.002, abs=0.001)


def test_what_is_more_precise_is_asked_for_where_parameters_are_held():
    bits = [optimum(KUMAR, budget, parameters=1e9).best.bits for budget in (1e19, 1e21, 1e23)]
    assert bits == sorted(bits)
    assert bits[-1] > bits[0] + 1


@LAWS
@pytest.mark.parametrize("held", [{}, {"parameters": 3e9}, {"tokens": 2e12}], ids=["free", "parameters", "tokens"])
def test_an_optimum_is_not_beaten_by_a_plan_of_its_cost(law, held):
    found = optimum(law, 1e23, **held)
    best = found.best
    assert cost(best.parameters, best.tokens, best.bits) == pytest.approx(1e23)
    assert best.loss <= min(c.loss for c in found.choices) + 1e-9
    assert [c.loss for c in found.choices] == sorted(c.loss for c in found.choices)
    for name, value in held.items():
        assert getattr(best, name) == pytest.approx(value)
    generator = np.random.default_rng(0)
    bits = generator.uniform(3.5, 32, 20_000)
    size = held.get("parameters", np.exp(generator.normal(np.log(best.parameters), 1, 20_000)))
    size = 1e23 / (6 / 16 * bits * held["tokens"]) if "tokens" in held else size
    losses = law.loss(size, 1e23 / (6 / 16 * bits * size), law.at_bits(bits))
    assert best.loss <= losses.min() + 1e-9
    assert losses.min() - best.loss < 1e-2


@LAWS
def test_many_points_are_one_point_many_times(law):
    size, tokens = np.array([1e8, 1e9, 1e10]), np.array([1e10, 1e11, 1e12])
    many = law.loss(size, tokens, law.at_bits(np.array([5.0, 8.0, 16.0])))
    one = [law.loss(n, d, law.at_bits(b)) for n, d, b in zip(size, tokens, (5.0, 8.0, 16.0), strict=True)]
    np.testing.assert_allclose(many, one, rtol=1e-14)


@LAWS
def test_the_best_plan_is_not_overtrained_and_others_waste(law):
    precision = law.at_bits(8.0)
    best = overtraining(law, 1e9, 1e12, precision)
    assert best.parameters * best.tokens == pytest.approx(1e21)
    again = overtraining(law, best.parameters, best.tokens, precision)
    assert again.share == pytest.approx(1, abs=1e-6)
    assert again.loss == pytest.approx(best.loss)
    assert 0 < best.share < 0.9
    shrunk = best.share * 1e21
    size = overtraining(law, 1e9, shrunk / 1e9, precision).parameters
    assert law.loss(size, shrunk / size, precision) == pytest.approx(law.loss(1e9, 1e12, precision), abs=1e-9)


def test_a_best_precision_at_the_end_of_the_search_is_called_that():
    narrow = replace(SUN, bits_sought=(6.0, 32.0))
    assert fixed_compute(narrow).remarks[0].startswith("the best lies at the end of what was sought, 6 bits: fewer may")
    assert optimum(narrow, 1e21).remarks[0].startswith("the best lies at the end")
    assert fixed_compute(SUN).remarks == SUN.remarks


def test_answers_say_how_far_they_extrapolate():
    found = {o.what: o.factor for o in answer(KUMAR, 8e9, 0.5e9, Bits(8, 4, 16)).outside}
    assert found == {"parameters": pytest.approx(8e9 / 220e6), "tokens": pytest.approx(3.0)}
    assert answer(KUMAR, 1e8, 1e10, Bits(8, 8, 8)).outside == ()
    assert outside([Range("bits", 4, 8)], {"bits": 0.0})[0].factor == np.inf


def test_precision_is_asked_in_a_laws_own_terms():
    assert asked_precision(KUMAR, weights=8, activations=8)[1] == (8, 8, 16)
    law, precision = asked_precision(SUN, format="E4M3", block=32)
    assert precision == (4, 3, 32)
    assert law.choices()["E2M1"] == (2, 1, 32)
    assert asked_precision(SUN)[1] == (8, 7, 128)
    assert layout("e4m3", "channel").block == CHANNEL


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: law_named("kumer"), "did you mean kumar?"),
        (lambda: asked_precision(KUMAR, format="e4m3"), "--weights, --activations and --kv"),
        (lambda: asked_precision(KUMAR, block=128), "--block"),
        (lambda: asked_precision(KUMAR, weights=-1), "--weights -1"),
        (lambda: asked_precision(SUN, kv=8), "no KV cache; give --format"),
        (lambda: layout("fp8"), "e4m3 or e5m2"),
        (lambda: layout("e4m3", 0), "--block 0"),
        (lambda: answer(KUMAR, 1e9, 1e10, Bits(8, 3, 8)), "give more bits"),
        (lambda: answer(KUMAR, 0, 1e10, Bits.all(8)), "parameters: must be positive"),
        (lambda: optimum(KUMAR, 1e24, 1e9, 1e12), "leave one of the two out"),
        (lambda: optimum(SUN, float("nan")), "budget: must be positive"),
        (
            lambda: replace(KUMAR, terms=(Term(("weights", "kv"), 2.0, 0.0),)).loss(1e9, 1e10, Bits(8, 8, 16)),
            "weights and kv have the same bits",
        ),
        (lambda: replace(KUMAR, C_T=None).post_penalty(1e9, 1e10, 4), "without --fit"),
    ],
)
def test_what_a_law_cannot_say_is_refused_in_one_line(ask, says):
    with pytest.raises(SpecError, match=says) as error:
        ask()
    assert "\n" not in str(error.value)


def test_answers_are_printed_with_their_limits():
    text = shown(print_law_answer, answer(KUMAR, 8e9, 15e12, Bits(8, 8, 16)))
    for part in (
        "Kumar et al.",
        "2.8271",
        "36.4 times above 220 M",
        "not how they are split",
        "quantized after training",
    ):
        assert part in text, part
    text = shown(print_law_answer, answer(SUN, 1e9, 15e12, layout("e2m1")))
    for part in ("E2M1, 128 numbers a scale", "393 B", "Fewer tokens would do better", "three operands of six"):
        assert part in text, part
    text = shown(print_optimum, optimum(SUN, 1e24, tokens=15e12))
    for part in ("tokens held", "any number", "E3M2", "×150", "KV cache"):
        assert part in text, part


def test_the_chart_is_a_page_of_its_own():
    page = render_fixed_compute([fixed_compute(KUMAR), fixed_compute(SUN)])
    assert "least at 7.0 bits" in page
    assert "1.76 B parameters" in page
    assert 'src="http' not in page
