"""Launch scripts, argument lists and YAML of Megatron become jobs that load, and what they cannot say is said."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.interop import Imported, import_file
from greylag.interop.flat_yaml import read_yaml
from greylag.spec import Job, SpecError, load_job, num_parameters
from greylag.spec.load import load_preset

DENSE = """#!/bin/bash
#SBATCH --nodes=16
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-16}
CHECKPOINT=$1
LAYERS=32
PRECISION=fp8

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr ${MASTER_ADDR:-localhost}
)
NETWORK=(
    --num-layers $LAYERS --hidden-size 4096   # Llama 3 8B
    --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 500000
    --attention-dropout 0.0 --hidden-dropout 0.0
    --vocab-size 128256 --make-vocab-size-divisible-by 64
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256
    --train-iters 5000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 200
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
if [[ "$PRECISION" == "fp8" ]]; then
    TRAINING+=("--fp8-format hybrid" "--fp8-recipe tensorwise" --fp8-param-gather)
    TRAINING+=(--first-last-layers-bf16 --num-layers-at-start-in-bf16 2)
fi
CUTS=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap
    --recompute-granularity selective --recompute-modules core_attn layernorm
)
OTHER=(--save "$CHECKPOINT" --log-interval 10 --tensorboard-dir $CHECKPOINT/tb --split 99,1,0)

srun -l torchrun ${LAUNCH[@]} pretrain_gpt.py \\
    "${NETWORK[@]}" ${TRAINING[@]} \\
    ${CUTS[@]} "${OTHER[@]}" 2>&1 | tee log.txt
"""

SPARSE = """
MODEL_ARGS:
  # DeepSeek-V3, shortened
  --num-layers: 14
  --hidden-size: 7168
  --ffn-hidden-size: 18432
  --num-attention-heads: 128
  --seq-length: 4096
  --max-position-embeddings: 4096
  --position-embedding-type: rope
  --normalization: "RMSNorm"
  --swiglu: true
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --multi-latent-attention: true
  --qk-layernorm: true
  --q-lora-rank: 1536
  --kv-lora-rank: 512
  --qk-head-dim: 128
  --qk-pos-emb-head-dim: 64
  --v-head-dim: 128
  --mtp-num-layers: 1
  --num-experts: 64 # of 256
  --moe-layer-freq: ([0]*3+[1]*11)
  --moe-ffn-hidden-size: 2048
  --moe-shared-expert-intermediate-size: 2048
  --moe-router-topk: 8
  --moe-router-num-groups: 8
  --moe-router-group-topk: 4
  --moe-router-score-function: sigmoid
  --moe-router-topk-scaling-factor: 2.5
  --moe-router-enable-expert-bias: true
  --moe-grouped-gemm: true
  --moe-token-dispatcher-type: alltoall
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --vocab-size: 129280
  --bf16: true
  --fp8-format: e4m3
  --fp8-recipe: blockwise
  --micro-batch-size: 1
  --global-batch-size: 512
  --pipeline-model-parallel-size: 4
  --pipeline-model-parallel-layout: Et*2|(tt|)*5t|tmL
  --expert-model-parallel-size: 16
  --expert-tensor-parallel-size: 1
  --use-distributed-optimizer: true
  --overlap-moe-expert-parallel-comm: true
  --recompute-granularity: selective
  --recompute-modules: "[mla_up_proj moe_act]"
  --auto-detect-ckpt-format:
    true
  --save: ${CHECKPOINT_SAVE_PATH}
METRICS:
  - "iteration-time"
  - "lm loss"
