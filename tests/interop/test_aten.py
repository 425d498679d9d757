"""Operators' recorded inputs become products, attention cores and moved bytes, or nothing is said of them."""

from typing import Any

import pytest
import torch

from greylag.interop import aten
from greylag.interop.aten import read_operator
from greylag.interop.inputs import Inputs
from greylag.spec.measurement import AttentionSample, GemmSample, MoveSample
from greylag.spec.model import Model
from greylag.spec.work import attention_flops

BF16, FP8 = "c10::BFloat16", "c10::Float8_e4m3fn"
MIB = 1 << 20


def read(name: str, *tensors: Any, kernels: tuple[str, ...] = ("k",), strides: Any = (), **values: Any) -> Any:
    """Of arguments (type, dims...) or None, in their positions; `a7="True"` is the scalar at 7."""
    said = {int(at.removeprefix("a")): value for at, value in values.items()}
    count = max([len(tensors), *(at + 1 for at in said)])
    dims: list[Any] = [list(t[1:]) if t else [] for t in tensors] + [[]] * (count - len(tensors))
    types = [t[0] if t else "" for t in tensors] + ["Scalar"] * (count - len(tensors))
    return read_operator(name, Inputs(dims, types, list(strides), [said.get(i, "") for i in range(count)]), kernels)


A, B, C = (BF16, 512, 1024), (BF16, 1024, 256), (BF16, 512, 256)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (read("aten::mm", A, B), (512, 256, 1024, "bf16", 1, 2.0)),
        (read("aten::mm", ("c10::Half", 4, 8), ("c10::Half", 8, 2)), (4, 2, 8, "bf16", 1, 2.0)),
        (read("aten::mm", A, B, ("float", 512, 256)), (512, 256, 1024, "bf16", 1, 4.0)),
        (read("aten::mm", A, B, a2="6"), (512, 256, 1024, "bf16", 1, 4.0)),
        (read("aten::addmm", (BF16, 256), A, B, a3="1", a4="1"), (512, 256, 1024, "bf16", 1, 2.0)),
        (read("aten::addmm", (BF16, 256), A, B, a3="6", a4="1"), (512, 256, 1024, "bf16", 1, 2.0)),
        (read("aten::addmm", C, A, B, a3="1", a4="1"), (512, 256, 1024, "bf16", 1, 4.0)),
        (read("aten::addmm", (BF16, 256), A, B, a3="6", a5="1"), (512, 256, 1024, "bf16", 1, 4.0)),
        (read("aten::bmm", (BF16, 12, 4, 8), (BF16, 12, 8, 2)), (4, 2, 8, "bf16", 12, 2.0)),
        (read("aten::baddbmm", (BF16, 12, 4, 2), (BF16, 12, 4, 8), (BF16, 12, 8, 2)), (4, 2, 8, "bf16", 12, 4.0)),
        (read("aten::_scaled_mm", (FP8, 4, 8), (FP8, 8, 2), a6="15"), (4, 2, 8, "fp8", 1, 2.0)),
        (read("aten::_scaled_mm", (FP8, 4, 8), ("c10::Float8_e5m2", 8, 2), a6="6"), (4, 2, 8, "fp8", 1, 4.0)),
        (read("aten::_grouped_mm", (BF16, 96, 8), (BF16, 6, 8, 2), ("int", 6)), (16, 2, 8, "bf16", 6, 2.0)),
        (read("aten::_grouped_mm", (BF16, 8, 96), (BF16, 96, 2), ("int", 6)), (8, 2, 16, "bf16", 6, 2.0)),
        (read("aten::_grouped_mm", (BF16, 6, 8, 4), (BF16, 4, 96), ("int", 6)), (8, 16, 4, "bf16", 6, 2.0)),
        (
            read("aten::_scaled_grouped_mm", (FP8, 96, 8), (FP8, 6, 8, 2), None, None, ("int", 6), a7="15"),
            (16, 2, 8, "fp8", 6, 2.0),
        ),
    ],
)
def test_products(sample: GemmSample, expected: tuple[Any, ...]) -> None:
    assert (sample.m, sample.n, sample.k, sample.dtype, sample.groups, sample.out_bytes) == expected


@pytest.mark.parametrize(
    "sample",
    [
        read("aten::mm", ("double", 4, 8), ("double", 8, 2)),
        read("aten::mm", A, ("float", 1024, 256)),
        read("aten::mm", A, (BF16, 512, 256)),
        read("aten::mm", (BF16, 0, 8), (BF16, 8, 2)),
        read("aten::bmm", (BF16, 12, 4, 8), (BF16, 1, 8, 2)),
        read("aten::mm", ("float", 4, 8), ("float", 8, 2)),
        read("aten::mm", A, B, kernels=("void splitKreduce_kernel<float, float>",)),
        read("aten::_grouped_mm", (BF16, 8, 96), (BF16, 96, 2)),
        read("aten::conv2d", A, B),
    ],
)
def test_no_products(sample: Any) -> None:
    assert sample is None


