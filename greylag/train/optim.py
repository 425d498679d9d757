"""Optimizer: AdamW on FP32 master weights, warmup and cosine, and clipping by the global norm.

With FP32 moments it is torch's own, fused. With narrower ones (`numerics.optim_state`) it is the one here: the same
arithmetic in FP32 on moments that are restored before and stored after, a piece of each parameter at a time.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from greylag.numerics.optim_state import Noise, Storage, Stored, restore, storage, store, zeros
from greylag.parallel import first_row, local
from greylag.spec.job import Run
from greylag.spec.precision import Precision

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of the mean and the mean of squares."""


def adamw(model: nn.Module, run: Run, precision: Precision) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101); norms and biases are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if precision.first_moment == precision.second_moment == "fp32":
        return torch.optim.AdamW(groups, lr=run.learning_rate, betas=(run.beta1, run.beta2), eps=run.eps, fused=True)
    return NarrowAdamW(groups, run, precision)


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW whose moments are stored in fewer bits than FP32.

    A parameter's state is its `step` and, sharded as it is itself, `exp_avg` and `exp_avg_sq` of its shape; where they
    are codes, `exp_avg_scale` and `exp_avg_sq_scale` of its blocks' shape: number = code * scale, and then its square
    for `e4m3-root`. So a checkpoint holds plain tensors, which any number of ranks can read.
    """

    def __init__(self, groups: list[dict[str, Any]], run: Run, precision: Precision) -> None:
        self.run, self.names = run, (precision.first_moment, precision.second_moment)
        super().__init__(groups, {"lr": run.learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        noise: dict[tuple[int, torch.device], Noise] = {}
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (p, group) in enumerate(parameters):
            if p.grad is None:
                continue
            state = self.state[p] or self._begin(p)
            state["step"] += 1
            key = int(state["step"]), local(p).device
            if key not in noise:
                noise[key] = Noise(self.run.seed, *key)
            self._move(p, group, noise[key], number)

    def _storages(self, p: Tensor) -> list[Storage]:
        betas = (self.run.beta1, self.run.beta2)
        return [storage(name, beta, p.dim()) for name, beta in zip(self.names, betas, strict=True)]

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        state = self.state[p]
        state["step"] = torch.zeros(())
        for key, how in zip(MOMENTS, self._storages(p), strict=True):
            stored = zeros(local(p).shape, how, local(p).device)
            state[key] = _sharded_as(p, stored.codes)
            if stored.scale_inv is not None:
                state[f"{key}_scale"] = _sharded_as(p, stored.scale_inv)
        return state

    def _move(self, p: Tensor, group: dict[str, Any], noise: Noise, number: int) -> None:
        """One step of one parameter, some rows at a time."""
        run, state, how = self.run, self.state[p], self._storages(p)
        step, rate = int(state["step"]), group["lr"]
        assert p.grad is not None
        w_MK, g_MK = _rows(local(p)), _rows(local(p.grad))
        held = {key: _rows(local(x)) for key, x in state.items() if key != "step"}
        moments = [Stored(held[key], held.get(f"{key}_scale")) for key in MOMENTS]
        place, columns = first_row(p) * p.shape[1:].numel(), w_MK.shape[1]
        for rows in _pieces(w_MK.shape, noise.size):
            w, g = w_MK[rows], g_MK[rows]
            at = place + rows.start * columns
            drawn = [noise.draw(how[k].noise_bits, 2 * number + k, at, w.shape) for k in (0, 1)]
            first, second = (stored.rows(rows) for stored in moments)
            m = restore(first, how[0]).lerp_(g, 1 - run.beta1)
            v = restore(second, how[1]).mul_(run.beta2).addcmul_(g, g, value=1 - run.beta2)
            unit = v.sqrt().div_(math.sqrt(1 - run.beta2**step)).add_(run.eps)
            w.mul_(1 - rate * group["weight_decay"]).addcdiv_(m, unit, value=-rate / (1 - run.beta1**step))
            store(m, how[0], drawn[0], first)
            store(v, how[1], drawn[1], second)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state. Torch casts it to the parameter's dtype, which is exact, and it is cast back here."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for key, how in zip(MOMENTS, self._storages(p), strict=True):
                state[key] = state[key].to(how.dtype)


def _sharded_as(p: Tensor, mine: Tensor) -> Tensor:
    """`mine`, this rank's part, as a DTensor sharded as `p` is, whose dims but the last it has; or itself."""
    if not isinstance(p, DTensor):
        return mine
    shape = torch.Size((*p.shape[:-1], mine.shape[-1])) if p.dim() > 1 else p.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def _rows(x: Tensor) -> Tensor:
    """View as a matrix (M, K); a vector is one row."""
    return x.view(-1, x.shape[-1]) if x.dim() > 1 and x.numel() else x.view(1, -1)


def _pieces(shape: torch.Size, size: int) -> list[slice]:
    """Slices of the rows of (M, K), of about `size` elements each."""
    step = max(1, size // max(1, shape[1]))
    return [slice(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]


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
