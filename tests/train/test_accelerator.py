"""Measuring accelerators, with CPUs in their place: what is measured, over which ranks, and what is refused."""

import os
import time
from dataclasses import replace

import pytest
import torch

from greylag.spec.error import SpecError
from greylag.spec.measurement import AttentionSample, GemmSample, Measurements, MoveSample
from greylag.train import kernels
from greylag.train.accelerator import Sizes, fitting, measure_accelerators, one_kind
from greylag.train.collectives import COLLECTIVES, peers, whole_size
from greylag.train.stopwatch import CPU, lap, seconds, seconds_together

SMALL, LARGE = 1 << 12, 1 << 19
SIZES = Sizes(
    dtypes=("bf16", "fp8"),
    gemms=((32, 32, 32), (128, 512, 512)),
    accumulating=((64, 64, 64),),
    grouped=((4, 16, 32, 32), (4, 64, 256, 256)),
    attention=((1, 2, 32), (1, 2, 192)),
    moves=(1 << 15, LARGE),
    messages=(SMALL, LARGE),
    warm_up=0.0,
)
NOTHING = Sizes(gemms=((8, 8, 8),), accumulating=(), grouped=(), attention=(), moves=(), messages=(), warm_up=0.0)


def measure_here(
    rank: int, world: int, local_world: int, sizes: Sizes, asked: int | None = None, device_type: str = "cpu"
) -> Measurements | str | None:
    """As a rank that a launcher made, on a node of `local_world`; the message if it is refused."""
    os.environ.update(LOCAL_WORLD_SIZE=str(local_world), LOCAL_RANK=str(rank % local_world))
    try:
        return measure_accelerators(asked, device_type, sizes)
    except SpecError as error:
        return str(error)


@pytest.fixture(scope="module")
def pair() -> Measurements:
    measured = measure_accelerators(2, "cpu", SIZES)
    assert measured
    return measured


@pytest.fixture(scope="module")
def single(ranks) -> Measurements:
    return ranks(1, measure_here, 1, SIZES)[0]


@pytest.fixture(params=["single", "pair"])
def measured(request: pytest.FixtureRequest) -> Measurements:
    return request.getfixturevalue(request.param)


def test_all_is_measured_that_a_cpu_has(measured: Measurements) -> None:
    gemms = [(g.dtype, g.groups, g.m, g.n, g.k, g.out_bytes) for g in measured.gemms]
    plain = [("bf16", 1, *shape, 2.0) for shape in SIZES.gemms]
    assert gemms == plain + [("bf16", *shape, 2.0) for shape in SIZES.grouped]
    assert [sample.backward for sample in measured.attention] == [False, False, True, True]
    assert {sample.width for sample in measured.attention} == {256}
    assert len(measured.moves) == 4 * len(SIZES.moves)
    assert measured.launch_us is None


FASTEST_FLOPS, FASTEST_BYTES = 1e13, 1e12
"""A second of any CPU, and of what its memory and links move."""


def test_times_are_those_of_work(measured: Measurements) -> None:
    """However busy the machine: no less than its hardware takes."""
    for gemm in measured.gemms:
        assert gemm.seconds > 2 * gemm.groups * gemm.m * gemm.n * gemm.k / FASTEST_FLOPS
    for attention in measured.attention:
        assert attention.seconds > (2 if attention.backward else 1) * attention.flops / FASTEST_FLOPS
    for move in [*measured.moves, *measured.collectives]:
        assert move.seconds > move.bytes / FASTEST_BYTES


def test_who_measured_what_is_said(pair: Measurements, single: Measurements) -> None:
    assert f"{os.cpu_count()} cores" in pair.device
    assert single.device == pair.device
    assert pair.source.startswith("greylag calibrate, 20")
    assert pair.source.endswith(f", torch {torch.__version__}, 2 ranks")
    assert single.source.endswith(", 1 rank")


def test_two_ranks_have_collectives_and_one_has_none(pair: Measurements, single: Measurements) -> None:
    assert single.collectives == []
    found = [(s.collective, s.bytes, s.ranks, s.stride) for s in pair.collectives]
    assert found == [(name, size, 2, 1) for size in SIZES.messages for name in COLLECTIVES]


def test_on_two_nodes_each_tier_is_measured_alone(ranks) -> None:
    first, *others = ranks(4, measure_here, 2, replace(NOTHING, messages=(SMALL,)))
    assert others == [None, None, None]
    assert {sample.bytes for sample in first.collectives} == {SMALL}
    everyone, own, across = ([(name, *group) for name in COLLECTIVES] for group in ((4, 1), (2, 1), (2, 2)))
    everyone.remove(("p2p", 4, 1))
    assert [(s.collective, s.ranks, s.stride) for s in first.collectives] == everyone + own + across


def test_groups_of_nodes() -> None:
    assert peers(0, 1, 1) == []
    assert [tuple(p) for p in peers(1, 3, 1)] == [([0, 1, 2], 1, True)]
    assert [tuple(p) for p in peers(5, 8, 8)] == [(list(range(8)), 1, True)]
    assert [tuple(p) for p in peers(5, 12, 4)] == [
        (list(range(12)), 1, False),
        ([4, 5, 6, 7], 1, True),
        ([1, 5, 9], 4, True),
    ]
    with pytest.raises(SpecError, match="as many on every node"):
        peers(0, 6, 4)


