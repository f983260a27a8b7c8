"""Sizes and fonts of pictures for papers of some venues, and for slides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VenueStyle:
    """The size and font of pictures for a venue.

    Attributes:
        text_width: width of a column of text and of pictures, in inches.
        max_height: largest height, in inches.
        font_size: font size of axis labels, in points.
        uses_serif_font: whether the font is that of Times.
        source: where these values are prescribed.
    """

    text_width: float
    max_height: float
    font_size: float
    uses_serif_font: bool
    source: str

    @property
    def matplotlib_parameters(self) -> dict[str, Any]:
        """Parameters of matplotlib. STIX resembles Times and comes with matplotlib; fonts are embedded as TrueType."""
        fonts = {"font.family": "serif", "font.serif": ["STIXGeneral", "DejaVu Serif"], "mathtext.fontset": "stix"}
        return {
            "font.size": self.font_size,
            "axes.titlesize": 1.1 * self.font_size,
            "axes.linewidth": 0.06 * self.font_size,
            "lines.linewidth": 0.16 * self.font_size,
            "pdf.fonttype": 42,
        } | (fonts if self.uses_serif_font else {})


VENUES = {
    "neurips": VenueStyle(5.5, 7.5, 9, True, "neurips_2024.sty: one column of 5.5 inches, text of 10 points, Times"),
    "icml": VenueStyle(3.25, 7.5, 8, True, "icml2024.sty: two columns of 3.25 inches, captions of 9 points, Times"),
    "ieee": VenueStyle(
        3.5, 7.5, 9, True, "IEEE Author Center, Resolution and Size: a column of 3.5 inches, 9 to 10 points"
    ),
    "talk": VenueStyle(12.0, 6.5, 18, False, "a slide of 13.33 by 7.5 inches (16:9) less its margins, 18 points"),
}
MIN_ASPECT_RATIO = 0.55  # smallest height / width of a panel
MIN_PANEL_WIDTH = 2.6  # smallest width, in inches at 9 points, of a panel in a row of several
_CURRENT_VENUE: ContextVar[VenueStyle | None] = ContextVar("venue", default=None)


@contextlib.contextmanager
def use_venue(venue: VenueStyle | None) -> Iterator[None]:
    """Draw and save the pictures of this block for the venue; None: for a screen."""
    token = _CURRENT_VENUE.set(venue)
    try:
        yield
    finally:
        _CURRENT_VENUE.reset(token)


def current_venue() -> VenueStyle | None:
    """Return the venue of the enclosing `use_venue`, or None."""
    return _CURRENT_VENUE.get()


def panel_layout(count: int, columns: int, width: float, height: float) -> tuple[int, float, float]:
    """Adapt the columns, and the width and height of a panel in inches, to the current venue.

    The figure is as wide as a column of text. Panels keep their aspect ratio, unless it is very flat or the picture
    would be too high; a narrow figure has fewer panels in a row.
    """
    venue = current_venue()
    if venue is None:
        return columns, width, height
    columns = min(columns, count, max(1, int(venue.text_width / (MIN_PANEL_WIDTH * venue.font_size / 9))))
    panel_width, rows = venue.text_width / columns, -(-count // columns)
    return columns, panel_width, min(max(height / width, MIN_ASPECT_RATIO) * panel_width, venue.max_height / rows)
