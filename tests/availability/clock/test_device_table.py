"""Clients with measured devices: a table's numbers, FedScale's units, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from timed import QUIET, SEEDS, column, run_of

from fedsim import ConfigError
from fedsim.availability.clock import Devices, Events
from fedsim.availability.clock.device_profiles import DEVICE_PROFILES, LINK_PROFILES
from fedsim.core.effects import sentences_without_effect
from fedsim.core.errors import CheckpointError

TABLE = {"compute": [0.1, 0.2, 0.4, 0.8], "down": [10.0, 20.0, 40.0, 80.0], "up": [1.0, 2.0, 4.0, 8.0]}


def times_of(simulation, down=30, up=5):
    return simulation.round_clock.clock.times(0, np.arange(8), down, up)


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


def test_named_devices_and_links_have_the_numbers_of_their_profiles(build):
    """12.99 and 61.88 ms of inference, three times as long for training; 29.5/7.6 and 5.9/2.0 megabits per second."""
    devices = ["jetson_nano@4g", "raspberry_pi_4@3g"]
    times = times_of(build(clock=Devices(devices=devices)), 1_000_000, 500_000)
    expected = {
        0.03897: pytest.approx(8 / 29.5 + 4 / 7.6),
        0.18564: pytest.approx(8 / 5.9 + 4 / 2.0),
    }
    assert sorted(times.sample[:4]) == pytest.approx(sorted([*expected, *expected]))
    assert [expected[round(float(sample), 5)] for sample in times.sample] == list(times.link)


def test_profiles_in_a_table_are_those_of_the_list(build, tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("device,factor\nkirin_970,0.1\n")
    times = times_of(build(clock=Events(devices=str(path), up=10.0)))
    assert times.sample == pytest.approx(np.full(8, 3 * 24.49 / 1000 / 10))
    assert times.link == pytest.approx(np.full(8, 0.5))
    single = times_of(build(clock=Devices(devices="kirin_970")))
    assert single.sample == pytest.approx(10 * times.sample)
    assert not single.link.any()


def test_the_how_to_lists_each_profile_with_its_numbers():
    page = (Path(__file__).parents[3] / "docs" / "how_to_events.md").read_text(encoding="utf-8")
    for name, device in DEVICE_PROFILES.items():
        assert f"| `{name}` | {device.inference:g} | {device.run} |" in page
    for name, link in LINK_PROFILES.items():
        assert f"| `{name}` | {link.down:g} | {link.up:g} |" in page
    assert len(DEVICE_PROFILES) + len(LINK_PROFILES) == page.count("\n| `") - _rows_of_strategies(page)


def _rows_of_strategies(page: str) -> int:
    """Rows of the page's table of strategies that start with a name."""
    table = page.partition("| strategy |")[2].partition("\n\n")[0]
    return table.count("\n| `")


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
        ({"compute": [0.1, "fast"]}, "compute=fast of row 1 must be a positive number"),
        ({"computation": [10.0], "communication": [-1.0]}, "communication=-1.0 of .* must be a positive number"),
        ({"compute": []}, "has no rows"),
        ("jetson_nan", "clock.devices='jetson_nan' is unknown; choose one of .* did you mean 'jetson_nano'?"),
        ({"device": ["pixel"]}, "clock.devices='pixel' is unknown; choose one of snapdragon_8_gen_2"),
        (["kirin_970@6g"], "the link in clock.devices='6g' is unknown; choose one of 3g, 4g, 5g, broadband"),
        (["kirin_970@5g", "jetson_nano"], "gives jetson_nano no link, but others have one"),
    ],
)
def test_a_table_that_describes_no_devices_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        Devices(devices=table)


def test_a_setting_beside_a_table_has_no_effect_if_the_table_has_its_column(build):
    def told(table):
        simulation = build(clock=Devices(devices=table, down=10.0, up=5.0))
        return list(sentences_without_effect("clock", simulation.round_clock.clock, simulation))

    assert told({"compute": [0.1]}) == []
    assert told({"compute": [0.1], "up": [1.0]}) == [
        "clock.up=5.0 has no effect without clock.devices without such a column"
    ]
