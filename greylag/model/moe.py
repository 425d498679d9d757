"""Mixture of experts: a router, routed experts as one grouped GEMM, and shared experts that every token meets.

Routing is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): scores per expert, a balancing bias that only the choice
sees (auxiliary-loss-free, arXiv 2408.15664), a limit on the groups (nodes) that a token may reach, and weights from
the scores without the bias. No token is dropped. The router is computed in FP32. How tokens come to experts that live
on other ranks is an `Exchange`'s affair, handed in when the model is built.

Shape suffixes: T tokens, D hidden, E experts, A choices per token (top_k), R tokens that came to this rank, C their
choices among its experts, P rows of the grouped GEMM.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model.attention import LinearFactory, QuantizerFactory
from greylag.model.mlp import SwiGLU
from greylag.numerics import grouped_linear
from greylag.numerics.cache import form_of
from greylag.numerics.swiglu import gated
from greylag.spec.model import Model, MoE
from greylag.spec.precision import BLOCK, Precision


class Exchange(Protocol):
    """Where experts live. Brings tokens to them, and back what they made of the tokens."""

    def own(self, w_ENK: Tensor) -> Tensor:
        """The weights of this rank's experts, in order, of all experts' parameter."""

    def visit(self, x_TD: Tensor, chosen_TA: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """What the chosen experts make of each token: (T, A, D).

        `compute` takes the tokens that came to this rank (R, D), the row of each of their choices among its experts
        (C,) and the expert (C,), counted from the rank's first; it gives a row for each choice (C, D).
        """


class OneRank:
    """All experts on this rank: tokens stay where they are. Satisfies `Exchange`."""

    def own(self, w_ENK: Tensor) -> Tensor:
        """All of them."""
        return w_ENK

    def visit(self, x_TD: Tensor, chosen_TA: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Every token meets its experts here."""
        T, A = chosen_TA.shape
        token_C = torch.arange(T, device=x_TD.device).repeat_interleave(A)
        return compute(x_TD, token_C, chosen_TA.flatten()).view(T, A, -1)

    def __str__(self) -> str:
        return "all experts on each rank"


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
        if self.training:  # evaluation and recompute leave no trace
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
    """The routed experts, SwiGLU MLPs as grouped GEMMs: parameters of all, of which a rank may hold a part."""

    def __init__(
        self, hidden_size: int, moe: MoE, precision: Precision, quantizer: QuantizerFactory, exchange: Exchange
    ) -> None:
        super().__init__()
        self.exchange = exchange
        E, F_ = moe.num_experts, moe.ffn_hidden_size
        self.form, self.smooth = form_of(precision.swiglu_input), precision.smooth_swiglu
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * F_, hidden_size))
        self.w_down = nn.Parameter(torch.empty(E, hidden_size, F_))
        self.gate_up_quantizer = quantizer("ffn.experts.w_gate_up")
        self.down_quantizer = quantizer("ffn.experts.w_down")

    def forward(self, x_RD: Tensor, row_C: Tensor, expert_C: Tensor) -> Tensor:
        """Rows of `x` (R, D) through an expert for each choice (C, D): its row and which of this rank's experts."""
        w_gate_up, w_down = self.exchange.own(self.w_gate_up), self.exchange.own(self.w_down)
        rows_C, segments, num_rows = slots(expert_C, w_down.shape[0])
        x_PD = dispatch(x_RD, row_C, rows_C, num_rows)
        inner_P2F = grouped_linear(x_PD, w_gate_up, self.gate_up_quantizer, segments)
        y_PF, kept, factors_EF, ready = gated(inner_P2F, segments, self.form, self.smooth, self.down_quantizer)
        y_PD = grouped_linear(y_PF, w_down, self.down_quantizer, segments, kept, factors_EF, ready)
        return y_PD.index_select(0, rows_C)

    def extra_repr(self) -> str:
        """Shape, and where they are."""
        E, F2, D = self.w_gate_up.shape
        return f"{E} x ({D} -> {F2 // 2} -> {D}), {self.exchange}"


class MoEFeedForward(nn.Module):
    """Routed and shared experts in the place of a dense MLP."""

    def __init__(
        self,
        model: Model,
        precision: Precision,
        linear: LinearFactory,
        quantizer: QuantizerFactory,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__()
        assert model.moe
        self.moe, self.exchange = model.moe, exchange or OneRank()
        self.router = Router(model.hidden_size, model.moe)
        self.experts = Experts(model.hidden_size, model.moe, precision, quantizer, self.exchange)
        if model.moe.num_shared_experts:
            width = model.moe.shared_ffn_hidden_size
            self.shared = SwiGLU(model.hidden_size, width, linear, False, precision, "ffn.shared")

    def forward(self, x_BSD: Tensor) -> Tensor:
        """`x` (B, S, D) to the weighted sum of its experts."""
        x_TD = x_BSD.flatten(0, 1)
        chosen_TA, weights_TA = self.router(x_TD)
        y_TAD = self.exchange.visit(x_TD, chosen_TA, self.experts)
        y_TD = torch.bmm(weights_TA.unsqueeze(1).to(y_TAD.dtype), y_TAD).squeeze(1)
        if self.moe.num_shared_experts:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x_BSD)


def dispatch(x_RD: Tensor, row_C: Tensor, rows_C: Tensor, num_rows: int) -> Tensor:
    """Copy row `row_C` of `x` to row `rows_C` of (P, D), for each choice; other rows are zero.

    Keeps indices only for backward.
    """
    from_P = rows_C.new_full((num_rows,), x_RD.shape[0])
    from_P[rows_C] = row_C
    return F.pad(x_RD, (0, 0, 0, 1)).index_select(0, from_P)


def slots(chosen: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int]], int]:
    """Where each choice of an expert goes: rows (of its shape), the segment of each expert, and the number of rows.

    Segments start at multiples of 128, so that no scaling tile along the tokens reaches into another expert.
    """
    flat = chosen.flatten()
    counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
    segments, row = [], 0
    for count in counts:
        segments.append((row, count))
        row += -(-count // BLOCK) * BLOCK
    order = flat.argsort(stable=True)
    first = torch.tensor([start - sum(counts[:e]) for e, (start, _) in enumerate(segments)], device=flat.device)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device) + first[flat[order]]
    return rows.view_as(chosen), segments, row
