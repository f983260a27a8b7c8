"""Constants that were fitted to a paper's numbers never look like the literal reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle

from fedsim.studies.plots.bars import bars_figure, heatmap_figure
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.curves import curves_figure
from fedsim.studies.results.runs import Run


def cells(fitted: str = "d = 6") -> list[ResultCell]:
    """Two algorithms by two readings, of which one is fitted."""
    found = []
    for number, (algorithm, reading) in enumerate([(a, r) for a in ("PFL", "ProFL") for r in ("literal", "d = 6")]):
        at = {"algorithm": algorithm, "reading": reading}
        rows = [{"round": t, "replicate": r, "loss": float(number + t + r)} for t in (1, 2) for r in (0, 1)]
        numbers = {"loss": np.array([number + 1.0, number + 2.0])}
        run = Run(Path("nowhere"), rows, {"local_steps": 1})
        found.append(
            ResultCell(at, run, values_by_measure=numbers, paper_values={"loss": 2.0}, is_fitted=fitted in at.values())
        )
    return found


def named(drawing) -> dict[str, object]:
    """The legend: name → what is drawn there."""
    legend = drawing.legends[0]
    return {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}


@pytest.mark.parametrize(("group", "colours"), [("algorithm", "reading"), ("reading", "algorithm")])
def test_fitted_bars_are_hatched_and_the_legend_says_so(group: str, colours: str) -> None:
    drawing = bars_figure(cells(), "loss", group, colours)
    drawn = [patch for patch in drawing.axes[0].patches if isinstance(patch, Rectangle) and patch.get_height()]
    heights = {patch.get_height(): bool(patch.get_hatch()) for patch in drawn}
    assert heights == {1.5: False, 2.5: True, 3.5: False, 4.5: True}  # readings alternate
    hatched = {name: bool(getattr(handle, "get_hatch", lambda: None)()) for name, handle in named(drawing).items()}
    expected = {name: name == "d = 6" for name in dict.fromkeys(cell.axis_labels[colours] for cell in cells())}
    assert hatched == {**expected, "paper": False, "fitted": True}


def test_without_fitted_labels_nothing_is_hatched_or_dashed() -> None:
    drawing = bars_figure(cells(fitted="none"), "loss", "algorithm", "reading")
    assert not any(patch.get_hatch() for patch in drawing.axes[0].patches)
    assert "fitted" not in named(drawing)
    lines = curves_figure(cells(fitted="none"), "loss", panel="reading", colours="algorithm").axes[1].lines
    assert {line.get_linestyle() for line in lines} == {"-"}


def test_fitted_curves_are_dashed_and_named() -> None:
    drawing = curves_figure(cells(), "loss", panel="reading", colours="algorithm")
    literal, fitted = ({line.get_label(): line.get_linestyle() for line in axes.lines} for axes in drawing.axes)
    assert literal == {"PFL": "-", "ProFL": "-"}
    assert fitted == {"PFL, fitted": "--", "ProFL, fitted": "--"}
    crossed = curves_figure(cells(), "loss", colours="algorithm", dashes="reading").axes[0].lines
    assert [line.get_label() for line in crossed] == [
        "PFL, literal", "PFL, d = 6, fitted", "ProFL, literal", "ProFL, d = 6, fitted",
    ]  # fmt: skip


def test_fitted_squares_of_a_map_say_so() -> None:
    drawing = heatmap_figure(cells(), "loss", "reading", "algorithm")
    assert ["fitted" in text.get_text() for text in drawing.axes[0].texts] == [False, True, False, True]


def test_colours_of_a_heatmap_may_follow_the_logarithm() -> None:
    for log, norm in ((True, LogNorm), (False, Normalize)):
        (picture,) = heatmap_figure(cells(), "loss", "reading", "algorithm", log=log).axes[0].images
        assert type(picture.norm) is norm


def test_iterations_are_rounds_times_local_steps() -> None:
    (cell, *_) = cells()
    assert cell.run is not None
    cell.run.settings["local_steps"] = 5
    for iterations, expected, name in ((False, [1, 2], "round"), (True, [5, 10], "iteration")):
        axes = curves_figure([cell], "loss", iterations=iterations).axes[0]
        assert list(axes.lines[0].get_xdata()) == expected
        assert axes.get_xlabel() == name
