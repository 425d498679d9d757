"""Whatever a job file says, it becomes a Job or one line that names the key; `problems()` never raises."""

import datetime
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greylag.spec import Finding, Job, SpecError, load_job
from greylag.spec.load import job_from

BASE: dict[str, Any] = {
    "model": "deepseek-v3-tiny",
    "precision": "fp8-block128",
    "cluster": "local-2x1",
    "sequence": 64,
    "global_batch": 4,
    "strategy": {"dp": 2},
    "run": {"steps": 4, "warmup_steps": 2},
}
TEXT = """
model = "deepseek-v3-tiny"
precision = "fp8-block128"
cluster = "local-2x1"
sequence = 64
global_batch = 4
[run]
steps = 4
warmup_steps = 2
"""
DENSE, MOE, H100 = "llama-3-tiny", "deepseek-v3-tiny", "h100-8x1"
HUGE = 10**30


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    """BASE with changes; a table in both is merged, a name meets a table as its preset, None drops the key."""
    table = deepcopy(BASE)
    for key, value in changes.items():
        old = table.get(key)
        if value is None:
            del table[key]
        elif isinstance(value, dict) and old is not None:
            table[key] = {**(old if isinstance(old, dict) else {"preset": old}), **value}
        else:
            table[key] = value
    return table


def message(table: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        job_from(table, name="bad")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_base_is_good() -> None:
    assert not job_from(BASE, name="good").problems()


@pytest.mark.parametrize(
    ("changes", "wrong", "right"),
    [
        ({"sequence_": 1}, "sequence_", "sequence"),
        ({"model": {"num_layer": 2}}, "model.num_layer", "model.num_layers"),
        ({"model": {"moe": {"topk": 2}}}, "model.moe.topk", "model.moe.top_k"),
        ({"model": {"mla": {"kv_rank": 2}}}, "model.mla.kv_rank", "model.mla.kv_lora_rank"),
        ({"strategy": {"microbatch": 2}}, "strategy.microbatch", "strategy.micro_batch"),
        ({"precision": {"scales": "pow2"}}, "precision.scales", "precision.scale"),
        (
            {"precision": {"input": {"granulari": "tensor"}}},
            "precision.input.granulari",
            "precision.input.granularity",
        ),
        ({"run": {"lerning_rate": 1.0}}, "run.lerning_rate", "run.learning_rate"),
        ({"cluster": {"nodes": 2}}, "cluster.nodes", "cluster.node"),
        ({"cluster": {"device": {"memory": 8}}}, "cluster.device.memory", "cluster.device.memory_gib"),
        ({"cluster": {"preset": "h100", "network": {"gbps": 8.0}}}, "cluster.network.gbps", "cluster.network.gb_per_s"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unknown_key_names_the_nearest(changes: dict, wrong: str, right: str) -> None:
    text = message(merged(changes))
    assert f"unknown key '{wrong}'" in text
    assert f"did you mean '{right}'?" in text


def test_unknown_key_without_a_near_one_lists_all() -> None:
    assert "known keys: dp, replicas, pp" in message(merged({"strategy": {"xyzzy": 1}}))


@pytest.mark.parametrize("key", ["model", "precision", "cluster", "sequence", "global_batch"])
def test_missing_key(key: str) -> None:
    assert f"'{key}' is missing" in message(merged({key: None}))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"preset": None, "num_layers": 2}}, "model.hidden_size"),
        ({"precision": {"preset": None}}, "precision.input"),
        ({"cluster": {"preset": None}}, "cluster.device"),
        ({"precision": {"preset": None, "input": {}, "weight": {}, "grad": {}}}, "precision.input.format"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_missing_key_of_a_table(changes: dict, key: str) -> None:
    table = merged(changes)
    for section in changes:
        del table[section]["preset"]
    assert f"'{key}' is missing; add it" in message(table)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sequence": "64"}, "sequence"),
        ({"sequence": 64.0}, "sequence"),
        ({"sequence": True}, "sequence"),
        ({"sequence": float("nan")}, "sequence"),
        ({"sequence": HUGE}, "sequence"),
        ({"sequence": -(2**64)}, "sequence"),
        ({"sequence": datetime.date(2026, 1, 1)}, "sequence"),
        ({"global_batch": [4]}, "global_batch"),
        ({"global_batch": {"size": 4}}, "global_batch"),
        ({"name": 3}, "name"),
        ({"model": 3}, "model"),
        ({"model": ["llama"]}, "model"),
        ({"model": {"preset": 3}}, "model.preset"),
        ({"model": {"num_layers": 1.5}}, "model.num_layers"),
        ({"model": {"bias": 1}}, "model.bias"),
        ({"model": {"moe": [1]}}, "model.moe"),
        ({"model": {"moe": 3}}, "model.moe"),
        ({"precision": 8}, "precision"),
        ({"precision": {"input": "e4m3"}}, "precision.input"),
        ({"cluster": {"device": "H100"}}, "cluster.device"),
        ({"cluster": {"devices_per_node": "8"}}, "cluster.devices_per_node"),
        ({"cluster": {"device": {"peak_tflops": 3}}}, "cluster.device.peak_tflops"),
        ({"strategy": 3}, "strategy"),
        ({"strategy": [1, 2]}, "strategy"),
        ({"strategy": {"tp": "2"}}, "strategy.tp"),
        ({"strategy": {"tp": ""}}, "strategy.tp"),
        ({"strategy": {"tp": True}}, "strategy.tp"),
        ({"strategy": {"dp": 2.0}}, "strategy.dp"),
        ({"strategy": {"dp": HUGE}}, "strategy.dp"),
        ({"run": 3}, "run"),
        ({"run": {"data": "text.txt"}}, "run.data"),
        ({"run": {"data": [1]}}, "run.data"),
        ({"run": {"tensorboard": "yes"}}, "run.tensorboard"),
        ({"run": {"learning_rate": "1e-3"}}, "run.learning_rate"),
        ({"run": {"learning_rate": 10**400}}, "run.learning_rate"),
        ({"run": {"seed": 2**63}}, "run.seed"),
    ],
    ids=repr,
)
def test_wrong_type(changes: dict, key: str) -> None:
    assert f"'{key}" in message(merged(changes))


