"""A picture of 256 colours is smaller, and looks like the one of all colours."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedsim.studies.plots.style import save_small_png


@pytest.mark.parametrize("drawn", ["curves", "heat"])
def test_few_colours_look_like_all_of_them(drawn: str) -> None:
    figure = Figure(figsize=(5, 4))
    axes = figure.subplots()
    x = np.linspace(0, 10, 200)
    if drawn == "curves":
        for shift in range(6):
            axes.plot(x, np.sin(x + shift), linewidth=2)
            axes.fill_between(x, np.sin(x + shift) - 0.3, np.sin(x + shift) + 0.3, alpha=0.18)
    else:
        figure.colorbar(axes.imshow(np.outer(np.sin(x), np.cos(x))))
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=200)
    save_small_png(figure, small, dpi=200)
    assert len(small.getvalue()) < 0.6 * len(full.getvalue())
    one, other = Image.open(full), Image.open(small)
    assert other.mode == "P"
    assert one.info["dpi"] == other.info["dpi"]
    apart = np.abs(np.asarray(one.convert("RGB"), int) - np.asarray(other.convert("RGB"), int)).max(2)
    assert apart.mean() < 1  # of 255
    assert (apart > 32).mean() < 1e-3