def model(heads: int, width: int) -> Model:
    size = {"hidden_size": heads * width, "num_heads": heads, "vocab_size": 1, "ffn_hidden_size": 1}
    return Model(name="m", num_layers=1, max_sequence=1, **size)


def core(name: str, query: int, causal: int, shape: tuple[int, ...], said: str = "True", **more: Any) -> Any:
    tensor = (more.pop("type", BF16), *shape)
    leading = [None] * query
    return read(name, *leading, tensor, tensor, tensor, kernels=("flash_fwd",), **{f"a{causal}": said}, **more)


@pytest.mark.parametrize(
    ("sample", "causal", "backward"),
    [
        (core("aten::_scaled_dot_product_flash_attention", 0, 4, (2, 8, 1024, 64)), True, False),
        (core("aten::_scaled_dot_product_flash_attention", 0, 4, (2, 8, 1024, 64), "False"), False, False),
        (core("aten::_flash_attention_forward", 0, 8, (2, 1024, 8, 64)), True, False),
        (core("aten::_flash_attention_backward", 1, 11, (2, 1024, 8, 64)), True, True),
        (core("aten::_efficient_attention_forward", 0, 9, (2, 1024, 8, 64), "1"), True, False),
        (core("aten::_efficient_attention_backward", 1, 14, (2, 1024, 8, 64), "0"), False, True),
        (core("aten::_scaled_dot_product_cudnn_attention", 0, 6, (2, 8, 1024, 64)), True, False),
        (core("aten::_scaled_dot_product_cudnn_attention_backward", 1, 14, (2, 8, 1024, 64)), True, True),
        (core("flash_attn::_flash_attn_forward", 0, 5, (2, 1024, 8, 64), a6="-1"), True, False),
        (core("flash_attn_3::bwd", 1, 16, (2, 1024, 8, 64)), True, True),
    ],
)
def test_attention_counts_as_work_does(sample: AttentionSample, causal: bool, backward: bool) -> None:
    flops = attention_flops(model(8, 64), 1024, 2 * 1024, causal=causal)
    assert flops == pytest.approx(4 * 2 * 8 * 1024 * 1024 * 64 / (2 if causal else 1), rel=1e-3)
    assert sample == AttentionSample(flops=flops, width=128, backward=backward, seconds=0.0)


def test_attention_with_a_window_or_packed_sequences_or_unlike_heads() -> None:
    window = core("flash_attn::_flash_attn_forward", 0, 5, (2, 1024, 8, 64), a6="255")
    assert window.flops == attention_flops(model(8, 64), 1024, 2048, window=256)
    name, rows, value = "flash_attn::_flash_attn_varlen_forward", (BF16, 2048, 8, 64), (BF16, 2048, 8, 32)
    packed = read(name, rows, rows, value, ("int", 3), ("int", 3), kernels=("flash",), a5="1024", a9="True")
    assert packed.flops == attention_flops(model(8, 48), 1024, 2048)
    assert packed.width == 96
    assert read(name, rows, rows, value, ("int", 4), ("int", 4), kernels=("flash",), a5="1024", a9="True") is None


@pytest.mark.parametrize(
    "sample",
    [
        core("aten::_scaled_dot_product_flash_attention", 0, 4, (2, 8, 1024, 64), ""),
        core("aten::_scaled_dot_product_cudnn_attention", 0, 6, (2, 8, 1024, 64), "0.125"),
        core("aten::_efficient_attention_forward", 0, 9, (2, 1024, 8, 64), "True"),
        core("aten::_flash_attention_forward", 0, 8, (2, 1024, 8, 64), type="float"),
        core("aten::_flash_attention_forward", 0, 8, (2, 1024, 8, 64), "False", a11="128"),
        read("aten::_scaled_dot_product_flash_attention", *[(BF16, 2, 8, 1024, 64)] * 3, a4="True"),
        read(
            "aten::_scaled_dot_product_efficient_attention",
            *[(BF16, 2, 8, 1024, 64)] * 4,
            kernels=("fmha",),
            a6="False",
        ),
        read(
            "aten::_scaled_dot_product_flash_attention",
            (BF16, 2, 8, 1, 64),
            *[(BF16, 2, 8, 1024, 64)] * 2,
            kernels=("flash",),
            a4="True",
        ),
    ],
)
def test_no_attention_where_the_masked_part_is_unknown(sample: Any) -> None:
    assert sample is None


X, ROW = (BF16, 1024, 1024), (BF16, 1024)


