"""Configurations of torchtitan, of all their layouts, become jobs that load."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.interop import Imported, import_file
from greylag.spec import Job, SpecError, load_job, num_parameters
from greylag.spec.load import load_preset

NEW = """
[job]
description = "ours"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
min_lr_factor = 0.1
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
"""
OLD = """
[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 8
seq_len = 4096
warmup_steps = 20
steps = 100
data_parallel_degree = -1
tensor_parallel_degree = 8
compile = true
[experimental]
pipeline_parallel_degree = 4
pipeline_parallel_split_points = ["layers.18", "layers.40", "layers.60"]
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatches = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[float8]
enable_float8_linear = false
"""


def imported(folder: Path, text: str, cluster: str | None = "h100-8x4", **given: str) -> Imported:
    path = folder / "train.toml"
    path.write_text(text)
    return import_file(path, cluster, {name.replace("__", "."): value for name, value in given.items()})


def job_of(folder: Path, text: str, cluster: str = "h100-8x4", **given: str) -> Job:
    job = imported(folder, text, cluster, **given).job
    assert job
    return job


def test_the_later_layout(tmp_path: Path) -> None:
    found = imported(tmp_path, NEW)
    (tmp_path / "job.toml").write_text(found.text)
    job = load_job(tmp_path / "job.toml")
    assert not job.problems()
    s, p = job.strategy, job.precision
    assert (s.dp, s.tp, s.zero, s.micro_batch, s.recompute, s.overlap) == (16, 2, 3, 2, "full", ("dp", "tp"))
    assert (job.sequence, job.global_batch) == (8192, 32)
    assert (p.input.granularity, p.grad.format, p.parameter_gather) == ("tensor", "e5m2", "fp8")
    assert (job.run.warmup_steps, job.run.min_learning_rate) == (200, pytest.approx(3e-5))
    assert [line for line in found.remarks if not line.startswith("irrelevant")] == []


def test_the_earlier_layout(tmp_path: Path) -> None:
    job = job_of(tmp_path, OLD, "h100-8x8")
    s = job.strategy
    assert (s.dp, s.tp, s.pp, s.micro_batch, s.schedule, s.zero) == (2, 8, 4, 1, "1f1b", 2)
    assert s.stage_layers == (18, 22, 20, 20)
    assert (s.recompute, s.recompute_layers, job.global_batch) == ("full", 10, 16)
    assert not job.precision.is_fp8
    assert job.run.warmup_steps == 20


@pytest.mark.parametrize(
    ("name", "flavor", "preset"),
    [("llama3", "8B", "llama-3-8b"), ("llama3", "70B", "llama-3-70b"), ("llama3", "405B", "llama-3-405b"),
     ("qwen3", "32B", "qwen3-32b"), ("deepseek_v3", "671B", "deepseek-v3"), ("deepseek_v3", "236B", "deepseek-v2")],
)  # fmt: skip
def test_flavors_have_the_weights_of_their_presets(tmp_path: Path, name: str, flavor: str, preset: str) -> None:
    text = NEW.replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"')
    assert num_parameters(job_of(tmp_path, text).model) == num_parameters(load_preset("model", preset))


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"parallelism__fsdp_reshard_after_forward": "never"}, "zero", 2),
        ({"parallelism__data_parallel_replicate_degree": "2"}, "replicas", 2),
        ({"parallelism__pipeline_parallel_degree": "2"}, "stage_layers", ()),
        ({"parallelism__pipeline_parallel_degree": "4"}, "stage_layers", (8, 9, 8, 7)),
        ({"parallelism__pipeline_parallel_degree": "2", "parallelism__pipeline_parallel_schedule": "DualPipeV"},
         "schedule", "dualpipe-v"),
        ({"parallelism__pipeline_parallel_degree": "2"}, "micro_batch", 1),
        ({"activation_checkpoint__mode": "none"}, "recompute", "none"),
        ({"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "4"},
         "recompute_layers", 8),
    ],
)  # fmt: skip
def test_strategy(tmp_path: Path, changes: dict[str, str], key: str, value: Any) -> None:
    assert getattr(job_of(tmp_path, NEW, **changes).strategy, key) == value


def test_experts_stay_high_unless_they_are_named(tmp_path: Path) -> None:
    text = NEW.replace('"llama3"', '"qwen3"').replace('"8B"', '"30B-A3B"')
    high = job_of(tmp_path, text).precision.gemms("layers.0.ffn.experts.w_down", 48)
    assert not high.is_fp8
    low = job_of(tmp_path, text + '[quantize.grouped_mm.float8]\nfqns = ["experts"]\n')
    assert low.precision.gemms("layers.0.ffn.experts.w_down", 48).is_fp8


@pytest.mark.parametrize(
    ("changes", "group", "named"),
    [
        ({"activation_checkpoint__mode": "memory_budget"}, "not expressible", "activation_checkpoint.mode"),
        ({"training__dtype": "bfloat16"}, "not expressible", "training.dtype"),
        ({"parallelism__novelty": "3"}, "not expressible", "parallelism.novelty"),
        ({"optimizer__name": "Muon"}, "not expressible", "optimizer.name"),
        ({"compile__enable": "false"}, "approximated", "compile.enable"),
        ({"metrics__log_freq": "3"}, "irrelevant", "metrics.log_freq"),
    ],
)
def test_what_is_not_exact_is_named_in_its_group(
    tmp_path: Path, changes: dict[str, str], group: str, named: str
) -> None:
    remarks = imported(tmp_path, NEW, **changes).remarks
    assert any(line.startswith(group) and named in line for line in remarks), remarks


@pytest.mark.parametrize(
    ("text", "cluster", "said"),
    [
        (NEW, None, "give --cluster"),
        (NEW, "h100", "says no number of devices"),
        (NEW.replace('"8B"', '"9B"'), "h100-8x1", "no '9B' of llama3"),
        (NEW.replace('"llama3"', '"flux"'), "h100-8x1", "'flux' is no model"),
        ("[model", "h100-8x1", "not valid TOML"),
        ("a = 1", "h100-8x1", r"no \[model\] and \[training\]"),
        (NEW.replace("= -1", "= 3"), "h100-8x1", "is not the 4 data-parallel ranks"),
        (NEW + 'recipe_name = "best"', "h100-8x1", "no 'best'"),
    ],
)
def test_bad_input_is_named_with_its_file(tmp_path: Path, text: str, cluster: str | None, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        imported(tmp_path, text, cluster)
    assert str(caught.value).startswith(f"{tmp_path / 'train.toml'}: ")


KEYS = ["training__local_batch_size", "training__seq_len", "training__steps", "training__global_batch_size",
        "parallelism__pipeline_parallel_degree", "parallelism__pipeline_parallel_layers_per_stage",
        "parallelism__data_parallel_shard_degree", "activation_checkpoint__selective_ac_option", "optimizer__lr",
        "parallelism__pipeline_parallel_first_stage_less_layers", "lr_scheduler__min_lr_factor",
        "quantize__linear__float8__recipe_name", "parallelism__data_parallel_replicate_degree"]  # fmt: skip
VALUES = st.one_of(st.integers(-1, 40).map(str), st.floats().map(str), st.sampled_from(["", "x", "9" * 30, "rowwise"]))


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_values_become_a_job_or_are_refused(
    changes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, refused = tmp_path_factory.getbasetemp(), ""
    try:
        job = imported(folder, NEW, **changes).job
        assert job is not None
        assert not job.problems()
    except SpecError as error:
        refused = str(error)
    assert not refused or refused.startswith(f"{folder / 'train.toml'}: ")
