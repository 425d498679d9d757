"""Wire: weights that are gathered in the form in which their layer takes them, FP8 codes or BF16, not as FP32 masters.

Each rank quantizes its rows once, FSDP2 gathers bytes, and the layer's GEMMs take them as they come: a quarter of
FP32's bytes, and nothing is quantized twice. A layer sees the same bits however it is sharded, because the scales are
those of the whole: a block of 128x128 or a tensor may lie on several ranks, so before a gather the ranks agree on
every amax, in one small all-reduce, and derive the same scales. None travel behind the codes, for which FSDP2's padded
shards would have no room.

Which weights may travel so is `Precision.gathered`'s to say. The seam is FSDP2's own: a tensor subclass around the
FP32 shard, with `fsdp_pre_all_gather` and `fsdp_post_all_gather`. FP8 goes as uint8, which every backend takes.

Shape suffixes: E experts (1 for a plain matrix), M rows, K columns.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from greylag.numerics import Quantizer
from greylag.numerics.formats import FORMATS
from greylag.numerics.quantize import tile_amax, tile_of, tiled
from greylag.numerics.scaling import scale_inv_from_amax
from greylag.numerics.weight import QuantizedWeight, quantize_to
from greylag.parallel.waits import Waits
from greylag.spec.precision import BLOCK

_aten = torch.ops.aten
_STAY = (
    _aten.detach.default, _aten.alias.default, _aten.view.default, _aten.as_strided.default, _aten.slice.Tensor,
    _aten.split.Tensor, _aten.new_zeros.default,
)  # fmt: skip


class WireForm:
    """How one weight travels, and the scales that the ranks agreed on. Its rows, or experts, are cut over ranks."""

    def __init__(self, quantizer: Quantizer, shape: torch.Size, device: torch.device) -> None:
        recipe = quantizer.gemms.forward
        self.quantizer, self.shape, self.kind = quantizer, shape, recipe.scale
        self.fmt = FORMATS[recipe.weight.format] if recipe.weight.is_scaled else None
        self.tile = tile_of(recipe.weight.granularity) if self.fmt else (0, 0)
        self.delayed = quantizer.delayed("forward", "weight")
        tiles = (shape[0] if len(shape) == 3 else 1, -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
        self.amax = torch.zeros(tiles if self.in_blocks else (1, 1, 1), device=device)
        """Of every tile: (E, row tiles, column tiles)."""
        self.scale_inv = torch.zeros_like(self.amax)
        self.is_agreed = False

    @property
    def in_blocks(self) -> bool:
        """Whether a scale is for a block; else it is for the whole weight."""
        return self.tile == (BLOCK, BLOCK)

    def measure(self, mine: Tensor, first: int) -> None:
        """Set `amax` to that of this rank's rows or experts from `first`. Inf stands for NaN, which a maximum loses."""
        self.amax.zero_()
        if mine.numel():
            x_EMK, _ = self._in_tiles(mine, first)
            part = self.amax[self._covered(first, x_EMK)]
            part.copy_(tile_amax(tiled(x_EMK.flatten(0, 1).abs(), self.tile)).view_as(part))
            part.nan_to_num_(torch.inf, torch.inf)

    def agree(self, amax: Tensor) -> None:
        """Take the amax of the whole weight, and derive its scales."""
        self.amax.copy_(amax)
        if self.quantizer.training:
            self.quantizer.nonfinite += (~self.amax.isfinite()).sum()
        if self.delayed is not None:
            self.scale_inv.copy_(self.delayed.observe(self.amax))
        else:
            assert self.fmt
            self.scale_inv.copy_(scale_inv_from_amax(self.amax, self.fmt, self.kind))
        self.is_agreed = True

    def encode(self, mine: Tensor, first: int) -> Tensor:
        """This rank's rows or experts as they travel, in their shape: codes as uint8, or BF16."""
        if self.fmt is None:
            return mine.to(torch.bfloat16)
        assert self.is_agreed, "the whole model's forward, before which scales are agreed on, did not run"
        if not mine.numel():
            return torch.empty_like(mine, dtype=torch.uint8)
        x_EMK, before = self._in_tiles(mine, first)
        scale_inv = self.scale_inv[self._covered(first, x_EMK)].flatten(0, 1)
        codes = quantize_to(x_EMK.flatten(0, 1), self.fmt, self.tile, scale_inv).encoded().view(x_EMK.shape)
        if self.quantizer.watcher:
            self._show(x_EMK, before, mine.shape[-2], first)
        return codes[:, before : before + mine.shape[-2]].reshape(mine.shape).view(torch.uint8)

    def decode(self, gathered: Tensor) -> QuantizedWeight:
        """The whole weight, of what all ranks sent; the same one when they send again, since memory is shared."""
        if self.fmt is None:
            return QuantizedWeight(gathered, None, self.tile, None)
        scale_inv = self.scale_inv if len(self.shape) == 3 and self.in_blocks else self.scale_inv[0]
        return QuantizedWeight(gathered.view(self.fmt.container), scale_inv, self.tile, self.fmt)

    def _in_tiles(self, mine: Tensor, first: int) -> tuple[Tensor, int]:
        """(E, M, K) with zero rows up to the edges of tiles, and how many are before this rank's."""
        x_EMK = mine if mine.dim() == 3 else mine.unsqueeze(0)
        if not self.in_blocks:
            return x_EMK, 0
        before = first % BLOCK if mine.dim() == 2 else 0
        return F.pad(x_EMK, (0, 0, before, -(before + x_EMK.shape[1]) % BLOCK)), before

    def _covered(self, first: int, x_EMK: Tensor) -> tuple[slice, slice]:
        """The tiles of the whole weight that `_in_tiles` covers."""
        if not self.in_blocks:
            return slice(0, 1), slice(0, 1)
        expert, row = (first, 0) if len(self.shape) == 3 else (0, first // BLOCK)
        return slice(expert, expert + x_EMK.shape[0]), slice(row, row + x_EMK.shape[1] // BLOCK)

    def _show(self, x_EMK: Tensor, before: int, count: int, first: int) -> None:
        """Let an observer see this rank's rows. What others hold of their tiles is shown as the agreed amax."""
        assert self.quantizer.observer
        assert self.fmt
        covered = self._covered(first, x_EMK)
        known_EMK = x_EMK.clone() if self.in_blocks else F.pad(x_EMK, (0, 0, 0, 1))
        columns = x_EMK.shape[-1]
        amax = self.amax[covered].repeat_interleave(BLOCK if self.in_blocks else columns, -1)[..., :columns]
        known_EMK[:, :before] = amax[:, :1]
        known_EMK[:, before + count :] = amax[:, -1:]
        source = known_EMK.flatten(0, 1)
        q = quantize_to(source, self.fmt, self.tile, self.scale_inv[covered].flatten(0, 1))
        self.quantizer.observer.quantized("forward", "weight", source, q)


class MasterShard(Tensor):
    """This rank's rows of a weight in FP32, which FSDP2 gathers in their `form`."""

    rows: Tensor
    form: WireForm

    @staticmethod
    def __new__(cls, rows: Tensor, form: WireForm) -> "MasterShard":
        """Around `rows`, whose memory it shares."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, rows.shape, rows.stride(), rows.storage_offset(), dtype=rows.dtype, device=rows.device
        )
        self.rows, self.form = rows, form
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Everything is done on the rows. FSDP2's cuts of them are shards of the same weight; results are plain."""
        out = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        first = args[0] if args else None
        if not isinstance(first, cls):
            return out
        if func._schema.name.endswith("_") and out is first.rows:
            return first
        if func in _STAY:
            return tree_map(lambda x: cls(x, first.form) if isinstance(x, Tensor) else x, out)
        return out

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What this rank sends: its rows, encoded, and as many more as make all ranks' alike."""
        count = -(-outer_size[0] // mesh.size())
        sent = self.form.encode(self.rows, count * mesh.get_local_rank())
        missing = count - self.rows.shape[0]
        if missing:
            sent = torch.cat((sent, sent.new_zeros(missing, *sent.shape[1:])))
        return (sent,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight. Its codes lie in FSDP2's own buffer, where later gathers put them again: `out` has them."""
        (gathered,) = outputs
        return (self.form.decode(gathered[: self.form.shape[0]]), ()) if out is None else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterShard({self.rows})"


def plain(x: Any) -> Any:
    """The rows of a `MasterShard`; anything else as it is."""
    return x.rows if isinstance(x, MasterShard) else x


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    mine: Tensor = plain(x.to_local() if isinstance(x, DTensor) else x)
    return mine


def is_gathered_as_codes(x: Tensor) -> bool:
    """Whether FSDP2 gathers this parameter as FP8 codes."""
    mine = x.to_local() if isinstance(x, DTensor) else x
    return isinstance(mine, MasterShard) and mine.form.fmt is not None


def first_row(x: Tensor) -> int:
    """Place of this rank's first row among all rows of a tensor whose rows are sharded."""
    first, count = 0, x.shape[0] if x.dim() else 1
    if isinstance(x, DTensor):
        coordinate = x.device_mesh.get_coordinate()
        assert coordinate is not None
        for ranks, place, placement in zip(x.device_mesh.shape, coordinate, x.placements, strict=True):
            if placement.is_shard():
                assert placement.is_shard(0), "parameters are sharded by rows"
                count = -(-count // ranks)
                first += place * count
    return first


def mark(model: nn.Module, quantizers: Mapping[str, Quantizer]) -> list[str]:
    """Before FSDP2 shards them: the weights of these names will travel as their quantizer makes operands of them.

    Returns the names, but for those of weights that are cut already and will not be gathered (experts spread by ep).
    """
    names = [name for name in quantizers if not isinstance(model.get_parameter(name), DTensor)]
    for name in names:
        weight, quantizer = model.get_parameter(name), quantizers[name]
        at, _, last = name.rpartition(".")
        shard = MasterShard(weight.detach(), WireForm(quantizer, weight.shape, weight.device))
        setattr(model.get_submodule(at), last, nn.Parameter(shard))
    return names


class Agreement:
    """Before the whole model's forward, if it gathers: the ranks agree on the scales of what travels as codes."""

    def __init__(self, model: nn.Module, names: list[str], group: dist.ProcessGroup, waits: Waits) -> None:
        """After FSDP2 has sharded the model over `group`. Registers itself."""
        self.model, self.names, self.group, self.waits = model, names, group, waits
        self.shards: list[tuple[Tensor, WireForm]] = []
        for weight in map(model.get_parameter, names):
            assert isinstance(weight, DTensor)
            mine = weight.to_local()
            assert isinstance(mine, MasterShard)
            if mine.form.fmt is not None:
                self.shards.append((weight, mine.form))
        if self.shards:
            model.register_forward_pre_hook(self, prepend=True)

    def __call__(self, *_: Any) -> None:
        """Agree, unless weights lie gathered from the micro-batch before."""
        if not isinstance(self.model.get_parameter(self.names[0]), DTensor):
            return
        with torch.no_grad():
            for p, form in self.shards:
                form.measure(local(p), first_row(p))
            forms = [form for _, form in self.shards]
            amax = torch.cat([form.amax.flatten() for form in forms])
            with self.waits.noted():
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
            for form, part in zip(forms, amax.split([form.amax.numel() for form in forms]), strict=True):
                form.agree(part.view_as(form.amax))
