"""The progress display of a run: a live line on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Protocol

from rich import filesize

from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import DISTANCE_COLUMNS
from fedsim.run.tracking.result import MetricsRow, format_spread, mean_std

log = logging.getLogger("fedsim.progress")


class ProgressView(Protocol):
    """Displays rounds as they complete."""

    def __enter__(self) -> ProgressView: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def round(self, completed_rounds: int, active: float) -> None:
        """Show that a round is complete; `active` clients took part, per replicate."""

    def evaluated(self, completed_rounds: int, facts: str, active: float) -> None:
        """Show an evaluation; `active` clients took part in its round."""


class NoProgress:
    """Shows nothing."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def round(self, completed_rounds: int, active: float) -> None:
        return None

    def evaluated(self, completed_rounds: int, facts: str, active: float) -> None:
        return None


class LogProgress(NoProgress):
    """One log line per evaluation."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def evaluated(self, completed_rounds: int, facts: str, active: float) -> None:
        active_text = f"  {active:.3g} active" if completed_rounds else ""  # the initial model was sent to nobody
        log.info("round %*d/%d  %s%s", len(str(self.rounds)), completed_rounds, self.rounds, facts, active_text)


class BarProgress:
    """A single line that is redrawn: round, bar, the last evaluation, active clients, time left."""

    def __init__(self, rounds: int, completed_rounds: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def fixed_width_column(width: int) -> Column:
            """Return a column that a narrow terminal does not squeeze."""
            return Column(no_wrap=True, min_width=width, justify="right")

        self._bar = Progress(
            MofNCompleteColumn(table_column=fixed_width_column(2 * len(str(rounds)) + 1)),
            BarColumn(bar_width=10, table_column=fixed_width_column(10)),
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            TextColumn("{task.fields[active]} active", table_column=fixed_width_column(9)),
            TimeRemainingColumn(compact=True, table_column=fixed_width_column(5)),
            TextColumn("left", table_column=fixed_width_column(4)),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("rounds", total=rounds, completed=completed_rounds, facts="", active="0")

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def round(self, completed_rounds: int, active: float) -> None:
        self._bar.update(self._task, completed_rounds=completed_rounds, active=f"{active:.3g}")

    def evaluated(self, completed_rounds: int, facts: str, active: float) -> None:
        self._bar.update(self._task, facts=facts)


def progress_view(style: str, rounds: int, completed_rounds: int) -> ProgressView:
    """Return the display for this run; 'auto' depends on whether standard error is a terminal."""
    if style == "none":
        return NoProgress()
    return BarProgress(rounds, completed_rounds) if sys.stderr.isatty() else LogProgress(rounds)


def evaluation_line(rows: list[MetricsRow], rounds_per_second: float | None) -> str:
    """Return the line of an evaluation: columns of metrics.csv by their names, without underscores."""
    line_segments = []
    test_metric = "test_accuracy" if "test_accuracy" in rows[0] else "test_loss"
    for name in ("train_loss", test_metric, *DISTANCE_COLUMNS):
        if name in rows[0]:
            scale, form, unit = (100, ".1f", " %") if is_fraction(name) else (1, ".3g", "")
            mean, std = mean_std([row[name] * scale for row in rows])
            line_segments.append(f"{name.replace('_', ' ')} {mean:{form}}{format_spread(std)}{unit}")
    if rounds_per_second is not None:
        line_segments.append(f"{short_number(rounds_per_second)} samples/s")
    if rows[0]["total_bytes_up"]:
        line_segments.append(f"{filesize.decimal(rows[0]['total_bytes_up'])} up")
    return "  ".join(line_segments)


def short_number(number: float) -> str:
    """Return a large number in short form: 154k."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"