@pytest.mark.parametrize(
    ("changes", "key", "choice"),
    [
        ({"strategy": {"zero": 4}}, "strategy.zero", "3"),
        ({"strategy": {"schedule": "gpipe"}}, "strategy.schedule", "1f1b"),
        ({"precision": {"input": {"format": "fp4"}}}, "precision.input.format", "e4m3"),
        ({"precision": {"scale": ""}}, "precision.scale", "pow2"),
        ({"precision": {"high": "fp16"}}, "precision.high", "bf16"),
        ({"model": {"norm": "batch\nnorm"}}, "model.norm", "rmsnorm"),
        ({"model": {"moe": {"scoring": "tanh"}}}, "model.moe.scoring", "sigmoid"),
        ({"cluster": {"device": {"kind": "tpu"}}}, "cluster.device.kind", "cuda"),
        ({"run": {"store": "redis"}}, "run.store", "file"),
    ],
    ids=repr,
)
def test_wrong_choice_lists_the_right_ones(changes: dict, key: str, choice: str) -> None:
    text = message(merged(changes))
    assert f"'{key}'" in text
    assert choice in text


@pytest.mark.parametrize(
    ("section", "name", "near"),
    [
        ("model", "lama-3-8b", "llama-3-8b"),
        ("model", "", "known: "),
        ("model", "../models/llama-3-8b", "llama-3-8b"),
        ("precision", "fp8-block", "fp8-block128"),
        ("cluster", "h10-8x1", "h100"),
        ("cluster", "local-2x", "local"),
        ("cluster", "local-2x1-2x1", "local"),
        ("cluster", "local--2x1", "local"),
        ("cluster", "a\nb", "known: "),
    ],
)
def test_misspelt_preset(section: str, name: str, near: str) -> None:
    for value in (name, {"preset": name}):
        text = message({**BASE, section: value})
        assert f"for '{section}'" in text
        assert near in text


# --- files and overrides ------------------------------------------------------------------------------------------


def load_message(path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_job(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"sequence = ",
        b"sequence = 1\nsequence = 2",
        b"[run]\n[run]",
        b"= 3",
        b"a = 2026-13-45",
        b"\x00\x01\x02",
        b"\xff\xfe\x00s",
        b"\x89PNG\r\n\x1a\n",
        b"a = " + b"[" * 5000,
        b"a = " + b"9" * 5000,
        b"",
        b'"a\\nb" = 1',
    ],
    ids=lambda c: repr(c[:12]),
)
def test_not_a_job_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    assert load_message(file).startswith(f"{file}: ")


