"""Compute demand: counts against published figures, the talk's nine days, clusters of every size, the trend."""

import datetime
import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from greylag.plan.demand import (
    BEYOND_SIX_ND,
    Demand,
    approximate_training,
    between,
    count_training,
    demand,
    predicted_utilization,
    stated_training,
    stated_utilization,
)
from greylag.plan.known import Trained, find_model, known_models, training
from greylag.plan.trend import fit_trend, running_record
from greylag.report.demand import print_demand, print_known
from greylag.report.trend import render_trend
from greylag.spec import SpecError, num_active_parameters, num_parameters
from greylag.spec.load import load_preset, presets
from greylag.spec.work import flops_per_token

H100 = load_preset("cluster", "h100").device.peak("bf16")
MODELS = known_models()
COUNTED = [model for model in MODELS if "dimensions" in model.ways]
TALK_UTILIZATION = {1024: 0.3985, 5000: 0.359, 10_000: 0.307}
"""Share of an H100's dense BF16 peak (989.5 TFLOP/s, NVIDIA H100 data sheet) by devices: talk of Moore Threads, WAIC,
July 2025. The talk shows days (DeepSeek-V3, 3.4e24 FLOPs: 97, 22, 13; Kimi K2, 2.98e24: 85, 19, 11; GPT-4, about
2.1e25: 602, 137, 80) and says that utilization falls as clusters grow; these are what its days imply. All nine round
right for 0.3984 to 0.3987, 0.3576 to 0.3599 and 0.3052 to 0.3089."""
RELATIVE = {"gopher-280b", "chinchilla-70b"}
"""Their relative positions have parameters that a Model lacks."""


def keys(models: list[Trained]) -> list[str]:
    return [model.key for model in models]


@pytest.mark.parametrize(
    ("key", "days"),
    [("deepseek-v3", [97, 22, 13]), ("kimi-k2", [85, 19, 11]), ("gpt-4", [602, 137, 80])],
)
def test_the_nine_figures_of_the_talk(key: str, days: list[int]) -> None:
    used = stated_utilization(list(TALK_UTILIZATION.values()))
    found = demand(training(find_model(key, MODELS)), list(TALK_UTILIZATION), H100, used)
    assert list(np.round(found.days.value)) == days
    assert list(TALK_UTILIZATION) == [1024, 5000, 10_000]
    assert sorted(TALK_UTILIZATION.values(), reverse=True) == list(TALK_UTILIZATION.values())


def test_the_bounds_stated_for_the_utilizations_of_the_talk() -> None:
    talk = {
        "deepseek-v3": (3.4e24, (97, 22, 13)),
        "kimi-k2": (2.98e24, (85, 19, 11)),
        "gpt-4": (2.1e25, (602, 137, 80)),
    }
    assert {key: find_model(key, MODELS).compute for key in talk} == {key: flops for key, (flops, _) in talk.items()}
    for at, (devices, bounds) in enumerate(
        {1024: (0.3984, 0.3987), 5000: (0.3576, 0.3599), 10_000: (0.3052, 0.3089)}.items()
    ):
        least = max(flops / (devices * H100 * 86400 * (days[at] + 0.5)) for flops, days in talk.values())
        most = min(flops / (devices * H100 * 86400 * (days[at] - 0.5)) for flops, days in talk.values())
        assert bounds == (np.ceil(1e4 * least) / 1e4, np.floor(1e4 * most) / 1e4)
        assert least < TALK_UTILIZATION[devices] < most


def test_counted_compute_agrees_with_published() -> None:
    both = [model for model in COUNTED if model.compute]
    close = [model for model in both if abs(model.difference) <= 0.10]
    assert len(close) >= 35, [(m.key, m.difference) for m in both]
    stated = [model for model in close if model.origin == "stated"]
    assert len(stated) >= 11, keys(stated)
    assert all(model.apart for model in both if model not in close)
    assert not any(model.apart for model in MODELS if model not in both or model in close)


