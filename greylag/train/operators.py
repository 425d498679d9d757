"""Operators: the memory-bound operators of `spec.work`, each as a callable at a given size, for `train.calibrate`.

They are the model's own functions. A maker takes a number of elements, as `spec.work` counts them for this operator,
and returns what to call and whether it has a backward.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from greylag.model.attention import attend
from greylag.model.moe import Router, dispatch, slots
from greylag.model.norm import RMSNorm
from greylag.model.rope import angles, rotate
from greylag.numerics.formats import E4M3, decode
from greylag.numerics.quantize import quantize
from greylag.numerics.swiglu import swiglu
from greylag.spec.model import MoE
from greylag.spec.precision import BLOCK

ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
WIDTH = 256
"""Hidden size of the tensors that are measured."""

Maker = Callable[[int], tuple[Callable[[], Tensor], bool]]
"""From a size to the operator at that size, and whether it has a backward."""


def operators() -> Iterator[tuple[str, tuple[int, ...], Maker]]:
    """(name, sizes, maker of a callable and whether it has a backward) of each operator in `spec.work`."""
    yield "norm", ELEMENTS, lambda n: (_apply(RMSNorm(WIDTH, 1e-6), _rows(n)), True)
    yield "residual", ELEMENTS, _residual
    yield "rope", ELEMENTS, _rope
    yield "reshape", ELEMENTS, _reshape
    yield "swiglu", ELEMENTS, lambda n: (_apply(swiglu, _rows(2 * n, 2 * WIDTH)), True)
    yield "gelu", ELEMENTS, lambda n: (_apply(torch.nn.functional.gelu, _rows(n)), True)
    yield "router", (1 << 10, 1 << 13, 1 << 16), _router
    yield "permute", ELEMENTS, _permute
    yield "embedding", ELEMENTS, _embedding
    yield "loss", ELEMENTS, _loss
    yield "attention", (1 << 24, 1 << 27, 1 << 30), _attention
    for name in ("1x128", "128x1", "128x128", "tensor"):
        yield f"quantize.{name}", ELEMENTS, functools.partial(_quantize, name)
    yield "retile", ELEMENTS, _retile
    yield "encode", ELEMENTS, _encode_codes
    yield "decode", ELEMENTS, _decode
    yield "adamw", ELEMENTS, _adamw
    yield "copy", (*ELEMENTS, 1 << 22), _copy


def _plain(n: int) -> Tensor:
    return torch.randn(n // WIDTH, WIDTH)


def _rows(n: int, width: int = WIDTH) -> Tensor:
    return torch.randn(n // width, width, requires_grad=True)


def _apply(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: function(x)


def _residual(n: int) -> tuple[Callable[[], Tensor], bool]:
    """Adding the branch; in backward the sum of the two gradients."""
    x = _rows(n)

    def run() -> Tensor:
        y = x * 1.0
        return y + y

    return run, True


def _rope(n: int) -> tuple[Callable[[], Tensor], bool]:
    cos, sin = angles(max(1, n // WIDTH), 64, 1e4)
    x = torch.randn(1, n // WIDTH, 4, 64, requires_grad=True)
    return lambda: rotate(x, cos, sin), True


def _reshape(n: int) -> tuple[Callable[[], Tensor], bool]:
    x = torch.randn(n // WIDTH, 4, 64, requires_grad=True)
    return lambda: torch.cat(x.split((32, 32), dim=-1), dim=-1), True


def _router(n: int) -> tuple[Callable[[], Tensor], bool]:
    moe = MoE(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=1,
        scoring="sigmoid",
        num_groups=4,
        top_k_groups=2,
        bias_update_rate=1e-3,
    )
    router = Router(8, moe)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(n // 8, 8, requires_grad=True)
    return lambda: router(x)[1], True


def _permute(n: int) -> tuple[Callable[[], Tensor], bool]:
    """Rows out to experts and back; `n` elements of the rows that experts see."""
    tokens = max(1, n // WIDTH // 2)
    chosen = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    weights = torch.full((tokens, 2), 0.5)
    x, here = torch.randn(tokens, WIDTH, requires_grad=True), torch.arange(tokens).repeat_interleave(2)

    def run() -> Tensor:
        rows, _, count = slots(chosen, 8)
        there = dispatch(x, here, rows.flatten(), count)
        back = there.index_select(0, rows.flatten()).view(tokens, 2, -1)
        return torch.bmm(weights.unsqueeze(1), back).squeeze(1)

    return run, True


def _embedding(n: int) -> tuple[Callable[[], Tensor], bool]:
    table = torch.randn(256, WIDTH, requires_grad=True)
    tokens = torch.randint(0, 256, (n // WIDTH,))
    return lambda: torch.nn.functional.embedding(tokens, table), True


def _loss(n: int) -> tuple[Callable[[], Tensor], bool]:
    x, target = _rows(n), torch.randint(0, WIDTH, (n // WIDTH,))
    return lambda: torch.nn.functional.cross_entropy(x, target), True


def _attention(flops: int) -> tuple[Callable[[], Tensor], bool]:
    """The causal core, by its forward FLOPs, at 4 heads of 64 and sequences of 256."""
    sequence, width = 256, 4 * (64 + 64)
    batch = max(1, round(flops / (width * sequence * (sequence + 1))))
    q, k, v = (torch.randn(batch, sequence, 4, 64, requires_grad=True) for _ in range(3))
    return lambda: attend(q, k, v, 0.125)[0], True


def _quantize(name: str, n: int) -> tuple[Callable[[], Tensor], bool]:
    """To values, as the GEMMs of a CPU take them; a whole tensor with an FP32 scale, as its presets have it."""
    tile = {"1x128": (1, BLOCK), "128x1": (BLOCK, 1), "128x128": (BLOCK, BLOCK), "tensor": (0, 0)}[name]
    x = _plain(n)
    return lambda: quantize(x, E4M3, tile, "fp32" if name == "tensor" else "pow2").dequantize(), False


def _retile(n: int) -> tuple[Callable[[], Tensor], bool]:
    values = quantize(_plain(n), E4M3, (1, BLOCK), "pow2").dequantize()
    return lambda: quantize(values, E4M3, (BLOCK, 1), "pow2", turn=True).dequantize(), False


def _decode(n: int) -> tuple[Callable[[], Tensor], bool]:
    codes = _plain(n).to(E4M3.dtype)
    return lambda: decode(codes), False


def _encode_codes(n: int) -> tuple[Callable[[], Tensor], bool]:
    q = quantize(_plain(n), E4M3, (1, 128), "pow2")

    def run() -> Tensor:
        q.codes = None
        return q.encoded()

    return run, False


def _copy(n: int) -> tuple[Callable[[], Tensor], bool]:
    """Into memory that was just given back, as FSDP2 fills gathered parameters."""
    x, there = _plain(n), torch.empty(n // WIDTH, WIDTH)
    storage = there.untyped_storage()

    def run() -> Tensor:
        storage.resize_(0)
        storage.resize_(4 * n)
        return there.copy_(x)

    return run, False


def _adamw(n: int) -> tuple[Callable[[], Tensor], bool]:
    """The update, and clipping before it."""
    weight, gradient = torch.nn.Parameter(torch.randn(n)), torch.randn(n)
    weight.grad = gradient
    optimizer = torch.optim.AdamW([weight], fused=True)

    def run() -> Tensor:
        torch._foreach_norm([gradient])
        torch._foreach_mul_([gradient], 1.0)
        optimizer.step()
        return weight

    return run, False
