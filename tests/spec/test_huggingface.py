"""A published config.json becomes the Model that transformers builds from it, weight for weight."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.spec import SpecError, load_job, num_parameters
from greylag.spec.huggingface import model_from, model_table, read_model
from greylag.spec.load import load_preset
from greylag.spec.model import Model

DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 128,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
SPARSE: dict[str, Any] = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **DENSE},
    "llama tied": {"model_type": "llama", **DENSE, "tie_word_embeddings": True},
    "llama head_dim": {"model_type": "llama", **DENSE, "head_dim": 32},
    "llama attention bias": {"model_type": "llama", **DENSE, "attention_bias": True},
    "llama mlp bias": {"model_type": "llama", **DENSE, "mlp_bias": True},
    "llama all biases": {"model_type": "llama", **DENSE, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **DENSE, "sliding_window": 16, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", **DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **DENSE},
    "qwen2 tied": {"model_type": "qwen2", **DENSE, "tie_word_embeddings": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **SPARSE, "shared_expert_intermediate_size": 64},
    "qwen2_moe wide": {"model_type": "qwen2_moe", **SPARSE, "shared_expert_intermediate_size": 80},
    "qwen2_moe steps": {"model_type": "qwen2_moe", **SPARSE, "shared_expert_intermediate_size": 64,
                        "decoder_sparse_step": 2},
    "qwen3": {"model_type": "qwen3", **DENSE, "head_dim": 32},
    "qwen3 bias": {"model_type": "qwen3", **DENSE, "head_dim": 32, "attention_bias": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **SPARSE, "head_dim": 32},
    "qwen3_moe dense layers": {"model_type": "qwen3_moe", **SPARSE, "head_dim": 32, "mlp_only_layers": [0, 1]},
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": 40},
    "deepseek_v2 lite": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 40, "n_group": 2, "topk_group": 1},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160, "n_positions": 128},
    "gpt2 inner": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160,
                   "n_positions": 128, "n_inner": 200},
    "gpt_oss": {"model_type": "gpt_oss", **DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
                "sliding_window": 16, "attention_bias": True},
    "phi3": {"model_type": "phi3", **DENSE},
    "olmo2": {"model_type": "olmo2", **DENSE},
    "olmoe": {"model_type": "olmoe", **DENSE, "num_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip
EXACT = [
    name for name in CONFIGS if name not in ("gpt_oss", "olmo2", "olmoe", "qwen3 bias") and "qwen2_moe" not in name
    and name not in ("llama attention bias", "llama mlp bias")
]  # fmt: skip


def model_of(config: dict[str, Any]) -> Model:
    return msgspec.convert(model_from(config, "config.json", "test")[0], Model)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_has_the_weights_that_transformers_builds(name: str) -> None:
    """What a Model cannot say is counted too: departures make up the whole difference."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = CONFIGS[name]
    table, departures = model_from(config, "config.json", "test")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    rest |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.CONFIG_MAPPING[config["model_type"]](**rest)
        )
    count = sum(p.numel() for p in theirs.parameters())
    assert num_parameters(msgspec.convert(table, Model)) + sum(d.parameters for d in departures) == count
    assert bool(departures) == (name not in EXACT)


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        # meta-llama/Meta-Llama-3-8B, openai-community/gpt2 scaled to GPT-3, Qwen/Qwen3-32B, deepseek-ai/DeepSeek-V3.
        ({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 8192, "rope_theta": 500000.0}, "llama-3-8b"),
        ({"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "vocab_size": 50257,
          "n_positions": 2048}, "gpt-3-175b"),
        ({"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
          "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
          "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000, "use_sliding_window": False,
          "max_window_layers": 64, "sliding_window": None}, "qwen3-32b"),
        ({"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
          "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
          "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
          "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
          "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
          "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
          "initializer_range": 0.006, "quantization_config": {"quant_method": "fp8"},
          "rope_scaling": {"type": "yarn", "factor": 40}, "ep_size": 1}, "deepseek-v3"),
    ],
)  # fmt: skip
def test_a_published_config_is_its_preset(config: dict[str, Any], preset: str) -> None:
    assert msgspec.structs.replace(model_of(config), name=preset) == load_preset("model", preset)


