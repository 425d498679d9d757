"""Which recipe each GEMM of each layer gets: class, place, override; and the faults of recipes that cannot be."""

from typing import Any

import pytest

from greylag.spec import SpecError
from greylag.spec.job import Job
from greylag.spec.load import job_from, load_preset, presets
from greylag.spec.precision import GEMMS, sensitivity
from greylag.spec.work import Gemm, distinct_layers, layer_recipes, linear_ops

BASE = {"model": "deepseek-v3-tiny", "cluster": "local-1x1", "sequence": 64, "global_batch": 4}


def job(model: str = "deepseek-v3-tiny", **precision: Any) -> Job:
    return job_from({**BASE, "model": model, "precision": {"preset": "fp8-block128", **precision}}, name="test")


def recipes(made: Job, name: str) -> list[str]:
    """Names of the recipes of a layer's three GEMMs."""
    return [recipe.name for recipe in made.precision.gemms(name, made.model.num_layers)]


CHANGED = "fp8-block128 (changed)"


def test_classes_decide_where_nothing_else_does() -> None:
    default = job()
    assert recipes(default, "layers.0.attention.wq_a") == ["bf16"] * 3
    assert recipes(default, "layers.0.attention.wkv_a") == ["bf16"] * 3
    for name in ("layers.0.attention.wo", "layers.0.ffn.w_down", "layers.1.ffn.experts.w_gate_up"):
        assert recipes(default, name) == ["fp8-block128"] * 3
    assert recipes(job(most_sensitive="B"), "layers.0.attention.wkv_a") == [CHANGED] * 3
    careful = job(most_sensitive="D")
    assert recipes(careful, "layers.0.ffn.w_gate_up") == [CHANGED, CHANGED, "bf16"]
    assert recipes(careful, "layers.2.ffn.experts.w_down") == ["bf16"] * 3
    assert recipes(careful, "layers.0.attention.wo") == ["bf16"] * 3


def test_every_linear_layer_has_a_class() -> None:
    for model in presets("models"):
        for name in layer_recipes(load_preset("model", model), job().precision, 0):
            assert all(sensitivity(f"layers.0.{name}", gemm) in "BCD" for gemm in GEMMS)


def test_first_and_last_layers_stay_high() -> None:
    made = job(first_layers_high=1, last_layers_high=2)
    high = [recipes(made, f"layers.{layer}.attention.wo")[0] == "bf16" for layer in range(5)]
    assert high == [True, False, False, True, True]
    assert distinct_layers(made.model, made.precision) == [(0, 1), (1, 2), (3, 2)]


def test_overrides_win_and_the_last_of_them_first() -> None:
    made = job(
        first_layers_high=1,
        overrides=[
            {"match": "*.w_down", "recipe": "fp8-tensor-current"},
            {"match": "layers.2.*", "gemms": ["weight-gradient"]},
            {"match": "layers.0.ffn.w_down", "recipe": "mxfp8"},
        ],
    )
    assert recipes(made, "layers.0.ffn.w_down") == ["mxfp8"] * 3
    assert recipes(made, "layers.1.ffn.experts.w_down") == ["fp8-tensor-current"] * 3
    assert recipes(made, "layers.2.ffn.experts.w_down") == ["fp8-tensor-current", "fp8-tensor-current", "bf16"]
    assert recipes(made, "layers.2.attention.wo") == [CHANGED, CHANGED, "bf16"]
    assert not made.problems()


def test_a_smoothed_weight_takes_its_scale_just_in_time() -> None:
    made = job("llama-3-tiny", preset="fp8-tensor-delayed", smooth_swiglu=True)
    down, up = (made.precision.gemms(f"layers.0.ffn.{name}", 4).forward for name in ("w_down", "w_gate_up"))
    assert (down.weight.timing, down.input.timing) == ("current", "delayed")
    assert up.weight.timing == "delayed"


def test_operators_of_a_layer_follow_its_recipes() -> None:
    made = job(overrides=[{"match": "*.w_down", "gemms": ["weight-gradient"]}])
    gemms = made.precision.gemms("layers.0.ffn.w_down", 5)
    names = {op.name for op in linear_ops(gemms, Gemm("layers.0.ffn.w_down.weight", "ffn", 64, 256, 768), 64)}
    assert names == {"quantize.1x128", "quantize.128x128"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"weight": {"granularity": "tensor"}}, "precision"),
        ({"grad": {"granularity": "128x128"}}, "precision"),
        ({"scale": "mx-ceil"}, "precision.scale"),
        ({"input": {"rounding": "stochastic"}}, "precision.input"),
        ({"preset": "bf16", "grad": {"rounding": "stochastic"}}, "precision.grad"),
        ({"preset": "mxfp8", "scale": "pow2"}, "precision.scale"),
        ({"preset": "bf16", "most_sensitive": "B"}, "precision.most_sensitive"),
        ({"preset": "fp32", "first_layers_high": 1}, "precision.first_layers_high"),
        ({"first_layers_high": 3, "last_layers_high": 3}, "precision.first_layers_high"),
        ({"first_moment": "e4m3"}, "precision.second_moment"),
        ({"preset": "fp32", "smooth_swiglu": True}, "precision.smooth_swiglu"),
        ({"first_layers_high": 5}, "precision"),
        ({"overrides": [{"match": "*"}]}, "precision"),
        ({"overrides": [{"match": "*.wo", "recipe": "mxfp8"}, {"match": "*", "recipe": "fp8-row"}]},
         "precision.overrides[0]"),
        ({"margin": 2000, "preset": "fp8-tensor-delayed"}, "precision.margin"),
        ({"amax_history": 10**12, "preset": "fp8-tensor-delayed"}, "precision.amax_history"),
        ({"overrides": [{"match": "*.wp"}]}, "precision.overrides[0].match"),
        ({"overrides": [{"match": "*.wo", "gemms": []}]}, "precision.overrides[0].gemms"),
        ({"overrides": [{"match": "*.wo", "recipe": {
            "input": {"format": "e4m3"}, "weight": {"format": "bf16"}, "grad": {"format": "e4m3"}}}]},
         "precision.overrides[0].recipe"),
    ],
)  # fmt: skip
def test_problem_names_the_key(changes: dict[str, Any], key: str) -> None:
    assert key in [finding.where for finding in job(**changes).problems()]


def test_swiglu_settings_need_swiglu() -> None:
    made = job("gpt-3-tiny", smooth_swiglu=True, swiglu_input="e4m3")
    assert [f.where for f in made.problems()] == ["precision.swiglu_input", "precision.smooth_swiglu"]


@pytest.mark.parametrize("name", presets("precisions"))
def test_every_preset_suits_dense_and_experts(name: str) -> None:
    for model in ("llama-3-tiny", "deepseek-v3-tiny"):
        assert not job(model, preset=name).problems()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"match": "*", "recipe": "fp8-blok128"}, "did you mean 'fp8-block128'?"),
        ({"match": "*", "gemm": ["forward"]}, "unknown key 'precision.overrides[0].gemm'; did you mean"),
        ({"match": "*", "gemms": ["wgrad"]}, "none of 'forward', 'input-gradient', 'weight-gradient'"),
        ({"recipe": "bf16"}, "'precision.overrides[0].match' is missing"),
        ({"match": "*", "recipe": "fp8-row-gw-hp"}, "says more than a recipe (overrides)"),
        ({"match": "*", "recipe": "fp8-deepseek"}, "says more than a recipe (attention_output, dispatch"),
    ],
)
def test_a_bad_override_is_told_in_words(override: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as error:
        job(overrides=[override])
    assert words in str(error.value)
