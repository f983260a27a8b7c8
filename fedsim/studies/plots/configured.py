"""Pictures of a configuration without training: class shares, participation probabilities and availability."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.availability import Availability
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.clients import draw_bubbles
from fedsim.studies.plots.style import matplotlib_parameters, nth_colour, panel_figure


def _availability_of(cell: ResultCell) -> Availability:
    assert cell.availability is not None
    return cell.availability


def base_probabilities(availability: Availability) -> np.ndarray:
    """Return the base probabilities p_i of the first replicate [m]; those of round 0 if the process has no base."""
    base = getattr(availability, "base_probabilities", None)
    return availability.probabilities(0)[0] if base is None else base[0]


def _cell_heading(cell: ResultCell) -> str:
    return " / ".join(cell.axis_labels.values())


def bubbles_figure(cells: list[ResultCell], clients: int = 20) -> Figure:
    """Draw a circle per client and class, with the class's share of the client's samples as area (fedawe Fig. 4)."""
    with matplotlib.rc_context(matplotlib_parameters()):
        figure, grid = panel_figure(len(cells), width=3.6, height=4.2, columns=min(len(cells), 4))
        for axes, cell in zip(grid, cells, strict=True):
            fractions = _availability_of(cell).population.class_fractions
            assert fractions is not None
            draw_bubbles(axes, fractions[0, :clients])
            axes.set_title(_cell_heading(cell))
    return figure


def probability_histogram(cells: list[ResultCell], bins: int = 20) -> Figure:
    """Draw a histogram of the clients' base probabilities p_i in the first replicate (fedawe Fig. 5)."""
    with matplotlib.rc_context(matplotlib_parameters()):
        drawing, grid = panel_figure(len(cells))
        for axes, cell in zip(grid, cells, strict=True):
            base = base_probabilities(_availability_of(cell))
            axes.hist(base, bins=bins, range=(0, 1), color=nth_colour(0), edgecolor="white", linewidth=0.6)
            axes.axvline(base.mean(), color=nth_colour(1), linewidth=1.4, label=f"mean {base.mean():.2f}")
            axes.set_xlabel("base probability $p_i$")
            axes.set_ylabel("clients")
            axes.set_title(_cell_heading(cell))
            axes.legend()
    return drawing


def availability_rasters(cells: list[ResultCell], rounds: int = 100) -> Figure:
    """Draw each client's probability over rounds, and below the rounds in which it was available (fedawe Fig. 6)."""
    with matplotlib.rc_context(matplotlib_parameters()):
        drawing = Figure(figsize=(3.3 * len(cells), 3.8), layout="constrained")
        grid = drawing.subplots(2, len(cells), squeeze=False, sharex=True, height_ratios=[1.2, 1])
        for column, cell in enumerate(cells):
            availability = _availability_of(cell)
            p = np.stack([availability.probabilities(t)[0] for t in range(rounds)], axis=1)
            presence_matrix = np.stack([availability.counts(t)[0] > 0 for t in range(rounds)], axis=1)
            base = base_probabilities(_availability_of(cell))
            probability_axes, raster_axes = grid[:, column]
            for client, curve in enumerate(p):
                probability_axes.plot(curve, color=nth_colour(client), linewidth=1.3, label=f"$p_i$ = {base[client]:g}")
                raster_axes.eventplot(
                    np.flatnonzero(presence_matrix[client]), lineoffsets=client, linelengths=0.8, linewidths=2.0,
                    colors=nth_colour(client),
                )  # fmt: skip
            probability_axes.set_title(_cell_heading(cell))
            probability_axes.set_ylim(0, 1)
            raster_axes.set_yticks(range(len(p)), [f"{b:g}" for b in base])
            raster_axes.set_ylim(-0.7, len(p) - 0.3)
            raster_axes.set_xlabel("round")
        grid[0, 0].set_ylabel("probability $p_i^t$")
        grid[1, 0].set_ylabel("available, by $p_i$")
        handles, names = grid[0, 0].get_legend_handles_labels()
        drawing.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=9)
    return drawing
