"""Traces of torch's profiler become measurements: kernels under their operators, collectives across ranks."""

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from greylag.interop.profile import SHAPELESS, SMALL, read_profile
from greylag.spec.error import SpecError
from greylag.spec.measurement import CollectiveSample, GemmSample, Measurements, MoveSample

BF16 = "c10::BFloat16"
MIB = 1 << 20
DEVICE = {"id": 0, "name": "NVIDIA H100 80GB HBM3"}


class Run:
    """A rank's trace as Kineto writes it. `old` numbers every event anew, so that ids link nothing and some collide."""

    def __init__(self, path: Path, rank: int = 0, old: bool = False) -> None:
        self.path, self.rank, self.old = path, rank, old
        self.events: list[dict[str, Any]] = []
        self.now, self.launches, self.operators = 1000.0, 0, 0
        self.around: int | None = None

    def event(self, cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        place = {"pid": 0, "tid": 7} if cat in ("kernel", "gpu_memcpy", "gpu_memset") else {"pid": 42, "tid": 42}
        self.events.append({"ph": "X", "cat": cat, "name": name, **place, "ts": ts, "dur": dur, "args": args})

    def launch(self, name: str, us: float, cat: str = "kernel", call: str = "cudaLaunchKernel", **args: Any) -> None:
        """A kernel of the operator around now; the host takes 5 us, and 5 more before the next."""
        self.launches += 1
        link = self.launches if self.old else self.around
        ids = {"correlation": self.launches, **({"External id": link} if link else {})}
        self.event("cuda_runtime", call, self.now, 5.0, **ids)
        self.event(cat, name, self.now + 100.0, us, device=0, stream=7, **ids, **args)
        self.now += 10.0

    def operator(self, name: str, *tensors: Any, kernels: Any = (), **args: Any) -> None:
        """An operator of tensors (type, dims...) that launches (name, us), inside of one that launches nothing."""
        shapes = (
            {"Input Dims": [list(t[1:]) for t in tensors], "Input type": [t[0] for t in tensors]} if tensors else {}
        )
        begun, outer = self.now, self.operators + 1
        self.operators = self.around = self.operators + 2
        self.now += 2.0
        for kernel in kernels:
            self.launch(*kernel[:2], **(kernel[2] if len(kernel) > 2 else {}))
        self.event("cpu_op", "aten::outer", begun - 1.0, self.now - begun + 2.0, **{"External id": outer})
        self.event("cpu_op", name, begun, self.now - begun, **{"External id": self.around}, **shapes, **args)
        self.around = None
        self.now += 10.0

    def collective(self, name: str, us: float, size: int, ranks: Any, **args: Any) -> None:
        said = {"Collective name": name, "In msg nelems": size, "Out msg nelems": size, "dtype": "BFloat16"}
        said |= {"Group size": len(ranks), "Process Group Name": "0", "Process Group Ranks": str(list(ranks))}
        self.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", us, **{**said, **args})

    def write(self, **more: Any) -> Path:
        info = {"distributedInfo": {"backend": "nccl", "rank": self.rank}, "deviceProperties": [DEVICE], **more}
        other = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, {"ph": "s", "id": 1, "cat": "ac2g"}]
        text = json.dumps({"schemaVersion": 1, **info, "traceEvents": other + self.events})
        self.path.write_bytes(gzip.compress(text.encode()) if self.path.suffix == ".gz" else text.encode())
        return self.path


A, B, X = (BF16, 512, 1024), (BF16, 1024, 256), (BF16, 1024, 1024)
SGEMM = "void cutlass::Kernel2<cutlass_80_wmma>(cutlass::Params)"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "rank0.json.gz")


def measured(*runs: Run) -> Measurements:
    return read_profile([run.write() for run in runs])