def test_number_of_hexadecimal_digits_beyond_all_limits(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(TEXT.replace("sequence = 64", "sequence = 0x" + "f" * 9000))
    assert "'sequence': a number beyond 64 bits" in load_message(file)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    good = tmp_path / "flight.toml"
    good.write_text(TEXT)
    assert f"no such file; did you mean {good}?" in load_message(tmp_path / "fligt.toml")
    assert "no such file; give the path" in load_message(tmp_path / "none" / "xyzzy.toml")
    assert "Is a directory" in load_message(tmp_path)
    assert "Not a directory" in load_message(good / "flight.toml")
    assert "File name too long" in load_message(tmp_path / ("x" * 300))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:  # root may read everything, so the system cannot be asked
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "cannot be read: Permission denied" in load_message(tmp_path / "flight.toml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("foo", "key=value"),
        ("=3", "key=value"),
        ("a.b", "key=value"),
        (".a=1", "key=value"),
        ("a.=1", "key=value"),
        ("run..steps=1", "key=value"),
        ("", "key=value"),
        ("strategy=3", "'strategy' must be of type table"),
        ("strategy.tp=", "'strategy.tp' must be of type integer"),
        ("strategy.tp=1\nsequence=2", "'strategy.tp' must be of type integer"),
        ("strategy.tp=" + "[" * 5000, "'strategy.tp' must be of type integer"),
        ("sequence.x=1", "'sequence' is a value and not a table"),
        ("model.moe.top_k.x=1", "'model.moe.top_k' must be of type integer"),
        ("xyzzy=1", "unknown key 'xyzzy'"),
        ("run.step=1", "did you mean 'run.steps'?"),
        ("a\nb=1", "unknown key 'a\\nb'"),
        ("model=lama-3-8b", "did you mean 'llama-3-8b'?"),
        ("run.steps=1e3", "'run.steps' must be of type integer"),
        ("run.steps=9223372036854775808", "'run.steps': a number beyond 64 bits"),
    ],
)
def test_bad_override(override: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "flight.toml"
    file.write_text(TEXT)
    assert said in load_message(file, override)


@pytest.mark.parametrize("pair", [("run.steps=1", "run.steps=2"), ("model.num_layers=2", "model=llama-3-8b")])
def test_override_that_undoes_another(pair: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "flight.toml"
    file.write_text(TEXT)
    assert "undoes" in load_message(file, *pair)
    assert load_job(file, ["model=llama-3-tiny", "model.num_layers=2", "run.steps=3", "run.seed=1"]).run.steps == 3


# --- problems -----------------------------------------------------------------------------------------------------

TENSOR = {"format": "e4m3", "granularity": "tensor"}
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": {"dp": 1, "tp": 3}, "cluster": "local-3x1"}, "strategy.tp"),
    ({"model": {"preset": "llama-3-8b", "num_heads": 24, "head_dim": 128, "num_kv_heads": 6}, "cluster": H100,
      "strategy": {"tp": 8, "dp": 1}}, "strategy.tp"),
    ({"strategy": {"dp": 1, "pp": 6}, "cluster": "local-6x1"}, "strategy.pp"),
    ({"strategy": {"dp": 4}}, "strategy"),
    ({"model": DENSE, "strategy": {"ep": 2}}, "strategy.ep"),
    ({"strategy": {"ep": 3, "dp": 3}, "cluster": "local-3x1", "global_batch": 3}, "strategy.ep"),
    ({"strategy": {"ep": 4}}, "strategy.ep"),
    ({"strategy": {"micro_batch": 3}}, "global_batch"),
    ({"global_batch": 3}, "global_batch"),
    ({"strategy": {"dp": 2, "replicas": 3}}, "strategy.replicas"),
    ({"strategy": {"replicas": 0}}, "strategy.replicas"),
    ({"strategy": {"micro_batch": 0}}, "strategy.micro_batch"),
    ({"strategy": {"dp": 0}}, "strategy.dp"),
    ({"strategy": {"dp": -1}}, "strategy.dp"),
    ({"strategy": {"tp": -2}}, "strategy.tp"),
    ({"strategy": {"dp": 2**62, "tp": 2**62}}, "strategy"),
    ({"cluster": "local-0x1"}, "cluster.devices_per_node"),
    ({"cluster": "local-2x0"}, "cluster.num_nodes"),
    ({"cluster": {"device": {"memory_gib": float("nan")}}}, "cluster.device.memory_gib"),
    ({"cluster": {"device": {"memory_gib": 0}}}, "cluster.device.memory_gib"),
    ({"cluster": {"device": {"memory_gb_per_s": 20.0}}}, "cluster.device.memory_gb_per_s"),
    ({"cluster": {"device": {"peak_tflops": {"fp32": 1.0}}}}, "cluster.device.peak_tflops"),
    ({"cluster": {"node": {"gb_per_s": 1.0, "latency_us": 1.0}}}, "cluster.node"),
    ({"cluster": {"preset": "h100-2x1", "node": {"gb_per_s": 0}}}, "cluster.node.gb_per_s"),
    ({"cluster": {"preset": "h100-2x1", "network": {"latency_us": -1}}}, "cluster.network.latency_us"),
    ({"cluster": {"preset": "h100-2x1", "device": {"peak_tflops": {"fp4": 1.0}}}}, "cluster.device.peak_tflops"),
    ({"cluster": {"preset": "h100-2x1", "device": {"peak_tflops": {"fp8": -1.0}}}}, "cluster.device.peak_tflops.fp8"),
    ({"cluster": {"preset": "h100-2x1", "name": "local-h100"}}, "cluster.name"),
    ({"sequence": 4096}, "sequence"),
    ({"sequence": 0}, "sequence"),
    ({"global_batch": -4}, "global_batch"),
    ({"strategy": {"dp": 1, "cp": 2}, "sequence": 66}, "strategy.cp"),
    ({"model": {"num_layers": 0}}, "model.num_layers"),
    ({"model": {"num_heads": 0}}, "model.num_heads"),
    ({"model": {"preset": DENSE, "num_heads": 0, "num_kv_heads": 0}}, "model.num_heads"),
    ({"model": {"preset": DENSE, "num_heads": 3, "head_dim": 64, "num_kv_heads": 2}}, "model.num_kv_heads"),
    ({"model": {"preset": "gpt-3-tiny", "num_heads": 3}}, "model.num_heads"),
    ({"model": {"preset": "gpt-3-tiny", "rope_theta": 5e5}}, "model.rope_theta"),
    ({"model": {"preset": DENSE, "head_dim": 33}}, "model.head_dim"),
    ({"model": {"norm_eps": float("inf")}}, "model.norm_eps"),
    ({"model": {"num_kv_heads": 4}}, "model.mla"),
    ({"model": {"position": "learned"}}, "model.position"),
    ({"model": {"bias": True}}, "model.bias"),
    ({"model": {"activation": "gelu"}}, "model.activation"),
    ({"model": {"mla": {"v_head_dim": -1}}}, "model.mla.v_head_dim"),
    ({"model": {"moe": {"top_k": 9}}}, "model.moe.top_k"),
    ({"model": {"moe": {"top_k": 5}}}, "model.moe.top_k"),
    ({"model": {"moe": {"num_groups": 3}}}, "model.moe.num_groups"),
    ({"model": {"moe": {"num_groups": 0}}}, "model.moe.num_groups"),
    ({"model": {"moe": {"top_k_groups": 5}}}, "model.moe.top_k_groups"),
    ({"model": {"moe": {"num_dense_layers": 5}}}, "model.moe.num_dense_layers"),
    ({"model": {"moe": {"num_experts": 0}}}, "model.moe.num_experts"),
    ({"precision": {"input": {"granularity": "128x128"}}}, "precision"),
    ({"precision": {"input": TENSOR}}, "precision"),
    ({"precision": {"input": {"timing": "delayed"}}}, "precision.input"),
    ({"precision": {"input": {"format": "bf16"}}}, "precision.input"),
    ({"precision": {"preset": "bf16", "grad": TENSOR}}, "precision"),
    ({"precision": {"preset": "bf16", "weight": {"format": "fp32"}}}, "precision"),
    ({"precision": {"preset": "bf16", "grad": {"granularity": "1x128"}}}, "precision.grad"),
    ({"precision": {"preset": "bf16", "scale": "fp32"}}, "precision.scale"),
    ({"precision": {"amax_history": 16}}, "precision.amax_history"),
    ({"precision": {"margin": 1}}, "precision.margin"),
    ({"precision": {"preset": "fp8-tensor-delayed", "margin": -1}}, "precision.margin"),
    ({"precision": {"preset": "fp8-tensor-delayed", "amax_history": 0}}, "precision.amax_history"),
    ({"run": {"beta1": 1.0}}, "run.beta1"),
    ({"run": {"beta2": 1.5}}, "run.beta2"),
    ({"run": {"beta1": -0.1}}, "run.beta1"),
    ({"run": {"eps": 0}}, "run.eps"),
    ({"run": {"clip_norm": float("inf")}}, "run.clip_norm"),
    ({"run": {"learning_rate": float("nan")}}, "run.learning_rate"),
    ({"run": {"learning_rate": 1e-5}}, "run.min_learning_rate"),
    ({"run": {"warmup_steps": 5}}, "run.warmup_steps"),
    ({"run": {"steps": 0, "warmup_steps": 0}}, "run.steps"),
    ({"run": {"seed": -1}}, "run.seed"),
    ({"run": {"weight_decay": -0.1}}, "run.weight_decay"),
    ({"run": {"checkpoint_every": -1}}, "run.checkpoint_every"),
    ({"run": {"keep_checkpoints": 0}}, "run.keep_checkpoints"),
    ({"run": {"data": []}}, "run.data"),
    ({"run": {"data": [""]}}, "run.data"),
    *(({"name": name}, "name") for name in ("", ".", "..", "../x", "/tmp/x", "a/b", "a\\b", "a\nb", "a\0b")),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "key"), PROBLEMS, ids=repr)
