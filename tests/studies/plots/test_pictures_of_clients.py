"""Pictures of clients: how many panels stand in a row, and whose numbers they show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made import curve, run

from fedsim.run.tracking.clients import ClientSummary
from fedsim.studies.plots import clients
from fedsim.studies.results.differences import load_runs


def with_clients(folder: Path, records: list[ClientSummary]) -> list[Any]:
    """Runs, one for each record."""
    for number, _ in enumerate(records):
        run(folder / str(number), {"lr": number}, {"test_accuracy": curve(0.1, 0.5)})
    found = load_runs([folder])
    for one, record in zip(found, records, strict=True):
        one.__dict__["clients"] = record
    return found


def record(seed: int, held_out: bool = True) -> ClientSummary:
    draw = np.random.default_rng(seed)
    numbers = draw.uniform(0, 1, (2, 5))
    return ClientSummary(
        5, numbers, np.full(5, 10), draw.dirichlet(np.ones(3), 5), draw.random((5, 12)) < 0.5,
        held_out=numbers / 2 if held_out else None, metrics={"mine": 3 * numbers},
    )  # fmt: skip


@pytest.mark.parametrize(("count", "columns"), [(2, 2), (4, 3)])
def test_panels_of_availability_fill_rows_of_three(tmp_path: Path, count: int, columns: int) -> None:
    drawing = clients.availability_figure(with_clients(tmp_path, [record(seed) for seed in range(count)]))
    assert drawing is not None
    grid = drawing.axes[0].get_gridspec()
    assert (grid.ncols, grid.nrows) == (columns, 2 * -(-count // columns))
    assert 4.4 <= drawing.get_figwidth() / columns <= 8.0
    assert drawing.get_figwidth() <= 3 * 4.4 + 1e-9
    drawn = [axes for axes in drawing.axes if axes.axison]
    assert len(drawn) == 2 * count
    for axes in drawn:  # a round stands above itself: numbers of clients and the clients below end together
        assert axes.get_xlim() == (-0.5, 11.5)


@pytest.mark.parametrize("held_out", [True, False])
def test_accuracies_are_of_samples_held_out_where_all_runs_have_them(tmp_path: Path, held_out: bool) -> None:
    runs = with_clients(tmp_path, [record(0), record(1, held_out)])
    for metric, scale, values in (
        (None, 100, [one.clients.held_out if held_out else one.clients.accuracy for one in runs]),
        ("mine", 1, [one.clients.metrics["mine"] for one in runs]),
    ):
        drawing = clients.accuracy_box_plot(runs, metric)
        assert drawing is not None
        axes = drawing.axes[0]
        dots = [np.sort(points.get_offsets()[:, 0]) for points in axes.collections]
        np.testing.assert_allclose(dots, [np.sort(scale * numbers.ravel()) for numbers in values])
        diamonds = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"]
        np.testing.assert_allclose(diamonds, [scale * numbers.mean() for numbers in values])
        heading = axes.get_xlabel().replace("\n", " ")
        assert ("held out" in heading) == (held_out and metric is None)
        assert ("(%)" in heading) == (metric is None)


def test_where_everybody_is_there_or_nothing_is_known_there_is_no_picture(tmp_path: Path) -> None:
    full = record(0)
    full.present[:] = True
    assert clients.availability_figure(with_clients(tmp_path, [full, full])) is None
    nobody = SimpleNamespace(clients=None)
    assert clients.availability_figure([nobody]) is None  # type: ignore[list-item]
