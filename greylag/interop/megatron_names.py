"""Megatron names: what becomes of each argument of Megatron-LM that no setting of a job stands for.

Names and meanings: megatron/training/arguments.py, megatron/training/config and TransformerConfig of NVIDIA/Megatron-LM
d98e8a6; dotted names: the configuration classes of NVIDIA-NeMo/Megatron-Bridge and the YAML of NVIDIA/NeMo 1.x.
"""

import re

IRRELEVANT = re.compile(
    r"""
    # Whole families: logging, checkpoints, data, tokenizers, evaluation, profiling, inference, fault tolerance.
    (log|logging|tensorboard|wandb|one-logger|app-tag|otel|timing|record|profile|pytorch-profiler|nvtx|memory-snapshot
    |save|load|ckpt|dist-ckpt|async|replicat|non-persistent|override|use-checkpoint|use-dist-ckpt|export
    |data|train-data|valid-data|test-data|per-split|dataloader|object-storage|fim|tokenizer|tiktoken|null-tokenizer
    |vocab-file|merge-file|sft-tokenizer|eval|exit|inference|inprocess|ft|adlr|straggler|rerun|error-injection
    |flight-recorder|workload-inspector|distributed-timeout|manual-gc
    # Of the loss and the optimizer's course.
    |lr-decay|lr-wsd|lr-warmup-init|loss-scale|decoupled|start-weight|end-weight|mup
    |moe-aux-loss|moe-z-loss|moe-router-load-balancing|moe-routing-trace|yarn|mscale)(-.*)?
    |no-(save|load|log|one-logger|ckpt|mmap|data|create-attention|use-tokenizer|check|manual|dist-ckpt|initialization
    |pad-vocab|yarn)(-.*)?
    # Data, seeds and start.
    |split|mock-data|num-workers|num-dataset-builder-threads|mid-level-dataset-surplus|seed|repeat|finetune
    |reset-position-ids|reset-attention-mask|eod-mask-loss|trust-remote-code|legacy-tokenizer|pretrained-checkpoint
    |auto-detect-ckpt-format|verify-integrity|init-model-with-meta-device|init-method-xavier-uniform
    |embedding-init-method-std|use-cpu-initialization|local-rank|lazy-mpu-init|test-mode|suspend-.*
    # What Megatron does anyway, or what changes values alone.
    |use-mcore-models|use-flash-attn|enable-experimental|enable-gpt-oss|distributed-backend|te-rng-tracker|bf16
    |attention-softmax-in-fp32|accumulate-allreduce-grads-in-fp32|apply-query-key-layer-scaling|moe-router-dtype
    |initial-loss-scale|min-loss-scale|hysteresis|calculate-per-token-loss|mtp-loss-scaling-factor|qk-clip.*
    |apply-layernorm-1p|layernorm-zero-centered-gamma|apply-wd-to-qk-layernorm|disable-bf16-reduced-precision-matmul
    |rotary-scaling-factor|rotary-seq-len-interpolation-factor|use-rope-scaling|rope-scaling-factor|rope-type
    |moe-input-jitter-eps|moe-per-layer-logging|moe-enable-routing-replay|group-query-attention|use-tp-pp-dp-mapping
    |check-weight-hash-across-dp-replicas-interval|check-for-nan-in-loss|check-for-large-grads|gpu-sniff-test-interval
    |disable-gloo-process-groups|enable-msc|disable-msc|train-sync-interval|barrier-with-l1-time|progress
    |use-persistent-ckpt-worker|enable-one-logger|align-.*|no-align-.*
    # Of torchrun, srun, sbatch and nsys.
    |rdzv.*|node-rank|master-addr|master-port|nnodes|nproc-per-node|max-restarts|monitor-interval|tee|redirects|role
    |local-ranks-filter|start-method|standalone|ntasks.*|nodes|gpus-per-.*|cpus-per-task|gres|mpi|mem|container.*
    |no-container.*|label|output|error|job-name|partition|account|time|exclusive|dependency|comment|kill-on-bad-exit
    |cpu-bind|unbuffered|trace|sample|cpuctxsw|capture-range.*|cuda-graph-trace|cuda-memory-usage|force-overwrite
    |[a-zA-Z]
    """,
    re.VERBOSE,
)
"""Names of arguments, and of launchers' options, that change no time and no byte of a step."""

