"""Figures of curves drawn again from curves.csv: its means and deviations, without a run."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.reproduce.report import save_curves
from fedsim.studies.results.runs import Run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments"


@pytest.fixture
def redraw_figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("redraw_figures")


def test_stored_curves_have_the_means_and_deviations_of_the_runs(redraw_figures: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [{"round": t, "seed": s, "train_loss": draw.normal(), "x": 1.0} for t in range(4) for s in range(3)]
    cells = [ResultCell({"algorithm": name}, Run(Path("nowhere"), rows, {})) for name in ("FedAvg", "a, b")]
    save_curves(tmp_path / "curves.csv", cells, ["train_loss"], {"recipe": "p/n"})
    stored = redraw_figures.read_cells(tmp_path / "curves.csv", set())
    assert [cell.axis_labels for cell in stored] == [{"algorithm": "FedAvg"}, {"algorithm": "a, b"}]
    rounds, values = stored[0].run.curve_along("train_loss", None)
    expected_rounds, expected = cells[0].run.curve("train_loss")
    assert rounds.tolist() == expected_rounds.tolist()
    np.testing.assert_allclose(values.mean(1), expected.mean(1), rtol=1e-4)
    np.testing.assert_allclose(values.std(1, ddof=1), expected.std(1, ddof=1), rtol=1e-2)
    assert redraw_figures.read_cells(tmp_path / "curves.csv", {"train_loss"})[0].run.curve_along("train_loss", None)[
        1
    ].shape == (4, 1)


def test_a_committed_figure_is_drawn_and_one_by_seconds_is_not(redraw_figures: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mifa" / "results" / "mnist-cpu"
    shutil.copytree(RESULTS / "mifa" / "results" / "mnist-cpu", folder)
    (folder / "figure.png").unlink()
    redraw_figures.redraw(folder)
    assert (folder / "figure.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="does not show curves by round"):
        redraw_figures.redraw(tmp_path / "late" / "results" / "seconds-paper")
