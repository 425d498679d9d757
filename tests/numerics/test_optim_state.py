"""Stored moments against the reference's table of values, and the two harms that they must not do."""

import math

import pytest
import torch
from torch import Tensor

from greylag.numerics.optim_state import Noise, Storage, restore, storage, store, zeros
from greylag.numerics.reference import representable

EIGHT_BITS = ("e4m3", "e5m2", "e4m3-root")
CPU = torch.device("cpu")


def numbers(name: str, shape: tuple[int, int]) -> Tensor:
    """Moments over many powers of two, with zeros, down to where FP32 itself ends."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator) * torch.exp2(40 * torch.rand(shape, generator=generator) - 20)
    x[:, 7] = 0.0
    x[2] = 0.0
    x[3] *= 1e-38
    return x if name == "e4m3" else x.square()


def expected(x_MK: Tensor, how: Storage, noise_MK: Tensor) -> Tensor:
    """What a moment becomes at rest, FP64, one number after the other."""
    assert how.fmt
    table = representable(how.fmt).tolist()
    out = torch.empty_like(x_MK, dtype=torch.float64)
    root = x_MK.sqrt() if how.root else x_MK
    for row in range(x_MK.shape[0]):
        for start in range(0, x_MK.shape[1], 128):
            block = root[row, start : start + 128]
            amax = max(block.abs().max().item(), 2.0**-100)
            scale_inv = (1 / (torch.tensor(how.fmt.max) / amax)).item()
            for k, number in enumerate(block):
                # An FP16 whose least normal number is the format's has `noise_bits` more than the format.
                to_fp16 = 2.0 ** (-14 - how.fmt.min_exponent)
                magnitude = (number.abs() * (torch.tensor(1 / scale_inv) * to_fp16)).half().item() / to_fp16
                below = max(i for i, value in enumerate(table) if value <= magnitude)
                spacing = table[min(below + 1, len(table) - 1)] - table[below]
                part = (magnitude - table[below]) / spacing * 2**how.noise_bits if spacing else 0.0
                assert part == int(part)
                code = below + (part + noise_MK[row, start + k].item() >= 2**how.noise_bits)
                if how.root or how.fmt.name == "e5m2":
                    code = max(code, 1)
                value = math.copysign(table[code] * scale_inv, number.item())
                out[row, start + k] = value**2 if how.root else value
    return out


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_store_equals_reference(name: str) -> None:
    how = storage(name, 0.95, 2)
    x_MK = numbers(name, (6, 200))
    noise = Noise(seed=1, step=2, device=CPU).draw(how.noise_bits, 3, 65500, x_MK.shape)
    stored = zeros(x_MK.shape, how, CPU)
    store(x_MK.clone(), how, noise, stored)
    torch.testing.assert_close(restore(stored, how).double(), expected(x_MK, how, noise), rtol=3e-7, atol=1e-44)


def test_bf16_is_to_nearest_where_it_moves_and_else_by_chance() -> None:
    assert not storage("bf16", 0.95, 2).stochastic
    how = storage("bf16", 0.999, 2)
    x_MK = numbers("e4m3", (16, 512))
    x_MK[3] = 0.0
    stored = zeros(x_MK.shape, how, CPU)
    total = torch.zeros(x_MK.shape, dtype=torch.float64)
    for step in range(256):
        store(x_MK.clone(), how, Noise(0, step, CPU).draw(16, 0, 0, x_MK.shape), stored)
        values = restore(stored, how)
        assert ((values - x_MK).abs() <= x_MK.abs() * 2.0**-7).all()
        total += values
    seen = x_MK != 0
    assert (total[seen] / 256 / x_MK[seen] - 1).abs().mean() < 2.0**-12  # half a spacing / sqrt(256)
    x_MK[:] = torch.tensor([1.0, -2.5])[torch.arange(512) % 2]
    store(x_MK.clone(), how, Noise(0, 9, CPU).draw(16, 0, 0, x_MK.shape), stored)
    assert torch.equal(restore(stored, how), x_MK)


@pytest.mark.parametrize(("name", "beta"), [("e5m2", 0.95), ("e4m3-root", 0.95), ("e4m3", 0.9), ("bf16", 0.999)])
def test_a_mean_falls_when_its_gradient_is_gone(name: str, beta: float) -> None:
    """Rounded to nearest it would not, or not below the least number."""
    how = storage(name, beta, 2)
    stored = zeros(torch.Size((64, 256)), how, CPU)
    start = torch.full((64, 256), 0.5)
    start[:, ::128] = 1.0  # one element per block keeps its gradient, and so the scale
    store(start.clone(), how, Noise(0, 0, CPU).draw(how.noise_bits, 0, 0, start.shape), stored)
    steps = round(math.log(0.25) / math.log(beta))
    for step in range(1, steps + 1):
        x = restore(stored, how).mul_(beta)
        x[:, ::128] = 1.0
        store(x, how, Noise(0, step, CPU).draw(how.noise_bits, 0, 0, x.shape), stored)
    fallen = restore(stored, how)[:, 1:128].double()
    assert fallen.mean() == pytest.approx(0.5 * beta**steps, rel=0.05)


@pytest.mark.parametrize("name", EIGHT_BITS[1:])
def test_no_mean_of_squares_is_flushed(name: str) -> None:
    how = storage(name, 0.95, 2)
    x_MK = torch.exp2(-torch.linspace(0, 130, 128)).repeat(2, 1)
    x_MK[1] = 0.0
    stored = zeros(x_MK.shape, how, CPU)
    store(x_MK.clone(), how, Noise(0, 1, CPU).draw(how.noise_bits, 0, 0, x_MK.shape), stored)
    values = restore(stored, how)
    least = {"e5m2": 2.0**-16 / 57344, "e4m3-root": (2.0**-9 / 448) ** 2}[name]
    assert (values[0] > 0.99 * least).all()
    assert (values[0, :15] / x_MK[0, :15] - 1).abs().max() <= 0.28  # a spacing
    assert (values[1] < 1e-33).all()  # far below eps squared


def test_a_shard_of_rows_holds_the_same_numbers() -> None:
    how, shape = storage("e4m3", 0.9, 2), (40, 200)
    x_MK, noise = numbers("e4m3", shape), Noise(0, 1, CPU)
    whole, parts = zeros(torch.Size(shape), how, CPU), zeros(torch.Size(shape), how, CPU)
    store(x_MK.clone(), how, noise.draw(how.noise_bits, 4, 0, shape), whole)
    for rows in (slice(0, 13), slice(13, 40)):
        piece = x_MK[rows].clone()
        store(piece, how, noise.draw(how.noise_bits, 4, rows.start * 200, piece.shape), parts.rows(rows))
    assert torch.equal(whole.codes.view(torch.uint8), parts.codes.view(torch.uint8))
    assert torch.equal(whole.scale_inv, parts.scale_inv)


def test_noise_repeats_beyond_its_table() -> None:
    noise = Noise(0, 1, CPU)
    drawn = noise.draw(16, 0, 5, (3, noise.size))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[:2].flatten()[:100], noise.draw(16, 0, 5, (1, 100))[0])
    assert not torch.equal(drawn, Noise(0, 2, CPU).draw(16, 0, 5, (3, noise.size)))
    assert noise.draw(7, 0, 0, (1, 99)).max() < 128


def test_vectors_stay_fp32() -> None:
    assert storage("e4m3", 0.9, 1) == storage("e5m2", 0.95, 1) == Storage(torch.float32)