@pytest.mark.parametrize("old", [False, True])
def test_kernels_belong_to_the_innermost_operator_around_their_launch(tmp_path: Path, old: bool) -> None:
    run = Run(tmp_path / "a.json", old=old)
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 50.0)])
    run.launch("my_kernel<float>", 2.0)
    run.operator("aten::add", X, X, ("Scalar",), kernels=[("vectorized_elementwise_kernel<4>", 3.0)])
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 40.0), ("splitKreduce_kernel<float>", 20.0)])
    found = measured(run)
    assert found.gemms == [GemmSample(m=512, n=256, k=1024, dtype="bf16", seconds=pytest.approx(55e-6))]
    assert found.moves == [MoveSample(bytes=6.0 * MIB, seconds=pytest.approx(3e-6))]
    assert (found.busy, found.unread) == (pytest.approx(115e-6), {"my_kernel": pytest.approx(2e-6)})
    assert (found.device, found.source) == (DEVICE["name"], f"trace {run.path}")


@pytest.mark.parametrize("lost", ["launches", "threads"])
def test_kernels_without_their_launch_are_known_by_a_shared_number(run: Run, lost: str) -> None:
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 50.0)])
    for event in [e for e in run.events if e["cat"] == "cuda_runtime"]:
        event["tid"] = 43
        if lost == "launches":
            run.events.remove(event)
    assert [sample.seconds for sample in measured(run).gemms] == [pytest.approx(50e-6)]


def test_equal_shapes_are_one_sample_that_warm_up_does_not_sway(run: Run) -> None:
    for us in (5000.0, 900.0, 50.0, 51.0, 52.0, 49.0, 50.0):
        run.operator("aten::mm", A, B, kernels=[(SGEMM, us)])
    assert [sample.seconds for sample in measured(run).gemms] == [pytest.approx(51e-6)]


def test_copies_and_fills_and_what_is_too_small(run: Run) -> None:
    run.operator(
        "aten::copy_", X, X, kernels=[("Memcpy DtoD (Device -> Device)", 4.0, {"cat": "gpu_memcpy", "bytes": MIB})]
    )
    run.operator("aten::zero_", X, kernels=[("Memset (Device)", 2.0, {"cat": "gpu_memset", "bytes": 3 * MIB})])
    run.operator("aten::copy_", X, X, kernels=[("Memcpy HtoD (Pinned)", 9.0, {"cat": "gpu_memcpy", "bytes": MIB})])
    run.operator("aten::add", (BF16, 8, 8), (BF16, 8, 8), kernels=[("add", 1.0)])
    found = measured(run)
    assert {(m.bytes, round(m.seconds * 1e6, 6)) for m in found.moves} == {(2.0 * MIB, 4.0), (3.0 * MIB, 2.0)}
    assert found.unread == {"Memcpy HtoD": pytest.approx(9e-6), SMALL: pytest.approx(1e-6)}


def test_the_unread_are_named_shortly_and_only_the_largest(run: Run) -> None:
    conv = "std::enable_if<!(f<int>::b), void>::type (anonymous namespace)::conv<float, int>(int, g<(lambda)1>)"
    run.operator("aten::conv2d", X, kernels=[(conv, 90.0)])
    for i in range(30):
        run.operator("aten::topk", X, kernels=[(f"sort_{i:02d}(int)", 30.0 - i)])
    unread = measured(run).unread
    assert list(unread)[:3] == ["conv", "sort_00", "sort_01"]
    assert (len(unread), unread["other"]) == (21, pytest.approx(sum(range(1, 12)) * 1e-6))


