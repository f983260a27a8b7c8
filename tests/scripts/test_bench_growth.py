"""The fit of `scripts/bench_growth.py`: what a round takes at any size, and what a unit adds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from bench_growth import overhead_and_unit  # type: ignore[import-not-found]


def test_a_line_is_found_again() -> None:
    sizes = [1.0, 10.0, 100.0, 1000.0]
    assert overhead_and_unit(sizes, [0.2 + 0.003 * n for n in sizes]) == pytest.approx((0.2, 0.003))


def test_a_large_size_weighs_no_more_than_a_small_one() -> None:
    """Deviations of 10 % up and down in turn change the fit by less than 10 %."""
    sizes = np.array([1.0, 3.0, 10.0, 30.0, 100.0, 300.0])
    seconds = (0.2 + 0.003 * sizes) * np.array([1.1, 0.9] * 3)
    overhead, unit = overhead_and_unit(list(sizes), list(seconds))
    assert overhead == pytest.approx(0.2, rel=0.1)
    assert unit == pytest.approx(0.003, rel=0.1)


@pytest.mark.parametrize(("seconds", "which"), [([4.0, 3.0, 2.0, 1.0], 1), ([1.0, 20.0, 300.0, 4000.0], 0)])
def test_neither_is_negative(seconds: list[float], which: int) -> None:
    """Time that falls with the size, and time that grows faster than the size."""
    fit = overhead_and_unit([1.0, 10.0, 100.0, 1000.0], seconds)
    assert fit[which] == 0
    assert fit[1 - which] > 0
