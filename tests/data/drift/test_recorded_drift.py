"""Recorded drifts: the rows of a table, the rounds between and after them, series of clients, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.datasets import GaussianMean
from fedsim.data.drift import Linear, Replay
from fedsim.local import SGD
from fedsim.models import Mean

T = np.arange(9)
RECORD = {"round": [4, 0, 2], "displacement": [1.0, 0.5, -2.0]}  # in any order


def displacements(drift, client=0, replicate=0, names=None):
    federation = Federation((0, 1), 2, np.full(4, 10), None, torch.device("cpu"), torch.float64)
    drift.setup(dataclasses.replace(federation, client_names=names) if names else federation, GaussianMean(2))
    return drift.displacement(T, np.full(len(T), replicate), np.full(len(T), client)).tolist()


def test_rounds_that_are_left_out_hold_or_interpolate():
    assert displacements(Replay(RECORD)) == [0.5, 0.5, -2, -2, 1, 1, 1, 1, 1]
    assert displacements(Replay(RECORD, between="linear")) == pytest.approx([0.5, -0.75, -2, -0.5, 1, 1, 1, 1, 1])


def test_a_repeated_record_starts_again_after_its_last_round():
    assert displacements(Replay(RECORD, repeat=True)) == [0.5, 0.5, -2, -2, 1, 0.5, 0.5, -2, -2]
    linear = displacements(Replay(RECORD, [1.0, -2.0], "linear", True), replicate=1)
    assert linear == pytest.approx([-1, 1.5, 4, 1, -2, -1, 1.5, 4, 1])


@pytest.mark.parametrize("names", [None, ("b", "a")])
def test_each_client_follows_its_series(tmp_path, names):
    path = tmp_path / "drift.csv"
    labels = names or ("0", "1")
    rows = [f"{labels[0]},0,1", f"{labels[1]},0,0", f"{labels[1]},3,6", f"{labels[0]},1,2"]
    path.write_text("\n".join(["client,round,displacement", *rows]))
    drift = Replay(str(path), between="linear", factors=[1.0, 0.5])
    assert displacements(drift, 0, names=names) == pytest.approx([1, 2, 2, 2, 2, 2, 2, 2, 2])
    assert displacements(drift, 1, names=names) == pytest.approx([0, 1, 2, 3, 3, 3, 3, 3, 3])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"round": [0]}, "drift.path has the columns round; it needs round and displacement, and may have client"),
        ({"round": [0, "x"], "displacement": [1, 1]}, "drift.path: round=x of row 1 must be a finite number"),
        ({"round": [0, 1.5], "displacement": [1, 1]}, "drift.path: round=1.5 of row 1 must be a whole number from 0"),
        (
            {"round": [0, 1], "displacement": [1, "1_0"]},
            "drift.path: displacement=1_0 of row 1 must be a finite number",
        ),
        ({"round": [0, 1], "displacement": [1, np.nan]}, "drift.path: displacement=nan of row 1 must be a finite"),
        ({"round": [1], "displacement": [1]}, "drift.path begins in round 1; give a row for round 0"),
        ({"round": [0, 0], "displacement": [1, 2]}, "drift.path has several rows for round 0; leave one"),
        (
            {"client": [0, 1, 1], "round": [0, 0, 0], "displacement": [1, 2, 3]},
            "drift.path has several rows for round 0 of client 1; leave one",
        ),
        (
            {"client": [0], "round": [0], "displacement": [1]},
            "drift.path has no row of client 1, but the run's clients are 0 to 1; give a series for each of them",
        ),
        (
            {"client": [0, 1, 7], "round": [0, 0, 0], "displacement": [1, 1, 1]},
            "drift.path has client 7, but the run's clients are 0 to 1",
        ),
    ],
)
def test_a_table_that_is_no_record_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        displacements(Replay(table))


def run_of(drift):
    return Simulation(
        GaussianMean(2, mean=1.0, variance=0.0, std=0.0), Mean, clients=2, drift=drift, rounds=4,
        local=SGD(lr=0.5, steps=1, batch_size=1), seeds=[0],
    )  # fmt: skip


def test_a_recorded_line_is_a_linear_drift():
    record = Replay({"round": [0, 10], "displacement": [0.0, 2.5]}, between="linear")
    models = [run_of(drift).run().state.model for drift in (record, Linear(0.25))]
    assert torch.allclose(*models, atol=1e-12)
    assert not torch.allclose(models[0], run_of(None).run().state.model)


def test_each_series_holds_its_last_value_between_its_own_rounds():
    record = {"client": [0, 1, 1, 0], "round": [0, 0, 3, 2], "displacement": [1.0, 5.0, 6.0, 2.0]}
    assert displacements(Replay(record), 0)[:5] == [1, 1, 2, 2, 2]
    assert displacements(Replay(record), 1)[:5] == [5, 5, 5, 6, 6]