_KERNELS = "which kernels are fused is the software's: its constants stand for all of them"
APPROXIMATED: dict[str, str] = {
    r"(no-)?(bias|masked-softmax|rope|cross-entropy|gradient-accumulation|persist|memory-efficient|swiglu"
    r"|apply-rope|gradient-reduce-div|fused|use-fused|use-flashinfer|use-transformer-engine-op|use-te-activ"
    r"|moe-permute|moe-router|moe-single|moe-use|mla-down-proj|moe-apply|fp16-lm)[a-z-]*(fusion|fuser"
    r"|layer-norm|fused-rope|loss-fusion|norm|impl|rope|func|cross-entropy|grouped-tensor|weight|bias"
    r"|input)|openai-gelu|output-logit-dtype|flash-attention-version"
    r"|use-grouped-gemm-for-.*|disable-jit-fuser|clone-scatter.*": _KERNELS,
    r"tp-comm-(?!overlap$).*|tp-comm-overlap-.*": "how TP communication is cut; the software's `exposed`",
    r"ddp-.*|no-use-layer.*|use-nccl-ub|.*nccl-ub|use-sharp|sharp-.*|nccl-.*|high-priority-.*|fsdp-.*"
    r"|disable-symmetric-registration|suggested-communication-unit-size|create-all-gather-group"
    r"|megatron-fsdp-(version|enable|max).*|keep-fp8-transpose-cache|batch-p2p-.*|pipeline-model-parallel-"
    r"comm-backend|use-ring-exchange-p2p": "buffers of dp communication; the software's `exposed`",
    r"overlap-p2p-communication-warmup-flush|microbatch-group-size-per-vp-stage"
    r"|microbatch-group-size-per-virtual-pipeline-stage": "the order of interleaving is the schedule's own",
    r"delay-wgrad-compute|defer-embedding-wgrad-compute|wgrad-deferral-limit"
    r"|overlap-dispatch-backward-with-experts-wgrad|moe-shared-expert-overlap|ep-overlap-.*"
    r"|overlap-param-gather-with-optimizer-step": "a further overlap; the software's `exposed`",
    r"moe-flex-dispatcher-backend|moe-enable-deepep|moe-.*-num-sms.*|moe-hybridep-.*"
    r"|moe-permute-fusion-into-hybridep": "which kernels bring tokens to nodes: the device's constants",
    r"cuda-graph-.*|optimizer-cuda-graph": "the whole step is launched from graphs",
    r"cp-comm-type|hierarchical-context-parallel-sizes": "keys and values are gathered (all_gather)",
    r"moe-router-force-load-balancing|moe-router-force-biased": "tokens are spread evenly over experts",
    r"moe-router-padding-for-.*": "rows that pad experts' inputs are not counted",
    r"batch-invariant-.*": "deterministic kernels are slower than those counted",
    r"empty-unused-memory-level": "emptying the allocator's cache takes time that is not counted",
    r"use-precision-aware-optimizer|store-param-remainders|reuse-grad-buf-for-mxfp8-param-ag"
    r"|no-store-param-remainders": "master weights are FP32 beside BF16",
    r"overlap-cpu-optimizer-d2h-h2d|use-torch-optimizer-for-cpu-offload|no-pin-cpu-.*|offload-modules"
    r"|cpu-offloading-.*|min-offloaded-tensor-size|activation-offload-fraction": "whole pools",
    r"glu-linear-offset|activation-func-clamp-value|rotary-interleaved|softmax-scale|qk-l2-norm"
    r"|no-rope-freq|moe-token-drop-policy|moe-pad-expert-input-to-capacity|mtp-detach-heads"
    r"|mtp-hsm": "changes neither FLOPs nor bytes noticeably",
}  # fmt: skip
"""By pattern: what stands in the place of arguments that a job only comes near."""

