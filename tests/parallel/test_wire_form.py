"""Weights cut over ranks and put together again, without ranks: what `Quantizer` makes of the whole, bit for bit."""

import pytest
import torch
from torch import Tensor

from greylag.numerics import Quantizer
from greylag.numerics.weight import QuantizedWeight
from greylag.parallel.wire import MasterShard, WireForm
from greylag.spec.load import load_preset

PRESETS = ("fp8-block128", "fp8-block128-fp32", "fp8-tensor-current", "fp8-tensor-delayed", "bf16")


def gather(w: Tensor, ranks: int, quantizers: list[Quantizer]) -> QuantizedWeight:
    """Each rank with its own quantizer, as `Agreement` and FSDP2 make it go."""
    forms = [WireForm(q, w.shape, w.device) for q in quantizers]
    count = -(-w.shape[0] // ranks)
    cut = [w[rank * count : (rank + 1) * count] for rank in range(ranks)]
    sent = []
    if forms[0].fmt is not None:
        for rank, form in enumerate(forms):
            form.measure(cut[rank], rank * count)
        amax = torch.stack([form.amax for form in forms]).amax(0)
        for form in forms:
            form.agree(amax)
    for rank, form in enumerate(forms):
        mine = form.encode(cut[rank], rank * count)
        assert mine.shape == cut[rank].shape
        assert mine.dtype == (torch.bfloat16 if form.fmt is None else torch.uint8)
        sent.append(mine)
    return forms[-1].decode(torch.cat(sent))


def quantizers(preset: str, count: int) -> list[Quantizer]:
    return [Quantizer(load_preset("precision", preset).recipe) for _ in range(count)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("shape", "ranks"), [
    ((256, 128), 2), ((300, 200), 3), ((130, 70), 4), ((9, 140), 4), ((2, 128), 4), ((5, 130, 140), 2),
    ((3, 64, 128), 4),
])  # fmt: skip
def test_whole_weight(preset: str, shape: tuple[int, ...], ranks: int) -> None:
    torch.manual_seed(1)
    w = torch.randn(shape) * torch.exp2(20 * torch.rand(shape[0]) - 10).view(-1, *[1] * (len(shape) - 1))
    whole, *cut = quantizers(preset, 1 + ranks)
    for step in range(2):  # the second with a history, where scales are delayed
        gathered = gather(w, ranks, cut)
        for theirs, mine in zip(whole.weights("forward", w), gathered.operands(), strict=True):
            assert torch.equal(mine.dequantize(), theirs.dequantize())
            if theirs.scale_inv is not None:
                assert torch.equal(mine.scale_inv, theirs.scale_inv)
                assert torch.equal(mine.encoded().view(torch.uint8), theirs.encoded().view(torch.uint8))
        for quantizer in (whole, *cut):
            delayed = quantizer.delayed("forward", "weight")
            if delayed is not None:
                assert torch.equal(delayed.history, whole.delayed("forward", "weight").history)
        for quantizer in (whole, *cut):
            if quantizer.delayed("forward", "weight") is not None:
                quantizer.delayed("forward", "weight").roll()
        w = w * 1.5 + step


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inf_and_nan_show_on_every_rank(bad: float) -> None:
    w = torch.randn(200, 140)
    w[190, 3] = bad
    whole, *cut = quantizers("fp8-block128", 4)
    whole.weights("forward", w)
    gathered = gather(w, 3, cut)
    assert [int(q.nonfinite) for q in cut] == [int(whole.nonfinite)] * 3 == [1] * 3
    (theirs,), (mine,) = whole.weights("forward", w), gathered.operands()
    assert torch.equal(mine.dequantize().nan_to_num(7.0), theirs.dequantize().nan_to_num(7.0))


def test_shard_of_rows_is_a_shard_still() -> None:
    (quantizer,) = quantizers("fp8-block128", 1)
    w = torch.randn(10, 128)
    form = WireForm(quantizer, w.shape, w.device)
    shard = MasterShard(w, form)
    for view in (shard.detach(), shard.view(-1), shard.narrow(0, 2, 3), *shard.chunk(2), shard.new_zeros(3, 128)):
        assert isinstance(view, MasterShard)
        assert view.form is form
    assert shard[2:].rows.data_ptr() == w[2:].data_ptr()
    assert shard.add_(1.0) is shard
    assert type(shard * 2) is type(shard.clone()) is type(torch.zeros_like(shard)) is Tensor
    assert shard.copy_(torch.ones(10, 128)) is shard
    assert w.sum() == 1280
