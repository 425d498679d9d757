"""What a matrix shows of how it was quantized, whatever it claims."""

import pytest
import torch

from greylag.numerics import Quantizer, evidence
from greylag.numerics.formats import FORMATS
from greylag.numerics.quantize import Quantized, cast, quantize, tile_of
from greylag.spec.load import load_preset
from greylag.spec.precision import GEMMS, OPERANDS

X = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 256)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize(
    ("granularity", "kind"),
    [("1x128", "pow2"), ("1x128", "fp32"), ("128x128", "fp32"), ("1x32", "mx-ceil"), ("1x32", "mx-floor"),
     ("tensor", "fp32")],
)  # fmt: skip
@pytest.mark.parametrize("along", [True, False])
def test_what_was_done_is_seen(fmt: str, granularity: str, kind: str, along: bool) -> None:
    q = quantize(X, FORMATS[fmt], tile_of(granularity, along), kind)
    assert kind in evidence.scale_kinds(X, q)
    assert not evidence.is_delayed(q, ())
    assert evidence.granularity(q, int(along)) == granularity
    assert evidence.granularity(q, int(not along)) == granularity or granularity in ("1x128", "1x32")
    assert evidence.is_pow2(q) == (kind != "fp32")
    assert evidence.is_on_grid(q)
    assert evidence.is_nearest(X, q)
    assert evidence.is_on_grid(q.t())
    assert evidence.is_on_grid(q.rows(128, 128))


@pytest.mark.parametrize("preset", ["fp8-block128", "fp8-row", "fp8-tensor-current", "mxfp8"])
def test_every_operand_of_a_layer_is_known_again(preset: str) -> None:
    quantizer = Quantizer(load_preset("precision", preset))
    for gemm in GEMMS:
        for role in OPERANDS[gemm]:
            groups = [(0, 256)] if role == "weight" else [(0, 256), (256, 100)]
            along = gemm == "forward" or (gemm == "input-gradient" and role == "grad")
            source = torch.cat([X, X[:100] / 64, torch.zeros(28, 256)])
            q = quantizer.quantize(gemm, role, source, along, groups=groups)
            recipe = quantizer.gemms.of(gemm)
            seen, kinds = evidence.granularity(q, int(along)), evidence.scale_kinds(source, q)
            if seen != recipe.operand(role).granularity:
                assert (recipe.operand(role).granularity, seen) == ("row", "1x128")
                assert recipe.scale not in kinds
                kinds = evidence.group_scale_kinds(source, q)
            assert recipe.scale in kinds, (gemm, role)


def test_rows_are_found_again() -> None:
    whole = quantize(X, FORMATS["e4m3"], (1, 128), "pow2")
    marks = evidence.row_marks(whole)
    assert evidence.find_rows(evidence.row_marks(whole.rows(100, 30)), marks) == [100]
    assert evidence.find_rows(evidence.row_marks(quantize(2 * X, FORMATS["e4m3"], (1, 128), "pow2")), marks) == []


def test_values_that_were_never_rounded_are_off_the_grid() -> None:
    q = quantize(X, FORMATS["e4m3"], (1, 128), "pow2")
    raw = Quantized(q.shape, q.tile, q.scale_inv, values=X.clone(), fmt=q.fmt)
    assert not evidence.is_on_grid(raw)
    assert not evidence.is_nearest(X, raw)
    one = q.dequantize().clone()
    one[3, 200] *= 1 + 2.0**-20
    assert not evidence.is_on_grid(Quantized(q.shape, q.tile, q.scale_inv, values=one, fmt=q.fmt))


def test_a_wider_format_has_only_its_name() -> None:
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        q = cast(X, dtype)
        assert evidence.format_name(q) == name
        assert evidence.is_on_grid(q)
        assert evidence.granularity(q, 1) == "tensor"


def test_a_scale_of_earlier_steps_is_none_of_this_tensor() -> None:
    quantizer = Quantizer(load_preset("precision", "fp8-tensor-delayed"))
    scale = quantizer.input_scale
    quantizer.quantize("forward", "input", X)
    scale.roll()
    q = quantizer.quantize("forward", "input", 1.7 * X)
    assert evidence.scale_kinds(1.7 * X, q) == []
    assert evidence.is_delayed(q, [scale])


def test_stochastic_rounding_is_not_nearest() -> None:
    q = quantize(X, FORMATS["e4m3"], (1, 128), "pow2", noise=torch.Generator().manual_seed(0))
    assert evidence.is_on_grid(q)
    assert not evidence.is_nearest(X, q)