@pytest.mark.parametrize("model", COUNTED, ids=lambda model: model.key)
def test_dimensions_give_the_published_parameters(model: Trained) -> None:
    off = num_parameters(model.model) / model.parameters - 1
    assert abs(off) < (0.08 if model.key in RELATIVE else 0.015)
    active = num_active_parameters(model.model) / (model.active or model.parameters) - 1
    assert abs(active) < (0.08 if model.key in RELATIVE else 0.055)


def test_the_bounds_of_six_n_d_are_those_of_the_table() -> None:
    over = [m.counted / (6 * (m.active or m.parameters) * m.tokens) for m in COUNTED]
    assert BEYOND_SIX_ND == (np.floor(100 * min(over)) / 100, np.ceil(100 * max(over)) / 100)


def test_every_row_says_where_its_figures_are_from() -> None:
    assert len(MODELS) >= 30
    assert {"gpt-3-175b", "deepseek-v3", "kimi-k2", "llama-3-1-405b", "gpt-4", "grok-3", "grok-4"} <= set(keys(MODELS))
    for model in MODELS:
        assert model.ways, model.key
        assert bool(model.compute) == bool(model.origin) == bool(model.compute_source), model.key
        if model.parameters or model.tokens:
            assert model.source, model.key
        if model.compute_low:
            assert model.compute_low < model.compute < model.compute_high


def test_the_table_is_no_preset_of_any_section() -> None:
    for folder in ("models", "clusters", "precisions", "software"):
        assert "trained" not in presets(folder)


def test_counting_is_that_of_work_at_the_sequence() -> None:
    model = load_preset("model", "llama-3-8b")
    found = count_training(model, 8192, 15e12)
    assert found.flops.value == 15e12 * flops_per_token(model, 8192)
    assert count_training(model, 16384, 15e12).flops.value > found.flops.value
    assert not found.flops.has_interval
    assert "exact count" in found.flops.basis


def test_six_n_d_counts_active_parameters_and_carries_an_interval() -> None:
    found = approximate_training(671e9, 14.8e12, 37e9)
    assert found.flops.value == 6 * 37e9 * 14.8e12
    assert found.flops.low < found.flops.value < found.flops.high
    assert approximate_training(70e9, 15e12).flops.value == 6 * 70e9 * 15e12


def of_ten(**more: object) -> Demand:
    return demand(stated_training(1e24, "ten"), [1000, 2000], 1e15, stated_utilization(0.5), **more)


def test_days_hours_energy_and_money() -> None:
    found = of_ten(watts=700, pue=1.2, price=2.0)
    assert found.days.value == pytest.approx([1e24 / 5e17 / 86400, 1e24 / 1e18 / 86400])
    assert found.device_hours.value == pytest.approx([1e24 / 5e14 / 3600] * 2)
    assert found.energy.value == pytest.approx(found.device_hours.value * 0.7 * 1.2)
    assert found.money.value == pytest.approx(found.device_hours.value * 2)
    assert not found.days.has_interval
    assert "stated" in found.days.basis
    assert of_ten().energy is None
    assert of_ten().money is None


def test_an_interval_of_utilization_is_one_of_every_figure() -> None:
    used = predicted_utilization([0.4, 0.3], [0.35, 0.25], [0.42, 0.36], "predicted by a search")
    found = demand(stated_training(1e24, "x"), [1000, 5000], [1e15, 2e15], used, watts=700, price=[2.0, 3.0])
    for figure in (found.days, found.device_hours, found.energy, found.money):
        assert np.all(figure.low < figure.value)
        assert np.all(figure.value < figure.high)
        assert figure.low / figure.value == pytest.approx([0.4 / 0.42, 0.3 / 0.36])
        assert figure.high / figure.value == pytest.approx([0.4 / 0.35, 0.3 / 0.25])
        assert "predicted by a search" in figure.basis


