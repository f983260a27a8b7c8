"""Styles that distinguish runs in a picture: one swept key sets the colour, another the dashes and markers."""

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
)  # for runs whose swept keys do not fit colours and line styles
NEUTRAL_COLOUR = "#555555"  # of legend entries that explain a line style or marker
DEEP, PALE = 0.0, 0.88  # the range of the colour map for ordered values


@dataclass(frozen=True)
class CurveStyle:
    """The colour, dashes and marker of a curve."""

    tint: str = NEUTRAL_COLOUR
    dashes: Any = "-"
    marker: str = ""

    def line(self, name: str) -> Line2D:
        """Return the curve's entry in a legend."""
        return Line2D([], [], color=self.tint, linestyle=self.dashes, marker=self.marker, markersize=4.5, label=name)


@dataclass
class CurveStyles:
    """The curve styles of runs, with their legend.

    Attributes:
        of: the style of each run, in their order.
        legend: (text, style) of each entry of the legend.
        legend_title: what colours, lines and markers stand for; None where runs differ in other ways.
    """

    of: list[CurveStyle]
    legend: list[tuple[str, CurveStyle]]
    legend_title: str | None = None

    def entries(self) -> dict[str, Artist]:
        """Return the legend as label → artist, for matplotlib."""
        return {name: style.line(name) for name, style in self.legend}


def curve_styles(runs: list[Run]) -> CurveStyles:
    """Return the styles of the runs, distinct as long as there are enough."""
    swept_looks = _styles_by_keys(runs)
    if swept_looks is not None and len(set(swept_looks.of)) == len(runs):
        return swept_looks
    shape_colours = [SHAPE_COLOUR_PAIRS[number % len(SHAPE_COLOUR_PAIRS)] for number in range(len(runs))]
    of = [CurveStyle(nth_colour(tint), *LINE_SHAPES[shape]) for shape, tint in shape_colours]
    keys = swept_settings(runs)
    title = key_name(display_key(keys[0])) if len(keys) == 1 else None
    return CurveStyles(of, [(run.label, style) for run, style in zip(runs, of, strict=True)], title)


def _styles_by_keys(runs: list[Run]) -> CurveStyles | None:
    """Return styles by swept keys, or None if there are too many keys or values.

    Two swept keys of up to eight values each are shown by colours and by dashes, so that twenty runs need nine entries;
    a third key is shown by markers. Numbers of a single key are shown by a colour map.
    """
    keys = swept_settings(runs)
    texts_by_key = {key: [value_text(run, key, keys) for run in runs] for key in keys}
    values = {key: list(dict.fromkeys(texts)) for key, texts in texts_by_key.items()}
    if len(keys) == 2 and all(len(values_of_key) <= len(LINE_SHAPES) for values_of_key in values.values()):
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
    """Return whether colours, dashes and markers suffice for three keys with these sorted numbers of values."""
    return counts[0] <= len(DASHES) and counts[1] <= len(MARKERS) and counts[2] <= len(COLOURS)


def _styles_by_key(
    texts_by_key: dict[str, list[str]], values: dict[str, list[str]], keys: list[str], shapes: list[tuple[Any, str]]
) -> CurveStyles:
    """Return styles that show the first key by colours, the second by line shapes, the third by markers."""
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
    """Return the runs' ranks by their numbers of the key; empty if these are not numbers or not distinct."""
    numbers = [run.settings.get(key) for run in runs]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        return []
    ranks = sorted(range(len(runs)), key=lambda n: numbers[n])  # type: ignore[arg-type,return-value]
    return [ranks.index(n) for n in range(len(runs))] if len(set(numbers)) == len(runs) else []
