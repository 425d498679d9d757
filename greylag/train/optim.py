"""Optimizer: AdamW on FP32 master weights, warmup and cosine, and clipping by the global norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from greylag.spec.job import Run


def adamw(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); norms and biases are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=run.learning_rate, betas=(run.beta1, run.beta2), eps=run.eps, fused=True)


def learning_rate(run: Run, number: int) -> float:
    """Learning rate of step `number` (from 1): linear warmup, then a cosine down to the minimum at the last step."""
    if number <= run.warmup_steps:
        return run.learning_rate * number / run.warmup_steps
    progress = min(1.0, (number - run.warmup_steps) / max(1, run.steps - run.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return run.min_learning_rate + (run.learning_rate - run.min_learning_rate) * cosine


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `limit`; return the norm before, a scalar tensor."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], scale)
    return norm
