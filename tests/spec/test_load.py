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
from tables import BASE, merged

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
HUGE = 10**30


def message(table: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        job_from(table, name="bad")
    assert len(str(caught.value).splitlines()) == 1
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
        ({"sequence": {"\x1e\u2028": 2**63}}, "sequence.\\x1e\\u2028"),
    ],
    ids=repr,
)
def test_wrong_type(changes: dict, key: str) -> None:
    assert f"'{key}" in message(merged(changes))


@pytest.mark.parametrize(
    ("changes", "key", "choice"),
    [
        ({"strategy": {"zero": 4}}, "strategy.zero", "3"),
        ({"strategy": {"schedule": "2f2b"}}, "strategy.schedule", "1f1b"),
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
    assert len(str(caught.value).splitlines()) == 1
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