def test_kernels_of_graphs_and_of_before_are_said_to_be(run: Run) -> None:
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 7.0, {"call": "cudaGraphLaunch"})])
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 5.0)])
    run.event("kernel", SGEMM, 10.0, 3.0, device=0, correlation=10**6)
    found = measured(run)
    assert [sample.seconds for sample in found.gemms] == [pytest.approx(5e-6)]
    assert [(name.split()[1:4], round(s * 1e6, 6)) for name, s in found.unread.items()] == [
        (["in", "CUDA", "graphs,"], 7.0),
        (["launched", "before", "the"], 3.0),
    ]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("allreduce", {}, ("all_reduce", 2.0 * MIB, 8, 1)),
        ("_allgather_base", {"Out msg nelems": 8 * MIB}, ("all_gather", 16.0 * MIB, 8, 1)),
        ("_reduce_scatter_base", {"In msg nelems": 8 * MIB, "dtype": "Float"}, ("reduce_scatter", 32.0 * MIB, 8, 1)),
        ("all_to_all", {"dtype": "Byte"}, ("all_to_all", 1.0 * MIB, 8, 1)),
        ("all_to_allv", {"In split size": "[3, 2, 3, 2]"}, ("all_to_all", 2.0 * MIB, 8, 1)),
        ("allreduce", {"Process Group Ranks": "[0, 16, 32, ...]"}, ("all_reduce", 2.0 * MIB, 8, 16)),
        ("allreduce", {"Process Group Ranks": [3, 1], "Group size": 2}, ("all_reduce", 2.0 * MIB, 2, 2)),
        ("send", {"Dst Rank": 4}, ("p2p", 2.0 * MIB, 2, 4)),
        ("recv", {"Process Group Ranks": "[0, 8]", "Group size": 2}, ("p2p", 2.0 * MIB, 2, 8)),
        ("allreduce", {"Process Group Ranks": "[0, 1, 4]"}, None),
        ("allreduce", {"Process Group Ranks": "[0]", "Group size": 1}, None),
        ("all_to_allv", {"In split size": "[9, 1, 1, 1]"}, None),
        ("allreduce", {"Group size": 0}, None),
        ("send", {}, None),
        ("broadcast", {}, None),
        ("coalesced", {}, None),
    ],
)
def test_collectives(run: Run, name: str, args: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    run.operator("aten::add", X, X, kernels=[("add", 3.0)])
    run.collective(name, 100.0, MIB, range(8), **args)
    found = measured(run)
    assert [(c.collective, c.bytes, c.ranks, c.stride) for c in found.collectives] == ([expected] if expected else [])
    assert sum(found.unread.values()) == pytest.approx(0.0 if expected else 100e-6)


def test_arguments_of_a_collective_may_stand_at_its_operator_alone(run: Run) -> None:
    said = {"Collective name": "allreduce", "In msg nelems": 4 * MIB, "Out msg nelems": 4 * MIB, "dtype": "Half"}
    said |= {"Group size": 4, "Process Group Ranks": "[0, 2, 4, 6]"}
    run.operator("record_param_comms", kernels=[("ncclKernel_AllReduce_RING_LL_Sum_half(a)", 70.0)], **said)
    run.operator(
        "record_param_comms", kernels=[("ncclKernel_Broadcast(a)", 9.0), ("ncclKernel_Broadcast(a)", 9.0)], **said
    )
    found = measured(run)
    size = {"bytes": 8.0 * MIB, "ranks": 4, "stride": 2}
    assert found.collectives == [CollectiveSample(collective="all_reduce", **size, seconds=pytest.approx(70e-6))]
    assert found.unread == {"ncclKernel_Broadcast": pytest.approx(18e-6)}


def ranks_of(
    tmp_path: Path, times: list[list[float]], name: str = "allreduce", first: int = 0, **args: Any
) -> list[Run]:
    runs = []
    for rank, waits in enumerate(times):
        runs.append(Run(tmp_path / f"{rank}.json.gz", rank))
        for k, us in enumerate(waits):
            numbered = {"Comms Id": 77 + first * rank + k} if first else {}
            runs[-1].collective(name, us, MIB, range(2), **numbered, **args)
    return runs


def test_of_all_ranks_the_last_to_come_counts(tmp_path: Path) -> None:
    runs = ranks_of(tmp_path, [[90.0, 40.0, 41.0], [42.0, 80.0, 800.0]])
    assert [c.seconds for c in measured(*runs).collectives] == [pytest.approx(41e-6)]
    runs[1].rank = 0  # another window of the same rank is no other rank
    assert [c.seconds for c in measured(*runs).collectives] == [pytest.approx(40e-6)]


def test_groups_of_one_name_and_other_ranks_do_not_meet(tmp_path: Path) -> None:
    runs = ranks_of(tmp_path, [[90.0, 40.0, 41.0], [42.0, 80.0, 800.0]])
    for event in runs[1].events:
        event["args"]["Process Group Ranks"] = "[2, 3]"
    assert [c.seconds for c in measured(*runs).collectives] == [pytest.approx(40e-6)]


def test_of_one_rank_a_low_quantile_counts(tmp_path: Path) -> None:
    (run,) = ranks_of(tmp_path, [[100.0 + i for i in range(20)] + [50.0]])
    assert [c.seconds for c in measured(run).collectives] == [pytest.approx(101e-6)]


def test_windows_of_unlike_length_match_by_number_alone(tmp_path: Path) -> None:
    times = [[90.0, 40.0, 41.0], [80.0, 39.0]]
    unmatched = measured(*ranks_of(tmp_path, times)).collectives
    assert [c.seconds for c in unmatched] == [pytest.approx(39e-6)]
    matched = measured(*ranks_of(tmp_path, times, first=1)).collectives
    assert [c.seconds for c in matched] == [pytest.approx(40e-6)]


def test_a_transfer_meets_at_both_ends(tmp_path: Path) -> None:
    a, b = Run(tmp_path / "a.json", 0), Run(tmp_path / "b.json", 4)
    for us in (60.0, 61.0, 62.0):
        a.collective("send", us, MIB, range(8), **{"Dst Rank": 4, "Comms Id": 2**64 - int(us)})
        b.collective("recv", 1000.0 - us, MIB, range(8), **{"Src Rank": 0, "Comms Id": "7"})
    (transfer,) = measured(a, b).collectives
    assert (transfer.collective, transfer.stride, transfer.seconds) == ("p2p", 4, pytest.approx(61e-6))


def test_an_exchange_of_routed_tokens_is_as_large_as_its_largest_part(tmp_path: Path) -> None:
    a, b = Run(tmp_path / "a.json", 0), Run(tmp_path / "b.json", 4)
    for more in (10, 20, 30):
        a.collective("all_to_allv", 100.0, MIB + more, (0, 4))
        b.collective("all_to_allv", 90.0 + more, MIB - more, (0, 4))
    (exchange,) = measured(a, b).collectives
    assert (exchange.bytes, exchange.seconds) == (2.0 * (MIB + 20), pytest.approx(100e-6))


def test_host_time_per_kernel_is_between_calls_that_wait(run: Run) -> None:
    for launches in [2, 1, 1] * 120:
        run.operator("aten::add", X, X, kernels=[("add", 3.0)] * launches)
        run.event("cuda_runtime", "cudaStreamSynchronize", run.now, 900.0, correlation=0)
        run.now += 1000.0
    assert measured(run).launch_us == pytest.approx(10.0)


def test_no_host_time_where_the_queue_is_full_or_few_are_launched_or_graphs_are(tmp_path: Path) -> None:
    few, full, graphs = (Run(tmp_path / f"{i}.json") for i in range(3))
    few.operator("aten::add", X, X, kernels=[("add", 3.0)] * 90)
    full.operator("aten::add", X, X, kernels=[("add", 3.0)] * 2000)
    for i, event in enumerate([e for e in full.events if e["cat"] == "kernel"]):
        event["ts"] = 1000.0 + 500.0 * i
    graphs.operator("aten::add", X, X, kernels=[("add", 3.0)] * 150)
    graphs.operator("aten::add", X, X, kernels=[("add", 3.0, {"call": "cudaGraphLaunch"})] * 160)
    assert [measured(run).launch_us for run in (few, graphs)] == [None, None]
    assert measured(full).launch_us == pytest.approx(10.0)
    full.events = [e for e in full.events if e["name"] != "cudaLaunchKernel" or e["ts"] > 7000.0]
    assert measured(full).launch_us is None


def test_steps_are_as_long_as_host_or_device_takes(run: Run) -> None:
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 50.0)])
    assert measured(run).step is None
    for i, (host, device) in enumerate([(900.0, 100.0), (200.0, 300.0), (310.0, 290.0)]):
        run.event("user_annotation", f"ProfilerStep#{i}", 1000.0 * i, host)
        run.event("gpu_user_annotation", f"ProfilerStep#{i}", 1000.0 * i, device)
    assert measured(run).step == pytest.approx(310e-6)


