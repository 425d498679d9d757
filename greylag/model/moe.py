"""Mixture of experts: a router, routed experts as one grouped GEMM, and shared experts that every token meets.

Routing is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): scores per expert, a balancing bias that only the choice
sees (auxiliary-loss-free, arXiv 2408.15664), a limit on the groups (nodes) that a token may reach, and weights from
the scores without the bias. No token is dropped. The router is computed in FP32.

Shape suffixes: T tokens, D hidden, E experts, A choices per token (top_k), P rows of the grouped GEMM.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model.attention import LinearFactory
from greylag.model.mlp import SwiGLU
from greylag.numerics import Recipe, grouped_linear
from greylag.numerics.swiglu import swiglu
from greylag.spec.model import Model, MoE
from greylag.spec.precision import BLOCK, Precision


class Router(nn.Module):
    """Chooses `top_k` experts for each token and weighs them."""

    bias: Tensor
    load: Tensor

    def __init__(self, hidden_size: int, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        if moe.bias_update_rate:
            self.register_buffer("bias", torch.zeros(moe.num_experts))
        self.register_buffer("load", torch.zeros(moe.num_experts), persistent=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts (T, A) and their weights (T, A), FP32."""
        moe = self.moe
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid() if moe.scoring == "sigmoid" else logits_TE.softmax(-1)
        chosen_TA = self.choose(scores_TE.detach())
        self.load += torch.bincount(chosen_TA.flatten(), minlength=moe.num_experts)
        weights_TA = scores_TE.gather(1, chosen_TA)
        if moe.normalize_top_k:
            weights_TA = weights_TA / weights_TA.sum(-1, keepdim=True).clamp_min(1e-20)
        return chosen_TA, weights_TA * moe.routed_scale

    def choose(self, scores_TE: Tensor) -> Tensor:
        """Indices (T, A) of the experts with the highest biased score within the best groups.

        With a bias a group counts by the sum of its two best experts (DeepSeek-V3), without one by its best
        (DeepSeek-V2).
        """
        moe = self.moe
        biased = scores_TE + self.bias if moe.bias_update_rate else scores_TE
        if moe.top_k_groups < moe.num_groups:
            grouped = biased.view(-1, moe.num_groups, moe.num_experts // moe.num_groups)
            best = min(2 if moe.bias_update_rate else 1, grouped.shape[-1])
            groups = grouped.topk(best, dim=-1).values.sum(-1).topk(moe.top_k_groups, dim=-1).indices
            closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=biased.device).scatter_(1, groups, False)
            biased = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        return biased.topk(moe.top_k, dim=-1).indices

    @torch.no_grad()
    def rebalance(self) -> None:
        """Once per step, `load` summed over ranks: raise the bias of starved experts, lower that of crowded ones."""
        if self.moe.bias_update_rate:
            self.bias += self.moe.bias_update_rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()

    def extra_repr(self) -> str:
        """Shape and precision."""
        E, D = self.weight.shape
        return f"{D} -> {E} experts, top {self.moe.top_k}, FP32"


class Experts(nn.Module):
    """All routed experts: SwiGLU MLPs as grouped GEMMs."""

    def __init__(self, hidden_size: int, moe: MoE, precision: Precision) -> None:
        super().__init__()
        E, F_ = moe.num_experts, moe.ffn_hidden_size
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * F_, hidden_size))
        self.w_down = nn.Parameter(torch.empty(E, hidden_size, F_))
        self.gate_up_recipe, self.down_recipe = Recipe(precision), Recipe(precision)

    def forward(self, x_PD: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        """Rows in segments, one per expert, through that expert."""
        hidden = swiglu(grouped_linear(x_PD, self.w_gate_up, self.gate_up_recipe, segments))
        return grouped_linear(hidden, self.w_down, self.down_recipe, segments)

    def extra_repr(self) -> str:
        """Shape."""
        E, F2, D = self.w_gate_up.shape
        return f"{E} x ({D} -> {F2 // 2} -> {D})"


class MoEFeedForward(nn.Module):
    """Routed and shared experts in the place of a dense MLP."""

    def __init__(self, model: Model, precision: Precision, linear: LinearFactory) -> None:
        super().__init__()
        assert model.moe
        self.moe = model.moe
        self.router = Router(model.hidden_size, model.moe)
        self.experts = Experts(model.hidden_size, model.moe, precision)
        if model.moe.num_shared_experts:
            self.shared = SwiGLU(model.hidden_size, model.moe.shared_ffn_hidden_size, linear, False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """`x` (B, S, D) to the weighted sum of its experts."""
        x_TD = x_BSD.flatten(0, 1)
        chosen_TA, weights_TA = self.router(x_TD)
        rows_TA, segments, num_rows = slots(chosen_TA, self.moe.num_experts)
        x_PD = dispatch(x_TD, rows_TA, num_rows)
        y_PD = self.experts(x_PD, segments)
        y_TAD = y_PD.index_select(0, rows_TA.flatten()).view(*chosen_TA.shape, -1)
        y_TD = torch.bmm(weights_TA.unsqueeze(1).to(y_TAD.dtype), y_TAD).squeeze(1)
        if self.moe.num_shared_experts:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x_BSD)


def dispatch(x_TD: Tensor, rows_TA: Tensor, num_rows: int) -> Tensor:
    """Copy each token to its rows (P, D); rows of no token are zero. Keeps indices only for backward."""
    T, A = rows_TA.shape
    token_P = rows_TA.new_full((num_rows,), T)
    token_P[rows_TA.flatten()] = torch.arange(T, device=x_TD.device).repeat_interleave(A)
    return F.pad(x_TD, (0, 0, 0, 1)).index_select(0, token_P)


def slots(chosen_TA: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int]], int]:
    """Where each choice goes: rows (T, A), the segment of each expert, and the number of rows.

    Segments start at multiples of 128, so that no scaling tile along the tokens reaches into another expert.
    """
    flat = chosen_TA.flatten()
    counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
    segments, row = [], 0
    for count in counts:
        segments.append((row, count))
        row += -(-count // BLOCK) * BLOCK
    order = flat.argsort(stable=True)
    first = torch.tensor([start - sum(counts[:e]) for e, (start, _) in enumerate(segments)], device=flat.device)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device) + first[flat[order]]
    return rows.view_as(chosen_TA), segments, row
