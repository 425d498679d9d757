import numpy as np
import pytest
from msgspec.structs import replace

from greylag.sim.fit import fit
from greylag.sim.links import ALONE, Links
from greylag.sim.operators import Operators
from greylag.spec import SpecError
from greylag.spec.cluster import Cluster, Efficiency
from greylag.spec.load import load_preset
from greylag.spec.measurement import AttentionSample, CollectiveSample, GemmSample, Measurements, MoveSample
from greylag.spec.software import Software

PLANTED = Efficiency(
    gemm=0.68, gemm_fp8=0.55, gemm_ramp=400.0, launch_us=10.0, attention=0.62, attention_backward=0.48, memory=0.88,
    kernel_us=6.0, node=0.8, network=0.7, all_to_all=0.5, all_to_all_network=0.35,
)  # fmt: skip


def planted(cluster: Cluster, noise: float) -> Measurements:
    """What a device with PLANTED constants would have taken."""
    draw = np.random.default_rng(0)
    device = replace(cluster.device, efficiency=PLANTED)
    true = replace(cluster, device=device)
    operators, links = Operators(true, Software(name="kernels", grouped=0.7)), Links(true, ALONE)

    def noisy(seconds: object) -> float:
        return float(np.asarray(seconds, float).reshape(-1)[0] * np.exp(draw.normal(0, noise)))

    def gemm(m: int, n: int, k: int, dtype: str, groups: int = 1) -> GemmSample:
        seconds = operators.gemms(*(np.array([x]) for x in (m, n, k)), [dtype], np.array([groups]), [2.0])
        return GemmSample(m=m, n=n, k=k, dtype=dtype, groups=groups, seconds=noisy(seconds))

    sizes = (512, 1024, 4096, 8192)
    return Measurements(
        device="card at hand",
        source="a test",
        launch_us=7.0,
        gemms=[gemm(m, n, k, t) for m in sizes for n in (1536, 4096) for k in sizes for t in ("bf16", "fp8")]
        + [gemm(1024, 2048, 4096, "bf16", groups) for groups in (4, 8, 16)],
        attention=[
            AttentionSample(flops=f, width=w, backward=b, seconds=noisy(operators.attention(f, w, b)))
            for f in (1e11, 1e12, 4e12)
            for w in (128, 256)
            for b in (False, True)
        ],
        moves=[MoveSample(bytes=s, seconds=noisy(operators.move(s))) for s in (1e7, 1e8, 1e9)],
        collectives=[
            CollectiveSample(collective=name, bytes=size, ranks=ranks, stride=stride, seconds=noisy(seconds))
            for size in (1e5, 1e7, 1e8, 1e9)
            for ranks, stride in ((8, 1), (4, 8), (32, 1))
            for name, seconds in (
                ("all_gather", links.gather(size, ranks, stride)),
                ("all_reduce", links.reduce(size, ranks, stride)),
                ("all_to_all", links.all_to_all(size, ranks, stride)),
                ("p2p", links.send(size, stride)),
            )
        ],
    )


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_preset("cluster", "h100-8x4")


def test_planted_constants_are_found(cluster: Cluster) -> None:
    found = fit(cluster, planted(cluster, noise=0.02))
    assert set(found.before) == {*Efficiency.__struct_fields__, "grouped"}
    planted_too = {"grouped": 0.7, "launch_us": 7.0}
    for name, value in found.after.items():
        assert value == pytest.approx(planted_too.get(name) or getattr(PLANTED, name), rel=0.12), name
    assert found.cluster.device.name == "card at hand"
    assert 0.02 < (found.cluster.device.spread or 0) < 0.06  # nine in ten of a deviation of 2%: 3.3%
    assert {"GEMM", "attention", "elementwise", "all-gather", "p2p"} < set(found.errors)


def test_what_no_sample_touches_stays(cluster: Cluster) -> None:
    measured = planted(cluster, noise=0.0)
    found = fit(cluster, Measurements(device="d", source="s", moves=measured.moves))
    assert set(found.before) == {"memory", "kernel_us"}
    assert found.cluster.device.efficiency.gemm == cluster.device.efficiency.gemm


def test_a_few_wild_samples_do_not_move_it(cluster: Cluster) -> None:
    measured = planted(cluster, noise=0.02)
    wild = [replace(g, seconds=g.seconds * 20) for g in measured.gemms[::12]]
    found = fit(cluster, replace(measured, gemms=measured.gemms + wild))
    assert found.after["gemm"] == pytest.approx(PLANTED.gemm, rel=0.12)


def test_faster_than_the_data_sheet_stays_at_it(cluster: Cluster) -> None:
    moves = [MoveSample(bytes=s, seconds=s / 4e12) for s in (1e8, 1e9, 4e9)]
    assert fit(cluster, Measurements(device="d", source="s", moves=moves)).after["memory"] <= 1.0


def test_kernels_of_another_device_are_refused(cluster: Cluster) -> None:
    moves = [MoveSample(bytes=s, seconds=s / 2e13) for s in (1e8, 1e9, 4e9)]
    with pytest.raises(SpecError, match="is it the right --cluster"):
        fit(cluster, Measurements(device="d", source="s", moves=moves))


def test_too_few_samples(cluster: Cluster) -> None:
    with pytest.raises(SpecError, match=r"run\.json: fewer than 3 kernels"):
        fit(cluster, Measurements(device="d", source="run.json"))


def test_a_link_that_is_not_there(cluster: Cluster) -> None:
    measured = planted(cluster, noise=0.0)
    with pytest.raises(SpecError, match="network"):
        fit(replace(cluster, network=None), measured)
