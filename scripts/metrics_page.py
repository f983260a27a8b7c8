"""Write docs/metrics.md: the columns of metrics.csv, their labels, units and TensorBoard tags, from the registry.

python scripts/metrics_page.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedsim.evaluation import registry
from fedsim.evaluation.registry import MetricDescription

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
SECTIONS = {
    "What is measured": registry.MODEL_METRICS | registry.OVER_TIME,
    "Diagnostics": registry.DIAGNOSTICS,
    "Models of clients": {
        name: metric
        for name, metric in registry.PERSONAL_MODEL_METRICS.items()
        if name.startswith("personal_") or metric is registry.VALIDATED_CLIENTS_METRIC
    },
    "Work and time": registry.PROGRESS_COLUMNS | registry.WORK_COLUMNS | registry.CLOCK_COLUMNS,
}
BEFORE = {
    "What is measured": "A run has those of these columns that its data and model allow: accuracies need labels, "
    "`…_by_client` test samples that belong to clients, `validation_…` samples held out by `partition.validation`, "
    "distances a closed form or a performative shift. If several models are evaluated (`evaluate`), the columns of "
    "further ones have the prefix `global_` (the server's model), `client_mean_` (the mean of all clients' models) or "
    "`calibrated_` (the server's model with a [calibrated last layer](results.md#a-calibrated-last-layer)).",
    "Diagnostics": "Columns that [`diagnostics`](results.md#metrics-over-clients) adds, in addition to "
    "statistics over clients: `…_variance`, `…_jain`, `…_worst5`, `…_best10`, `…_absent`, `…_unseen`, "
    "`…_present` and `…_departed`, appended to the column of a mean over clients.",
    "Models of clients": "Columns that [`personal`](configuration.md#personal) adds. The prefix names the model: "
    "`personal_` (the client's personal model), `localized_` (the client's model after the local steps of the "
    "next round) or `global_` (the server's model).",
    "Work and time": "Columns that describe the run. Columns without a tag have no TensorBoard curve.",
}
METRICS_OF_USERS = """## User-defined metrics

`metrics=[f1_score]` adds `test_f1_score`, `train_f1_score` and `client_f1_score_worst10`, with the labels
*test f1 score*, *training f1 score* and *training f1 score, worst tenth of clients*, and tags such as
`f1_score/test_f1_score`. The metric itself, or `better`, states whether higher or lower values are better."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """All of it."""
    parts = [
        "# Metrics",
        "Written by `python scripts/metrics_page.py` from `fedsim.evaluation.registry`; do not edit.\n"
        "A metric has one name: the column of `metrics.csv` is also the name on the command line "
        "(`--metric`, `stop.metric`, `objective`),\nin `run.frame()`, and in Weights & Biases, MLflow and trackio. "
        "Pictures, HTML reports and LaTeX tables show its label, TensorBoard its tag.",
        "Means over clients weight them as the strategy's objective does: equally, or by data with\n"
        "`strategy.weighting=data`. Test metrics weight samples equally, except those by client. Columns of\n"
        "validation samples and of clients' own models weight clients equally.",
    ]
    for title, metrics in SECTIONS.items():
        parts += [f"## {title}", BEFORE[title], table(metrics)]
    return "\n\n".join([*parts, METRICS_OF_USERS]) + "\n"


def table(metrics: Mapping[str, MetricDescription]) -> str:
    """One line per metric."""
    lines = ["| column | label (unit) | better | TensorBoard tag | meaning |", "|---|---|---|---|---|"]
    for metric in metrics.values():
        tag = f"`{metric.tag}`" if metric.tag else "–"
        lines.append(
            f"| `{metric.column}` | {metric.heading} | {metric.better or '–'} | {tag} | {metric.description} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
