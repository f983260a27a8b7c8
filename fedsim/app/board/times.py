"""What an algorithm's rounds cost: its processor time, when it runs alone and on one thread."""

from __future__ import annotations

import statistics
import time
from typing import Any

from fedsim.app.board.track_settings import TrackSettings
from fedsim.app.build import build
from fedsim.app.reproduce.runner import Job

ROUNDS = 100  # run; the second half of them is timed, when what is recorded once has been recorded


class Times(TrackSettings):
    """{'ms': median processor time of a round of all seeds, 'made': command, commit, versions} of every algorithm in a
    track; 'ms' is None where it cannot run."""

    file = "times.json"

    def ms(self, track: str, entry: str) -> float | None:
        """Milliseconds a round; None where it has not been timed or cannot run."""
        timing = self.of(track, entry)
        return None if timing is None or timing["ms"] is None else float(timing["ms"])


def milliseconds(job: Job, shared: dict[str, Any]) -> float:
    """Median processor time of a round of this run, evaluations left out; nothing is written.

    Args:
        job: its configuration has at least two rounds.
        shared: data sets, as `fedsim.app.build.build` takes them.

    Raises:
        ConfigError: it cannot run.
    """
    steps = build(job.config, shared=shared)[0].steps()
    spent = []
    try:
        work = next(steps)
        while True:
            start = time.process_time()
            work = steps.send(work.trainer.perform(work))
            spent.append(time.process_time() - start)
    except StopIteration:
        return 1000 * statistics.median(spent[len(spent) // 2 :])