@pytest.mark.parametrize(
    ("sample", "moved"),
    [
        (read("aten::add", X, X, a2="1"), 6 * MIB),
        (read("aten::add", X, None, a2="1"), 4 * MIB),
        (read("aten::add_", X, X, a2="1"), 6 * MIB),
        (read("aten::mul", X, ROW), 4 * MIB + 2048),
        (read("aten::mul", (BF16, 1024, 1), ROW), 2 * MIB + 4096),
        (read("aten::mul", X, X, ("float", 1024, 1024)), 8 * MIB),
        (read("aten::mul", X, ("float", 1024, 1024)), 10 * MIB),
        (read("aten::where", ("bool", 1024, 1024), X, X), 7 * MIB),
        (read("aten::silu", X), 4 * MIB),
        (read("aten::copy_", ("float", 1024, 1024), X, None), 6 * MIB),
        (read("aten::copy_", X, X, None, strides=[[1024, 1], [0, 1], []]), 2 * MIB + 2048),
        (read("aten::zero_", X), 2 * MIB),
        (read("aten::fill_", X, None), 2 * MIB),
        (read("aten::native_layer_norm", X, None, ROW, ROW, None), 4 * MIB + 4096),
        (read("aten::_fused_rms_norm", X, None, ROW, None), 4 * MIB + 2048),
        (read("aten::sum", X, a1="[0]"), 2 * MIB + 2048),
        (read("aten::sum", X, a1="[0, -1]"), 2 * MIB + 2),
        (read("aten::mean", X), 2 * MIB),
    ],
)
def test_moves(sample: MoveSample, moved: int) -> None:
    assert sample == MoveSample(bytes=float(moved), seconds=0.0)


def test_a_concatenation_has_its_width_from_its_kernel() -> None:
    cat = Inputs([[[512, 1024], [512, 1024]], []], ["TensorList", "Scalar"], [[[1024, 1], [1024, 1]], []])
    kernel = "void CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 4, 64, 64>"
    assert read_operator("aten::cat", cat, (kernel,)) == MoveSample(bytes=4.0 * MIB, seconds=0.0)
    assert read_operator("aten::cat", cat, ("CatArrayBatchedCopy",)) is None
    transposed = Inputs(cat.dims, cat.types, [[[1024, 1], [1, 512]], []])
    assert read_operator("aten::cat", transposed, (kernel,)) is None


@pytest.mark.parametrize(
    "sample",
    [
        read("aten::add", X, X, kernels=("two", "kernels")),
        read("aten::copy_", X, X, None, strides=[[1024, 1], [1, 1024], []]),
        read("aten::add", ("long int", 1024, 1024), ("long int", 1024, 1024)),
        read("aten::copy_", X, ("c10::complex<float>", 1024, 1024)),
        read("aten::topk", X),
        read("mine::add", X, X),
    ],
)
def test_no_moves(sample: Any) -> None:
    assert sample is None


def test_a_strange_form_of_inputs_says_nothing() -> None:
    assert Inputs.of((b'[["a"]]', b"[1, null]", b"[3]", b"[]")) == Inputs()
    assert read_operator("aten::mm", Inputs([["a"], {}], [BF16, BF16]), ("k",)) is None


def arguments(name: str) -> list[list[str]]:
    overloads = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return [[a.name for a in getattr(overloads, o)._schema.arguments] for o in overloads.overloads()]


def test_positions_are_those_of_torch() -> None:
    for name, at in aten._CORES.items():
        if name.startswith("aten::"):
            said = arguments(name)[0]
            assert said[at.query : at.query + 3] == ["query", "key", "value"], name
            assert said[at.causal] in ("is_causal", "custom_mask_type"), name
            for where, names in (
                (at.bias, ("bias", "attn_bias")),
                (at.ends, ("cum_seq_q", "cu_seqlens_q")),
                (at.longest, ("max_q", "max_seqlen_q")),
                (at.window, ("window_size_left",)),
            ):
                assert where is None or said[where] in names, name
    for name, gemm in aten._GEMMS.items():
        for said in arguments(name.removesuffix("_")):
            assert said[gemm.left].removesuffix("1") in ("self", "mat", "batch"), name
            assert said[gemm.left + 1].removesuffix("2") in ("mat", "batch"), name
            if gemm.out_dtype and gemm.arguments in (None, len(said)) and "out" not in said:
                assert said[gemm.out_dtype] == "out_dtype", name
    for name, (ends, out_dtype) in aten._GROUPED.items():
        assert (arguments(name)[0][ends], arguments(name)[0][out_dtype]) == ("offs", "out_dtype")


def test_elementwise_operators_read_as_many_tensors_as_torch_gives_them() -> None:
    for name, arity in aten._ELEMENTWISE.items():
        overloads = getattr(torch.ops.aten, name)
        schemas = [getattr(overloads, o)._schema for o in overloads.overloads()]
        tensors = [i for s in schemas for i, a in enumerate(s.arguments) if "Tensor" in str(a.type) and not a.is_out]
        assert max(tensors) + 1 == arity, name
