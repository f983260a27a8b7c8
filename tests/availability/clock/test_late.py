"""What is late and arrives: by the clock, in checkpoints; what cannot be late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timed import column, run_of

from fedsim import ConfigError, Execution
from fedsim.availability.clock import (
    ConstantDelay,
    Devices,
    GeometricDelay,
    LognormalDelay,
    UniformDelay,
    UniformWork,
)
from fedsim.core.errors import CheckpointError
from fedsim.run.checkpoint import _in_flight
from fedsim.strategies import FedBuff, FedPBC


def test_what_is_late_arrives_when_it_is_done(build, play):
    """Clients take 2, 1, 4 and 3 seconds, and a round 1.5: they arrive 1, 0, 2 and 1 rounds later."""
    clock, rounds = Devices(0.1, deadline=1.5, late="deliver"), ConstantDelay([1, 0, 2, 1])
    ticking, delayed = ([p.after.model for p in play(build(**one))] for one in ({"clock": clock}, {"delay": rounds}))
    assert all(torch.equal(a, b) for a, b in zip(ticking, delayed, strict=True))
    result = run_of(build(clock=clock))
    assert column(result, "virtual_seconds") == pytest.approx(np.arange(7) * 1.5)
    assert column(result, "active_clients") == [0, 1, 3, 2, 3, 1, 4]  # after rounds 0 … 5
    assert column(result, "late_clients") == [0, 3, 0, 2, 1, 2, 0]
    sent = np.cumsum([0, 4, 1, 3, 2, 3, 1])
    assert column(result, "total_bytes_down") == (sent * 32).tolist()
    assert column(result, "total_bytes_up") == (np.cumsum(column(result, "active_clients")) * 32).tolist()


@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_under_way_is_in_the_checkpoint(build, tmp_path, place):
    def run(rounds, out, resume=False, **options):
        how = Execution(dtype="float64", memory=place)
        simulation = build(
            delay=UniformDelay(0, 3), work=UniformWork(), strategy=FedBuff(2), rounds=rounds, execution=how, **options
        )
        return run_of(simulation, out=out, resume=resume)

    run(3, tmp_path / "a")
    resumed, whole = run(6, tmp_path / "a", resume=True), run(6, tmp_path / "b")
    assert torch.equal(resumed.state.model, whole.state.model)
    assert torch.equal(resumed.state.buffer, whole.state.buffer)
    assert column(resumed, "total_bytes_down") == column(whole, "total_bytes_down")
    one, other = (load_file(tmp_path / name / "checkpoint.safetensors") for name in "ab")
    assert len(one["in_flight.start"]) == len(one["in_flight.due"]) > 0
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    torn = {name: value[:-1] if name == "in_flight.due" else value for name, value in one.items()}
    with pytest.raises(CheckpointError, match="the delayed rows do not match"):
        _in_flight(tmp_path, torn, whole.state.model)


def test_rows_that_cannot_be_late_are_refused(build):
    with pytest.raises(ConfigError, match=r"delay and clock\.late=deliver both determine when a row arrives"):
        build(delay=ConstantDelay(1), clock=Devices(deadline=1.0, late="deliver"))
    with pytest.raises(ConfigError, match=r"first and late=deliver exclude each other"):
        Devices(deadline=1.0, late="deliver", first=2)
    with pytest.raises(ConfigError, match="not defined for rows that started from an older model"):
        build(clock=Devices(deadline=1.0, late="deliver"), strategy=FedPBC())


@pytest.mark.parametrize("law", [ConstantDelay, GeometricDelay, LognormalDelay])
@pytest.mark.parametrize("count", [0, 5])
def test_delays_of_more_groups_than_clients_are_refused_before_the_run(build, law, count) -> None:
    """Once the federation is there, and not in the first round, when the run's folder has been made."""
    with pytest.raises(ConfigError, match="delay"):
        build(delay=law([1] * count), strategy=FedBuff(2))