LEFT_OUT: dict[str, str] = {
    r"fp8-dot-product-attention|fp8-multi-head-attention|use-kitchen-attention": "attention core in FP8",
    r"fp8-output-proj": "the output head in FP8",
    r"kitchen-.*|use-kitchen|quant-recipe|te-precision-config-file|fp[48]-quantizer-factory":
        "a recipe of its own for each layer",
    r"moe-expert-capacity-factor|moe-token-dropping|moe-expert-rank-capacity-factor":
        "tokens beyond capacity are dropped or padded: FLOPs of experts",
    r"moe-shared-expert-gate": "a gate on the shared expert: a vector of weights a layer",
    r"softmax-type": "a sink in each head",
    r"attention-output-gate": "a gate on attention's output: FLOPs and weights",
    r"moe-latent-size": "experts in a narrower space: FLOPs and bytes of experts",
    r"mtp-use-repeated-layer": "prediction modules that share a layer: weights",
    r"distribute-saved-activations": "saved inputs cut over TP: memory",
    r"outer-dp-sharding-strategy|enable-full-sharding-in-hsdp": "state cut over replicas too: memory",
    r"moe-paged-stash.*": "activations of experts in pages: memory",
    r"moe-dispatch-fwd-dtype|moe-combine-bwd-dtype": "tokens that travel in MXFP8: bytes on the wire",
    r"fp32-residual-connection": "a residual stream in FP32: memory and bandwidth",
    r"activation-func-fp8-input-store": "inputs of activations kept in FP8: memory",
    r"tensor-parallel-num-weight-shards|expert-tensor-parallel-num-weight-shards|gtp-.*":
        "weights cut further than TP: memory and messages",
    r"hybrid-context-parallel|max-seqlen-per-dp-cp-rank|variable-seq-lengths|sft|seq-.*packing.*":
        "sequences of unequal length",
    r"num-microbatches-with-partial-activation-checkpoints": "recompute of some micro-batches only",
}  # fmt: skip
"""By pattern: what arguments that a job cannot express change."""

REFUSED: dict[str, str] = {
    r"is-hybrid-model|hybrid-override-pattern|hybrid-layer-pattern|mamba-.*|gdp-.*|mtp-hybrid-.*":
        "Mamba layers",
    r"experimental-attention-variant|linear-attention-freq|dsa-.*|linear-(conv|key|value|num)-.*":
        "linear or sparse attention",
    r"heterogeneous-.*": "layers that differ from one another",
    r"yaml-cfg": "arguments in another file: import that file",
    r"vision-.*|img-.*|patch-dim|num-channels|swin-.*|dino-.*": "a vision model",
    r"bert-.*|ict-.*|biencoder-.*|decoder-seq-length|mask-prob|short-seq-prob|vocab-extra-ids":
        "an encoder (BERT, T5)",
    r"enable-mhc-connections|mhc-.*": "hyper-connections",
    r"perform-rl-step|rl-.*|grpo-.*|langrl-.*": "reinforcement learning",
}  # fmt: skip
"""By pattern: architectures and tasks of which a job would be a false picture."""

ALIASES = {
    "num-moe-experts": "num-experts", "layernorm-epsilon": "norm-epsilon", "sequence-length": "seq-length",
    "encoder-seq-length": "seq-length", "encoder-num-layers": "num-layers", "decoder-num-layers": "num-layers",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank", "fp8": "fp8-format",
    "fp8-param": "fp8-param-gather", "fp4": "fp4-format", "num-layers-in-first-pipeline-stage":
    "decoder-first-pipeline-num-layers", "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "activations-checkpoint-granularity": "recompute-granularity", "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers", "ub-tp-comm-overlap": "tp-comm-overlap",
    "max-steps": "train-iters", "num-nodes": "nnodes", "devices": "nproc-per-node", "lr-warmup-steps":
    "lr-warmup-iters", "warmup-steps": "lr-warmup-iters", "gradient-clip-val": "clip-grad", "data-parallel-sharding":
    "data-parallel-sharding-strategy", "activation": "activation-func", "position-embedding": "position-embedding-type",
    "context-parallel": "context-parallel-size", "layernorm-type": "normalization", "persistent-save-interval":
    "save-interval", "num-gpus-per-node": "nproc-per-node", "min-learning-rate": "min-lr", "share-embeddings-and-"
    "output-weights": "tied", "add-bias-linear": "bias-linear", "bias": "bias-linear", "enable-cuda-graph":
    "cuda-graph", "external-cuda-graph": "cuda-graph", "moe-layer-recompute": "recompute-moe-layers",
}  # fmt: skip
"""Names of Megatron-Bridge, NeMo and older releases, and the argument that they stand for."""


def sort_name(name: str) -> tuple[str, str]:
    """(group, what to say) of an argument that nothing has read: irrelevant, approximated, left out or refused."""
    if IRRELEVANT.fullmatch(name):
        return "irrelevant", ""
    for group, patterns in (("refused", REFUSED), ("left out", LEFT_OUT), ("approximated", APPROXIMATED)):
        for pattern, what in patterns.items():
            if re.fullmatch(pattern, name):
                return group, what
    return "left out", "not known here as an argument of Megatron-LM: what it changes is not counted"
