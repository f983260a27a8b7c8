"""Energy of the clients' devices: sums by hand, what late and lost updates cost, and resumed runs."""

from __future__ import annotations

import numpy as np
import pytest
from timed import FULL, QUIET, SEEDS, SIZES, column, run_of

from fedsim import ConfigError
from fedsim.availability.clock import Devices, Events
from fedsim.strategies import FedAsync

BYTES = 32  # of a model
COMPUTE_SECONDS = 0.1 * 5 * np.array(SIZES)  # seconds of a client's round
POWER, DOWN, UP = np.array([2.0, 2.0, 3.0, 3.0]), 0.01, 0.02  # watts by client, joules per byte
DEVICES = {"power": [2.0, 3.0], "joules_down": DOWN, "joules_up": UP}
COST = POWER * COMPUTE_SECONDS + BYTES * (DOWN + UP)


@pytest.mark.parametrize("clock", [Devices, Events])
def test_a_round_costs_what_its_clients_spend(build, clock):
    counts = FULL.copy()
    counts[1:, 0, 2] = 0
    counts[2, 0] = 0
    joules = column(run_of(build(counts, clock=clock(0.1, **DEVICES))), "joules")
    assert joules == pytest.approx(np.cumsum([0, *(counts[:, 0] * COST).sum(1)]))


def test_late_clients_compute_and_send_nothing(build):
    """Clients take 2, 1, 4 and 3 seconds."""
    joules = column(run_of(build(clock=Devices(0.1, deadline=2.0, **DEVICES), rounds=2)), "joules")
    assert joules[1] == pytest.approx(COST.sum() - 2 * BYTES * UP)
    delivered = run_of(build(clock=Devices(0.1, deadline=2.0, late="deliver", **DEVICES), rounds=2))
    assert column(delivered, "joules")[1] == pytest.approx(COST.sum())


def test_clients_of_an_asynchronous_run_spend_energy_when_they_start(build):
    """Rounds of 2, 1, 4 and 3 seconds: all start at first, then clients 1, 0, 1, 1, 3."""
    joules = column(run_of(build(strategy=FedAsync(), clock=Events(0.1, **DEVICES))), "joules")
    assert joules == pytest.approx(np.cumsum([0, COST.sum(), *COST[[1, 0, 1, 1, 3]]]))


def test_of_failing_clients_the_upload_is_not_counted(build):
    simulation = build(strategy=FedAsync(), clock=Events(0.1, failure=0.5, joules_up=1.0))
    result = run_of(simulation)
    sent = sum(np.isinf(simulation.round_clock.clock.failure_fractions(0, np.arange(4))))
    assert column(result, "joules")[1] == sent * BYTES
    assert sent < 4


def test_a_table_has_the_numbers_of_devices(build):
    table = {"compute": [0.1], "power": [2.0], "joules_up": [0.5]}
    joules = column(run_of(build(clock=Devices(devices=table), rounds=1)), "joules")
    assert joules[1] == pytest.approx((2.0 * COMPUTE_SECONDS + 0.5 * BYTES).sum())
    with pytest.raises(ConfigError, match=r"power=-1\.0 of .* must be 0 or a positive number"):
        Devices(devices={"compute": [0.1], "power": [-1.0]})


def test_without_a_number_there_is_no_column(build):
    assert "joules" not in run_of(build(clock=Devices(0.1), rounds=1)).history[0]


@pytest.mark.slow
def test_a_resumed_run_goes_on_adding(build, tmp_path):
    def simulation(rounds):
        return build(strategy=FedAsync(), clock=Events(0.1, jitter=1.0, **DEVICES), rounds=rounds)

    simulation(3).run(tmp_path / "run", tracking=QUIET)
    resumed = simulation(6).run(tmp_path / "run", resume=True, tracking=QUIET)
    whole = run_of(simulation(6))
    for seed in SEEDS:
        assert column(resumed, "joules", seed)[-1] == column(whole, "joules", seed)[-1]
