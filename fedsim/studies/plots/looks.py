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
from fedsim.studies.plots.style import LINE_STYLES, MARKER_SHAPES, PALETTE, nth_colour
from fedsim.studies.results.differences import setting_label, swept_settings
from fedsim.studies.results.display_names import key_display_name
from fedsim.studies.results.runs import Run

LINE_SHAPES = list(
    zip(LINE_STYLES * 2, ["", "", "", "", *MARKER_SHAPES[:4]], strict=True)
)  # dashes, and again with markers
SHAPE_COLOUR_PAIRS = list(
    product(range(len(LINE_SHAPES)), range(len(PALETTE)))
)  # for runs whose swept keys do not fit colours and line styles
NEUTRAL_COLOUR = "#555555"  # of legend entries that explain a line style or marker
DARKEST_MAP_POSITION, LIGHTEST_MAP_POSITION = 0.0, 0.88  # the range of the colour map for ordered values


@dataclass(frozen=True)
class CurveStyle:
    """The colour, dashes and marker of a curve."""

    colour: str = NEUTRAL_COLOUR
    dashes: Any = "-"
    marker: str = ""

    def legend_line(self, name: str) -> Line2D:
        """Return the curve's entry in a legend."""
        return Line2D([], [], color=self.colour, linestyle=self.dashes, marker=self.marker, markersize=4.5, label=name)


@dataclass
class CurveStyles:
    """The curve styles of runs, with their legend.

    Attributes:
        styles: the style of each run, in their order.
        legend: (text, style) of each entry of the legend.
        legend_title: what colours, lines and markers stand for; None where runs differ in other ways.
    """

    styles: list[CurveStyle]
    legend: list[tuple[str, CurveStyle]]
    legend_title: str | None = None

    def legend_entries(self) -> dict[str, Artist]:
        """Return the legend as label → artist, for matplotlib."""
        return {name: style.legend_line(name) for name, style in self.legend}


def curve_styles(runs: list[Run]) -> CurveStyles:
    """Return the styles of the runs, distinct as long as there are enough."""
    swept_looks = _styles_by_keys(runs)
    if swept_looks is not None and len(set(swept_looks.styles)) == len(runs):
        return swept_looks
    shape_colours = [SHAPE_COLOUR_PAIRS[number % len(SHAPE_COLOUR_PAIRS)] for number in range(len(runs))]
    styles = [CurveStyle(nth_colour(colour), *LINE_SHAPES[shape]) for shape, colour in shape_colours]
    keys = swept_settings(runs)
    title = key_display_name(display_key(keys[0])) if len(keys) == 1 else None
    return CurveStyles(styles, [(run.label, style) for run, style in zip(runs, styles, strict=True)], title)


def _styles_by_keys(runs: list[Run]) -> CurveStyles | None:
    """Return styles by swept keys, or None if there are too many keys or values.

    Two swept keys of up to eight values each are shown by colours and by dashes, so that twenty runs need nine entries;
    a third key is shown by markers. Numbers of a single key are shown by a colour map.
    """
    keys = swept_settings(runs)
    texts_by_key = {key: [setting_label(run, key, keys) for run in runs] for key in keys}
    values = {key: list(dict.fromkeys(texts)) for key, texts in texts_by_key.items()}
    if len(keys) == 2 and all(len(values_of_key) <= len(LINE_SHAPES) for values_of_key in values.values()):
        return _styles_by_key(
            texts_by_key, values, sorted(keys, key=lambda key: len(values[key]) <= len(LINE_STYLES)), LINE_SHAPES
        )
    if len(keys) == 3 and _can_style_three_keys(sorted(map(len, values.values()))):
        first_key, *remaining_keys = keys
        order = [first_key, *sorted(remaining_keys, key=lambda key: len(values[key]))]
        if len(values[order[1]]) > len(LINE_STYLES) or len(values[first_key]) > len(PALETTE):
            order = [max(keys, key=lambda key: len(values[key])), *sorted(keys, key=lambda key: len(values[key]))[:2]]
        return _styles_by_key(texts_by_key, values, order, [(dash, "") for dash in LINE_STYLES])
    if len(keys) == 1 and len(runs) > 2 and (ranks := _ranks_of_setting_values(runs, keys[0])):
        colour_map = matplotlib.colormaps["viridis"]
        step = (LIGHTEST_MAP_POSITION - DARKEST_MAP_POSITION) / (len(runs) - 1)
        styles = [CurveStyle(to_hex(colour_map(DARKEST_MAP_POSITION + step * rank))) for rank in ranks]
        legend = sorted(zip((run.label for run in runs), styles, ranks, strict=True), key=lambda entry: entry[2])
        return CurveStyles(styles, [(name, style) for name, style, _ in legend], key_display_name(display_key(keys[0])))
    return None


def _can_style_three_keys(counts: list[int]) -> bool:
    """Return whether colours, dashes and markers suffice for three keys with these sorted numbers of values."""
    return counts[0] <= len(LINE_STYLES) and counts[1] <= len(MARKER_SHAPES) and counts[2] <= len(PALETTE)


def _styles_by_key(
    texts_by_key: dict[str, list[str]], values: dict[str, list[str]], keys: list[str], shapes: list[tuple[Any, str]]
) -> CurveStyles:
    """Return styles that show the first key by colours, the second by line shapes, the third by markers."""
    colour, shape, *marker_keys = keys
    styles = []
    for number, text in enumerate(texts_by_key[colour]):
        dashes, marker = shapes[values[shape].index(texts_by_key[shape][number])]
        if marker_keys:
            marker = MARKER_SHAPES[values[marker_keys[0]].index(texts_by_key[marker_keys[0]][number])]
        styles.append(CurveStyle(nth_colour(values[colour].index(text)), dashes, marker))
    legend = [(text, CurveStyle(nth_colour(n))) for n, text in enumerate(values[colour])]
    legend += [(text, CurveStyle(NEUTRAL_COLOUR, *shapes[n])) for n, text in enumerate(values[shape])]
    legend += [
        (text, CurveStyle(NEUTRAL_COLOUR, "", MARKER_SHAPES[n]))
        for key in marker_keys
        for n, text in enumerate(values[key])
    ]
    channels = ["colour", "line" if len(values[shape]) <= len(LINE_STYLES) else "line and marker", "marker"]
    title = ", ".join(
        f"{channel}: {key_display_name(display_key(key))}" for channel, key in zip(channels, keys, strict=False)
    )
    return CurveStyles(styles, [(text, style) for text, style in legend if text], title)


def _ranks_of_setting_values(runs: list[Run], key: str) -> list[int]:
    """Return the runs' ranks by their numbers of the key; empty if these are not numbers or not distinct."""
    numbers = [run.settings.get(key) for run in runs]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
        return []
    ranks = sorted(range(len(runs)), key=lambda n: numbers[n])  # type: ignore[arg-type,return-value]
    return [ranks.index(n) for n in range(len(runs))] if len(set(numbers)) == len(runs) else []
