"""Calibration: what `greylag calibrate --cluster` puts together, measured kernels and the constants fitted to them.

It stands beside `cli` and `simulation`, which compose the other commands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from greylag.interop.jobfile import to_toml
from greylag.interop.profile import read_profile
from greylag.report.calibrated import print_calibrated
from greylag.report.derived import check_place, write_derived
from greylag.sim import predict
from greylag.sim.fit import Fitted, fit, of_device
from greylag.spec.cluster import Cluster
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.load import CHANGED, load_job, load_preset, presets
from greylag.spec.measurement import Measurements

Measure = Callable[[int | None, str], Measurements | None]
"""From a number of ranks (None: all) and a kind of device to what they measured; None on a rank that stays silent."""
SPEEDS = (0.2, 3.0)
"""Between these a framework's `speed` is sought: beyond them it is another job that was traced."""


@dataclass(frozen=True)
class Request:
    """What is to be calibrated, from what, and the file to write."""

    preset: str
    """A cluster preset of accelerators, whose data sheet is taken, with its size."""
    out: Path | None
    ranks: int | None = None
    traces: tuple[Path, ...] = ()
    job: Path | None = None
    """The job that the traces are of."""
    force: bool = False

    def checked(self) -> tuple[Cluster, Job | None]:
        """The preset and the job, once all is in order. Raises SpecError for what is not, or has no effect."""
        cluster: Cluster = load_preset("cluster", self.preset)
        if cluster.is_local:
            raise SpecError("--cluster local: this machine's CPUs are calibrated by `greylag calibrate` alone")
        if self.out is None:
            raise SpecError("--out is missing: name the cluster file to write, such as my-h100.toml")
        check_place(self.out, self.force, (".toml",))
        if self.out.stem == "local" or self.out.stem.startswith("local-"):
            raise SpecError(f"{self.out}: 'local' is the name of this machine's CPUs; choose another")
        if self.traces and self.ranks is not None:
            raise SpecError("--ranks: has no effect on traces, which have their own; leave it out")
        twice = next((path for path in self.traces if self.traces.count(path) > 1), None)
        if twice:
            raise SpecError(f"--from-trace {twice}: is given twice; leave it out once")
        if self.job and not self.traces:
            raise SpecError("--job: is the job that was traced; give its traces by --from-trace")
        job = load_job(self.job) if self.job else None
        if job and job.cluster.is_local:
            raise SpecError(f"{self.job}: runs on this machine's CPUs; give the job that was traced")
        return cluster, job


def calibrate_accelerators(request: Request, measure: Measure | None = None) -> None:
    """Measure accelerators or read traces, fit the preset's constants, say what changed and write the cluster file.

    `measure` is `train.accelerator.measure_accelerators`, given where there are no traces: it needs torch. With the job
    that was traced, also say how fast its framework is beside these kernels. Raises SpecError if anything asked for is
    amiss, there is too little to fit, or the job's step cannot be reached.
    """
    cluster, job = request.checked()
    assert request.out
    assert measure or request.traces
    measured = measure(request.ranks, cluster.device.kind) if measure else read_profile(request.traces)
    if measured is None:  # another rank speaks
        return
    other = preset_of(measured.device)
    if other and measured.device != cluster.device.name:
        raise SpecError(f"{measured.source}: made on {measured.device}, whose data sheet is that of --cluster {other}")
    found = fit(cluster, measured)
    speed = framework_speed(job, found, measured) if job else None
    print_calibrated(cluster, found.before, found.after, found.errors, measured)
    write_derived(request.out, as_toml(request.preset, found, measured).encode())
    print(request.out)
    if job and speed:
        of_job = {"grouped": found.after.get("grouped"), "speed": float(f"{speed:.3g}")}
        facts = ", ".join(f"{name} = {value}" for name, value in of_job.items() if value is not None)
        preset = job.software.name.removesuffix(CHANGED)
        print(f'In the job, beside other changes of its software: software = {{ preset = "{preset}", {facts} }}')


def preset_of(device: str) -> str | None:
    """The cluster preset of a device by its name, if there is one."""
    found = ((name, load_preset("cluster", name)) for name in presets("clusters") if name != "local")
    return next((name for name, cluster in found if cluster.device.name == device), None)


def as_toml(preset: str, found: Fitted, measured: Measurements) -> str:
    """The cluster file: its preset and what differs from it."""
    device = found.cluster.device
    head = f"# {device.name}: constants of its own kernels, by {measured.source}.\n"
    constants = of_device(found.after)
    table = {"preset": preset, "device": {"name": device.name, "spread": device.spread, "efficiency": constants}}
    return head + to_toml(table)


def framework_speed(job: Job, found: Fitted, measured: Measurements) -> float:
    """`software.speed` by which the job's predicted step is the traced one, on the kernels that were found.

    It takes up what the simulator does not name. Raises SpecError if no sensible speed does.
    """
    from scipy.optimize import brentq

    step = measured.step
    if step is None:
        raise SpecError(f"{measured.source}: holds no steps; call the profiler's step() after each, or leave out --job")
    cluster = replace(job.cluster, device=found.cluster.device)
    own = replace(job.software, grouped=found.after.get("grouped", job.software.grouped))

    def excess(speed: float) -> float:
        software = replace(own, speed=speed)
        return predict(replace(job, cluster=cluster, software=software)).total_seconds - step

    slow, fast = (excess(speed) for speed in SPEEDS)
    if slow < 0 or fast > 0:
        at = predict(replace(job, cluster=cluster, software=replace(own, speed=1.0))).total_seconds
        raise SpecError(
            f"{job.name}: its step takes {at:.3g} s by these kernels, the traced one {step:.3g} s: no speed "
            "of a framework explains that; is it the job that was traced?"
        )
    return float(brentq(excess, *SPEEDS, xtol=1e-4))
