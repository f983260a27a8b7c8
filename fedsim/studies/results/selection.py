"""Selection of the best of several runs by a validation metric, which tables do not report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsim.evaluation.columns import validation_metric
from fedsim.studies.results.runs import Run


def selection_metric(runs: Sequence[Run], reported_metric: str) -> tuple[str, str]:
    """Return the metric that selects among the runs, and a warning for readers ('' if it is on validation data)."""
    common_metrics = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    metric = validation_metric(common_metrics)
    if metric is not None:
        return metric, ""
    return reported_metric, (
        f"chosen by {reported_metric} itself, since the runs have no validation samples: what is "
        "reported of the chosen is "
        "optimistic; partition.validation=0.2 gives them some"
    )


def find_best_run(runs: Iterable[Run], metric: str, last: int = 1) -> Run:
    """Return the run with the best metric, averaged over replicates and the `last` evaluations; the first in a tie.

    A run whose metric is NaN ranks last.
    """

    def ranking_score(run: Run) -> float:
        mean = float(run.final_values(metric, last).mean())
        return (mean if run.higher_is_better(metric) else -mean) if mean == mean else -float("inf")

    return max(runs, key=ranking_score)
