"""The comparisons that a board reports: which entries are compared in which cells, and under which question."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError

ASKS_BETTER, ASKS_EQUIVALENT = "better", "equivalent"
ALL_CELLS_PATTERN = "*"


@dataclass
class Comparison:
    """A comparison of two entries in some of a board's cells.

    Attributes:
        one, other: names of the two entries.
        asks: 'better': is one better than the other; 'equivalent': do they differ by at most the board's margin for
            the measure?
        measure: the measure that is compared; None: the board's main measure.
        cells: patterns of cell names; a cell that matches one of them is included,
        but: unless it matches one of these patterns.
    """

    one: str
    other: str
    asks: str = ASKS_BETTER
    measure: str | None = None
    cells: list[str] = field(default_factory=lambda: [ALL_CELLS_PATTERN])
    but: list[str] = field(default_factory=list)

    def check(
        self,
        finding_label: str,
        entry_names: Collection[str],
        margin_by_measure: Mapping[str, float | None],
        cells: Collection[str],
    ) -> None:
        """Refuse a comparison that names entries, measures or cells that the board does not have.

        Args:
            finding_label: names the comparison in the message.
            entry_names: names of the board's entries.
            margin_by_measure: measure → its equivalence margin; None where the board has none. The first one
                is the main measure.
            cells: names of the board's cells.
        """
        for side_key in ("one", "other"):
            checks.check_choice(f"{finding_label}.{side_key}", getattr(self, side_key), entry_names)
        checks.check_choice(f"{finding_label}.asks", self.asks, (ASKS_BETTER, ASKS_EQUIVALENT))
        if self.measure is not None:
            checks.check_choice(f"{finding_label}.measure", self.measure, margin_by_measure)
        for side_key in ("cells", "but"):
            for pattern in getattr(self, side_key):
                if not fnmatch.filter(cells, pattern):
                    raise ConfigError(f"{finding_label}.{side_key}: {pattern!r} matches none of the board's cells")
        if not any(map(self.includes, cells)):
            raise ConfigError(f"{finding_label}.but={self.but} leaves none of its cells")
        measure = self.measure or next(iter(margin_by_measure))
        if self.asks == ASKS_EQUIVALENT and margin_by_measure[measure] is None:
            raise ConfigError(
                f"{finding_label}.asks={ASKS_EQUIVALENT} needs the largest difference in {measure!r} that does "
                f"not matter: set equivalence_margins.{measure}"
            )

    def includes(self, cell: str) -> bool:
        """Return whether the comparison includes the cell of this name."""
        is_included, is_excluded = (
            any(fnmatch.fnmatch(cell, pattern) for pattern in patterns) for patterns in (self.cells, self.but)
        )
        return is_included and not is_excluded


@dataclass
class BoardQuestion:
    """A question, and the comparisons whose outcomes answer it; the page writes the answers from the numbers.

    Attributes:
        question: the question, ending with a question mark.
        comparisons: the comparisons, in the order of the page.
    """

    question: str
    comparisons: list[Comparison]

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> BoardQuestion:
        """Create a finding from its YAML content."""
        return cls(content["question"], [Comparison(**comparison) for comparison in content["comparisons"]])

    def check(self, finding_label: str) -> None:
        """Refuse a heading that is not a question, since only the numbers may assert an answer."""
        if not self.question.strip().endswith("?"):
            raise ConfigError(
                f"{finding_label}.question={self.question!r} must be a question; the page writes the answers"
            )
