"""Simulated runs against the closed form, which share the rules and none of the arithmetic."""

import numpy as np
import pytest
from msgspec.structs import replace

from greylag.plan.campaign import simulate
from greylag.plan.failures import Failures, load_failures
from greylag.plan.goodput import enough_spares, goodput
from greylag.plan.recovery import POLICIES, Fleet, Recovery
from greylag.spec.error import SpecError
from greylag.spec.quantity import HOUR

LLAMA, RSC = load_failures("llama-3"), load_failures("meta-rsc-1")


def both(failures, fleet, recovery, policy, days=60, trials=100, seed=1):
    rng = np.random.default_rng(seed)
    simulated = simulate(failures, fleet, recovery, policy, days, rng, trials)
    return simulated, goodput(failures, fleet, recovery, policy)


def agree(simulated, exact, within=0.01):
    assert simulated.goodput == pytest.approx(exact.goodput, rel=within)
    assert simulated.interval[0] <= simulated.goodput <= simulated.interval[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("devices", [1024, 16_384, 100_000])
@pytest.mark.parametrize("failures", [LLAMA, RSC], ids=["llama-3", "meta-rsc-1"])
def test_simulation_and_closed_form_agree(failures, devices, policy):
    fleet = Fleet(num_devices=devices)
    fleet = replace(fleet, spares=enough_spares(failures, fleet, Recovery()))
    simulated, exact = both(failures, fleet, Recovery(), policy)
    agree(simulated, exact)
    assert simulated.failures == pytest.approx(60 * 86400 / exact.mttf, rel=0.05)


@pytest.mark.parametrize("policy", ["spares", "eject", "skip"])
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("devices", [1024, 16_384])
def test_they_agree_where_spares_run_out(devices, spares, policy):
    fleet = Fleet(num_devices=devices, spares=spares, repair=6 * HOUR)
    simulated, exact = both(LLAMA, fleet, Recovery(), policy, days=200)
    agree(simulated, exact)
    assert simulated.waiting == pytest.approx(exact.losses["waiting for repair"], abs=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_they_agree_on_slow_nodes_and_corruption(policy):
    """Ten times Llama 3's rate of corruption, noticed after three hours, and two slow nodes a day."""
    failures = replace(LLAMA, causes={**LLAMA.causes, "corruption": {"more": 60}, "slow": {"more": 108}})
    fleet = Fleet(num_devices=16_384, spares=40)
    simulated, exact = both(failures, fleet, Recovery(notice=3 * HOUR), policy, trials=200)
    agree(simulated, exact)
    assert exact.losses["corruption"] > 0.05
    assert exact.losses["slow nodes"] > 0.01


@pytest.mark.parametrize("interval", [60.0, 600.0, 3600.0])
@pytest.mark.parametrize("policy", ["restart", "eject"])
def test_they_agree_at_every_checkpoint_interval(interval, policy):
    recovery = Recovery(interval=interval, save=30.0)
    agree(*both(LLAMA, Fleet(num_devices=16_384, spares=20), recovery, policy, trials=200))


def test_nothing_fails():
    failures = Failures(name="none", node_days=1.0)
    simulated, exact = both(failures, Fleet(num_devices=1024), Recovery(), "restart", trials=2)
    assert simulated.goodput == pytest.approx(exact.goodput, rel=1e-3)
    assert simulated.failures == 0
    assert simulated.error == 0


def test_the_same_seed_gives_the_same_runs():
    first, second = (both(LLAMA, Fleet(num_devices=1024), Recovery(), "eject", trials=20)[0] for _ in range(2))
    assert first == second


def test_uncertain_rates_widen_the_spread():
    few = Failures(name="few", node_days=2000.0, causes={"hardware": {"gpu": 8}})
    given = {"fleet": Fleet(num_devices=16_384, spares=40), "recovery": Recovery(), "policy": "restart", "days": 60}
    sure, unsure = (
        simulate(few, **given, rng=np.random.default_rng(2), trials=300, uncertain=uncertain)
        for uncertain in (False, True)
    )
    low, high = goodput(few, given["fleet"], given["recovery"], "restart").interval
    assert unsure.interval[1] - unsure.interval[0] > 3 * (sure.interval[1] - sure.interval[0])
    assert unsure.interval == pytest.approx((low, high), abs=0.03)


def test_what_cannot_be_simulated_is_refused():
    rng, fleet = np.random.default_rng(0), Fleet(num_devices=1024)
    with pytest.raises(SpecError, match="days"):
        simulate(LLAMA, fleet, Recovery(), "restart", 0, rng)
    with pytest.raises(SpecError, match="trials"):
        simulate(LLAMA, fleet, Recovery(), "restart", 1, rng, trials=1)
