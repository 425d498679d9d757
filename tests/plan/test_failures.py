"""Failures: published counts and times to failure, intervals of counts, and rates fitted to findings."""

import math

import pytest

from greylag.plan.failures import Failures, count_restarts, fit, kind_of, load_failures
from greylag.plan.poisson import count_interval
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.load import presets
from greylag.spec.quantity import DAY, HOUR
from greylag.spec.step import Step

LLAMA, RSC = load_failures("llama-3"), load_failures("meta-rsc-1")


def per_thousand_node_days(failures):
    """Of nodes of eight devices."""
    return failures.count / failures.device_seconds * 8 * DAY * 1000


def within(value, interval):
    return interval[0] <= value <= interval[1]


# Published failures.


def test_llama_3_counts_what_was_published():
    assert LLAMA.count == 419
    assert LLAMA.node_days == 2048 * 54
    assert LLAMA.mttf(16384) / HOUR == pytest.approx(54 * 24 / 419)
    assert per_thousand_node_days(LLAMA) == pytest.approx(3.79, abs=0.005)


# arXiv 2410.21680: 1.8 h and 0.23 h; FT-HSDP, arXiv 2602.00277: a failure every 18 minutes.
@pytest.mark.parametrize(("devices", "hours"), [(16384, 1.8), (131072, 0.23), (100_000, 18 / 60)])
def test_rsc_1_gives_the_published_time_to_failure(devices, hours):
    assert within(hours * HOUR, RSC.mttf_interval(devices))
    assert RSC.mttf(devices) / HOUR == pytest.approx(hours, rel=0.03)


def test_rsc_1_misses_the_measured_time_to_failure_of_small_jobs():
    """7.9 h at 1,024 GPUs were measured (arXiv 2410.21680): the rate of nodes alone says 28.8 h."""
    assert RSC.mttf(1024) / HOUR == pytest.approx(28.8, abs=0.1)


def test_the_table_of_the_facts():
    hours = {10_000: (5.1, 3.0), 16384: (3.1, 1.8), 32768: (1.5, 0.9), 100_000: (0.5, 17.7 / 60)}
    for devices, (llama, rsc) in hours.items():
        assert LLAMA.mttf(devices) / HOUR == pytest.approx(llama, rel=0.04)
        assert RSC.mttf(devices) / HOUR == pytest.approx(rsc, rel=0.03)


def test_rsc_2_has_its_published_rate():
    assert per_thousand_node_days(load_failures("meta-rsc-2")) == pytest.approx(2.34, abs=0.002)


def test_byterobust_has_its_published_counts():
    """arXiv 2509.16293, table 1: of all incidents 9.9% are hangs, 0.8% a falling MFU, 0.3% NaN; 5,948 are implicit."""
    failures = load_failures("byterobust")
    implicit = [failures.causes["unknown"]["job hang"], failures.counts["slow"], failures.counts["corruption"]]
    assert sum(implicit) == 5948
    assert failures.count == 43264 + 5948
    assert [round(100 * n / sum(implicit)) for n in implicit] == [round(100 * p / 11.0) for p in (9.9, 0.8, 0.3)]


def test_megascale_was_repaired_a_hundred_times():
    """NSDI 2024: over 100 times in several weeks on more than 10,000 GPUs."""
    assert 14 * DAY < 100 * load_failures("megascale").mttf(10_000) < 42 * DAY


# Intervals.


def test_a_counts_interval_is_garwoods():
    assert count_interval(0, 0.95) == (0.0, pytest.approx(3.688879454))
    assert count_interval(5, 0.95) == pytest.approx((1.623486390, 11.668332079))
    assert count_interval(419) == pytest.approx((385.908711158, 454.268336765))


@pytest.mark.parametrize("count", [1, 7, 419, 2171, 50_000])
def test_a_counts_interval_is_half_chi_square(count):
    chi2 = pytest.importorskip("scipy.stats").chi2
    low, high = count_interval(count)
    assert low == pytest.approx(chi2.ppf(0.05, 2 * count) / 2, rel=1e-9)
    assert high == pytest.approx(chi2.ppf(0.95, 2 * count + 2) / 2, rel=1e-9)


def test_where_nothing_was_counted_the_upper_end_remains():
    failures = Failures(name="none", node_days=100.0)
    assert failures.mttf(8) == math.inf
    assert failures.mttf(8, "high") == pytest.approx(100 * DAY / 2.995732)


# Fitting.


def test_findings_become_rates():
    stop = Finding(level="error", what="GPU 3 fell off the bus (XID 79)", rank=3, step=10)
    twin = Finding(level="error", what="GPU 3 is not answering", rank=4, step=10)
    link = Finding(level="error", what="link flaps", node="n7")
    slow = Finding(level="warning", what="rank 5 is slow", step=12)
    skipped = Finding(level="warning", what="the gradient norm is not finite: the step was not applied", step=9)
    failures = fit([[stop, twin, slow, skipped], [link]], device_hours=8 * 24 * 100, restarts=4)
    assert failures.counts == {
        "hardware": 1,
        "network": 1,
        "software": 0,
        "unknown": 2,
        "corruption": 0,
        "slow": 1,
    }
    assert failures.node_days == 100
    assert within(failures.mttf(8), failures.mttf_interval(8))


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("NVLink error on GPU 3", "hardware"),
        ("the InfiniBand link of mlx5_0 is down", "network"),
        ("RoCE retransmits", "network"),
        ("digest of the weights differs from the peers'", "corruption"),
        ("rank 3 waits least: it is a straggler", "slow"),
        ("CUDA out of memory", "software"),
        ("uncorrectable ECC error", "hardware"),
        ("the process died with code 9", "unknown"),
    ],
)
def test_the_words_of_a_finding_tell_its_class(what, kind):
    assert kind_of(Finding(level="error", what=what)) == kind


def test_todays_trainer_writes_no_failure():
    """It writes a warning for a step that was not applied, and goes on."""
    findings = [Finding(level="warning", what="Inf or NaN in an operand of a GEMM: the step was not applied", step=3)]
    failures = fit([findings], device_hours=1000.0)
    assert failures.count == 0
    assert kind_of(findings[0]) == "software"


def test_restarts_show_in_the_numbers_of_steps():
    numbers = [1, 2, 3, 2, 3, 4, 1]
    steps = [Step(source="measured", number=n, seconds={"other": 1.0}, tokens=1, flops=1.0) for n in numbers]
    assert count_restarts(steps) == 2


# Presets and files.


def test_presets_are_named():
    assert presets("failures") == ["byterobust", "llama-3", "megascale", "meta-rsc-1", "meta-rsc-2"]
    with pytest.raises(SpecError, match="did you mean 'llama-3'"):
        load_failures("llama3")
    with pytest.raises(SpecError, match="known: byterobust, llama-3"):
        load_failures("gemini")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("node_days = 0.0", "node_days is 0"),
        ("node_days = 1.0\nnode_years = 2.0", "node_years"),
        ("node_days = 1.0\n[causes.gremlins]\nx = 1", "gremlins"),
        ("node_days = 1.0\n[causes.slow]\nx = -1", "0 or more"),
        ("node_days = ", "not valid TOML"),
    ],
)
def test_files_of_failures_are_checked(tmp_path, content, says):
    path = tmp_path / "own.toml"
    path.write_text(content)
    with pytest.raises(SpecError, match=says) as caught:
        load_failures(str(path))
    assert "\n" not in str(caught.value)


def test_no_such_file():
    with pytest.raises(SpecError, match="cannot be read"):
        load_failures("nowhere.toml")
