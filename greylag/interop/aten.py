"""ATen: what an operator of PyTorch computes or moves, from the inputs that a profiler recorded.

Positions of arguments are those of the operators' schemas (native_functions.yaml of PyTorch 2.1 to 2.13, flash-attn 2.7
and 3). Where an older schema has something else there, it is of another type, and nothing is said of the operator. The
samples have no time yet; `profile` puts it in.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from greylag.interop.inputs import Inputs, Shape, fastest_dim
from greylag.spec.measurement import AttentionSample, Dtype, GemmSample, Kernel, MoveSample
from greylag.spec.work import core_flops

_FLOATS = ("float", "double", "bfloat16", "half")
_SCALAR_TYPES = {5: 2, 6: 4, 7: 8, 15: 2, 23: 1, 24: 1, 25: 1, 26: 1}
"""Bytes of c10::ScalarType's floating types by number: Half, Float, Double, BFloat16, the Float8s."""


_PART = re.compile(r"reduce_?kernel", re.IGNORECASE)
"""What adds up the parts of a GEMM: a trace that lost kernels may hold it alone."""
_FUSED = re.compile(r"flash|fmha|attn|attention|sdpa|bwd_kernel", re.IGNORECASE)
"""Attention kernels: an outer operator may launch only what prepares them."""


def read_operator(name: str, inputs: Inputs, kernels: Sequence[str]) -> Kernel | None:
    """What an operator did in these kernels, a sample of 0 seconds; None if that does not follow from its inputs."""
    if name in _GEMMS or name in _GROUPED:
        gemm = _gemm(name, inputs) if name in _GEMMS else _grouped(name, inputs)
        return None if all(map(_PART.search, kernels)) else gemm
    if name in _CORES:
        return _attention(name, inputs) if any(map(_FUSED.search, kernels)) else None
    return _move(name, inputs, kernels[0]) if len(kernels) == 1 else None


class _Gemm(NamedTuple):
    """Where a GEMM's left operand stands, which the right one follows."""

    left: int
    out_dtype: int | None = None
    """Where the result's dtype is said."""
    arguments: int | None = None
    """Of the overload that says it."""


_GEMMS = {
    "aten::mm": _Gemm(0, 2, 3),
    "aten::bmm": _Gemm(0, 2, 3),
    "aten::addmm": _Gemm(1, 3, 6),
    "aten::addmm_": _Gemm(1),
    "aten::_addmm_activation": _Gemm(1),
    "aten::baddbmm": _Gemm(1, 3, 6),
    "aten::baddbmm_": _Gemm(1),
    "aten::_scaled_mm": _Gemm(0, 6),
    "aten::_scaled_mm_v2": _Gemm(0, 9),
}
_GROUPED = {
    "aten::_grouped_mm": (2, 4),
    "aten::_scaled_grouped_mm": (4, 7),
    "aten::_scaled_grouped_mm_v2": (8, 10),
}
"""Where the groups' ends and the result's dtype stand."""


def _gemm(name: str, inputs: Inputs) -> GemmSample | None:
    """A product of matrices, or of equal ones in a batch."""
    at = _GEMMS[name]
    left, right = inputs.shape(at.left), inputs.shape(at.left + 1)
    dtype = _operands(inputs, at.left)
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    result = (*left[:-1], right[-1])
    out = inputs.last_like(result, at.out_dtype or at.left + 2)
    said = at.out_dtype if at.arguments in (None, len(inputs.dims)) else None
    width = _out_width(inputs, at.left, said) if out is None else inputs.width(out)
    if at.left and inputs.shape(0) == result:
        width += inputs.width(0)  # what is added to the product is read
    m, k, n, groups = left[-2], left[-1], right[-1], left[0] if len(left) == 3 else 1
    if dtype is None or min(m, n, k, groups) < 1:
        return None
    return GemmSample(m=m, n=n, k=k, dtype=dtype, groups=groups, out_bytes=float(width), seconds=0.0)


def _grouped(name: str, inputs: Inputs) -> GemmSample | None:
    """Products of groups: rows, columns or the contracted dim of a matrix, cut at `ends`, taken in equal parts."""
    ends, out_dtype = _GROUPED[name]
    left, right = inputs.shape(0), inputs.shape(1)
    dtype = _operands(inputs, 0)
    if not {len(left), len(right)} <= {2, 3} or left[-1] != right[-2]:
        return None
    groups = left[0] if len(left) == 3 else right[0] if len(right) == 3 else sum(inputs.shape(ends))
    m, n, k = left[-2], right[-1], left[-1]
    if dtype is None or not groups:
        return None
    match len(left), len(right):
        case 2, 3:
            m = round(m / groups)
        case 3, 2:
            n = round(n / groups)
        case 2, 2:
            k = round(k / groups)
    width = float(_out_width(inputs, 0, out_dtype))
    return GemmSample(m=m, n=n, k=k, dtype=dtype, groups=groups, out_bytes=width, seconds=0.0) if m * n * k else None


