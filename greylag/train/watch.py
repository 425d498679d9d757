"""Watch: the collectives and matrix multiplies of a step as torch itself is asked for them.

It sees what passes torch's dispatcher on this thread and autograd's, FSDP2's collectives in backward among them
(measured on gloo, torch 2.13). Bare process groups do not go through it, and are watched at their methods.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from greylag.numerics import Quantized

_COLLECTIVES = {
    "allgather": "all_gather", "allgather_": "all_gather", "_allgather_base": "all_gather",
    "_allgather_base_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce", "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "alltoall_": "all_to_all", "alltoall_base": "all_to_all", "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "p2p", "recv_": "p2p",
}  # fmt: skip
_MULTIPLIES = ("mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
_NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


class Watch(TorchDispatchMode):
    """Sees every collective and every matrix multiply that passes torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.multiplies: list[tuple[str, list[tuple[torch.Size, str]]]] = []
        """Since the last that was told of: (operator, shape and dtype of both operands)."""
        self.kinds: dict[Any, tuple[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):  # DTensor asks what shape would come of it
            return func(*args, **(kwargs or {}))
        if any(kind is not Tensor and kind is not nn.Parameter and issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # a DTensor's own collectives come here once it has taken itself apart
        if func not in self.kinds:
            self.kinds[func] = (func.namespace, func._schema.name.partition("::")[2])
        space, name = self.kinds[func]
        if space in ("c10d", "_c10d_functional"):
            self.send(name, [args, kwargs])
        elif name in _MULTIPLIES:
            operands = [t for t in tree_leaves(args) if isinstance(t, Tensor)][:2]
            self.multiplies.append((name, [(t.shape, dtype_name(t.dtype)) for t in operands]))
        return func(*args, **(kwargs or {}))

    def send(self, name: str, arguments: Any) -> None:
        """A collective is asked for."""
        tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        if name in _NOT_SENT or not tensors:
            return
        kind = _COLLECTIVES.get(name, name)
        key = (kind, dtype_name(tensors[0].dtype))
        self.messages[key] += 1
        self.bytes[key] += max(t.nbytes for t in tensors)

    def multiplied(self, a: Quantized, b: Quantized) -> str:
        """The operators, with their operands' dtypes, that multiplied `a` and `b` just now; empty if none did.

        Of experts there is one for each, of some rows of `a`, or of a part of the dim that is contracted.
        """
        names: dict[str, None] = {}
        for name, operands in reversed(self.multiplies):
            shapes = [tuple(t) for t, _ in operands]
            rows = shapes[1] == b.shape and shapes[0][1] == a.shape[1] and shapes[0][0] <= a.shape[0]
            columns = shapes[0][0] == a.shape[0] and shapes[1][1] == b.shape[1] and shapes[0][1] <= a.shape[1]
            if not rows and not columns:
                break
            names[f"{name} {' x '.join(dtype for _, dtype in operands)}"] = None
        self.multiplies.clear()
        return ", ".join(names)


class WatchedGroup:
    """A bare process group whose collectives are seen."""

    def __init__(self, group: Any, watch: Watch) -> None:
        self._group, self._watch = group, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in _COLLECTIVES:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._watch.send(name, [args, kwargs])
            return found(*args, **kwargs)

        return call
