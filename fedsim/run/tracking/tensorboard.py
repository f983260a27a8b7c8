"""TensorBoard event files: one folder for the mean over replicates and one for each replicate.

Those of a sweep are read as `strategy=fedawe/mean` and `strategy=fedawe/seed_0`. The folders lie side by side because
TensorBoard takes what lies below a row of its HPARAMS table for more results of that row.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

from fedsim.core.files import create_real_folder, name_write_errors
from fedsim.evaluation.registry import describe_metric
from fedsim.run.tracking.observer import EvaluationEvent, Observer, RunEnded, RunStarted
from fedsim.run.tracking.result import mean_std

EVENT_FILE_PREFIX = "events.out.tfevents."
EVENT_TIMESTAMP_PATTERN = re.compile(re.escape(EVENT_FILE_PREFIX) + r"(\d+)")

log = logging.getLogger(__name__)


def _ensure_next_file_sorts_last(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second of their creation, and
    skips a file that sorts before those it has read. Make the next name sort last.

    So wait, for a second at most, until a new file comes after those that are there. Where the clock was set back,
    those of later seconds are renamed to earlier ones, in the same order.
    """
    open_time_by_path = {
        path: int(match[1]) for path in folder.glob("*/*") if (match := EVENT_TIMESTAMP_PATTERN.match(path.name))
    }
    while int(time.time()) == max(open_time_by_path.values(), default=0):
        time.sleep(0.02)
    is_out_of_order = False
    for directory in {path.parent for path in open_time_by_path}:
        latest_time = int(time.time())
        for path in sorted((path for path in open_time_by_path if path.parent == directory), reverse=True):
            if open_time_by_path[path] >= latest_time:
                is_out_of_order = True
                path.rename(
                    path.with_name(EVENT_TIMESTAMP_PATTERN.sub(f"{EVENT_FILE_PREFIX}{latest_time - 1:010d}", path.name))
                )
            latest_time = min(latest_time - 1, open_time_by_path[path])
    if is_out_of_order:
        log.warning("the system clock is behind this run's earlier event files; they are renamed to keep their order")


class TensorBoard(Observer):
    """Writes event files into `mean` and `seed_S` in the run folder; those of a single replicate into `seed_S`.

    Where they cannot be written the run ends, as where metrics.csv cannot.
    """

    def __init__(self) -> None:
        self._writers: list[Any] = []

    def begin(self, run: RunStarted) -> None:
        """Hide older points from the first round on that will be written again."""
        if run.folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._files, self._settings = run.folder / "event files", run.settings
        with name_write_errors(self._files):
            _ensure_next_file_sorts_last(run.folder)
            names, first_step = run.names, run.completed_rounds + 1 if run.completed_rounds else 0
            for name in ["mean", *names] if len(names) > 1 else names:
                self._writers.append(SummaryWriter(str(create_real_folder(run.folder / name)), purge_step=first_step))

    def evaluated(self, event: EvaluationEvent) -> None:
        """Write the scalars of each replicate, their mean, and the metrics of clients as histograms."""
        if not self._writers:
            return
        mean_writer, *replicate_writers = self._writers
        with name_write_errors(self._files):
            for metric_name in event.rows[0]:
                if (scalar_tag := describe_metric(metric_name).tag) is not None:
                    mean_writer.add_scalar(
                        scalar_tag, mean_std([row[metric_name] for row in event.rows])[0], event.round
                    )
                    for writer, row in zip(replicate_writers, event.rows, strict=False):
                        writer.add_scalar(scalar_tag, row[metric_name], event.round)
            for metric_name, values in event.clients.items():
                if len(values):
                    mean_writer.add_histogram(f"clients/{metric_name}", values, event.round, bins="auto")
            self._flush()

    def finish(self, event: RunEnded) -> None:
        """Write the pictures of a run of more than one round, and the settings for the HPARAMS table, whose results are
        the last points of the metrics' curves.

        What its columns are is left to TensorBoard: it looks at all runs of a sweep, and puts first what differs. Said
        by a run, which knows but its own settings, they would be those of whichever run is found first.
        """
        if not self._writers:
            return
        from torch.utils.tensorboard.summary import hparams

        with name_write_errors(self._files):
            if event.round > 1:  # a single round has no curve, and drawing takes a second
                for heading, figure in event.pictures():
                    self._writers[0].add_figure(f"figures/{heading}", figure, event.round)
            scalar_settings = {
                k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self._settings.items()
            }
            _columns, start, end = hparams(scalar_settings, {})
            for summary in (start, end):
                self._writers[0]._get_file_writer().add_summary(summary)
            self._flush()

    def _flush(self) -> None:
        """Flush the files; raise an OSError if that fails."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        if self._writers:
            with name_write_errors(self._files):
                for writer in self._writers:
                    writer.close()
