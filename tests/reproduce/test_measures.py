"""Numbers of a run: the end, a window, the first round that reaches a target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsim.plots.curves import smooth
from fedsim.plots.runs import Run
from fedsim.reproduce.measures import Measure, best_rounded

ROUNDS = [0, 10, 20, 30, 40]
VALUES = {3: [0.1, 0.3, 0.5, 0.6, 0.8], 4: [0.1, 0.5, 0.3, 0.8, 0.8]}


def run() -> Run:
    rows = [{"round": t, "seed": s, "accuracy": VALUES[s][e]} for e, t in enumerate(ROUNDS) for s in VALUES]
    return Run(Path(), rows, {})


def test_the_end_and_a_window_of_rounds() -> None:
    assert Measure("accuracy")(run()).tolist() == [0.8, 0.8]
    assert np.allclose(Measure("accuracy", last=20)(run()), [0.7, 0.8])  # rounds 30 and 40: later than 40 − 20
    assert np.allclose(Measure("accuracy", last=21, percent=True)(run()), [190 / 3, 190 / 3])


@pytest.mark.parametrize(
    ("reach", "every", "expected"),
    [(0.5, 1, 10.0), (0.5, 20, 20.0), (0.875, 1, 30.0), (0.875, 20, 40.0), (1.0, 1, 40.0), (1.01, 1, np.nan)],
)
def test_the_first_round_at_which_the_mean_reaches_a_target(reach: float, every: int, expected: float) -> None:
    found = Measure("accuracy", reach=reach, every=every)(run(), target=0.8)
    assert np.array_equal(found, [expected], equal_nan=True)


def test_the_target_of_table_8_is_rounded_down_to_tens() -> None:
    assert best_rounded([run()], "accuracy", last=20) == pytest.approx(0.7)
    assert best_rounded([run()], "accuracy", last=1) == pytest.approx(0.8)


def test_the_moving_average_starts_at_the_first_value() -> None:
    values = np.array([[4.0], [0.0], [0.0]])
    assert smooth(values, 0.5)[:, 0].tolist() == [4.0, 2.0, 1.0]
