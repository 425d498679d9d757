"""The trace parses, its slices never overlap, its arrows join what they should, and its memory returns to rest."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from greylag.sim.timeline import Timeline, graph, simulate
from greylag.sim.trace import trace
from greylag.spec import SpecError
from greylag.spec.schedule import in_flight
from greylag.spec.strategy import Schedule

CASES: list[tuple[Schedule, int]] = [("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2)]


def timed(schedule: Schedule, vp: int, transfer: float = 1e-4) -> Timeline:
    rng = np.random.default_rng(1)
    return simulate(graph(schedule, 4, vp, 9), *rng.uniform(1e-3, 2e-3, (3, 4 * vp)), transfer)


def events(written: bytes) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(written)["traceEvents"]
    return listed


@pytest.mark.parametrize(("schedule", "vp"), CASES)
@pytest.mark.parametrize("transfer", [0.0, 1e-4, 5e-3])
def test_slices_follow_each_other_and_are_the_timeline(schedule: Schedule, vp: int, transfer: float) -> None:
    timeline = timed(schedule, vp, transfer)
    threads = defaultdict(list)
    for e in events(trace(timeline)):
        if e["ph"] == "X":
            assert e["dur"] >= 0
            threads[e["pid"], e["tid"]].append((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3), e["name"]))
    for (rank, thread), slices in threads.items():
        assert all(a[1] <= b[0] for a, b in pairwise(slices))
        if thread == 0:
            row = timeline.actions[rank]
            assert [name.split(",")[0] for *_, name in slices] == [
                f"{a.kind} stage {a.stage} micro-batch {a.micro_batch}" for a in row
            ]
            assert [s for s, *_ in slices] == pytest.approx(timeline.start[rank] * 1e9, abs=1)
            assert [e for _, e, _ in slices] == pytest.approx(timeline.end[rank] * 1e9, abs=1)
    sends = sum(len(s) for (_, thread), s in threads.items() if thread)
    assert sends == (0 if transfer == 0 else sum(int((~np.isnan(row)).sum()) for row in timeline.arrival))


def test_dear_transfers_take_more_threads() -> None:
    def most(t: Timeline) -> int:
        return max(e["tid"] for e in events(trace(t)) if e["ph"] == "X")

    assert most(timed("1f1b", 1, 5e-3)) > most(timed("1f1b", 1, 1e-4)) == 1


@pytest.mark.parametrize(("schedule", "vp"), CASES)
def test_arrows_lead_from_a_send_to_the_next_stage(schedule: Schedule, vp: int) -> None:
    listed = events(trace(timed(schedule, vp)))
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in listed if e["ph"] == "X"}
    starts = {e["id"]: e for e in listed if e["ph"] == "s"}
    ends = [e for e in listed if e["ph"] == "f"]
    assert len(starts) == len(ends) == sum(e["ph"] == "X" and e["tid"] > 0 for e in listed)
    for end in ends:
        start = starts[end["id"]]
        sent = slices[start["pid"], start["tid"], start["ts"]].split()
        taken = slices[end["pid"], end["tid"], end["ts"]].split()
        assert sent[0] == "send"
        assert start["ts"] < end["ts"]
        assert start["pid"] != end["pid"]
        assert int(taken[2]) - int(sent[3]) == (1 if sent[1] == "F" else -1)
        assert taken[4].strip(",") == sent[5].strip(",")


@pytest.mark.parametrize(("schedule", "vp"), CASES)
def test_memory_returns_to_rest_after_its_peak(schedule: Schedule, vp: int) -> None:
    timeline = timed(schedule, vp)
    activation = np.arange(1, 4 * vp + 1) * 1e6
    resting = [7e9, 8e9, 9e9, 1e10]
    counters = defaultdict(list)
    for e in events(trace(timeline, activation=activation, resting=resting)):
        if e["ph"] == "C":
            counters[e["pid"]].append((e["ts"], e["args"]["bytes"]))
    peaks = in_flight(timeline.actions, activation.tolist())
    for rank, changes in counters.items():
        times, held = zip(*changes, strict=True)
        assert list(times) == sorted(set(times))
        assert held[0] in (resting[rank], resting[rank] + activation[timeline.actions[rank][0].stage])
        assert held[-1] == resting[rank] == min(held)
        assert max(held) == resting[rank] + sum(n * activation[stage] for (stage, _), n in peaks[rank].items())


def test_ranks_can_be_chosen_and_must_exist() -> None:
    listed = events(trace(timed("1f1b", 1), ranks=[1, 2]))
    assert {e["pid"] for e in listed} == {1, 2}
    assert {(e["ph"], e["pid"]) for e in listed if e["ph"] in "sf"} == {("s", 1), ("f", 2), ("s", 2), ("f", 1)}
    with pytest.raises(SpecError, match="ranks 0 to 3"):
        trace(timed("1f1b", 1), ranks=[4])


def test_names_and_compression() -> None:
    plain = trace(timed("dualpipe", 1))
    assert gzip.decompress(trace(timed("dualpipe", 1), compress=True)) == plain
    names = {(e["name"], e["args"].get("name")) for e in events(plain) if e["ph"] == "M"}
    assert {("process_name", "rank 3"), ("thread_name", "compute"), ("thread_name", "transfers")} <= names
    assert b'"F stage 0 micro-batch 5, backwards through the ranks"' in plain