def test_a_message_is_cut_evenly() -> None:
    assert whole_size(1 << 16, 8) == 1 << 16
    assert whole_size(1 << 10, 3) == 1020
    assert whole_size(4, 8) == 32


def test_attention_is_counted_as_each_query_sees_it() -> None:
    batch, heads, sequence = 3, 4, 10
    seen = sum(range(1, sequence + 1))
    sample = kernels.attention(batch, heads, sequence, False, CPU).sample(1.0)
    assert isinstance(sample, AttentionSample)
    assert sample.flops == batch * heads * seen * 2 * (128 + 128)


def test_moves_are_counted_by_what_is_read_and_written() -> None:
    count = 3 * kernels.WIDTH
    found = {name: kernels.move(name, 2 * count, CPU).sample(1.0) for name in kernels.MOVES}
    assert all(isinstance(sample, MoveSample) for sample in found.values())
    moved = {name: sample.bytes for name, sample in found.items()}
    codes_and_scales = count + 4 * count / 128
    assert moved == {**dict.fromkeys(("copy", "silu", "norm"), 4 * count), "add": 6 * count,
                     "quantize": 2 * count + codes_and_scales}  # fmt: skip


@pytest.mark.parametrize("device_type", ["cuda", "musa"])
def test_a_device_that_is_not_here(device_type: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has accelerators")
    with pytest.raises(SpecError, match=f"no {device_type.upper()} device here; measure on the cluster, or give"):
        measure_accelerators(None, device_type, SIZES)


def test_more_ranks_than_devices() -> None:
    with pytest.raises(SpecError, match=r"--ranks 1000: this machine has \d+ CPU devices"):
        measure_accelerators(1000, "cpu", SIZES)


def test_other_ranks_than_a_launcher_made(ranks) -> None:
    assert ranks(1, measure_here, 1, SIZES, 2, "cpu") == ["--ranks 2: torchrun made 1 ranks; leave it out"]


def test_different_devices_are_named() -> None:
    assert one_kind(["H100", "H100"]) == "H100"
    with pytest.raises(SpecError, match=r"different devices: H100 \(rank 0\), H200 \(rank 2\)"):
        one_kind(["H100", "H100", "H200", "H100"])


def test_what_does_not_fit_is_left_out() -> None:
    trials = [kernels.gemm(size, size, size, "bf16", CPU) for size in (256, 8192)]
    trials += [kernels.move("copy", size, CPU) for size in (1 << 20, 1 << 40)]
    kept = [trial.sample(1.0) for trial in fitting(trials, float(1 << 26))]
    assert [type(sample) for sample in kept] == [GemmSample, MoveSample]
    assert isinstance(kept[0], GemmSample)
    assert kept[0].m == 256
    with pytest.raises(SpecError, match=r"no GEMM fits into 0\.00098 GiB"):
        fitting(trials, float(1 << 20))


def test_the_full_set_fits_a_small_card_but_for_the_largest() -> None:
    """Of 24 GiB half is taken."""
    full = Sizes()
    assert len(full.gemms) == 40
    trials = [kernels.gemm(*shape, dtype, CPU) for dtype in ("bf16", "fp8") for shape in full.gemms]
    trials += [kernels.grouped_gemm(*shape, "fp8", CPU) for shape in full.grouped]
    trials += [kernels.attention(*shape, True, CPU) for shape in full.attention]
    trials += [kernels.move("add", size, CPU) for size in full.moves]
    assert len(fitting(trials, 12.0 * 2**30)) == len(trials)
    assert len(fitting(trials, 1.0 * 2**30)) < len(trials)


def test_the_fault_of_a_rank_that_was_started_here_comes_back() -> None:
    with pytest.raises(SpecError, match="no GEMM fits"):
        measure_accelerators(1, "cpu", replace(NOTHING, gemms=((1 << 20, 1 << 20, 1 << 20),)))


def test_memory_of_a_trial_bounds_what_it_makes() -> None:
    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            out = function(*arguments, **(named or {}))
            if function is torch.ops.aten.randn.default:
                Counted.total += out.nbytes
            return out

    trial = kernels.gemm(64, 96, 128, "bf16", CPU)
    with Counted():
        trial.take()
    assert trial.memory / 2 < Counted.total < trial.memory


def test_a_stopwatch_gives_the_time_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only `run` moves."""
    calls: list[str] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.015625 * calls.count("run"))

    def run() -> None:
        calls.append("run")

    row = [run] * 4
    assert lap(row, CPU) == 4 * 0.015625
    calls.clear()
    assert seconds(row, lambda: calls.append("prepare")) == 0.015625
    assert calls == ["prepare", *["run"] * 4] * 4
    calls.clear()
    assert seconds_together(row, lambda: calls.append("align")) == 0.015625
    assert calls == ["align", *["run"] * 4] * 9