def test_prediction_modules_are_counted() -> None:
    assert model_of({**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1}).num_mtp_layers == 1


def test_windows_become_a_rule() -> None:
    qwen = {**CONFIGS["qwen2"], "use_sliding_window": True, "sliding_window": 16}
    whole = model_of({**qwen, "max_window_layers": 0})
    assert [whole.has_window(i) for i in range(4)] == [True] * 4
    oss = model_of(CONFIGS["gpt_oss"])
    assert [oss.has_window(i) for i in range(4)] == [True, False, True, False]
    _, departures = model_from({**qwen, "max_window_layers": 2}, "config.json", "test")
    assert [d.key for d in departures] == ["layer_types"]
    assert model_of({**qwen, "use_sliding_window": False}).window is None


def test_layers_with_experts_become_a_rule() -> None:
    sparse = model_of(CONFIGS["qwen2_moe steps"])
    assert [sparse.is_moe_layer(i) for i in range(4)] == [False, True, False, True]
    for changes in ({"mlp_only_layers": [1]}, {"num_hidden_layers": 10_000, "decoder_sparse_step": 20_000}):
        with pytest.raises(SpecError, match="follow no rule"):
            model_of({**CONFIGS["qwen3_moe"], **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llamas"}, "did you mean 'llama'"),
        ({"model_type": "mamba2"}, "no architecture 'mamba2'"),
        ({"model_type": "llava", "text_config": {}}, "text_config"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' must be of type integer"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers': 1000000000"),
        ({"attention_sinks": 4}, "unknown key 'attention_sinks'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        model_of({**CONFIGS["llama"], **changes})


def write(folder: Path, config: object) -> Path:
    path = folder / "models" / "my-llama" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config))
    return path


def job_file(folder: Path, model: str) -> Path:
    path = folder / "job.toml"
    path.write_text(f'precision = "bf16"\ncluster = "h100"\nsequence = 64\nglobal_batch = 8\nmodel = {model}\n')
    return path


def test_a_job_names_a_config_beside_it(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"])
    job = load_job(job_file(tmp_path, '"models/my-llama/config.json"'))
    assert job.model.name == "my-llama"
    assert job.model == msgspec.structs.replace(model_of(CONFIGS["llama"]), name="my-llama")
    assert not job.problems()


def test_a_job_changes_a_config(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"])
    path = job_file(tmp_path, '{ preset = "models/my-llama/config.json", num_layers = 2 }')
    assert load_job(path).model.num_layers == 2
    assert load_job(path, ["model.num_layers=3"]).model.num_layers == 3
    assert load_job(path).model.name == "my-llama (changed)"
    with pytest.raises(SpecError, match=r"unknown key 'model\.num_layer'"):
        load_job(path, ["model.num_layer=3"])


def test_a_job_refuses_what_a_model_cannot_say(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS["gpt_oss"])
    with pytest.raises(SpecError, match=r"sinks.*greylag import .*config\.json"):
        load_job(job_file(tmp_path, '"models/my-llama/config.json"'))
    assert read_model(path)[0]["window"] == 16


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"model_type": 3}', "\udce9", "[" * 100_000])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SpecError) as caught:
        model_table(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_job(job_file(tmp_path, '"nowhere/config.json"'))


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=5),
                 st.dictionaries(st.text(), st.integers(), max_size=2))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_any_config_is_read_or_refused_in_words(name: str, data: st.DataObject) -> None:
    config = dict(CONFIGS[name])
    keys = sorted({*config, "rope_parameters", "layer_types", "mlp_only_layers", "moe_layer_freq", "clip_qkv"})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        config[key] = data.draw(JUNK)
    refused = ""
    try:
        msgspec.convert(model_from(config, "config.json", "test")[0], Model)
    except SpecError as error:
        refused = str(error)
    assert not refused or refused.startswith("config.json: ")
