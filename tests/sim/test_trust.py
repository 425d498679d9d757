"""How far a prediction says that it may be off."""

import pytest
from msgspec.structs import replace

from greylag.sim import predict
from greylag.sim.trust import UNKNOWN, trust
from greylag.spec import Job
from greylag.spec.load import job_from
from greylag.spec.software import Evidence, Software

KNOWN = Software(
    name="known", parameters="bf16", activations="fused",
    evidence=(Evidence(device="NVIDIA H100 80GB HBM3", kind="dense", dtype="bf16", rows=20, ranks=128, spread=0.1),),
)  # fmt: skip


def job(precision: str = "bf16", cluster: str = "h100-8x16", model: str = "llama-3-8b") -> Job:
    table = {"model": model, "precision": precision, "cluster": cluster, "sequence": 4096, "global_batch": 4096}
    return replace(job_from(table, "test"), software=KNOWN)


def test_runs_of_the_kind_give_their_spread() -> None:
    found = trust(job())
    assert found.spread == 0.1
    assert found.remarks == ("rests on 20 measured runs of known on NVIDIA H100 80GB HBM3, dense, BF16",)
    step = predict(job())
    assert step.interval
    assert step.interval[0] * 1.1 == step.total_seconds
    assert step.interval[1] == step.total_seconds * 1.1


def test_what_goes_beyond_the_runs_is_said_and_widens_the_interval() -> None:
    for beyond, word in (
        (job(precision="fp8-block128"), "fp8 (known: bf16)"),
        (job(cluster="b200-8x16"), "NVIDIA B200 (known: NVIDIA H100"),
        (job(model="mixtral-8x7b"), "experts (known: dense)"),
        (job(cluster="h100-8x64"), "512 devices, measured runs had up to 128"),
    ):
        found = trust(beyond)
        assert found.spread > 0.1
        assert word in found.remarks[0]
        assert found.remarks[0].startswith("extrapolates")


def test_a_framework_without_runs_is_widest() -> None:
    unknown = replace(job(), software=replace(KNOWN, evidence=()))
    assert trust(unknown) == (UNKNOWN, ("no measured run of known is at hand",))


def test_a_calibrated_device_needs_no_run_of_its_own_and_brings_its_spread() -> None:
    elsewhere = job(cluster="b200-8x16")
    measured = replace(elsewhere.cluster, device=replace(elsewhere.cluster.device, spread=0.075))
    found = trust(replace(elsewhere, cluster=measured))
    assert found.spread == pytest.approx(0.125)
    runs = "rests on 20 measured runs of known on NVIDIA H100 80GB HBM3, dense, BF16"
    assert found.remarks == (f"{runs}, and on kernels measured on NVIDIA B200",)
    assert found.spread < trust(elsewhere).spread