def test_without_dims_collectives_alone_are_read(run: Run) -> None:
    run.operator("aten::mm", kernels=[(SGEMM, 50.0)])
    with pytest.raises(SpecError, match=r"rank0.*no operator has 'Input Dims'; profile with record_shapes=True"):
        measured(run)
    run.collective("allreduce", 30.0, MIB, range(2))
    found = measured(run)
    assert len(found.collectives) == 1
    assert found.unread == {SHAPELESS: pytest.approx(50e-6)}


def test_devices_must_be_of_one_kind(tmp_path: Path, run: Run) -> None:
    run.operator("aten::mm", A, B, kernels=[(SGEMM, 50.0)])
    other = Run(tmp_path / "other.json")
    other.events = run.events
    paths = [run.write(), other.write(deviceProperties=[{"id": 0, "name": "NVIDIA H20"}, DEVICE | {"id": 1}])]
    with pytest.raises(SpecError, match=r"other\.json: made on NVIDIA H20, .*rank0.* on NVIDIA H100.*one kind"):
        read_profile(paths)
    assert read_profile([other.write(deviceProperties=[])]).device == ""
    assert read_profile([other.write(deviceProperties=[DEVICE | {"id": 5}])]).device == DEVICE["name"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "not JSON, or cut off"),
        (b'{"traceEvents": [{"ph": "X"}', "not JSON, or cut off"),
        (gzip.compress(b'{"traceEvents": []}' * 99)[:-20], "gzip file is cut off or damaged"),
        (b"\x1f\x8bnonsense", "gzip file is cut off or damaged"),
        (b"[]", "not a profiler's trace"),
        (b'{"traceEvents": [{"cat": "kernel", "ts": "soon"}]}', "not a profiler's trace"),
        (b'{"events": []}', "no 'traceEvents' in it"),
        (b'{"traceEvents": [{"cat": "cpu_op", "name": "aten::mm"}]}', "no GPU kernels.*on CPU alone"),
    ],
)
def test_errors_name_the_file_in_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=rf"trace\.json: .*{said}") as caught:
        read_profile([path])
    assert "\n" not in str(caught.value)


