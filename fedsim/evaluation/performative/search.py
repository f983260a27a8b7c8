"""Progress and time limit of the search for reference points."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fedsim.core.errors import NoReferenceError

log = logging.getLogger(__name__)

MAX_LOG_INTERVAL = 10.0  # largest time between log lines, if one evaluation of the risk does not take longer


class EvaluationCounter:
    """Counts evaluations of the risk; all replicates of a run share it.

    Args:
        seconds: after which a search is stopped; None: no limit.
        clock: monotonic time in seconds.
        group: whose settings limit it, 'shift' or 'drift'.

    Attributes:
        activity: the current activity.
    """

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic, group: str = "shift"
    ) -> None:
        self.seconds, self._clock, self.activity = seconds, clock, "evaluating the risk"
        self.group = group
        self._start_time = self._last_message = clock()
        self.evaluations = 0

    def count_evaluation(self) -> None:
        """Count one evaluation of the risk.

        Raises:
            NoReferenceError: the time limit is exceeded.
        """
        current_time = self._clock()
        elapsed, self.evaluations = current_time - self._start_time, self.evaluations + 1
        if self.seconds is not None and elapsed > self.seconds:
            raise NoReferenceError(
                f"given up after {elapsed:.0f} s and {self.evaluations - 1} evaluations of the "
                f"risk, while {self.activity}; "
                "if data react discontinuously, as to a threshold, the point may not exist; set "
                f"{self.group}.references=none, or raise {self.group}.references_seconds={self.seconds:g} or set it "
                "to null"
            )
        if current_time - self._last_message > MAX_LOG_INTERVAL:
            self._last_message = current_time
            limit = "" if self.seconds is None else f" of at most {self.seconds:g} ({self.group}.references_seconds)"
            log.info("reference points: %s; %.0f s%s", self.activity, elapsed, limit)
