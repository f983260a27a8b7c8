"""What the pictures of the pages show is true: formulas against runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from fedsim.availability import Bernoulli, Groups
from fedsim.strategies import FedAvg

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "page_pictures.py"))


def test_the_performative_points_are_where_the_curves_say() -> None:
    stable, optimal = SCRIPT["stable_and_optimal"]()
    theta = np.linspace(0, 6, 60_001)
    risk = SCRIPT["performative_risk"]
    assert theta[risk(theta, theta).argmin()] == pytest.approx(optimal, abs=1e-4)
    assert theta[risk(theta, np.full_like(theta, stable)).argmin()] == pytest.approx(stable, abs=1e-4)
    page = " ".join((ROOT / "docs" / "performative.md").read_text(encoding="utf-8").split())
    assert f"= {stable:.2f}$" in page
    assert f"= {optimal:.0f}$" in page


@pytest.mark.slow
def test_the_bias_of_the_picture_is_that_of_runs() -> None:
    ended = SCRIPT["_ended"](FedAvg(), Bernoulli(Groups(p0=0.2, p1=1.0)))
    assert np.mean(ended) == pytest.approx(1 / 1.2, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [-1.0, 0.8])
def test_the_lag_of_the_picture_is_that_of_runs(epsilon: float) -> None:
    assert SCRIPT["tracked"](0.05, epsilon, 5) == pytest.approx(SCRIPT["lag"](0.05, epsilon, 5), rel=1e-3)


def test_the_pages_have_all_pictures() -> None:
    for name in SCRIPT["PICTURES"]:
        assert (ROOT / "docs" / "assets" / f"{name}.png").exists()
        assert any(f"assets/{name}.png" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
