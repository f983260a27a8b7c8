"""Curves of another model beside those of the first, where runs evaluate both."""

from __future__ import annotations

import csv
from pathlib import Path

from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.curves import curve_metrics, curves_figure
from fedsim.studies.reproduce.report import save_curves
from fedsim.studies.results.runs import Run

OPTIONS = {"metric": "train_loss", "colours": "algorithm", "also": "client_mean"}


def cells() -> list[ResultCell]:
    """FedPBC measures both models, FedAvg one."""
    rows = [{"round": t, "seed": 0, "train_loss": 3.0 - t} for t in (0, 1, 2)]
    both = [row | {"client_mean_train_loss": row["train_loss"] / 2} for row in rows]
    runs = {"FedPBC": Run(Path("nowhere"), both, {}), "FedAvg": Run(Path("nowhere"), rows, {})}
    return [ResultCell({"algorithm": name}, run) for name, run in runs.items()]


def test_the_other_model_is_dotted_in_the_same_colour_and_named():
    axes = curves_figure(cells(), **OPTIONS, minimum=-1.0).axes[0]
    drawn = {line.get_label(): line for line in axes.lines}
    assert list(drawn) == ["FedPBC", "FedPBC, mean of all clients' models", "FedAvg"]
    first, other, rival = drawn.values()
    assert [line.get_linestyle() for line in drawn.values()] == ["-", ":", "-"]
    assert first.get_color() == other.get_color() != rival.get_color()
    assert list(other.get_ydata()) == [1.5, 1.0, 0.5]
    assert axes.get_ylim()[0] == -1.0
    plain = curves_figure(cells(), "train_loss", colours="algorithm").axes[0].lines
    assert [line.get_label() for line in plain] == ["FedPBC", "FedAvg"]


def test_its_curve_is_written_beside_the_picture_for_the_runs_that_have_it(tmp_path):
    assert curve_metrics(OPTIONS) == ["train_loss", "client_mean_train_loss"]
    save_curves(tmp_path / "curves.csv", cells(), curve_metrics(OPTIONS), {})
    with open(tmp_path / "curves.csv") as file:
        written = [(row["algorithm"], row["metric"]) for row in csv.DictReader(file) if row["round"] == "0"]
    assert written == [("FedPBC", "train_loss"), ("FedPBC", "client_mean_train_loss"), ("FedAvg", "train_loss")]


def test_the_ticks_of_a_share_are_in_per_cent_as_its_label_says():
    rows = [{"round": t, "seed": 0, "test_accuracy": 0.25 * t, "train_loss": 1.0} for t in (0, 1, 2)]
    drawn_cells = [ResultCell({"algorithm": "FedAvg"}, Run(Path("nowhere"), rows, {}))]
    accuracy, loss = curves_figure(drawn_cells, ["test_accuracy", "train_loss"], colours="algorithm").axes[:2]
    assert accuracy.get_ylabel().endswith("(%)")
    assert accuracy.yaxis.get_major_formatter()(0.25, 0) == "25"
    assert "%" not in loss.get_ylabel()
    assert loss.yaxis.get_major_formatter()(0.25, 0) != "25"


def test_curves_of_newcomers_are_written_too(tmp_path):
    rows = [{"round": 1, "seed": 0, "train_loss": 1.0}]
    newcomers = [{"epoch": epoch, "train_loss": [1.0 / epoch]} for epoch in (1, 2)]
    run = Run(Path("nowhere"), rows, {}, newcomers=newcomers)
    assert run.has_metric("newcomers train_loss")
    assert not run.has_metric("newcomers test_loss")
    assert not Run(Path("nowhere"), rows, {}).has_metric("newcomers train_loss")
    save_curves(tmp_path / "curves.csv", [ResultCell({"algorithm": "FedAvg"}, run)], ["newcomers train_loss"], {})
    with open(tmp_path / "curves.csv") as file:
        assert [row["mean"] for row in csv.DictReader(file)] == ["1", "0.5"]


def test_every_metric_has_a_row_of_panels() -> None:
    """Three panels of each: a picture of one column more would break the rows elsewhere."""
    rows = [{"round": t, "seed": 0, "test_loss": 2.0 - t, "train_loss": 1.0} for t in (0, 1)]
    drawn_cells = [ResultCell({"data": name}, Run(Path("nowhere"), rows, {})) for name in "ABC"]
    drawing = curves_figure(drawn_cells, ["test_loss", "train_loss"], panel="data")
    grid = drawing.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (2, 3)
    assert [axes.get_title() for axes in drawing.axes] == [*"ABC"] * 2
    for row in (drawing.axes[:3], drawing.axes[3:]):
        assert len({axes.get_ylabel() for axes in row}) == 1
