"""Fit: the constants of a device from what its own kernels and collectives took.

The most probable constants: errors are of the logarithm of the seconds, with tails that weigh linearly; a Gaussian
prior on the logarithm of each constant pulls to where the cluster has it, so that what no sample touches stays as it
is. Shares stay below 1.
"""

from dataclasses import dataclass

import numpy as np
from msgspec.structs import asdict, replace

from greylag.sim.links import ALONE, Links
from greylag.sim.operators import Operators
from greylag.sim.timeline import Floats
from greylag.spec.cluster import Cluster, Efficiency
from greylag.spec.error import SpecError
from greylag.spec.measurement import AttentionSample, CollectiveSample, GemmSample, Measurements, MoveSample, Sample
from greylag.spec.software import Software

NOISE = 0.05
"""Standard deviation of a measured kernel's logarithm: what two runs of one kernel differ by."""
WIDTH = 0.7
"""Standard deviation of a constant's logarithm around the cluster's: within a factor of two, in two of three cases."""
TOO_WIDE = 0.5
"""Spread of the logarithm beyond which constants say nothing of a device."""
FEWEST = 3
"""Samples without which nothing is fitted."""


@dataclass(frozen=True)
class Fitted:
    """A cluster whose constants are those of measured kernels."""

    cluster: Cluster
    before: dict[str, float]
    """The constants that a sample depends on, as they were: of the device, and `grouped` of a framework."""
    after: dict[str, float]
    """The same as fitted."""
    errors: dict[str, Floats]
    """By kind of sample, the seconds by these constants over the measured ones, less one."""


def fit(cluster: Cluster, measured: Measurements) -> Fitted:
    """Fit the constants of a cluster's device, and the speed of the grouped GEMMs at hand, to measurements.

    Raises SpecError if there are too few samples, or the cluster lacks a figure (a peak, a link) that one needs.
    """
    from scipy.optimize import least_squares

    kinds = _kinds(measured)
    took = {kind: np.log([sample.seconds for sample in samples]) for kind, samples in kinds.items()}
    if sum(map(len, took.values())) < FEWEST:
        raise SpecError(f"{measured.source}: fewer than {FEWEST} kernels of known shape; measure a longer run")
    usual = asdict(Efficiency()) | {"grouped": Software(name="kernels").grouped}
    known = asdict(cluster.device.efficiency) | {"grouped": usual["grouped"]}
    names, default = list(known), np.array(list(known.values()))

    def seconds(values: Floats) -> dict[str, Floats]:
        return _seconds(cluster, dict(zip(names, values.tolist(), strict=True)), kinds)

    def residuals(shift: Floats) -> Floats:
        predicted = seconds(default * np.exp(shift))
        errors = [(np.log(predicted[kind]) - took[kind]) / NOISE for kind in took]
        return np.concatenate([*errors, shift / WIDTH])

    is_share = [usual[name] <= 1 for name in names]
    most = np.where(is_share, -np.log(np.minimum(default, 1.0)), 5.0) + 1e-9
    found = least_squares(residuals, np.zeros(len(names)), bounds=(-5.0, most), loss="soft_l1", x_scale=WIDTH)
    touched = np.abs(found.jac[: -len(names)]).max(axis=0) > 1e-6
    values = np.where(touched, default * np.exp(found.x), default)
    after = {n: float(f"{v:.4g}") for n, v, moves in zip(names, values, touched, strict=True) if moves}
    if measured.launch_us is not None:
        after["launch_us"] = float(f"{measured.launch_us:.4g}")
    predicted = seconds(values)
    errors = {kind: predicted[kind] / np.exp(took[kind]) - 1 for kind in took}
    spread = float(np.quantile(np.abs(np.log1p(np.concatenate(list(errors.values())))), 0.9))
    if spread > TOO_WIDE:
        raise SpecError(
            f"{measured.source}: one in ten kernels is more than {np.expm1(spread):.0%} off what {cluster.name} does "
            "by any constants; is it the right --cluster, and did the device do nothing else?"
        )
    efficiency = Efficiency(**of_device(known | after))
    device = replace(
        cluster.device,
        name=measured.device or cluster.device.name,
        efficiency=efficiency,
        spread=float(f"{spread:.3g}"),
    )
    return Fitted(replace(cluster, device=device), {name: known[name] for name in after}, after, errors)


def _kinds(measured: Measurements) -> dict[str, list[Sample]]:
    """The kinds of sample that there are, and the samples."""
    kinds: dict[str, list[Sample]] = {
        "GEMM": [*measured.gemms],
        "attention": [*measured.attention],
        "elementwise": [*measured.moves],
    }
    for sample in measured.collectives:
        kinds.setdefault(sample.collective.replace("_", "-"), []).append(sample)
    timed = {kind: [sample for sample in samples if sample.seconds > 0] for kind, samples in kinds.items()}
    return {kind: samples for kind, samples in timed.items() if samples}


def _seconds(cluster: Cluster, constants: dict[str, float], kinds: dict[str, list[Sample]]) -> dict[str, Floats]:
    """Seconds of every sample by these constants, by kind."""
    now = replace(cluster, device=replace(cluster.device, efficiency=Efficiency(**of_device(constants))))
    operators, links = Operators(now, Software(name="kernels", grouped=constants["grouped"])), Links(now, ALONE)

    def of(samples: list[Sample]) -> Floats:
        columns = {name: np.array([getattr(s, name) for s in samples]) for name in type(samples[0]).__struct_fields__}
        match samples[0]:
            case GemmSample():
                m, n, k, groups, out = (columns[name] for name in ("m", "n", "k", "groups", "out_bytes"))
                seconds = operators.gemms(m, n, k, columns["dtype"].tolist(), groups, out.tolist())
            case AttentionSample():
                forward, backward = (operators.attention(columns["flops"], columns["width"], b) for b in (False, True))
                seconds = np.where(columns["backward"], backward, forward)
            case MoveSample():
                seconds = operators.move(columns["bytes"])
            case CollectiveSample(collective=name):
                size, ranks, stride = (columns[field] for field in ("bytes", "ranks", "stride"))
                seconds = {
                    "all_gather": links.gather,
                    "reduce_scatter": links.gather,
                    "all_reduce": links.reduce,
                    "all_to_all": links.all_to_all,
                    "p2p": lambda size, ranks, stride: links.send(size, stride),
                }[name](size, ranks, stride)
        return np.asarray(seconds, float)

    return {kind: of(samples) for kind, samples in kinds.items()}


def of_device(constants: dict[str, float]) -> dict[str, float]:
    """Those of an Efficiency."""
    return {name: value for name, value in constants.items() if name in Efficiency.__struct_fields__}