def test_no_traces_is_an_error() -> None:
    with pytest.raises(SpecError, match="no traces"):
        read_profile([])


def test_what_torch_itself_writes(tmp_path: Path) -> None:
    """Operators as this torch records them, on CPU; the kernels that a GPU would run are put in."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        a, b = torch.ones(512, 768, dtype=torch.bfloat16), torch.ones(768, 640, dtype=torch.bfloat16)
        y = torch.nn.functional.linear(a, b.t().contiguous().t().t(), torch.ones(640, dtype=torch.bfloat16))
        q = torch.ones(2, 4, 128, 32, dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.nn.functional.silu(torch.ones(1024, 1024)) + 1
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    assert y.shape == (512, 640)
    with pytest.raises(SpecError, match="no GPU kernels"):
        read_profile([tmp_path / "cpu.json"])
    trace = json.loads((tmp_path / "cpu.json").read_text())
    for i, op in enumerate([e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]):
        if op["name"] in ("aten::addmm", "aten::silu", "aten::add"):
            args = {"correlation": i, "External id": op["args"]["External id"]}
            run = {
                "ph": "X",
                "cat": "kernel",
                "name": "k",
                "pid": 0,
                "tid": 7,
                "ts": op["ts"],
                "dur": 30.0 + i,
                "args": args,
            }
            call = {
                **run,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": op["pid"],
                "tid": op["tid"],
                "dur": 0.1,
            }
            trace["traceEvents"] += [run, call]
    (tmp_path / "gpu.json").write_text(json.dumps(trace))
    found = read_profile([tmp_path / "gpu.json"])
    assert [(g.m, g.n, g.k, g.dtype, g.out_bytes) for g in found.gemms] == [(512, 640, 768, "bf16", 2.0)]
    assert [m.bytes for m in found.moves] == [8.0 * MIB]
    assert found.unread == {}
    assert statistics.median(m.seconds for m in found.moves) > 0
