"""Pictures of a configuration without training show the availability process's own numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.configured import availability_rasters, probability_histogram

BASE = np.array([0.1, 0.2, 0.9])


def cell() -> ResultCell:
    """Three clients with these base probabilities; client i is available in every (i + 1)-th round."""
    availability: Any = SimpleNamespace(
        base_probabilities=BASE[None],
        probabilities=lambda t: BASE[None] * (1 - 0.1 * t),
        counts=lambda t: (t % np.arange(1, 4) == 0)[None].astype(float),
    )
    return ResultCell({"availability": "sine"}, availability=availability)


def test_a_histogram_of_base_probabilities_marks_and_names_their_mean() -> None:
    (axes,) = probability_histogram([cell()], bins=10).axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == np.histogram(BASE, 10, (0, 1))[0].tolist()
    (line,) = axes.lines
    assert line.get_xdata() == pytest.approx([0.4, 0.4])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mean 0.40"]


def test_rasters_show_probabilities_and_rounds_of_availability() -> None:
    probabilities, presence = availability_rasters([cell()], rounds=6).axes
    for client, line in enumerate(probabilities.lines):
        assert line.get_ydata() == pytest.approx([BASE[client] * (1 - 0.1 * t) for t in range(6)])
    rounds = [events.get_positions() for events in presence.collections]
    assert [list(of_client) for of_client in rounds] == [[0, 1, 2, 3, 4, 5], [0, 2, 4], [0, 3]]
