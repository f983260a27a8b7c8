"""How long reference points are sought: says what goes on, and ends what takes too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fedsim.core.errors import NoReferenceError

log = logging.getLogger(__name__)

SILENT = 10.0  # seconds without a word, at most, as long as the risk itself does not take longer


class Search:
    """Counts evaluations of the risk; all replicates of a run share it.

    Args:
        seconds: after which a search is given up; None: never.
        clock: seconds that only grow.

    Attributes:
        doing: what goes on.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self.doing = seconds, clock, "the risk is evaluated"
        self._began = self._last_message = clock()
        self.evaluations = 0

    def tick(self) -> None:
        """The risk is about to be evaluated.

        Raises:
            NoReferenceError: the time is over.
        """
        current_time = self._clock()
        spent, self.evaluations = current_time - self._began, self.evaluations + 1
        if self.seconds is not None and spent > self.seconds:
            raise NoReferenceError(
                f"given up after {spent:.0f} s and {self.evaluations - 1} evaluations of the risk, while {self.doing}; "
                "where data answer in jumps, as to a threshold, there may be none to be found; shift.references=none "
                f"does not seek it, and shift.references_seconds={self.seconds:g} may be more, or null"
            )
        if current_time - self._last_message > SILENT:
            self._last_message = current_time
            limit = "" if self.seconds is None else f" of at most {self.seconds:g} (shift.references_seconds)"
            log.info("reference points: %s; %.0f s%s", self.doing, spent, limit)