def test_intervals_of_flops_and_utilization_add_up() -> None:
    rough = stated_training(2.1e25, "gpt-4", low=8.2e24, high=4.4e25)
    found = demand(rough, 1000, 1e15, predicted_utilization(0.4, 0.35, 0.42, "predicted"))
    assert found.days.low == pytest.approx(8.2e24 / (1e18 * 0.42 * 86400))
    assert found.days.high == pytest.approx(4.4e25 / (1e18 * 0.35 * 86400))


def test_a_hundred_thousand_sizes_at_once() -> None:
    sizes = np.arange(1, 100_001) * 8
    used = between(sizes[127:1250], [1024, 5000, 10_000], stated_utilization(list(TALK_UTILIZATION.values())))
    assert used.value[0] == pytest.approx(0.3985)
    assert used.value[-1] == pytest.approx(0.307)
    assert np.all(np.diff(used.value) < 0)
    found = demand(stated_training(1e24, "x"), sizes, H100, stated_utilization(0.4))
    assert found.days.value.shape == (100_000,)
    assert np.all(np.diff(found.days.value) < 0)


def test_between_keeps_intervals_and_refuses_to_reach_beyond() -> None:
    known = predicted_utilization([0.4, 0.3], [0.3, 0.2], [0.5, 0.4], "predicted")
    found = between([100, 1000, 10_000], [100, 10_000], known)
    assert found.value == pytest.approx([0.4, 0.35, 0.3])
    assert found.low == pytest.approx([0.3, 0.25, 0.2])
    assert found.high == pytest.approx([0.5, 0.45, 0.4])
    with pytest.raises(SpecError, match=r"known from 100 to 10,000 devices, not at 20,000"):
        between([200, 20_000], [100, 10_000], known)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: approximate_training(7e9, -1), "tokens must be a positive number, is -1"),
        (lambda: approximate_training(7e9, float("nan")), "tokens must be"),
        (lambda: approximate_training(7e9, 1e12, 8e9), "active parameters"),
        (lambda: count_training(load_preset("model", "llama-3-8b"), 0, 1e12), "sequence must be"),
        (lambda: stated_training(0, "x"), "FLOPs must be"),
        (lambda: stated_training(1e24, "x", low=2e24, high=3e24), "lie outside"),
        (lambda: stated_utilization([0.4, 1.5]), r"utilization 1.5 is not in \(0, 1\]"),
        (lambda: stated_utilization(40), "not in"),
        (lambda: stated_utilization(0), "not in"),
        (lambda: predicted_utilization(0.4, 0.5, 0.6, "x"), "outside its own interval"),
        (lambda: of_ten(pue=1.2), "pue has no effect without"),
        (lambda: of_ten(watts=700, pue=0.9), "pue 0.9"),
        (lambda: of_ten(watts=-700), "watts must be"),
        (lambda: of_ten(price=0), "price must be"),
        (lambda: of_ten(price=[1.0, 2.0, 3.0]), r"devices: 2 given for 3 clusters"),
        (lambda: of_ten(labels=["one"]), "labels: 1 given for 2 clusters"),
        (lambda: find_model("deepseek v4", MODELS), "did you mean 'deepseek-v"),
        (lambda: find_model("§", MODELS), "greylag plan demand --known"),
        (lambda: training(find_model("gpt-4", MODELS), "dimensions"), "not public"),
        (lambda: fit_trend(MODELS, since=2025.4), "a trend needs 3"),
    ],
)
def test_mistakes_are_told_in_one_line(ask: object, says: str) -> None:
    with pytest.raises(SpecError, match=says) as told:
        ask()
    assert "\n" not in str(told.value)


