"""What a board says in sentences, each of them shown by comparisons in its own tables."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.results.paired import PairedDifference

AHEAD, ALIKE = "ahead", "alike"
ALL_CELLS_PATTERN = "*"


@dataclass
class Comparison:
    """Attributes:

    one, other: entries.
    how: 'ahead': the interval of one's numbers less the other's, by seed, of means over the cells, excludes zero, and
        one is better; 'alike': it lies within ± `within`.
    measure: that is compared; None: the board's first.
    cells: patterns of cells' names; a cell that matches one is in,
    but: and one that matches one of these is out.
    within: what does not matter, in the measure's own unit (a fraction, where it is read in per cent).
    """

    one: str
    other: str
    how: str = AHEAD
    measure: str | None = None
    cells: list[str] = field(default_factory=lambda: [ALL_CELLS_PATTERN])
    but: list[str] = field(default_factory=list)
    within: float = 0.0

    def check(self, label: str, entries: Collection[str], measures: Collection[str], cells: Collection[str]) -> None:
        """Refuse what a board with these entries, measures and cells does not have."""
        for key in ("one", "other"):
            checks.choice(f"{label}.{key}", getattr(self, key), entries)
        checks.choice(f"{label}.how", self.how, (AHEAD, ALIKE))
        if self.measure is not None:
            checks.choice(f"{label}.measure", self.measure, measures)
        for key in ("cells", "but"):
            for pattern in getattr(self, key):
                if not fnmatch.filter(cells, pattern):
                    raise ConfigError(f"{label}.{key}: {pattern!r} matches none of the board's cells")
        if not any(map(self.of, cells)):
            raise ConfigError(f"{label}.but={self.but} leaves none of its cells")
        if (self.how == ALIKE) != (checks.not_negative(f"{label}.within", self.within) > 0):
            raise ConfigError(f"{label}.within={self.within} goes with how=alike, which needs it")

    def of(self, cell: str) -> bool:
        """Is this cell one of its own?"""
        is_included, is_excluded = (
            any(fnmatch.fnmatch(cell, pattern) for pattern in group) for group in (self.cells, self.but)
        )
        return is_included and not is_excluded

    def is_shown(self, by: PairedDifference, higher_is_better: bool) -> bool:
        """Do these differences show it? `higher_is_better`: larger numbers are better."""
        low, high = by.interval
        if self.how == ALIKE:
            return -self.within <= low and high <= self.within
        return low > 0 if higher_is_better else high < 0


@dataclass
class Finding:
    """Attributes:

    says: a sentence.
    shown_by: what shows it, all of it.
    """

    says: str
    shown_by: list[Comparison]

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Finding:
        """From YAML."""
        return cls(content["says"], [Comparison(**comparison) for comparison in content["shown_by"]])
