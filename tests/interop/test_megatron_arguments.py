"""Megatron's arguments one by one: what of a job each becomes, and what they cannot say is said."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.interop import Imported, import_file
from greylag.spec import Job, SpecError
from greylag.spec.load import load_preset

PLAIN = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 32 --bf16 --vocab-size 50257 --attention-dropout 0 --hidden-dropout 0 "
)


def imported(folder: Path, text: str, cluster: str | None = "h100-8x1", **given: str) -> Imported:
    path = folder / "run.sh"
    path.write_text(text)
    return import_file(path, cluster, given)


def job_of(folder: Path, more: str, cluster: str = "h100-8x1", **given: str) -> Job:
    job = imported(folder, PLAIN + more, cluster, **given).job
    assert job
    return job


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("--use-distributed-optimizer", "zero", 1),
        ("", "zero", 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero", 2),
        ("--use-torch-fsdp2", "zero", 3),
        ("--recompute-activations", "recompute_modules", ("attention",)),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "recompute", "full"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "recompute_layers", 1),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "vp", 2),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", "stage_layers", (1, 3)),
        ("--pipeline-model-parallel-size 4 --num-layers 6 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", "stage_layers", (1, 2, 2, 1)),
        ("--overlap-grad-reduce", "overlap", ("dp",)),
        ("", "overlap", ()),
        ("--optimizer-cpu-offload", "offload", ("optimizer",)),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "replicas", 2),
    ],
)  # fmt: skip
def test_strategy(tmp_path: Path, more: str, key: str, value: Any) -> None:
    assert getattr(job_of(tmp_path, more).strategy, key) == value


@pytest.mark.parametrize(
    ("more", "name", "formats"),
    [
        ("", "bf16", ("bf16", "bf16")),
        ("--fp8-format hybrid", "fp8-tensor-delayed", ("e4m3", "e5m2")),
        ("--fp8-format e4m3", "fp8-tensor-delayed", ("e4m3", "e4m3")),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "fp8-tensor-current", ("e4m3", "e5m2")),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "fp8-block128", ("e4m3", "e4m3")),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8", ("e4m3", "e4m3")),
    ],
)
def test_precision(tmp_path: Path, more: str, name: str, formats: tuple[str, str]) -> None:
    p, preset = job_of(tmp_path, more).precision, load_preset("precision", name)
    assert (p.input.format, p.grad.format) == formats
    assert (p.input.granularity, p.input.timing, p.scale) == (
        preset.input.granularity,
        preset.input.timing,
        preset.scale,
    )


def test_details_of_fp8_and_state(tmp_path: Path) -> None:
    delayed = job_of(tmp_path, "--fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max").precision
    assert (delayed.amax_history, delayed.amax_choice) == (16, "max")
    assert job_of(tmp_path, "--fp8-format hybrid").precision.amax_history == 1  # Megatron's default
    kept = job_of(tmp_path, "--fp8-format hybrid --no-fp8-wgrad").precision
    assert not kept.gemms("layers.0.ffn.w_up", 4).weight_gradient.is_fp8
    state = job_of(tmp_path, "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")
    assert (state.precision.first_moment, state.precision.second_moment) == ("bf16", "bf16")
    assert job_of(tmp_path, "--grad-reduce-in-bf16").software.gradients == "bf16"
    assert job_of(tmp_path, "--cuda-graph-impl local").software.graphs


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ("", {"activation": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tied_embeddings": True,
              "ffn_hidden_size": 2048, "vocab_size": 50304, "num_kv_heads": 8}),
        ("--swiglu", {"activation": "swiglu", "ffn_hidden_size": 1344}),
        ("--squared-relu", {"activation": "relu2"}),
        ("--disable-bias-linear --add-qkv-bias", {"bias": False, "qkv_bias": True}),
        ("--kv-channels 128 --qk-layernorm", {"head_dim": 128, "qk_norm": True}),
        ("--group-query-attention --num-query-groups 2", {"num_kv_heads": 2}),
        ("--tensor-model-parallel-size 4 --sequence-parallel", {"vocab_size": 50688}),
        ("--padded-vocab-size 50000", {"vocab_size": 50000}),
        ("--window-size 127,0 --window-attn-skip-freq 2", {"window": 128, "full_attention_every": 2}),
        ("--window-size '(127,0)'", {"window": 128, "full_attention_every": None}),
        ("--window-size 127,0 --window-attn-skip-freq [1,1,1,0]", {"window": 128, "full_attention_every": 4}),
    ],
)  # fmt: skip
def test_model(tmp_path: Path, more: str, values: dict[str, Any]) -> None:
    model = job_of(tmp_path, more).model
    assert {key: getattr(model, key) for key in values} == values


@pytest.mark.parametrize(
    ("more", "group", "named"),
    [
        ("--attention-dropout 0.1", "approximated", "--hidden-dropout"),
        ("--fp4-format e2m1", "not expressible", "--fp4-format"),
        ("--moe-expert-capacity-factor 1.0", "not expressible", "--moe-expert-capacity-factor"),
        ("--deterministic-mode", "approximated", "--deterministic-mode"),
        ("--num-experts 8 --moe-grouped-gemm", "approximated", "--moe-token-dispatcher-type"),
        ("--some-new-argument 3", "not expressible", "--some-new-argument"),
        ("--optimizer muon", "not expressible", "--optimizer"),
        ("--recompute-granularity selective --recompute-modules shared_experts", "not expressible", "shared_experts"),
        ("--fp16", "approximated", "--fp16"),
        ("--quick-geglu", "approximated", "--quick-geglu"),
        ("--no-rope-fusion", "approximated", "--no-rope-fusion"),
        ("--wandb-project x", "irrelevant", "--wandb-project"),
        ("--no-save-optim", "irrelevant", "--no-save-optim"),
    ],
)
def test_what_is_not_exact_is_named_in_its_group(tmp_path: Path, more: str, group: str, named: str) -> None:
    remarks = imported(tmp_path, PLAIN + more).remarks
    assert any(line.startswith(group) and named in line for line in remarks), remarks


def test_arguments_that_are_expressed_are_not_remarked_on(tmp_path: Path) -> None:
    assert imported(tmp_path, PLAIN + "--overlap-grad-reduce --swiglu").remarks == ()
    experts = "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type flex --disable-bias-linear"
    loss = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --no-gradient-accumulation-fusion"
    cut = "--tensor-model-parallel-size 2 --attention-backend unfused"
    assert imported(tmp_path, f"{PLAIN} --overlap-grad-reduce {experts} {loss} {cut}").remarks == ()


def test_what_is_fused(tmp_path: Path) -> None:
    plain = job_of(tmp_path, "").software
    assert (plain.attention, plain.dropout, plain.loss) == ("flash", False, "parallel")
    assert (plain.weight_gradients, plain.deterministic, plain.dispatch) == ("accumulated", False, "choices")
    local = job_of(tmp_path, "--transformer-impl local --hidden-dropout 0.1 --attention-dropout 0.1").software
    assert (local.attention, local.dropout) == ("unfused", True)
    assert job_of(tmp_path, "--transformer-impl local --use-flash-attn").software.attention == "flash"
    assert job_of(tmp_path, "--attention-backend unfused").software.attention == "unfused"
    assert job_of(tmp_path, "--cross-entropy-loss-fusion").software.loss == "compiled-parallel"
    assert job_of(tmp_path, "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te").software.loss == "in-place"
    assert job_of(tmp_path, "--no-gradient-accumulation-fusion").software.weight_gradients == "autograd"
    assert job_of(tmp_path, "--deterministic-mode").software.deterministic


def test_tensor_parallelism_with_and_without_its_sequence_cut(tmp_path: Path) -> None:
    two = "--tensor-model-parallel-size 2 "
    assert not job_of(tmp_path, two).strategy.sequence_parallel
    assert job_of(tmp_path, two + "--sequence-parallel").strategy.sequence_parallel
    assert job_of(tmp_path, "").strategy.sequence_parallel


def test_experts_follow_the_activation(tmp_path: Path) -> None:
    more = "--num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 512 "
    job = job_of(tmp_path, more + "--moe-token-dispatcher-type flex")
    assert job.model.activation == "gelu"
    assert job.software.dispatch == "nodes"
    assert job.model.moe is not None
    assert (job.model.moe.ffn_hidden_size, job.model.moe.shared_ffn_hidden_size) == (1024, 512)


@pytest.mark.parametrize(
    ("text", "cluster", "said"),
    [
        (PLAIN, None, "no number of devices, and not of which kind; give --cluster"),
        (PLAIN, "h100", "no number of devices; give it with --cluster h100-8x16"),
        (PLAIN, "h1000-8x1", "no preset 'h1000'"),
        (PLAIN + "--tensor-model-parallel-size 3", "h100-8x1", "does not divide 8 devices"),
        (PLAIN + "--tensor-model-parallel-size 0", "h100-8x1", "degrees begin at 1"),
        (PLAIN + "--global-batch-size 3", "h100-8x1", "cannot run: global_batch"),
        (PLAIN + "--num-layers", "h100-8x1", "--num-layers: has no value"),
        (PLAIN + "--num-layers $LAYERS", "h100-8x1", r"\$LAYERS is not known here; add num-layers=VALUE"),
        (PLAIN + "--num-layers many", "h100-8x1", "'many' is not a number"),
        (PLAIN + "--hybrid-override-pattern M-M*", "h100-8x1", "Mamba layers"),
        (PLAIN + "--moe-layer-freq [0]*3 --num-experts 4", "h100-8x1", "says 3 of 4 layers"),
        ("echo hello", "h100-8x1", "no command with Megatron's arguments"),
        ("", "h100-8x1", "no command with Megatron's arguments"),
    ],
)
def test_bad_input_is_named_with_its_file(tmp_path: Path, text: str, cluster: str | None, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        imported(tmp_path, text, cluster)
    assert str(caught.value).startswith(f"{tmp_path / 'run.sh'}: ")


@pytest.mark.parametrize("name", ["num-layers", "num_layers", "model.num_layers", "encoder-num-layers"])
def test_arguments_can_be_added(tmp_path: Path, name: str) -> None:
    assert job_of(tmp_path, "--num-layers $LAYERS", **{name: "6"}).model.num_layers == 6


NAMES = ("num-layers", "hidden-size", "seq-length", "num-experts", "moe-layer-freq", "fp8-format", "window-size",
         "pipeline-model-parallel-size", "pipeline-model-parallel-layout", "vocab-size", "lr", "train-samples",
         "recompute-modules", "expert-model-parallel-size", "window-attn-skip-freq", "kv-channels", "clip-grad",
         "decoder-first-pipeline-num-layers", "lr-warmup-fraction", "swiglu", "multi-latent-attention")  # fmt: skip
VALUES = st.one_of(
    st.integers(-2, 9).map(str), st.floats().map(str), st.text(st.sampled_from("[]()*+,Et|mL0129.e-"), max_size=12),
    st.sampled_from(["", "true", "1e400", "9" * 30, "[1]*4", "hybrid", "Et|tt|tL", "٣"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(options=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=4), is_yaml=st.booleans())
def test_any_arguments_become_a_job_or_are_refused(
    options: list[tuple[str, str]], is_yaml: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / ("fuzz.yaml" if is_yaml else "fuzz.sh")
    if is_yaml:
        words = PLAIN.replace("--bf16", "--bf16 true").split()
        lines = [f"  {n}: {v}" for n, v in zip(words[::2], words[1::2], strict=True)]
        lines += [f"  --{n}: {v}" for n, v in options]
        path.write_text("MODEL_ARGS:\n" + "\n".join(lines))
    else:
        path.write_text(PLAIN + " ".join(f"--{n} '{v}'" for n, v in options))
    refused = ""
    try:
        job = import_file(path, "h100-8x1").job
        assert job is not None
        assert not job.problems()
    except SpecError as error:
        refused = str(error)
    assert not refused or refused.startswith(f"{path}: ")
