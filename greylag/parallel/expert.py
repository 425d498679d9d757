"""Expert parallelism: experts spread over the ranks of a replica, to which tokens travel and from which they return.

A token goes once to each rank that has experts of its choice, in one message: its bytes (`parallel.payload`) and a
bit for each of that rank's experts, set where chosen. What comes back is a row for each choice, for weighing them,
and the gradient of the weights, is the router's, on the token's own rank.

    forward    tokens to experts     a row per token and rank    `form`: E4M3 or high
               outputs back          a row per choice            high
    backward   gradients to experts  a row per choice            `form`
               gradients back        a row per token and rank    high

That is DeepSeek-V3's scheme (arXiv 2412.19437, section 3.3.3): FP8 before the first projection and, in backward,
before the gradient of the last, high precision for what will be summed. A gradient is weighed before it is rounded,
so that the last projection's input gradient takes it as it came; its weight gradient rounds it again, down columns.

Between steps experts are a DTensor sharded by expert, as FSDP2 would cut them too: a checkpoint is the same one.

Shape suffixes: T tokens, A choices per token, D hidden, S rows sent, R received, K choices sent, C received, N experts
of a rank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from greylag.parallel.payload import Form, pack, pack_marks, unpack, unpack_marks
from greylag.parallel.waits import Waits
from greylag.parallel.world import World
from greylag.spec.parts import Part


def spread(model: nn.Module, parts: Iterable[Part], world: World) -> None:
    """Leave each rank its part of the experts among `parts`: whole ones, the same number, in the order of ranks."""
    mesh, size = world.mesh(), world.grid.ep
    for part in parts:
        if part.role == "expert":
            at, _, name = part.name.rpartition(".")
            module = model.get_submodule(at)
            mine = getattr(module, name).detach().chunk(size)[mesh.get_local_rank()].clone()
            setattr(module, name, nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)))


class AllToAll:
    """Tokens to the experts of all ranks of a replica and back. Satisfies `model.moe.Exchange`."""

    def __init__(self, world: World, num_experts: int, form: Form) -> None:
        assert world.grid.ep == world.grid.replica_world, "an expert group is the default process group"
        self.ranks, self.form, self.waits = world.grid.ep, form, world.waits
        self.num_experts = num_experts // self.ranks
        """Of this rank."""

    def own(self, w_ENK: Tensor) -> Tensor:
        """The weights of this rank's experts. Their gradient is a mean over ranks, as that of every weight."""
        own: Tensor = _Own.apply(w_ENK, self.ranks)
        return own

    def visit(self, x_TD: Tensor, chosen_TA: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """What the chosen experts make of each token: (T, A, D). All ranks call this together."""
        route = plan(chosen_TA, self.ranks, self.num_experts, self.waits)
        x_RD, marks_RN = _Dispatch.apply(x_TD, route, self)
        row_C, expert_C = marks_RN.nonzero().unbind(1)
        y_TAD: Tensor = _Combine.apply(compute(x_RD, row_C, expert_C), route, self)
        return y_TAD

    def __str__(self) -> str:
        form = "E4M3 1x128" if self.form == "e4m3" else "high"
        return f"{self.num_experts} on each of {self.ranks} ranks, tokens there in {form}, back in high"


@dataclass(frozen=True)
class Route:
    """Who goes where in one layer. Rows to send are in order of rank, then token, then expert."""

    shape: torch.Size
    """(T, A)."""
    tokens: Tensor
    """(S,): the token of each row that goes out."""
    marks: Tensor
    """(S, N): the experts of the row's rank that the token chose."""
    choices: Tensor
    """(K,): which of the T * A choices each row is that comes back."""
    rows_out: list[int]
    """Rows to each rank; `rows_in` from each. So too choices."""
    rows_in: list[int]
    choices_out: list[int]
    choices_in: list[int]


def plan(chosen_TA: Tensor, ranks: int, num_experts: int, waits: Waits) -> Route:
    """The route of tokens to the experts that they chose, `num_experts` on each rank; ranks tell each other how many.

    A token chooses no expert twice.
    """
    T, A = chosen_TA.shape
    token_TA = torch.arange(T, device=chosen_TA.device).unsqueeze(1).expand(T, A)
    key_TA = (chosen_TA // num_experts * T + token_TA) * num_experts + chosen_TA % num_experts
    key_K, choice_K = key_TA.flatten().sort()
    pair_S, row_K = (key_K // num_experts).unique_consecutive(return_inverse=True)
    marks_SN = torch.zeros(pair_S.numel(), num_experts, dtype=torch.bool, device=chosen_TA.device)
    marks_SN[row_K, key_K % num_experts] = True
    rows, choices = (torch.bincount(k // (T * n), minlength=ranks) for k, n in ((pair_S, 1), (key_K, num_experts)))
    out = torch.stack((rows, choices), dim=1)
    in_ = torch.empty_like(out)
    with waits.noted():
        dist.all_to_all_single(in_, out)
    (rows_out, choices_out), (rows_in, choices_in) = torch.stack((out.t(), in_.t())).tolist()
    return Route(chosen_TA.shape, pair_S % T, marks_SN, choice_K, rows_out, rows_in, choices_out, choices_in)


def swap(x: Tensor, out: list[int], in_: list[int], waits: Waits) -> Tensor:
    """Send the first `out[0]` rows to rank 0, the next `out[1]` to rank 1 ...; what they sent, in the ranks' order."""
    received = x.new_empty(sum(in_), *x.shape[1:])
    x = x.contiguous()
    with waits.noted():
        dist.all_to_all_single(received, x, in_, out)
    return received


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w_ENK: DTensor, ranks: int) -> Tensor:
        ctx.mesh, ctx.placements, ctx.ranks = w_ENK.device_mesh, w_ENK.placements, ranks
        return w_ENK.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return DTensor.from_local(grads[0] / ctx.ranks, ctx.mesh, ctx.placements, run_check=False), None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, route: Route, exchange: AllToAll) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.shape, ctx.waits = route, x_TD.shape, exchange.waits
        out = torch.cat((pack(x_TD, exchange.form)[route.tokens], pack_marks(route.marks)), dim=1)
        came = swap(out, route.rows_out, route.rows_in, exchange.waits)
        edge = came.shape[1] - pack_marks(route.marks[:0]).shape[1]
        marks_RN = unpack_marks(came[:, edge:], exchange.num_experts)
        ctx.mark_non_differentiable(marks_RN)
        return unpack(came[:, :edge], x_TD.shape[1], exchange.form, x_TD.dtype), marks_RN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        g_SD = swap(grads[0], ctx.route.rows_in, ctx.route.rows_out, ctx.waits)
        return g_SD.new_zeros(ctx.shape).index_add_(0, ctx.route.tokens, g_SD), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_CD: Tensor, route: Route, exchange: AllToAll) -> Tensor:
        ctx.route, ctx.form, ctx.waits = route, exchange.form, exchange.waits
        y_KD = swap(y_CD, route.choices_in, route.choices_out, exchange.waits)
        y = torch.empty_like(y_KD).index_copy_(0, route.choices, y_KD)
        return y.view(*route.shape, y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        g_KD = grads[0].flatten(0, 1)[ctx.route.choices]
        came = swap(pack(g_KD, ctx.form), ctx.route.choices_out, ctx.route.choices_in, ctx.waits)
        return unpack(came, g_KD.shape[1], ctx.form, g_KD.dtype), None, None
