"""Clients with measured devices: a table's numbers, FedScale's units, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from timed import QUIET, SEEDS, column, run_of

from fedsim import ConfigError
from fedsim.availability.clock import Devices, Events
from fedsim.core.errors import CheckpointError

TABLE = {"compute": [0.1, 0.2, 0.4, 0.8], "down": [10.0, 20.0, 40.0, 80.0], "up": [1.0, 2.0, 4.0, 8.0]}


def times_of(simulation, down=30, up=5):
    return simulation.pace.clock.times(0, np.arange(8), down, up)


def test_each_client_has_the_numbers_of_one_device(build):
    times = times_of(build(clock=Devices(devices=TABLE)))
    orders = []
    for r in range(2):
        sample, link = times.sample[4 * r : 4 * r + 4], times.link[4 * r : 4 * r + 4]
        rows = [TABLE["compute"].index(value) for value in sample]
        assert sorted(rows) == [0, 1, 2, 3]
        assert link == pytest.approx([30 / TABLE["down"][k] + 5 / TABLE["up"][k] for k in rows])
        orders.append(rows)
    assert orders[0] != orders[1]


def test_fewer_devices_than_clients_are_repeated_and_links_may_be_settings(build):
    times = times_of(build(clock=Devices(devices={"compute": [0.5, 2.0]}, down=10.0)))
    assert sorted(times.sample[:4]) == [0.5, 0.5, 2.0, 2.0]
    assert times.link == pytest.approx(np.full(8, 3.0))


def test_a_file_in_fedscales_units_is_read(build, tmp_path):
    """162 ms of inference are 0.486 s of training a sample, and 5,648 kbit/s are 5,648 · 128 bytes per second."""
    path = tmp_path / "devices.csv"
    path.write_text("computation,communication\n162.0,5648.0\n")
    times = times_of(build(clock=Events(devices=str(path))), 1280, 2560)
    assert times.sample == pytest.approx(np.full(8, 0.486))
    assert times.link == pytest.approx(np.full(8, (1280 + 2560) / (5648 * 128)))


@pytest.mark.slow
def test_equal_devices_are_the_settings_bit_for_bit(build):
    of_table, of_settings = (
        run_of(build(clock=clock))
        for clock in (
            Devices(devices={"compute": [0.1], "down": [64.0], "up": [32.0]}),
            Devices(0.1, down=64.0, up=32.0),
        )
    )
    assert column(of_table, "virtual_seconds", SEEDS[1]) == column(of_settings, "virtual_seconds", SEEDS[1])


@pytest.mark.slow
def test_a_resumed_run_must_meet_the_same_devices(build, tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("compute\n0.1\n0.2\n")
    build(clock=Devices(devices=str(path)), rounds=2).run(tmp_path / "run", tracking=QUIET)
    path.write_text("compute\n0.1\n0.3\n")
    with pytest.raises(CheckpointError, match=r"the table of devices \(compute\) changed since"):
        build(clock=Devices(devices=str(path)), rounds=4).run(tmp_path / "run", resume=True, tracking=QUIET)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"speed": [1.0]}, "clock.devices has the columns speed; it needs compute"),
        ({"compute": [0.1, 0.0]}, "compute=0.0 of .* must be a positive number"),
        ({"compute": ["fast"]}, "compute=fast of .* must be a positive number"),
        ({"computation": [10.0], "communication": [-1.0]}, "communication=-1.0 of .* must be a positive number"),
        ({"compute": []}, "has no rows"),
    ],
)
def test_a_table_that_describes_no_devices_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        Devices(devices=table)
