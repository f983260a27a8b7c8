"""Which trial of a tuned axis is kept."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.reproduce.tuning import TunedAxis


@pytest.mark.parametrize(("best", "expected"), [("lowest", "0.1"), ("highest", "0.3")])
@pytest.mark.parametrize("ended", [np.nan, np.inf, -np.inf])
def test_a_trial_that_did_not_end_well_is_never_the_best(best: str, expected: str, ended: float) -> None:
    numbers = {"failed": [0.0, ended], "0.1": [0.2, 0.2], "0.2": [0.3, 0.3], "0.3": [0.4, 0.4], "late": [ended, 9.0]}
    cells = [
        ResultCell({"rate": label, "strategy": "a"}, values_by_measure={"loss": np.array(each)})
        for label, each in numbers.items()
    ]
    other = [
        ResultCell({"rate": label, "strategy": "b"}, values_by_measure={"loss": np.array([1.0])})
        for label in ("x", "y")
    ]
    assert TunedAxis("rate", "loss", best).best_label_by_place(cells + other) == {"a": expected, "b": "x"}
