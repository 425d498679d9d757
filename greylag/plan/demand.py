"""Demand: the FLOPs that a training takes, and the days, energy and money that clusters of any size need for them.

FLOPs are model FLOPs: every matrix multiply of forward and backward (three times forward) and causal attention at the
length of the sequences, as `spec.work` counts them; nothing that is computed twice, no look-up of embeddings, no
multi-token prediction. Utilization is the caller's, stated or predicted: plan knows no simulator. Days are days of
computing; what failures and restarts add is not in them. Everything is plain arithmetic, for one size of a cluster or
an array of them, and every figure carries an interval or says why it has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from greylag.spec.error import SpecError
from greylag.spec.model import Model
from greylag.spec.parts import num_active_parameters, num_parameters
from greylag.spec.quantity import DAY, HOUR, count
from greylag.spec.work import flops_per_token

BEYOND_SIX_ND = (0.93, 1.24)
"""What counting gives over 6 x active parameters x tokens, least and most of the models of `presets/trained.toml` whose
dimensions are public (tests/plan hold it): 6 N D counts the look-up of embeddings and leaves attention out."""

Figures = float | NDArray[np.float64]
"""One number, or an array over sizes of a cluster."""


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that it lies in."""

    value: Figures
    low: Figures | None
    high: Figures | None
    """Both None where there is no interval."""
    basis: str
    """What the interval rests on, or why there is none."""

    @property
    def has_interval(self) -> bool:
        """Whether `low` and `high` are there."""
        return self.low is not None and self.high is not None

    @property
    def bounds(self) -> tuple[Figures, Figures]:
        """The interval; the value twice where there is none."""
        return (self.value, self.value) if self.low is None or self.high is None else (self.low, self.high)

    def __mul__(self, factor: Figures) -> "Estimate":
        """So many times as much; `factor` is positive and exact."""
        if self.low is None or self.high is None:
            return Estimate(self.value * factor, None, None, self.basis)
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.basis)


@dataclass(frozen=True)
class Training:
    """What is trained, on how much, and the FLOPs of it."""

    name: str
    flops: Estimate
    how: str
    """How the FLOPs were come by, in words."""
    tokens: float | None = None
    parameters: float | None = None
    active: float | None = None
    """Parameters that one token meets."""
    sequence: int | None = None
    """Tokens that attention was counted at."""


@dataclass(frozen=True)
class Demand:
    """A training on clusters of several sizes. Arrays have one number for each of them."""

    training: Training
    labels: tuple[str, ...]
    """What each cluster is called."""
    devices: NDArray[np.float64]
    peak: NDArray[np.float64]
    """FLOP/s of one device, of which utilization is a share."""
    dtype: str
    """Whose peak that is."""
    utilization: Estimate
    days: Estimate
    device_hours: Estimate
    energy: Estimate | None
    """kWh; None where nobody said what a device draws."""
    money: Estimate | None
    """In the currency of the price; None where there is no price."""


def count_training(model: Model, sequence: int, tokens: float) -> Training:
    """The training of a model of known dimensions on so many tokens, in sequences of `sequence`.

    Raises SpecError for a number that is not positive.
    """
    tokens = positive("tokens", tokens)
    sequence = int(positive("sequence", sequence))
    flops = flops_per_token(model, sequence) * tokens
    return Training(
        name=model.name,
        flops=Estimate(flops, None, None, "FLOPs are an exact count for these dimensions and tokens"),
        how=f"counted from dimensions: matrix multiplies forward and backward, causal attention at {sequence:,} tokens",
        tokens=tokens,
        parameters=float(num_parameters(model)),
        active=float(num_active_parameters(model)),
        sequence=sequence,
    )


def approximate_training(parameters: float, tokens: float, active: float | None = None, name: str = "") -> Training:
    """The training of a model of unknown dimensions: 6 x active parameters x tokens (arXiv 2001.08361, section 2.1).

    Raises SpecError for a number that is not positive, or more active parameters than there are.
    """
    parameters, tokens = positive("parameters", parameters), positive("tokens", tokens)
    met = positive("active parameters", parameters if active is None else active)
    if met > parameters:
        raise SpecError(f"active parameters {count(met)} are more than all {count(parameters)}; exchange the two")
    flops, (least, most) = 6 * met * tokens, BEYOND_SIX_ND
    basis = f"known models count {least:g} to {most:g} times 6 N D, which leaves attention out"
    return Training(
        name=name or "own model",
        flops=Estimate(flops, flops * least, flops * most, basis),
        how=f"6 x {'active ' if met < parameters else ''}parameters x tokens",
        tokens=tokens,
        parameters=parameters,
        active=met,
    )


def stated_training(
    flops: float, name: str, how: str = "stated", low: float | None = None, high: float | None = None
) -> Training:
    """A training of which only the FLOPs are known, and perhaps an interval that whoever says so gives with them.

    Raises SpecError if one is not positive, or if they are not in order.
    """
    value = positive("FLOPs", flops)
    if low is None or high is None:
        return Training(name, Estimate(value, None, None, "FLOPs are stated as one number"), how)
    least, most = positive("low FLOPs", low), positive("high FLOPs", high)
    if not least <= value <= most:
        raise SpecError(f"FLOPs {value:.3g} lie outside {least:.3g} to {most:.3g}; give low, value and high in order")
    return Training(name, Estimate(value, least, most, "the interval of the FLOPs is their source's"), how)


def stated_utilization(value: ArrayLike) -> Estimate:
    """A utilization that somebody states, in (0, 1], for one size or several. Raises SpecError for any other."""
    return _utilization(Estimate(np.asarray(value, float), None, None, "utilization is stated as one number"))