"""

PLAIN = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 32 --bf16 --vocab-size 50257 --attention-dropout 0 --hidden-dropout 0 "
)


def imported(folder: Path, text: str, cluster: str | None = "h100-8x1", name: str = "run.sh", **given: str) -> Imported:
    path = folder / name
    path.write_text(text)
    return import_file(path, cluster, given)


def job_of(folder: Path, more: str, cluster: str = "h100-8x1", **given: str) -> Job:
    job = imported(folder, PLAIN + more, cluster, **given).job
    assert job
    return job


def test_a_dense_script(tmp_path: Path) -> None:
    found = imported(tmp_path, DENSE, "h100")
    (tmp_path / "job.toml").write_text(found.text)
    job = load_job(tmp_path / "job.toml")
    assert not job.problems()
    assert found.job is not None
    assert job.strategy == found.job.strategy
    assert (job.cluster.num_devices, job.sequence, job.global_batch) == (128, 8192, 256)
    assert num_parameters(job.model) == num_parameters(load_preset("model", "llama-3-8b"))
    s = job.strategy
    assert (s.dp, s.tp, s.pp, s.vp, s.zero, s.schedule) == (16, 2, 4, 2, 1, "interleaved")
    assert (s.recompute, s.recompute_modules) == ("selective", ("attention", "norm"))
    assert s.overlap == ("dp", "tp", "pp")
    p = job.precision
    assert (p.input.granularity, p.input.timing, p.grad.format) == ("tensor", "current", "e5m2")
    assert (p.parameter_gather, p.first_layers_high, p.last_layers_high) == ("fp8", 2, 1)
    assert (job.run.steps, job.run.learning_rate, job.run.warmup_steps) == (5000, 3e-4, 200)
    assert (job.software.parameters, job.software.gradients) == ("bf16", "fp32")
    irrelevant = next(line for line in found.remarks if line.startswith("irrelevant"))
    for name in ("--save", "--log-interval", "--tensorboard-dir", "--split"):
        assert name in irrelevant
    assert [line for line in found.remarks if line.startswith("approximated")] == [
        "approximated: --fp8-param-gather: parameters travel in FP8, and rest as the software says"
    ]
    assert not [line for line in found.remarks if line.startswith("not expressible")]


def test_a_variable_of_the_script_can_be_set(tmp_path: Path) -> None:
    job = imported(tmp_path, DENSE, "h100", PRECISION="bf16", LAYERS="16").job
    assert job is not None
    assert (job.precision.is_fp8, job.model.num_layers) == (False, 16)


def test_a_sparse_test_case(tmp_path: Path) -> None:
    job = imported(tmp_path, SPARSE, "b200-8x16", "case.yaml").job
    assert job is not None
    model = job.model
    v3 = load_preset("model", "deepseek-v3")
    assert model.mla == v3.mla
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.num_dense_layers, model.moe.every) == (64, 3, 1)
    assert (model.moe.scoring, model.moe.routed_scale, model.moe.bias_update_rate) == ("sigmoid", 2.5, 0.001)
    assert (model.moe.num_groups, model.moe.top_k_groups, model.moe.num_shared_experts) == (8, 4, 1)
    assert model.num_mtp_layers == 1
    s = job.strategy
    assert (s.pp, s.vp, s.ep, s.etp, s.dp) == (4, 2, 16, 1, 32)
    assert s.stage_layers == (2, 2, 2, 2, 2, 2, 1, 1)
    assert s.recompute_modules == ("mla_up", "activation")
    assert "ep" in s.overlap
    assert (job.precision.weight.granularity, job.precision.most_sensitive) == ("128x128", "B")


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
        (DENSE, None, "16 nodes of 8 devices, and not of which kind; give --cluster"),
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
def test_bad_input_is_one_line(tmp_path: Path, text: str, cluster: str | None, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        imported(tmp_path, text, cluster)
    assert "\n" not in str(caught.value)


def test_arguments_can_be_added(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(PLAIN + "--num-layers $LAYERS")
    job = import_file(path, "h100-8x1", {"num-layers": "6"}).job
    assert job is not None
    assert job.model.num_layers == 6


def test_dotted_names_of_bridge(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc_per_node=8 --nnodes=2 train.py model.num_layers=8 model.hidden_size=1024 "
        "model.num_attention_heads=16 model.num_query_groups=4 model.seq_length=4096 model.gated_linear_unit=true "
        "model.add_bias_linear=false model.share_embeddings_and_output_weights=false model.normalization=RMSNorm "
        "model.position_embedding_type=rope model.vocab_size=32000 model.layernorm_epsilon=1e-6 "
        "model.tensor_model_parallel_size=2 model.sequence_parallel=true train.global_batch_size=64 "
        "train.micro_batch_size=1 ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true "
        "ddp.overlap_param_gather=true model.bf16=true model.hidden_dropout=0 model.attention_dropout=0 "
        "optimizer.lr=1e-4 scheduler.lr_warmup_iters=10 train.train_iters=100 ++model.recompute_granularity=full"
    )
    job = imported(tmp_path, text, "h100").job
    assert job is not None
    m, s = job.model, job.strategy
    assert (m.num_kv_heads, m.bias, m.tied_embeddings, m.norm, m.norm_eps) == (4, False, False, "rmsnorm", 1e-6)
    assert (s.dp, s.tp, s.zero, s.recompute, job.run.learning_rate) == (8, 2, 1, "full", 1e-4)


def test_yaml_is_read_strictly() -> None:
    text = "a: 1  # one\nb:\n  c: 'x # y'\n  d: [1, 2]\nb2:\n- p\n- q\ntext: |\n  any: thing\n   at all\nlast: ok\n"
    assert read_yaml(text, "f") == {
        "a": ["1"], "b.c": ["x # y"], "b.d": ["1", "2"], "b2": ["p", "q"], "text": ["(text)"], "last": ["ok"]
    }  # fmt: skip
    for bad in ("a: &x 1", "- x", "a", "a: {b: 1}", "\ta: 1"):
        with pytest.raises(SpecError, match="f: line 1"):
            read_yaml(bad, "f")


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
def test_any_arguments_become_a_job_or_one_line(
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
    try:
        job = import_file(path, "h100-8x1").job
        assert job is not None
        assert not job.problems()
    except SpecError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert "fuzz" in str(error)  # noqa: PT017