def _out_width(inputs: Inputs, left: int, out_dtype: int | None) -> int:
    """Bytes of the result's elements: as said, else as the operands', else BF16 where those are FP8."""
    return _SCALAR_TYPES.get(inputs.integer(out_dtype) or -1) or max(inputs.width(left), 2)


def _operands(inputs: Inputs, left: int) -> Dtype | None:
    """The dtype of both operands; None if they differ."""
    both = {_dtype(inputs.type(i)) for i in (left, left + 1)}
    return both.pop() if len(both) == 1 else None


def _dtype(name: str) -> Dtype | None:
    """The class of an operand's type, by the rate that GEMMs run at."""
    if name.startswith(("float8_e4m3", "float8_e5m2")):
        return "fp8"
    return "bf16" if name in ("bfloat16", "half") else None


class _Core(NamedTuple):
    """Where an attention operator's arguments stand; key and value follow the query."""

    query: int
    causal: int
    heads_first: bool = False
    bias: int | None = None
    ends: int | None = None
    """Of packed sequences."""
    longest: int | None = None
    window: int | None = None


_CORES = {
    "aten::_scaled_dot_product_flash_attention": _Core(0, 4, True),
    "aten::_scaled_dot_product_flash_attention_backward": _Core(1, 11, True),
    "aten::_scaled_dot_product_efficient_attention": _Core(0, 6, True, bias=3),
    "aten::_scaled_dot_product_efficient_attention_backward": _Core(1, 11, True, bias=4),
    "aten::_scaled_dot_product_cudnn_attention": _Core(0, 6, True, bias=3),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Core(1, 14, True, bias=8),
    "aten::_cudnn_attention_forward": _Core(0, 10, True, bias=3),
    "aten::_cudnn_attention_backward": _Core(1, 14, True, bias=8),
    "aten::_flash_attention_forward": _Core(0, 8, ends=3, longest=5, window=11),
    "aten::_flash_attention_backward": _Core(1, 11, ends=6, longest=8, window=15),
    "aten::_efficient_attention_forward": _Core(0, 9, bias=3, ends=4, longest=6),
    "aten::_efficient_attention_backward": _Core(1, 14, bias=4, ends=6, longest=8),
    "flash_attn::_flash_attn_forward": _Core(0, 5, window=6),
    "flash_attn::_flash_attn_backward": _Core(1, 11, window=12),
    "flash_attn::_flash_attn_varlen_forward": _Core(0, 9, ends=3, longest=5, window=10),
    "flash_attn::_flash_attn_varlen_backward": _Core(1, 15, ends=9, longest=11, window=16),
    "flash_attn_3::fwd": _Core(0, 24, ends=7, longest=12, window=25),
    "flash_attn_3::bwd": _Core(1, 16, ends=9, longest=13, window=17),
}


def _attention(name: str, inputs: Inputs) -> AttentionSample | None:
    """A fused core; none with a bias, which may mask anything, nor with sequences of unlike length."""
    at = _CORES[name]
    query, key, value = (inputs.shape(at.query + i) for i in range(3))
    if at.ends is not None and (ends := inputs.shape(at.ends)):
        parts = (math.prod(ends) - 1, inputs.integer(at.longest) or 0)
        if not query[:1] == key[:1] == (math.prod(parts),):
            return None
        query, key = parts + query[1:], parts + key[1:]
    causal = _causal(name, inputs.value(at.causal))
    biased = at.bias is not None and inputs.shape(at.bias)
    if len(query) != 4 or len(key) != 4 or causal is None or biased or _dtype(inputs.type(at.query)) != "bf16":
        return None
    heads, sequence = query[1:3] if at.heads_first else query[2:0:-1]
    keys = key[2 if at.heads_first else 1]
    left = inputs.integer(at.window)
    window = left + 1 if left is not None and 0 <= left < keys else None
    if (causal and sequence != keys) or (window and not causal):
        return None
    width = query[3] + value[-1]
    flops = core_flops(heads * width, keys, query[0] * sequence, causal, window)
    backward = name.endswith(("backward", "bwd"))
    return AttentionSample(flops=flops, width=width, backward=backward, seconds=0.0) if flops else None


