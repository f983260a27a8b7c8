"""Bars: a panel for every measure, each with its own numbers and the paper's."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.studies.plots.bars import bars_figure
from fedsim.studies.plots.cells import ResultCell

CELLS = [
    ResultCell(
        {"set": "A", "rule": rule},
        values_by_measure={"x": np.array([i, i + 2.0]), "y": np.array([10.0 + i])},
        paper_values={"x": 5.0},
    )
    for i, rule in enumerate(("one", "two"))
]


@pytest.mark.parametrize("measure", ["x", "y", ["y", "x"]])
def test_every_measure_has_a_panel_with_its_own_numbers(measure: str | list[str]) -> None:
    names = [measure] if isinstance(measure, str) else measure
    drawing = bars_figure(CELLS, measure, group="set", colours="rule")
    assert [axes.get_title() for axes in drawing.axes] == names
    for axes, name in zip(drawing.axes, names, strict=True):
        assert [bar.get_height() for bar in axes.patches] == [cell.values_by_measure[name].mean() for cell in CELLS]
        dots = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "o"]
        assert dots == ([5.0, 5.0] if name == "x" else [])


def test_panels_of_an_axis_and_of_measures_say_both() -> None:
    drawing = bars_figure(CELLS, ["x", "y"], panel="rule", group="set")
    assert [axes.get_title() for axes in drawing.axes] == ["one, x", "one, y", "two, x", "two, y"]


def test_an_axis_with_a_minimum_begins_there_and_ends_above_the_highest_bar_and_dot() -> None:
    for measure, highest in (("x", 5.0), ("y", 11.0)):
        (axes,) = bars_figure(CELLS, measure, group="set", colours="rule", minimum=0.5).axes
        low, high = axes.get_ylim()
        assert low == 0.5
        assert high >= highest