def predicted_utilization(value: ArrayLike, low: ArrayLike, high: ArrayLike, basis: str) -> Estimate:
    """A utilization that somebody predicts, with its interval and what that rests on. SpecError outside (0, 1]."""
    return _utilization(Estimate(np.asarray(value, float), np.asarray(low, float), np.asarray(high, float), basis))


def between(devices: ArrayLike, known: Sequence[int], utilization: Estimate) -> Estimate:
    """The utilization at any size between those where it is known: linear in the logarithm of the devices.

    `known` are sizes in ascending order, `utilization` has one figure for each. Raises SpecError beyond them.
    """
    asked, at = np.asarray(devices, float), np.asarray(known, float)
    assert np.all(np.diff(at) > 0)
    assert np.size(utilization.value) == at.size
    outside = asked[(asked < at[0]) | (asked > at[-1])]
    if outside.size:
        raise SpecError(
            f"utilization is known from {at[0]:,.0f} to {at[-1]:,.0f} devices, not at {outside.flat[0]:,.0f}; "
            "predict or state it there"
        )
    low, high = utilization.bounds

    def read(figures: Figures) -> NDArray[np.float64]:
        return np.asarray(np.interp(np.log(asked), np.log(at), np.asarray(figures)), float)

    if not utilization.has_interval:
        return Estimate(read(utilization.value), None, None, utilization.basis)
    return Estimate(read(utilization.value), read(low), read(high), utilization.basis)


def demand(
    training: Training,
    devices: ArrayLike,
    peak: ArrayLike,
    utilization: Estimate,
    *,
    dtype: str = "bf16",
    labels: Sequence[str] = (),
    watts: ArrayLike | None = None,
    pue: float | None = None,
    price: ArrayLike | None = None,
) -> Demand:
    """Days, device-hours, energy and money of a training, for as many clusters as there are `devices`.

    `peak` is FLOP/s of a device in `dtype`, `watts` what a device draws with its share of the server, `pue` what the
    site draws over that (None: 1.0, the site is not counted), `price` of a device-hour. Each is one number for all
    clusters or one for each. Raises SpecError for numbers that cannot be, or for a `pue` without `watts`.
    """
    if pue is not None and watts is None:
        raise SpecError("pue has no effect without the power of a device; give watts, or leave pue out")
    if pue is not None and not 1.0 <= pue < np.inf:
        raise SpecError(f"pue {pue:g} is no ratio of a site's power to its devices'; give 1 or more")
    used = _utilization(utilization)
    given = {"devices": devices, "peak": peak, "watts": watts, "price": price, "utilization": used.value}
    number, shape = positives("devices", devices), _shape({k: v for k, v in given.items() if v is not None}, labels)
    number, peaks = (np.broadcast_to(x, shape) for x in (number, positives("peak", peak)))
    used = used * np.ones(shape)
    (least, most), (low, high) = used.bounds, training.flops.bounds
    rate = number * peaks
    seconds = training.flops.value / (rate * used.value)
    basis = "; ".join(dict.fromkeys([training.flops.basis, used.basis]))
    if training.flops.has_interval or used.has_interval:
        time = Estimate(seconds, low / (rate * most), high / (rate * least), basis)
    else:
        time = Estimate(seconds, None, None, basis)
    hours = time * (number / HOUR)
    return Demand(
        training=training,
        labels=tuple(labels) or tuple(f"{n:,.0f} devices" for n in number),
        devices=number,
        peak=peaks,
        dtype=dtype,
        utilization=used,
        days=time * (1 / DAY),
        device_hours=hours,
        energy=None if watts is None else hours * (positives("watts", watts) * (pue or 1.0) / 1000),
        money=None if price is None else hours * positives("price", price),
    )


def positive(what: str, value: float) -> float:
    """The number as a float. Raises SpecError if it is not positive and finite."""
    return float(positives(what, value))


def positives(what: str, values: ArrayLike) -> NDArray[np.float64]:
    """The numbers as an array. Raises SpecError if one is not positive and finite."""
    array = np.asarray(values, float)
    wrong = array[~((array > 0) & np.isfinite(array))]
    if wrong.size or not array.size:
        found = f"{wrong.flat[0]:g}" if wrong.size else "nothing"
        raise SpecError(f"{what} must be a positive number, is {found}; give one")
    return array


def _utilization(utilization: Estimate) -> Estimate:
    """The same, if it is a share and lies in its interval."""
    for figures in (utilization.value, *utilization.bounds):
        array = np.asarray(figures, float)
        wrong = array[~((array > 0) & (array <= 1))]
        if wrong.size:
            raise SpecError(f"utilization {wrong.flat[0]:g} is not in (0, 1]; give a share of the peak, such as 0.4")
    low, high = utilization.bounds
    if np.any(np.asarray(low) > utilization.value) or np.any(np.asarray(high) < utilization.value):
        raise SpecError("a utilization lies outside its own interval; give low, value and high in this order")
    return utilization


def _shape(given: dict[str, ArrayLike], labels: Sequence[str]) -> tuple[int, ...]:
    """One dim, over clusters. Raises SpecError if numbers are given for other numbers of clusters, or of labels."""
    sizes = {name: np.size(np.asarray(value)) for name, value in given.items()}
    if labels:
        sizes["labels"] = len(labels)
    number = max(sizes.values())
    for name, size in sizes.items():
        if size not in (1, number) or (name == "labels" and size != number):
            raise SpecError(f"{name}: {size} given for {number} clusters; give one for all, or one for each")
    return (number,)