def _causal(name: str, value: str) -> bool | None:
    """Whether it is causal; the efficient kernels' mask is a number, either corner of 1 and 2."""
    if name.startswith("aten::_efficient_attention"):
        return {"0": False, "1": True, "2": True}.get(value)
    return {"False": False, "True": True}.get(value)


_ELEMENTWISE = {
    **dict.fromkeys(("abs", "cos", "erf", "exp", "gelu", "log", "log2", "nan_to_num", "neg", "reciprocal", "relu"), 1),
    **dict.fromkeys(("rsqrt", "sigmoid", "silu", "sin", "sqrt", "square", "tanh"), 1),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "pow", "maximum", "minimum"), 2),
    **dict.fromkeys(("gelu_backward", "sigmoid_backward", "silu_backward", "tanh_backward", "threshold_backward"), 2),
    **dict.fromkeys(("clamp_min", "clamp_max"), 2),
    **dict.fromkeys(("addcdiv", "addcmul", "clamp", "lerp", "masked_fill", "where"), 3),
}
"""How many of the first arguments may be tensors that are read."""
_REDUCTIONS = ("amax", "amin", "mean", "sum")
_NORMS = ("native_layer_norm", "_fused_rms_norm")


def _move(name: str, inputs: Inputs, kernel: str) -> MoveSample | None:
    """One kernel that reads each of its tensors once and writes its result, none of them a transpose."""
    base = name.removeprefix("aten::")
    if base == name:
        return None
    if base in ("fill_", "zero_"):
        moved = inputs.size(0)
    elif base == "copy_":
        moved = inputs.size(0) + inputs.size(1) if _read_alike(inputs, [0, 1]) else 0
    elif base in _NORMS:
        moved = inputs.size(0) + sum(map(inputs.size, range(4)))
    elif base in _REDUCTIONS:
        moved = _reduced(inputs)
    else:
        moved = _joined(inputs, kernel) if base == "cat" else _mapped(base, inputs)
    return MoveSample(bytes=float(moved), seconds=0.0) if moved else None


def _mapped(base: str, inputs: Inputs) -> int:
    """Bytes of an elementwise operator: `add`, or `add_` in place; 0 if unknown."""
    arity = _ELEMENTWISE.get(base.removesuffix("_"), 0)
    read = [i for i in range(arity) if inputs.shape(i)]
    floats = [inputs.width(i) for i in read if inputs.type(i) in _FLOATS]
    if not floats or not _read_alike(inputs, read):
        return 0
    moved = sum(map(inputs.size, read))
    if base.endswith("_"):
        return moved + inputs.size(0)
    result = _broadcast([inputs.shape(i) for i in read])
    out = inputs.last_like(result, arity)
    return moved + math.prod(result) * (max(floats) if out is None else inputs.width(out))


def _read_alike(inputs: Inputs, tensors: Sequence[int]) -> bool:
    """Whether the largest of some tensors lie alike in memory, as far as that is recorded, and all types are known."""
    largest = max(math.prod(inputs.shape(i)) for i in tensors)
    fastest = {inputs.fastest(i) for i in tensors if math.prod(inputs.shape(i)) == largest} - {None}
    return len(fastest) <= 1 and all(map(inputs.width, tensors))


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that these are broadcast to."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _reduced(inputs: Inputs) -> int:
    """Bytes of a reduction; its result counts where the reduced dims are recorded."""
    shape, said = inputs.shape(0), inputs.value(1)
    reduced = {int(dim) % len(shape) for dim in re.findall(r"-?\d+", said)} if shape and said[:1] == "[" else set()
    result = math.prod(size for dim, size in enumerate(shape) if dim not in reduced) if reduced else 0
    return inputs.size(0) + inputs.width(0) * result


def _joined(inputs: Inputs, kernel: str) -> int:
    """Bytes of a concatenation; 0 if unknown. The kernel's name alone says how wide its elements are."""
    width = re.search(r"OpaqueType<(\d+)", kernel)
    parts, strides = (of[0] if of else [] for of in (inputs.dims, inputs.strides))
    if not width or not all(isinstance(part, list) for part in parts):
        return 0
    if any(fastest_dim(*part) for part in zip(parts, strides, strict=False)):
        return 0
    return 2 * int(width[1]) * sum(map(math.prod, parts))
