"""Fit: the simulator's constants from measured step times, and what they say of models that they were not fitted to.

Constants are the numbers of `Efficiency`, for each device, and three of `Software`, for each generation. The fit
finds the most probable ones: errors are of the logarithm of the step time, with the tails of Huber's loss; a Gaussian
prior on the logarithm of each constant pulls to where nothing is known of the device, or operators were measured.
Damped Gauss-Newton steps (Levenberg 1944) by finite differences, of which a row has only those of its own device and
generation, taken anew every other round; a step that makes the loss larger is halved.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from greylag.spec.cluster import Efficiency
from greylag.spec.job import Job
from greylag.spec.software import Software
from truth_rows.row import Row

SOFTWARE = ("grouped", "speed", "exposed")
"""Numbers of a Software that are fitted."""
NOISE = 0.03
"""Standard deviation of a measured step time's logarithm: two runs of one setting differ by about this."""
HUBER = 2.0
"""Standard deviations from which an error weighs by its size and not by its square."""
WIDTH = {
    "speed": 0.3, "exposed": 0.7, "launch_us": 0.8, "kernel_us": 0.25, "gemm_ramp": 0.5, "node": 0.1,
}  # fmt: skip
"""Standard deviation of a constant's logarithm around its default."""
OTHER_WIDTH = 0.15
STEP = 0.02
"""Of a finite difference, in the logarithm."""
DAMPING = 1e-2
LONGEST_STEP = 0.4
"""Of a constant's logarithm in one round."""

MEASURED: dict[str, dict[str, float]] = {
    "b200": {"gemm": 0.49, "gemm_fp8": 0.45, "gemm_ramp": 128.0, "attention": 0.42,
             "attention_backward": 0.36, "memory": 0.6, "node": 0.67, "all_to_all": 0.6},
    "megatron-core-2026": {"grouped": 0.65},
}  # fmt: skip
"""Operators measured alone on a device by a framework's release, around which the prior lies (MooreThreads/SimuMax,
configs/system/b200_bf16_ceperm.json): GEMMs above 0.5 ms, median; attention, whose FLOPs it counts non-causal, halved;
grouped over plain GEMMs; elementwise kernels; collectives over NVLink."""

Key = tuple[str, str]
"""(device or generation, constant)."""
Predict = Callable[[Job], float]
"""Seconds of a job's step."""


@dataclass
class Fit:
    """Constants by (device or generation, name), as logarithms over their defaults."""

    predict: Predict
    default: dict[Key, float]
    shift: dict[Key, float]
    slopes: dict[str, dict[Key, float]] = field(default_factory=dict)
    """Of each row by id: d log seconds / d shift."""

    def value(self, key: Key, further: float = 0.0) -> float:
        """A constant, its logarithm moved by `further`; shares stay below 1."""
        value = self.default[key] * float(np.exp(self.shift[key] + further))
        return min(value, 1.0) if self.default[key] < 1 else value

    def lines(self, holder: str, names: Iterable[str]) -> list[str]:
        """The constants of a device or a generation, as lines of TOML."""
        return [f"{name} = {self.value((holder, name)):.3g}" for name in names]

    def job(self, row: Row, moved: Key | None = None) -> Job:
        """The row's job with these constants, one of them moved by STEP."""
        assert row.job
        job, device, generation = row.job, device_of(row), row.generation

        def now(key: Key) -> float:
            return self.value(key, STEP if key == moved else 0.0)

        efficiency = Efficiency(**{name: now((device, name)) for name in Efficiency.__struct_fields__})
        cluster = replace(job.cluster, device=replace(job.cluster.device, efficiency=efficiency))
        software = replace(job.software, **{name: now((generation, name)) for name in SOFTWARE})
        return replace(job, cluster=cluster, software=software)

    def log_seconds(self, row: Row, moved: Key | None = None) -> float:
        """Logarithm of the predicted step time."""
        return float(np.log(self.predict(self.job(row, moved))))


def device_of(row: Row) -> str:
    """The cluster preset's name without its size."""
    assert row.job
    return row.job.cluster.name.rsplit("-", 1)[0]


def keys_of(row: Row) -> list[Key]:
    """The constants that a row depends on."""
    device = [(device_of(row), name) for name in Efficiency.__struct_fields__]
    return device + [(row.generation, name) for name in SOFTWARE]


def start(rows: Iterable[Row], predict: Predict) -> Fit:
    """Constants of no device in particular, or of measured operators: not those of the presets, which a fit wrote."""
    default: dict[Key, float] = {}
    for row in rows:
        for key in keys_of(row):
            usual = Software(name="") if key[1] in SOFTWARE else Efficiency()
            default[key] = MEASURED.get(key[0], {}).get(key[1], float(getattr(usual, key[1])))
    return Fit(predict, default, dict.fromkeys(default, 0.0))


