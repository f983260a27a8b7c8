"""The progress of a sweep, printed as each run ends: number of finished runs, remaining time, and the best run so
far."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedsim.app.folders import override_key

TOTAL_RUNS_FILE = "total"  # file among a sweep's records with the number of runs and the start time
SUMMARY_FILE = "summary.json"
SUCCESSFUL_STATUSES = ("done", "kept")


def progress_text(records: Path, number: int) -> str:
    """Return '[3/8], about 4 min left:', as far as the sweep knows its number of runs; records of other runs say how
    many are done. The remaining time is left out where jobs end together, since it says nothing there.

    Args:
        records: folder of the sweep's records.
        number: of the run that has ended now.
    """
    from fedsim.app.job_progress import duration_text

    try:
        total, start_time = _total_and_start(records)
        other_records = [json.loads(path.read_text()) for path in records.glob("*.json") if path.stem != str(number)]
    except (OSError, ValueError):
        return f"[{number + 1}]"
    done_jobs = 1 + sum(other_record["status"] != "running" for other_record in other_records)
    has_running_jobs = any(other_record["status"] == "running" for other_record in other_records)
    seconds_left = (time.time() - start_time) * (total - done_jobs) / done_jobs
    return f"[{done_jobs}/{total}]" + (
        f", about {duration_text(seconds_left)} left:" if done_jobs < total and not has_running_jobs else ""
    )


def total_runs(records: Path) -> int | None:
    """Return the number of runs of the sweep; None if unknown."""
    try:
        return int(_total_and_start(records)[0])
    except (OSError, ValueError):
        return None


def _total_and_start(records: Path) -> tuple[int, float]:
    """Return the number of runs of the sweep, and when it began.

    Raises:
        OSError, ValueError: that is not known.
    """
    total, start_time = json.loads((records / TOTAL_RUNS_FILE).read_text())
    return total, start_time


def best_run_text(
    records: Path, folder: Path, overrides: list[str], objective: str | None, direction: Any = None
) -> str:
    """Return '; highest so far: test_accuracy 0.83 (lr=0.1)', or the lowest loss, of the runs that have ended; '' for
    the first one.

    Args:
        records: folder of the sweep's records.
        folder, overrides: of the run that has ended now, whose record does not say so yet.
        objective: metric that the sweep judges runs by; None: the leading one of those measured.
        direction: of a tuning sweep, maximize or minimize; None: the metric's own.
    """
    from fedsim.app.job_progress import leading_metric, metric_text
    from fedsim.evaluation.columns import is_higher_better

    runs = [(folder, overrides), *_successful_runs(records, folder)]
    final_metrics = [(run_metrics, texts) for run_folder, texts in runs if (run_metrics := _final_metrics(run_folder))]
    metric_name = leading_metric(final_metrics[0][0]) if final_metrics else None
    name = objective or (metric_name[0] if metric_name else None)
    values = [
        (run_metrics[name], texts)
        for run_metrics, texts in final_metrics
        if name in run_metrics and math.isfinite(run_metrics[name])
    ]
    if name is None or len(values) < 2:
        return ""
    higher_is_better = is_higher_better(name) if direction is None else "max" in str(direction).lower()
    value, texts = (max if higher_is_better else min)(values, key=lambda entry: entry[0])
    common_overrides = set(texts).intersection(*(run_texts for _, run_texts in runs))
    differing_overrides = [text for text in texts if text not in common_overrides and override_key(text) != "out"]
    adjective = "highest" if higher_is_better else "lowest"
    return f"; {adjective} so far: {metric_text(name, value)} ({' '.join(differing_overrides)})"


def num_tuning_trials(sweeper: DictConfig) -> int | None:
    """Return the number of trials of a tuning sweep; None if its sweeper does not say."""
    trials = sweeper.get("n_trials")
    return trials if isinstance(trials, int) else None


def _successful_runs(records: Path, folder: Path) -> Iterable[tuple[Path, list[str]]]:
    for path in records.glob("*.json"):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):  # another process is about to replace it
            continue
        if record["status"] in SUCCESSFUL_STATUSES and Path(record["folder"]) != folder:
            yield Path(record["folder"]), record["overrides"]


def _final_metrics(folder: Path) -> dict[str, float]:
    """Return metric → its mean over replicates after the last round; empty if there is no summary."""
    try:
        final_by_metric = json.loads((folder / SUMMARY_FILE).read_text())["final"]
        return {
            name: math.nan if statistics["mean"] is None else float(statistics["mean"])
            for name, statistics in final_by_metric.items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
