"""Software: what a training framework does with a job, beyond the job's own settings.

Two frameworks that fly the same job differ in the bytes they keep and in the time between kernels. The facts here are
those that a prediction needs; a trainer other than Greylag's own is simulated and not run.
"""

from typing import Literal

import msgspec

Loss = Literal["in-place", "parallel", "compiled-parallel", "torch", "compiled"]


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured runs of one kind that a framework's constants were held against."""

    device: str
    """Name of the device."""
    kind: Literal["dense", "experts"]
    dtype: str
    """Of the linear layers' GEMMs."""
    rows: int
    """How many runs."""
    ranks: int
    """Devices of the largest of them."""
    spread: float
    """Nine in ten of their step times lie within this share of the prediction made without their model."""


class Software(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One generation of a framework."""

    name: str
    parameters: Literal["fp32", "bf16"] = "fp32"
    """Weights as the model holds them. `bf16` has an FP32 master copy beside AdamW's moments."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """What gradients are accumulated and reduced in."""
    activations: Literal["autograd", "fused"] = "autograd"
    """What backward keeps: `autograd`, what Greylag's own layers keep (`spec.kept`); `fused`, what the fused layers of
    TransformerEngine and Megatron-Core keep."""
    graphs: bool = False
    """Whether kernels are launched from CUDA graphs, so that the host does not pace them."""
    attention: Literal["flash", "flash-2", "unfused"] = "flash"
    """`flash` keeps one number per row of the softmax and skips what is masked (cuDNN; FlashAttention-3, arXiv
    2407.08608), `flash-2` the same with kernels written before Hopper (arXiv 2307.08691), `unfused` writes the scores
    of every pair of tokens and keeps the probabilities."""
    dropout: bool = False
    """Dropout behind attention and the feed-forward layer, and of the probabilities (GPT-3's 0.1)."""
    loss: Loss = "in-place"
    """`in-place` writes the logits' gradient over them (TransformerEngine 2.11, pytorch/triton/cross_entropy.py);
    `parallel` keeps the softmax in FP32 (Megatron-Core, tensor_parallel/cross_entropy.py), `compiled-parallel` the same
    with one FP32 copy more (fusions/fused_cross_entropy.py); `torch` keeps the log-softmax in FP32 and makes its
    gradient beside it, over a cut vocabulary in four FP32 tensors (torch, distributed/tensor/parallel/loss.py);
    `compiled` keeps the logits and makes their gradient beside them."""
    weight_gradients: Literal["accumulated", "autograd"] = "accumulated"
    """Whether weight gradients are added to the buffer by the GEMM, autograd being handed one dummy per shape, never
    freed (TransformerEngine, module/base.py, get_dummy_wgrad), or come as tensors of their own."""
    gathered: bool = False
    """Whether projections keep their input gathered over tp, as DTensor does, where TransformerEngine gathers again."""
    deterministic: bool = False
    """Whether cuBLAS has the larger workspace that makes it deterministic (torch, use_deterministic_algorithms)."""
    dispatch: Literal["choices", "nodes"] = "choices"
    """How tokens travel to experts: once for each choice, by a collective between two reorderings (NCCL's all-to-all),
    or once to each node that has any of the chosen, whose ranks hand them on, by kernels that reorder as they send
    (DeepEP, arXiv 2412.19437, section 3.2.2; HybridEP)."""
    gathers: Literal["layers", "pieces"] = "layers"
    """How ZeRO-3 gathers parameters and scatters gradients: a layer's in one call, or each weight by itself, in a list
    of one piece per rank that are copied one by one (DeepSpeed of 2021, runtime/zero/partition_parameters.py,
    _allgather_param; torch, ProcessGroupNCCL::allgather)."""
    placed: bool = False
    """Whether weight gradients of `zb-h2` stand where ranks would else wait, by the times of profiled passes (ZB-2p,
    arXiv 2401.10241, section 3), and not by rule."""
    grouped: float = 0.85
    """Speed of its grouped GEMMs beside one GEMM of their rows."""
    speed: float = 1.0
    """Speed of this generation's kernels, beside that of the device's `Efficiency`."""
    exposed: float = 0.2
    """Share of the communication meant to be overlapped that still shows."""
    evidence: tuple[Evidence, ...] = ()
    """What is known of how far predictions can be trusted; empty where no run was at hand."""
