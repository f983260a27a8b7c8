"""Which of several runs is taken: that of the best value of a key, judged by data that no table reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsim.evaluation.columns import validation_metric
from fedsim.studies.results.runs import Run


def selection_metric(runs: Sequence[Run], reported: str) -> tuple[str, str]:
    """The metric that chooses among the runs, and what a reader must know of it ('' where it is validation data)."""
    shared = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    metric = validation_metric(shared)
    if metric is not None:
        return metric, ""
    return reported, (
        f"chosen by {reported} itself, since the runs have no validation samples: what is reported of the chosen is "
        "optimistic; partition.validation=0.2 gives them some"
    )


def best_run(runs: Iterable[Run], metric: str, last: int = 1) -> Run:
    """The run whose metric, the mean over replicates and the last so many evaluations, is best; of equal ones the
    first. A run that is not a number is never taken where another is."""

    def rank(run: Run) -> float:
        mean = float(run.final_values(metric, last).mean())
        return (mean if run.higher_is_better(metric) else -mean) if mean == mean else -float("inf")

    return max(runs, key=rank)