def test_names_are_found_however_they_are_written() -> None:
    assert find_model("DeepSeek V3", MODELS).key == "deepseek-v3"
    assert find_model("Llama 3.1 405B", MODELS).key == find_model("llama-3.1-405b", MODELS).key == "llama-3-1-405b"
    assert training(find_model("kimi-k2", MODELS), "6ND").flops.value == 6 * 32e9 * 15.5e12
    assert training(find_model("kimi-k2", MODELS), "dimensions").name == "Kimi K2"


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    table = tmp_path / "trained.toml"
    table.write_text("[mine]\nname = 'Mine'\ndate = 2026-01-01\nparameters = 1e9\ntokens = 1e12\n")
    assert known_models(table)[0].flops == 6e21
    table.write_text("[mine]\nname = 'Mine'\ndate = 2026-01-01\nparams = 1e9\n")
    with pytest.raises(SpecError, match=r"mine.*params"):
        known_models(table)
    table.write_text("name = 'Mine'\n")
    with pytest.raises(SpecError, match="no table of a model"):
        known_models(table)
    with pytest.raises(SpecError, match="cannot be read"):
        known_models(tmp_path / "none.toml")


def test_the_trend_of_an_exponential_is_exact() -> None:
    models = [
        Trained(key=str(y), name=str(y), date=datetime.date(y, 7, 2), compute=c, origin="stated")
        for y, c in [*((y, 1e23 * 4.0 ** (y - 2020)) for y in range(2020, 2026)), (2021, 2e22), (2023, 1e20)]
    ]
    found = fit_trend(models)
    assert len(found.records) == 6
    assert found.growth.value == pytest.approx(4.0, rel=0.01)
    assert found.doubling.value == pytest.approx(6.0, rel=0.01)
    assert found.doubling_error < 0.02


def test_the_trend_of_known_models() -> None:
    found = fit_trend(MODELS)
    assert list(found.records) == list(running_record(MODELS))
    assert (found.records[0].key, found.records[-1].key) == ("gpt-3-175b", "grok-4")
    assert "grok-3" in keys(list(found.records))
    assert 4.0 < found.growth.low < found.growth.value < found.growth.high < 6.5
    assert found.doubling.value == pytest.approx(12 * np.log(2) / np.log(found.growth.value))
    assert 0 < found.doubling_error < 1
    assert all(1 / 3 < model.flops / found.at(model.year) < 3 for model in found.records)
    assert len(fit_trend(MODELS, since=2022.0).records) < len(found.records)


def printed(function: object, *arguments: object) -> str:
    console = Console(width=220, file=io.StringIO(), highlight=False)
    function(*arguments, console)
    return console.file.getvalue()


def test_what_is_printed_of_a_demand() -> None:
    used = stated_utilization(list(TALK_UTILIZATION.values()))
    gpt_4 = training(find_model("gpt-4", MODELS))
    text = printed(print_demand, demand(gpt_4, list(TALK_UTILIZATION), H100, used, watts=700, price=2.0))
    for words in (
        "2.10e25 (8.20e24 to 4.40e25) FLOPs",
        "estimated: Epoch AI",
        "602 (235 to 1,261)",
        "137",
        "80 (31",
        "MWh",
    ):
        assert words in text
    assert "989.5 TFLOP/s" in text
    text = printed(print_demand, demand(stated_training(1e24, "[x]"), 8, H100, stated_utilization(0.4)))
    assert "[x]" in text
    assert "No intervals: FLOPs are stated as one number; utilization is stated as one number." in text


def test_what_is_printed_of_known_models() -> None:
    text = printed(print_known, MODELS, fit_trend(MODELS))
    assert re.search(r"DeepSeek-V3 .*671 B.*37.0 B.*14.8 T.*3.71e24.*3.40e24.*derived.*\+9.0%", text)
    assert f"{len(MODELS)} models" in text
    assert "agree within a tenth for 37" in text
    assert all(f"{model.name}: {model.apart}." in text for model in MODELS if model.apart)
    assert "doubled every 5.0 ± 0.3 months" in text
    assert "Epoch AI" in text


def test_the_page_of_the_trend_names_the_records() -> None:
    found = fit_trend(MODELS)
    page = render_trend(MODELS, found)
    assert page.startswith("<!DOCTYPE html>")
    for model in found.records:
        assert page.count(model.name) >= 3
    assert "log-linear fit to 10 records" in page
    assert "://" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
