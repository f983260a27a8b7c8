"""A metric has one entry in the registry: pictures, tables, TensorBoard and metrics.csv take its names there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedsim import EvaluationOptions, Simulation, Tracking
from fedsim.data.datasets import Digits
from fedsim.evaluation import COLUMN_DESCRIPTIONS, registry
from fedsim.evaluation.columns import MEASURED_COLUMNS, is_higher_better
from fedsim.evaluation.personal import PERSONAL_COLUMNS
from fedsim.evaluation.registry import METRICS, UNKNOWN_DIRECTION_TEXT, describe_metric
from fedsim.models import Linear
from fedsim.run.tracking.metrics_csv import read_column_descriptions
from fedsim.studies.plots.html_report import report_html
from fedsim.studies.plots.style import metric_axis_label
from fedsim.studies.results.differences import load_runs

NO_CURVE = {"round", "seed", "samples", "seconds"}


@pytest.mark.parametrize("column", METRICS)
def test_an_entry_is_whole_and_all_take_it(column: str) -> None:
    metric = describe_metric(column)
    assert metric is METRICS[column]
    assert metric.column == column
    assert re.fullmatch(r"[a-z][a-z0-9_]*", column)
    assert metric.label
    assert "_" not in metric.label
    assert metric.description
    assert metric.better in ("higher", "lower", None)
    assert metric.unit in ("", "%", "s", "bytes", "rounds", "J")
    assert (metric.tag is None) == (column in NO_CURVE)
    assert metric.tag is None or metric.tag.endswith(f"/{column}")
    assert is_higher_better(column) == (metric.better == "higher")
    assert metric.heading.startswith(metric.label)
    assert metric_axis_label(column).replace(r"$\theta^{\mathrm{PS}}$", "θ^PS").replace(
        r"$\theta^{\mathrm{PO}}$", "θ^PO"
    ) == (metric.heading)
    assert {**PERSONAL_COLUMNS, **COLUMN_DESCRIPTIONS}.get(column, metric.description) == metric.description


def test_no_two_metrics_share_a_label_or_a_tag() -> None:
    for names in (
        [metric.label for metric in METRICS.values()],
        [metric.tag for metric in METRICS.values() if metric.tag],
    ):
        assert not [name for name, count in Counter(names).items() if count > 1]


def test_columns_of_a_file_are_those_of_the_registry_in_its_order() -> None:
    assert [*COLUMN_DESCRIPTIONS][:3] == ["round", "seed", "test_loss"]
    assert {**COLUMN_DESCRIPTIONS, **PERSONAL_COLUMNS}.keys() == METRICS.keys() - registry.DIAGNOSTICS.keys()
    assert list(MEASURED_COLUMNS) == list(registry.MODEL_METRICS)


@pytest.mark.parametrize(
    ("column", "heading", "tag", "better"),
    [
        (
            "client_mean_test_accuracy_by_client_worst5",
            "test accuracy, worst 5 % of clients, mean of all clients' models (%)",
            "diagnostics/client_mean_test_accuracy_by_client_worst5",
            "higher",
        ),
        (
            "validation_loss_variance",
            "validation loss, variance over clients",
            "diagnostics/validation_loss_variance",
            "lower",
        ),
        ("client_mse_worst10", "training mse, worst tenth of clients", "mse/client_mse_worst10", "lower"),
        ("test_f1_score", "test f1 score", "f1_score/test_f1_score", "higher"),
        (
            "newcomers personal_validation_loss",
            "validation loss, personal models, newcomers",
            "loss/newcomers personal_validation_loss",
            "lower",
        ),
        (
            "personal_validation_accuracy or localized_validation_accuracy",
            "validation accuracy, clients' own models (%)",
            "accuracy/personal_validation_accuracy or localized_validation_accuracy",
            "higher",
        ),
    ],
)
def test_names_that_are_made_of_others(column: str, heading: str, tag: str, better: str) -> None:
    found = describe_metric(column)
    assert (found.heading, found.tag, found.better) == (heading, tag, better)


def test_what_a_users_metric_means_says_which_way_is_better() -> None:
    meanings = {"test_x": "x of the whole test set; higher is better", "test_y": "y" + UNKNOWN_DIRECTION_TEXT}
    assert describe_metric("test_x").better == "lower"  # nothing is known
    assert describe_metric("test_x", meanings).better == "higher"
    assert describe_metric("test_y", meanings).better is None
    assert describe_metric("test_x", meanings).description == meanings["test_x"]


def test_a_runs_file_curves_and_report_have_these_names(tmp_path: Path) -> None:
    evaluation = EvaluationOptions(
        every=1, of=["global", "client_mean"], diagnostics=["fairness", "staleness", "utility"]
    )
    Simulation(Digits(), Linear, clients=4, rounds=2, evaluation=evaluation).run(
        tmp_path, tracking=Tracking(progress="none")
    )
    meanings = read_column_descriptions(tmp_path / "metrics.csv")
    assert "staleness_max" in meanings
    for column, meaning in meanings.items():
        assert METRICS[column].description == meaning if column in METRICS else "over" in meaning
    tags = EventAccumulator(str(tmp_path / "seed_0")).Reload().Tags()["scalars"]
    assert set(tags) == {tag for column in meanings if (tag := describe_metric(column).tag)}
    page = report_html(load_runs([tmp_path]))
    for column in load_runs([tmp_path])[0].metrics:
        assert f"<code>{column}</code>" in page
