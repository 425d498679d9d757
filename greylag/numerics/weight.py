"""Weight: one that comes to its layer in the form that the layer's GEMMs take, quantized elsewhere and not again.

To autograd and to whoever asks for its dtype it is an FP32 tensor: its gradient is FP32, and any operator but those
of a linear layer reads its values. Underneath lie FP8 codes and their scales, or BF16. Who brings it (the gather of
sharded parameters, `parallel.wire`) sets the scales that all its rows share.

Shape suffixes: N out features, K in features, E experts, M rows.
"""

from typing import Any

import torch
from torch import Tensor

from greylag.numerics.formats import Format, encode, round_values
from greylag.numerics.quantize import Quantized, Tile, over_tiles, tiled, untiled, within

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.as_strided.default)
_ONLY_SHAPE = (
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.new_empty.default,
    _aten.new_zeros.default, _aten.new_empty_strided.default,
)  # fmt: skip


class QuantizedWeight(Tensor):
    """A weight (N, K) or (E, N, K).

    `codes`, of its shape, are those of a format, or numbers of a wider dtype where `scale_inv` is None. `scale_inv` is
    (row tiles, column tiles), with E before them if each expert has its own.
    """

    codes: Tensor
    scale_inv: Tensor | None
    tiles: Tile
    """What shares a scale, as in `Quantized.tile`."""
    fmt: Format | None

    @staticmethod
    def __new__(cls, codes: Tensor, scale_inv: Tensor | None, tile: Tile, fmt: Format | None) -> "QuantizedWeight":
        """Of codes and scales, which are not copied."""
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        self.codes, self.scale_inv, self.tiles, self.fmt = codes, scale_inv, tile, fmt
        return self

    def operands(self) -> list[Quantized]:
        """One operand (N, K) per expert, one for a matrix; on a CPU with its values, as `quantize` makes them."""
        matrices = self.codes.view(-1, *self.codes.shape[-2:])
        shape, scales = (matrices.shape[1], matrices.shape[2]), self.scale_inv
        made = [
            Quantized(
                shape, self.tiles, scales[e] if scales is not None and scales.dim() == 3 else scales, m, fmt=self.fmt
            )
            for e, m in enumerate(matrices)
        ]
        if self.fmt is not None and self.codes.device.type == "cpu":
            for q in made:
                q.dequantize()  # before anyone turns it: a GEMM's last bits follow the order of its operands in memory
        return made

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """Its values, a plain FP32 tensor."""
        return torch.stack([q.dequantize() for q in self.operands()]).view(self.codes.shape)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Views of the whole are weights like it; all else is done on values."""
        first = args[0] if args else None
        if func in _SAME and isinstance(first, cls) and all(tuple(a) == first.shape for a in args[1:2]):
            return cls(first.codes, first.scale_inv, first.tiles, first.fmt)

        def plain(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            return x.codes.new_empty((), dtype=x.dtype).expand(x.shape) if func in _ONLY_SHAPE else x.dequantize()

        return func(*torch.utils._pytree.tree_map(plain, args), **torch.utils._pytree.tree_map(plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.fmt.name if self.fmt else self.codes.dtype})"


def quantize_to(x_MK: Tensor, fmt: Format, tile: Tile, scale_inv: Tensor) -> Quantized:
    """FP32 `x` (M, K) as codes at scales that were chosen before, bit-equal to those of `quantize`. No zero is -0."""
    codes = encode(round_values(within(tiled(x_MK, tile), over_tiles(scale_inv), fmt), fmt), fmt)
    shape = (x_MK.shape[0], x_MK.shape[1])
    return Quantized(shape, tile, scale_inv, codes=untiled(codes, shape), fmt=fmt)
