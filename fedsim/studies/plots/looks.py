"""What runs look like beside one another: one swept key is the colour, another the dashes and markers of a curve."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from fedsim.core.settings import display_key
from fedsim.studies.plots.style import COLOURS, DASHES, MARKERS, nth_colour
from fedsim.studies.results.differences import swept_settings, value_text
from fedsim.studies.results.display_names import key_name
from fedsim.studies.results.runs import Run

LINE_SHAPES = list(zip(DASHES * 2, ["", "", "", "", *MARKERS[:4]], strict=True))  # dashes, and again with markers
SHAPE_COLOUR_PAIRS = list(
    product(range(len(LINE_SHAPES)), range(len(COLOURS)))
)  # of runs that no keys tell apart in this way
NEUTRAL_COLOUR = "#555555"  # of what is not said by a colour, in the legend
DEEP, PALE = 0.0, 0.88  # ends of the colours of values in order


@dataclass(frozen=True)
class CurveStyle:
    """Of a curve."""

    tint: str = NEUTRAL_COLOUR
    dashes: Any = "-"
    marker: str = ""

    def line(self, name: str) -> Line2D:
        """Its entry in a legend."""
        return Line2D([], [], color=self.tint, linestyle=self.dashes, marker=self.marker, markersize=4.5, label=name)


@dataclass
class CurveStyles:
    """Attributes:

    of: every run's, in their order.
    legend: what to write beside which.
    legend_title: what colours, lines and markers stand for; None where runs differ in other ways.
    """

    of: list[CurveStyle]
    legend: list[tuple[str, CurveStyle]]
    legend_title: str | None = None

    def entries(self) -> dict[str, Artist]:
        """The legend as matplotlib takes it."""
        return {name: style.line(name) for name, style in self.legend}


def curve_styles(runs: list[Run]) -> CurveStyles:
    """The runs' looks, no two alike as long as there are such."""
    swept_looks = _styles_by_keys(runs)
    if swept_looks is not None and len(set(swept_looks.of)) == len(runs):
        return swept_looks
    shape_colours = [SHAPE_COLOUR_PAIRS[number % len(SHAPE_COLOUR_PAIRS)] for number in range(len(runs))]
    of = [CurveStyle(nth_colour(tint), *LINE_SHAPES[shape]) for shape, tint in shape_colours]
    keys = swept_settings(runs)
    title = key_name(display_key(keys[0])) if len(keys) == 1 else None
    return CurveStyles(of, [(run.label, style) for run, style in zip(runs, of, strict=True)], title)


def _styles_by_keys(runs: list[Run]) -> CurveStyles | None:
    """How to draw the runs, and what to say of it.

    Two swept keys of up to eight values each are said by colours and by dashes, so that twenty runs need nine entries;
    a third by markers. Numbers of a single key are deep to pale colours. None where keys are more, or their values.
    """
    keys = swept_settings(runs)
    texts_by_key = {key: [value_text(run, key, keys) for run in runs] for key in keys}
    values = {key: list(dict.fromkeys(texts)) for key, texts in texts_by_key.items()}
    if len(keys) == 2 and all(len(key_values) <= len(LINE_SHAPES) for key_values in values.values()):
        return _styles_by_key(
            texts_by_key, values, sorted(keys, key=lambda key: len(values[key]) <= len(DASHES)), LINE_SHAPES
        )
    if len(keys) == 3 and _fit_three_keys(sorted(map(len, values.values()))):
        first, *remaining_keys = keys
        order = [first, *sorted(remaining_keys, key=lambda key: len(values[key]))]
        if len(values[order[1]]) > len(DASHES) or len(values[first]) > len(COLOURS):
            order = [max(keys, key=lambda key: len(values[key])), *sorted(keys, key=lambda key: len(values[key]))[:2]]
        return _styles_by_key(texts_by_key, values, order, [(dash, "") for dash in DASHES])
    if len(keys) == 1 and len(runs) > 2 and (ranks := _ranks_by_number(runs, keys[0])):
        shades = matplotlib.colormaps["viridis"]
        step = (PALE - DEEP) / (len(runs) - 1)
        of = [CurveStyle(to_hex(shades(DEEP + step * rank))) for rank in ranks]
        legend = sorted(zip((run.label for run in runs), of, ranks, strict=True), key=lambda entry: entry[2])
        return CurveStyles(of, [(name, style) for name, style, _ in legend], key_name(display_key(keys[0])))
    return None


def _fit_three_keys(counts: list[int]) -> bool:
    """Are there enough colours, dashes and markers for three keys?"""
    return counts[0] <= len(DASHES) and counts[1] <= len(MARKERS) and counts[2] <= len(COLOURS)


def _styles_by_key(
    texts_by_key: dict[str, list[str]], values: dict[str, list[str]], keys: list[str], shapes: list[tuple[Any, str]]
) -> CurveStyles:
    """The first key by colours, the second by shapes, the third by markers."""
    tint, shape, *marker_keys = keys
    of = []
    for number, text in enumerate(texts_by_key[tint]):
        dashes, marker = shapes[values[shape].index(texts_by_key[shape][number])]
        if marker_keys:
            marker = MARKERS[values[marker_keys[0]].index(texts_by_key[marker_keys[0]][number])]
        of.append(CurveStyle(nth_colour(values[tint].index(text)), dashes, marker))
    legend = [(text, CurveStyle(nth_colour(n))) for n, text in enumerate(values[tint])]
    legend += [(text, CurveStyle(NEUTRAL_COLOUR, *shapes[n])) for n, text in enumerate(values[shape])]
    legend += [
        (text, CurveStyle(NEUTRAL_COLOUR, "", MARKERS[n])) for key in marker_keys for n, text in enumerate(values[key])
    ]
    channels = ["colour", "line" if len(values[shape]) <= len(DASHES) else "line and marker", "marker"]
    title = ", ".join(f"{channel}: {key_name(display_key(key))}" for channel, key in zip(channels, keys, strict=False))
    return CurveStyles(of, [(text, style) for text, style in legend if text], title)


def _ranks_by_number(runs: list[Run], key: str) -> list[int]:
    """The runs' ranks by the numbers they have of the key; nothing where these are no numbers, or not distinct."""
    numbers = [run.settings.get(key) for run in runs]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        return []
    ranks = sorted(range(len(runs)), key=lambda n: numbers[n])  # type: ignore[arg-type,return-value]
    return [ranks.index(n) for n in range(len(runs))] if len(set(numbers)) == len(runs) else []
