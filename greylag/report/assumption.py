"""Assumption: the constants that a prediction rests on, with where each comes from, and what it cannot know.

A preset's comments name the sources of its figures; they are read from the preset's file, so that no source is written
down twice. What a job file changed is said to be the job file's.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from greylag.spec.cluster import Calibration, Efficiency
from greylag.spec.job import Job
from greylag.spec.load import PRESETS, load_preset, presets
from greylag.spec.quantity import count
from greylag.spec.software import Software
from greylag.spec.step import Step
from greylag.spec.work import distinct_layers, layer_gemms

OWN, DEFAULT = "The job file.", "Default (spec.cluster.Efficiency): none of this device's own is known."


class Constant(NamedTuple):
    """One constant."""

    what: str
    value: str


class Group(NamedTuple):
    """Constants of one source."""

    title: str
    source: str
    constants: list[Constant]


def assumptions(job: Job, calibration: Calibration | None = None) -> list[Group]:
    """The constants of a job's prediction; of a `local` cluster those of its calibration."""
    if job.cluster.is_local:
        return [_calibrated(calibration)] if calibration else []
    return [group for group in (*_cluster(job), _software(job)) if group.constants]


def limits(job: Job, step: Step, calibration: Calibration | None = None) -> list[str]:
    """What the prediction rests on, leaves out, or says beyond what was ever measured. Sentences."""
    said = [f"{remark[:1].upper()}{remark[1:]}." for remark in step.remarks]
    said.append("All ranks are taken to be alike: no slow rank, no failure, nobody else on the links.")
    if job.model.moe:
        said.append("Experts are taken to get equal loads; real routing is slower, most of all when training begins.")
    if job.cluster.is_local:
        return said + list(_beyond(job, calibration))
    if job.software.activations == "autograd":
        said.append("Memory is of a rank of an average pipeline stage.")
    return said


def _cluster(job: Job) -> Iterator[Group]:
    """By table of the preset's file, which has a comment for each."""
    cluster, stem = job.cluster, re.sub(r"-\d+x\d+$", "", job.cluster.name)
    is_preset = stem in presets("clusters")
    base = load_preset("cluster", stem) if is_preset else None
    sources = comments("clusters", stem) if is_preset else {}
    device = cluster.device
    shown = [Constant(f"peak {kind}", f"{tflops:,.5g} TFLOP/s") for kind, tflops in device.peak_tflops.items()]
    shown += [Constant("memory", f"{device.memory_gib:,.5g} GiB")]
    if device.memory_gb_per_s:
        shown.append(Constant("memory bandwidth", f"{device.memory_gb_per_s:,.5g} GB/s"))
    if device.num_sms:
        shown.append(Constant("multiprocessors", count(device.num_sms)))
    same = base is not None and msgspec.structs.replace(base.device, efficiency=device.efficiency) == device
    yield Group(device.name, sources.get("device", "") if same else OWN, shown)
    yield from _efficiency(device.efficiency, base.device.efficiency if base else None, sources)
    for tier, title in (("node", "Link inside a node"), ("network", "Link between nodes")):
        link = getattr(cluster, tier)
        if link:
            same = base is not None and getattr(base, tier) == link
            shown = [
                Constant("bandwidth", f"{link.gb_per_s:,.5g} GB/s"),
                Constant("latency", f"{link.latency_us:.3g} µs"),
            ]
            yield Group(title, sources.get(tier, "") if same else OWN, shown)


def _efficiency(mine: Efficiency, base: Efficiency | None, sources: dict[str, str]) -> Iterator[Group]:
    """What the device reaches of its data sheet: from the preset, the job file, or nowhere."""
    groups: dict[str, list[Constant]] = {}
    for name in Efficiency.__struct_fields__:
        value = getattr(mine, name)
        if base is not None and value == getattr(base, name) != getattr(Efficiency(), name):
            source = sources.get("device.efficiency", "")
        else:
            source = DEFAULT if value == getattr(Efficiency(), name) else OWN
        groups.setdefault(source, []).append(Constant(name.replace("_us", " (µs)").replace("_", " "), f"{value:.3g}"))
    for source, constants in groups.items():
        yield Group("What the device reaches of its peaks", source, constants)


def _software(job: Job) -> Group:
    mine = job.software
    is_preset = mine.name in presets("software")
    same = is_preset and load_preset("software", mine.name) == mine
    source = " ".join(comments("software", mine.name).values()) if same else OWN
    fields = [name for name in Software.__struct_fields__ if name not in ("name", "evidence")]
    facts = [(name.replace("_us", " (µs)"), getattr(mine, name)) for name in fields]
    return Group(f"Framework: {mine.name}", source, [Constant(n, str(v)) for n, v in facts])


def comments(folder: str, preset: str) -> dict[str, str]:
    """The comments of a preset's file by the table that they stand before or in; "" is the file's beginning."""
    text = (PRESETS / folder / f"{preset}.toml").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    table, waiting = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            waiting.append(line.lstrip("# ").strip())
            continue
        if line.startswith("["):
            table = line.strip("[] ")
        elif " # " in line:
            waiting.append(line.split(" # ", 1)[1].strip())
        found.setdefault(table, []).extend(waiting)
        waiting = []
    return {table: " ".join(lines) for table, lines in found.items() if lines}


def _calibrated(calibration: Calibration) -> Group:
    source = (
        f"Measured by `greylag calibrate` on {calibration.device}, {calibration.created}, torch {calibration.torch}."
    )
    shown = [
        Constant("ranks at once", count(calibration.num_ranks)),
        Constant("best matrix multiply", f"{calibration.peak / 1e9:,.4g} GFLOP/s"),
        Constant("matrix multiplies", f"{len(calibration.gemm)} shapes"),
        Constant("operators", f"{len(calibration.ops)} curves"),
        Constant("collectives", f"{len(calibration.collectives)} curves"),
    ]
    return Group("Calibration of this machine", source, shown)


def _beyond(job: Job, calibration: Calibration | None) -> Iterator[str]:
    """Matrix multiplies beyond the measured shapes take the rate of the nearest."""
    if calibration is None:
        return
    s = job.strategy
    tokens = s.micro_batch * job.sequence // s.cp
    for dim in ("m", "n", "k"):
        measured = [getattr(point, dim) for point in calibration.gemm]
        mine = [
            getattr(gemm, dim)
            for layer, _ in distinct_layers(job.model)
            for gemm in layer_gemms(job.model, layer, tokens, s.tp, s.ep)
        ]
        if max(mine) > max(measured):
            yield (
                f"Matrix multiplies with {dim} up to {max(mine):,} lie beyond the calibration, which went up to "
                f"{max(measured):,}: extrapolated at its last rate."
            )
