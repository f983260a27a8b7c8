"""Pictures of boards: what stands where."""

from __future__ import annotations

import numpy as np

from fedsim.studies.plots import standings


def test_lines_between_tracks_lie_between_their_columns() -> None:
    """Tracks of two, one and three cells: a line after the second column and one after the third."""
    drawing = standings.ranks_by_cell(
        ["a", "b"], list("uvwxyz"), np.ones((2, 6)), [("one", 2), ("two", 1), ("three", 3)]
    )
    axes = drawing.axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1.5, 1.5], [2.5, 2.5]]
    middles = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert middles == {"one": 0.5, "two": 2.0, "three": 4.0}
