"""Pictures of boards: what stands where."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedsim.studies.plots import standings


@pytest.mark.parametrize("high", [1.0, 2.5, 12.9, 13.0, 13.1, 14.0, 25.0, 26.0, 61.5, 700.0])
def test_ticks_are_a_dozen_and_the_first_at_most_and_as_many_as_that_allows(high: float) -> None:
    ticks = standings._ticks(1.0, high)
    assert ticks[0] == 1.0
    assert ticks[-1] <= high
    assert len(ticks) <= 13
    steps = set(np.diff(ticks[1:]))
    assert len(steps) <= 1
    assert len(ticks) >= 5 or high < 5


def text_boxes(drawing: Figure) -> list:
    """Where every text of a drawn figure lies, in pixels."""
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    axes = drawing.axes[0]
    texts = list(axes.texts)
    if axes.axison:
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
    return [text.get_window_extent() for text in texts if text.get_text().strip()]


def lies_inside(drawing: Figure) -> bool:
    return all(
        drawing.bbox.x0 <= box.x0 and box.x1 <= drawing.bbox.x1 and drawing.bbox.y0 <= box.y0
        and box.y1 <= drawing.bbox.y1
        for box in text_boxes(drawing)
    )  # fmt: skip


def test_lines_between_tracks_lie_between_their_columns() -> None:
    """Tracks of two, one and three cells: a line after the second column and one after the third."""
    drawing = standings.rank_heatmap(
        ["a", "b"], list("uvwxyz"), np.ones((2, 6)), [("one", 2), ("two", 1), ("three", 3)]
    )
    axes = drawing.axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1.5, 1.5], [2.5, 2.5]]
    middles = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert middles == {"one": 0.5, "two": 2.0, "three": 4.0}


@pytest.mark.parametrize("count", [2, 9])
def test_a_diagram_of_ranks_has_the_best_on_the_left_and_every_text_inside(count: int) -> None:
    ranks = np.sort(np.random.default_rng(count).uniform(1, count, count))
    names = [f"algorithm {number}" for number in range(count)]
    drawing = standings.critical_difference_diagram(names, ranks, 0.25 * count, [(0, 1)])
    axes = drawing.axes[0]
    assert lies_inside(drawing)
    low, high = axes.get_xlim()
    assert low < 1 < count < high
    texts = [text.get_text().strip() for text in axes.texts]
    assert f"CD = {0.25 * count:.2f}" in texts
    assert [text for text in texts if "algorithm" in text] == [
        f"{name}  {rank:.1f}" if number < (count + 1) // 2 else f"{rank:.1f}  {name}"
        for number, (name, rank) in enumerate(zip(names, ranks, strict=True))
    ]
    numbers = {float(text.get_text()): text.get_position()[0] for text in axes.texts if text.get_text().isdigit()}
    assert numbers == {float(rank): rank for rank in range(1, count + 1)}
    upright = [set(line.get_xdata()) for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert [{rank} for rank in numbers] == upright
    joined = next(line.get_xdata() for line in axes.lines if line.get_color() == "#D55E00")
    assert joined[0] == pytest.approx(ranks[0], abs=0.01 * count)
    assert joined[1] == pytest.approx(ranks[1], abs=0.01 * count)


def test_wins_and_cells_are_named_and_every_text_lies_inside() -> None:
    names, columns = ["first", "second", "a third with a long name", *"uvwxyz"], ["one", "two"]
    counts, values = np.zeros((9, 9), dtype=int), np.linspace(-1, 1, 18).reshape(9, 2)
    counts[0, 1:3], counts[1, 0] = (3, 4), 1
    values[0, 1], values[2, 1] = np.nan, -np.inf
    for drawing, across in (
        (standings.wins_heatmap(names, counts, 4), names),
        (standings.difference_heatmap(names, columns, values, "points"), columns),
    ):
        axes = drawing.axes[0]
        assert lies_inside(drawing)
        assert [text.get_text() for text in axes.get_yticklabels()] == names
        assert [text.get_text() for text in axes.get_xticklabels()] == across
    written = {text.get_position(): text.get_text() for text in standings.wins_heatmap(names, counts, 4).axes[0].texts}
    assert written == {(1, 0): "3", (2, 0): "4", (0, 1): "1"}
    missing = standings.difference_heatmap(names, columns, values, "points").axes[0].texts
    assert {text.get_position(): text.get_text() for text in missing} == {(1, 0): "×", (1, 2): "×"}
