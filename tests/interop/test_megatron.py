"""Whole files of Megatron, launch scripts and YAML, become jobs that load."""

from pathlib import Path

import pytest

from greylag.interop import Imported, import_file
from greylag.interop.flat_yaml import read_yaml
from greylag.spec import SpecError, load_job, num_parameters
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


def imported(folder: Path, text: str, cluster: str | None, name: str = "run.sh", **given: str) -> Imported:
    path = folder / name
    path.write_text(text)
    return import_file(path, cluster, given)


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


def test_a_script_says_how_many_devices_and_not_which(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="16 nodes of 8 devices, and not of which kind; give --cluster"):
        imported(tmp_path, DENSE, None)


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