def test_problem_names_the_key(changes: dict, key: str) -> None:
    table = merged(changes)
    job = job_from(table, name="bad")
    before = msgspec.to_builtins(job)
    findings = job.problems()
    assert key in [f.where for f in findings], findings
    for finding in findings:
        assert finding.level == "error"
        assert finding.advice
        assert "\n" not in str(finding)
    assert job.problems() == findings
    assert repr(msgspec.to_builtins(job)) == repr(before)


def test_data_parallel_degree_is_filled_in() -> None:
    job = job_from({**BASE, "cluster": "h100-8x2", "strategy": {"tp": 4}, "global_batch": 8}, name="filled")
    assert job.strategy.dp == 4
    assert not job.problems()


# --- anything at all ----------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.sampled_from([HUGE, -HUGE, 2**63 - 1, 2**31]),
    st.floats(), st.text(max_size=5), st.dates(), st.sampled_from(["fp32", "e4m3", "tensor", "local", "h100-8x2"]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["drop", "set", "add"]), st.integers(0, 10**6), st.text(max_size=4), VALUES),
    min_size=1,
    max_size=4,
)
WHOLE = msgspec.to_builtins(job_from(BASE, name="whole"))
"""A job with every key written out, so that every key can be changed."""


def places(table: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for key, value in table.items():
        found.append((table, key))
        if isinstance(value, dict):
            found += places(value)
    return found


def assert_job_or_one_line(make: Any) -> None:
    fault, job = None, None
    try:
        job = make()
    except SpecError as error:
        fault = str(error)
    if fault is not None:
        assert len(fault.splitlines()) == 1
        assert "'" in fault or ":" in fault
        return
    assert isinstance(job, Job)
    assert all(isinstance(f, Finding) and f.where and f.advice for f in job.problems())
    assert isinstance(str(job), str) or job.problems()


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([BASE, WHOLE]), MUTATIONS)
def test_any_mutation_is_a_job_or_one_line(table: dict, mutations: list) -> None:
    table = deepcopy(table)
    for kind, place, name, value in mutations:
        candidates = places(table)
        if not candidates:
            break
        inner, key = candidates[place % len(candidates)]
        if kind == "drop":
            del inner[key]
        else:
            inner[key if kind == "set" else name] = deepcopy(value)
    assert_job_or_one_line(lambda: job_from(table, name="mutated"))


@settings(max_examples=200, deadline=2000)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.integers(0, len(TEXT)), st.booleans())
def test_any_bytes_are_a_job_or_one_line(tmp_path_factory, noise: bytes, place: int, alone: bool) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.toml"
    file.write_bytes(noise if alone else TEXT[:place].encode() + noise + TEXT[place:].encode())
    assert_job_or_one_line(lambda: load_job(file))


@settings(max_examples=200, deadline=2000)
@given(st.lists(st.text(max_size=12) | st.builds("{}={}".format, st.sampled_from(list(BASE)), st.text()), max_size=3))
def test_any_overrides_are_a_job_or_one_line(tmp_path_factory, overrides: list[str]) -> None:
    file = tmp_path_factory.getbasetemp() / "overridden.toml"
    file.write_text(TEXT)
    assert_job_or_one_line(lambda: load_job(file, overrides))


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3-8b", "gpt-3-tiny"])
def test_json_round_trip(model: str) -> None:
    table = {**tomllib.loads(TEXT), "model": model, "run": {"data": ["a", "b"], "learning_rate": 0.1 + 0.2}}
    job = job_from(table, name="round")
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
    assert job_from(msgspec.to_builtins(job), name="other") == job