def fit(rows: list[Row], predict: Predict, rounds: int = 8) -> Fit:
    """Constants fitted to the step times of `rows` (which all have a job and a time)."""
    found = start(rows, predict)
    now = {row.id: found.log_seconds(row) for row in rows}
    for number in range(rounds):
        if number % 2 == 0:
            found.slopes = {row.id: _slopes(found, row, now[row.id]) for row in rows}
        now, gain = _advance(found, rows, now, set(found.shift))
        if gain < 1e-3:
            break
    return found


def _advance(found: Fit, rows: list[Row], now: dict[str, float], free: set[Key]) -> tuple[dict[str, float], float]:
    """Move the `free` constants one step; logarithms of seconds after it, and the share of the loss that it took."""
    before, old = _loss(found, rows, now), dict(found.shift)
    step = _step(found, rows, now)
    for half in (1.0, 0.5, 0.25, 0.125):
        found.shift = {key: value + (half * step[key] if key in free else 0.0) for key, value in old.items()}
        after = {row.id: found.log_seconds(row) for row in rows}
        loss = _loss(found, rows, after)
        if loss < before:
            return after, (before - loss) / before
    found.shift = old
    return now, 0.0


def _loss(found: Fit, rows: list[Row], now: dict[str, float]) -> float:
    """Huber's loss of all errors, and the prior's."""
    error = np.abs([(now[row.id] - np.log(row.seconds or 1.0)) / NOISE for row in rows])
    prior = sum((value / _width(key)) ** 2 for key, value in found.shift.items())
    tails = np.where(error < HUBER, error**2, HUBER * (2 * error - HUBER))
    return float(tails.sum()) + prior


def _width(key: Key) -> float:
    return WIDTH.get(key[1], OTHER_WIDTH)


def _slopes(found: Fit, row: Row, now: float) -> dict[Key, float]:
    return {key: (found.log_seconds(row, key) - now) / STEP for key in keys_of(row)}


def _step(found: Fit, rows: list[Row], now: dict[str, float]) -> dict[Key, float]:
    """One damped Gauss-Newton step."""
    keys = list(found.shift)
    place = {key: i for i, key in enumerate(keys)}
    width = np.array([_width(key) for key in keys])
    shift = np.array([found.shift[key] for key in keys])
    matrix = np.diag(1 / width**2)
    side = -shift / width**2
    for row in rows:
        assert row.seconds
        error = (now[row.id] - float(np.log(row.seconds))) / NOISE
        weight = min(1.0, HUBER / max(abs(error), 1e-12)) / NOISE**2
        at = [place[key] for key in found.slopes[row.id]]
        slope = np.array(list(found.slopes[row.id].values()))
        matrix[np.ix_(at, at)] += weight * np.outer(slope, slope)
        side[at] -= weight * slope * error * NOISE
    matrix[np.diag_indices_from(matrix)] *= 1 + DAMPING
    step = np.clip(np.linalg.solve(matrix, side), -LONGEST_STEP, LONGEST_STEP)
    return dict(zip(keys, (float(s) for s in step), strict=True))


def left_out(rows: list[Row], whole: Fit, rounds: int = 3) -> dict[str, float]:
    """Seconds by row id, each predicted by constants fitted to the other models alone.

    Each fit starts from the whole one with its slopes, and takes `rounds` steps with true errors of the rows left in. A
    constant that only the model left out has seen returns to its default.
    """
    found: dict[str, float] = {}
    for family in dict.fromkeys(row.family for row in rows):
        away = [row for row in rows if row.family == family]
        touched = {key for row in away for key in keys_of(row)}
        kept = [row for row in rows if row.family != family and touched & set(keys_of(row))]
        seen = {key for row in kept for key in keys_of(row)}
        shift = {key: value if key in seen else 0.0 for key, value in whole.shift.items()}
        without = Fit(whole.predict, whole.default, shift, whole.slopes)
        now = {row.id: without.log_seconds(row) for row in kept}
        for _ in range(rounds if kept else 0):
            now, gain = _advance(without, kept, now, touched & seen)
            if gain < 1e-3:
                break
        found |= {row.id: whole.predict(without.job(row)) for row in away}
    return found


def as_toml(found: Fit) -> str:
    """What to paste into the presets: a table per device, three lines per generation."""
    lines = []
    for device in dict.fromkeys(name for name, constant in found.shift if constant not in SOFTWARE):
        lines += [f"# clusters/{device}.toml", "[device.efficiency]"]
        lines += [*found.lines(device, Efficiency.__struct_fields__), ""]
    for generation in dict.fromkeys(name for name, constant in found.shift if constant in SOFTWARE):
        lines += [f"# software/{generation}.toml", *found.lines(generation, SOFTWARE), ""]
    return "\n".join(lines)
