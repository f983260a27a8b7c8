"""Metrics that a user adds, of test sets in several batches and of ragged clients: against formulas, or torchmetrics on
all outputs at once.
"""

from __future__ import annotations

import warnings

import numpy as np
import own_metrics as own
import pytest
import torch
from own_metrics import CLASSES, SEEDS, SIZES, Score, labelled, models_of, of, outputs_of
from torch import nn

from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets import Dataset
from fedsim.evaluation.metrics.tallies import StreamedMetric
from fedsim.models import Linear
from fedsim.models.losses import IGNORED_LABEL
from fedsim.strategies import FedAvg

import_torchvision()  # torchmetrics imports it, and it may need help
tm = pytest.importorskip("torchmetrics.functional")

CLASSIFIED = {  # metric → column, naive value of scores [B, C] and labels [B], which way is better
    "auroc": ("auroc", lambda p, y: own.macro(own.area, p, y), "higher"),
    "average_precision": ("average_precision", lambda p, y: own.macro(own.precision, p, y), "higher"),
    "f1": ({"name": "f1_score", "average": "macro", "column": "f1"},
           lambda p, y: own.macro_f1(p.argmax(1), y, CLASSES), "higher"),
    "top2": ({"name": "accuracy", "top_k": 2, "column": "top2"}, lambda p, y: own.top(2, p, y), "higher"),
    "perplexity": ("perplexity", lambda p, y: np.exp(-np.log(p[np.arange(len(y)), y]).mean()), "lower"),
    "jaccard_index": (
        "jaccard_index",
        lambda p, y: tm.jaccard_index(*map(torch.as_tensor, (p, y)), task="multiclass", num_classes=CLASSES), "higher"),
    "calibration_error": (
        {"name": "calibration_error", "n_bins": 7},
        lambda p, y: tm.calibration_error(
            *map(torch.as_tensor, (p, y)), task="multiclass", num_classes=CLASSES, n_bins=7), "lower"),
    "margin": ({"_target_": "own_metrics.margin", "scale": 2.0, "better": "higher"},
               lambda p, y: 2 * (np.log(p[np.arange(len(y)), y]) - np.log(p).mean(1)).mean(), "higher"),
    "Largest": (own.Largest, lambda p, y: -np.log(p[np.arange(len(y)), y]).min(), "lower"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*AUC.*")
def test_they_are_those_of_all_outputs_at_once():
    """Pooled over two batches, of every client, their mean and that of the worst tenth; none where there is none."""
    dataset = labelled()
    simulation = of(dataset, Linear, [metric for metric, _, _ in CLASSIFIED.values()])
    models = models_of(simulation)
    found = simulation.evaluator(models)
    without = of(dataset, Linear, []).evaluator(models)
    for name, values in without.metrics.items():
        np.testing.assert_array_equal(found.metrics[name], values)
    absent = 0
    for r, row in enumerate(models):
        test, train = (outputs_of(simulation, row, x).softmax(1).numpy() for x in (dataset.test_x, dataset.train_x))
        for column, (_, naive, better) in CLASSIFIED.items():
            pooled = found.metrics[f"test_{column}"][r]
            assert pooled == pytest.approx(float(naive(test, dataset.test_y.numpy())), abs=2e-7), column
            each = []
            for client in range(len(SIZES)):
                mine = (dataset.owners == client).numpy()
                each.append(float(naive(train[mine], dataset.train_y.numpy()[mine])))
            np.testing.assert_allclose(found.client_metrics[column][r], each, atol=2e-7, err_msg=column)
            assert found.metrics[f"train_{column}"][r] == pytest.approx(np.nanmean(each), abs=2e-7), column
            known = np.sort([v for v in each if not np.isnan(v)])
            tenth = len(known) // 10
            worst = known[:tenth] if better == "higher" else known[-tenth:]
            assert found.metrics[f"client_{column}_worst10"][r] == pytest.approx(worst.mean(), abs=2e-7), column
            absent += np.isnan(each).sum()
        halves = [
            own.macro(own.area, test[part], dataset.test_y.numpy()[part]) for part in (slice(1000), slice(1000, None))
        ]
        assert abs(np.mean(halves) - found.metrics["test_auroc"][r]) > 1e-5  # a mean over batches would be another
    assert absent > 3


def test_a_function_of_whole_sets_sees_them_whole():
    dataset = labelled()
    simulation = of(dataset, Linear, [own.spread, {"_target_": own.spread, "column": "again", "better": "higher"}])
    models = models_of(simulation)
    found = simulation.evaluator(models)
    for r, row in enumerate(models):
        output = outputs_of(simulation, row, dataset.test_x)
        assert found.metrics["test_spread"][r] == pytest.approx(own.spread(output, dataset.test_y), abs=1e-12)
    np.testing.assert_array_equal(found.metrics["test_spread"], found.metrics["test_again"])
    assert np.all(found.metrics["client_spread_worst10"] > found.metrics["client_again_worst10"])


def test_replicates_are_apart():
    """A seed's numbers are those it has alone, to rounding."""
    metrics = ["auroc", {"name": "f1_score", "average": "macro"}, own.spread, own.Largest]
    together = of(labelled(), Linear, metrics).run().history
    for place, seed in enumerate(SEEDS):
        alone = of(labelled(), Linear, metrics, seeds=(seed,)).run().history
        for row, other in zip(alone, together[place :: len(SEEDS)], strict=True):
            assert row["seed"] == other["seed"] == seed
            for name in (name for name in row if name != "seconds"):
                assert row[name] == pytest.approx(other[name], abs=1e-7), name


def test_clients_weigh_as_the_objective_does():
    dataset = labelled()
    simulation = of(dataset, Linear, ["auroc"], strategy=FedAvg(weighting="data"))
    found = simulation.evaluator(models_of(simulation))
    for each, mean in zip(found.client_metrics["auroc"], found.metrics["train_auroc"], strict=True):
        there = ~np.isnan(each)
        weights = np.array(SIZES)[there]
        assert mean == pytest.approx((each[there] * weights).sum() / weights.sum(), abs=1e-12)
        assert abs(mean - each[there].mean()) > 1e-3


def test_a_replicate_whose_outputs_are_no_numbers_has_none_and_spoils_no_other():
    simulation = of(labelled(), Linear, ["auroc", own.spread, own.margin])
    models = models_of(simulation)
    before = simulation.evaluator(models).metrics
    models[1] = torch.nan
    after = simulation.evaluator(models).metrics
    for name in (name for name in after if name.endswith(("auroc", "spread", "margin"))):
        np.testing.assert_array_equal(after[name][[0, 2]], before[name][[0, 2]])
        assert np.isnan(after[name][1]), name


def test_a_single_logistic_output_is_a_probability():
    """Whatever the scores of a batch are: those that all lie in [0, 1] are no probabilities."""
    data = labelled()
    y, test_y = (data.train_y > 1).long(), (data.test_y > 1).long()
    dataset = Dataset("two", data.train_x, y, data.test_x, test_y, classes=2, loss="logistic")
    metrics = ["auroc", "average_precision", "f1_score", "mean_squared_error"]
    macro = {"name": "f1_score", "task": "multiclass", "average": "macro", "column": "macro_f1"}
    simulation = of(dataset, Score, [*metrics, macro], loss="logistic")
    models = models_of(simulation)
    models[1] = torch.tensor([1e-3, 0, 0, 0, 0, 0.25])
    found = simulation.evaluator(models).metrics
    for r, row in enumerate(models):
        score = outputs_of(simulation, row, dataset.test_x)[:, 0].numpy()
        label, one = test_y.numpy(), 1 / (1 + np.exp(-score))
        for name, value in {
            "auroc": own.area(score, label),
            "average_precision": own.precision(score, label),
            "f1_score": 2 * np.sum((score > 0) & (label == 1)) / (np.sum(score > 0) + label.sum()),
            "macro_f1": own.macro_f1((score > 0).astype(int), label, 2),
            "mean_squared_error": np.mean((one - label) ** 2),
        }.items():
            assert found[f"test_{name}"][r] == pytest.approx(value, abs=2e-7), name


def test_two_classes_may_be_taken_as_positive_and_negative():
    data = labelled()
    dataset = Dataset("two", data.train_x, data.train_y % 2, data.test_x, data.test_y % 2, classes=2)
    simulation = of(dataset, Linear, [{"name": "average_precision", "task": "binary"}])
    models = models_of(simulation)
    found = simulation.evaluator(models).metrics["test_average_precision"]
    for r, row in enumerate(models):
        p = outputs_of(simulation, row, dataset.test_x).softmax(1)[:, 1].numpy()
        assert found[r] == pytest.approx(own.precision(p, dataset.test_y.numpy()), abs=2e-7)


class Tokens(nn.Module):
    def __init__(self, shape=None, classes: int = 6) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3), nn.Linear(3, 6)

    def forward(self, tokens):
        return self.head(self.table(tokens).cumsum(1))


def test_labels_of_positions_count_where_there_are_any():
    """Perplexity is exp of the mean over all positions that have a label, not over sequences."""
    draw = np.random.default_rng(3)
    x, y = (torch.as_tensor(draw.integers(0, 6, (1100, 7))) for _ in range(2))
    for row, length in zip(y, draw.integers(1, 8, 1100), strict=True):
        row[length:] = IGNORED_LABEL
    dataset = Dataset("text", x[:50], y[:50], x[50:], y[50:], classes=6)
    macro = {"name": "f1_score", "average": "macro"}
    simulation = of(dataset, Tokens, ["perplexity", macro, "jaccard_index", "auroc"])
    models = models_of(simulation)
    found = simulation.evaluator(models).metrics
    for r, row in enumerate(models):
        scores, labels = outputs_of(simulation, row, x[50:]).flatten(0, 1), y[50:].flatten()
        there = labels != IGNORED_LABEL
        p, labels = scores[there].softmax(1).numpy(), labels[there].numpy()
        for name, value in {
            "perplexity": np.exp(-np.log(p[np.arange(len(labels)), labels]).mean()),
            "f1_score": own.macro_f1(p.argmax(1), labels, 6),
            "jaccard_index": np.mean(
                [
                    np.sum((p.argmax(1) == c) & (labels == c)) / np.sum((p.argmax(1) == c) | (labels == c))
                    for c in range(6)
                ]
            ),
            "auroc": tm.auroc(torch.as_tensor(p), torch.as_tensor(labels), task="multiclass", num_classes=6).item(),
        }.items():
            assert found[f"test_{name}"][r] == pytest.approx(value, abs=1e-6), name  # fmt: skip


def test_several_labels_of_a_sample():
    draw = np.random.default_rng(4)
    x, y = torch.as_tensor(draw.standard_normal((1100, 5))), torch.as_tensor(draw.integers(0, 2, (1100, 3))).double()
    y[50:, 2] = 0  # a label that nobody has in the test set
    dataset = Dataset("several", x[:50], y[:50], x[50:], y[50:], classes=3, loss="multi_label")

    def three(shape=None):
        return Score(outputs=3)

    metrics = [
        "auroc",
        {"name": "auroc", "average": "micro", "column": "micro"},
        {"name": "f1_score", "average": "macro"},
    ]
    simulation = of(dataset, three, metrics)
    models = models_of(simulation)
    found = simulation.evaluator(models).metrics
    for r, row in enumerate(models):
        p, label = outputs_of(simulation, row, x[50:]).sigmoid().numpy(), y[50:].numpy()
        areas = [own.area(p[:, c], label[:, c]) for c in range(3)]
        assert np.isnan(areas[2])
        assert found["test_auroc"][r] == pytest.approx(np.mean(areas[:2]), abs=2e-7)
        assert found["test_micro"][r] == pytest.approx(own.area(p.ravel(), label.ravel()), abs=2e-7)
        f1 = tm.f1_score(
            *map(torch.as_tensor, (p, label.astype(int))), task="multilabel", num_labels=3, average="macro"
        )
        assert found["test_f1_score"][r] == pytest.approx(f1.item(), abs=2e-7)


@pytest.mark.parametrize(("outputs", "flat"), [(1, True), (1, False), (2, False)], ids=["B", "B1", "Bk"])
def test_numbers_as_targets(outputs: int, flat: bool):
    draw = np.random.default_rng(5)
    x = torch.as_tensor(draw.standard_normal((1100, 5)))
    y = torch.as_tensor(draw.standard_normal((1100, 2)))[:, : outputs if outputs > 1 else 1]
    y = y[:, 0] if flat else y
    dataset = Dataset("numbers", x[:50], y[:50], x[50:], y[50:], loss="squared")

    def model(shape=None):
        return Score(outputs=outputs, flat=flat)

    root = {"name": "mean_squared_error", "squared": False, "column": "rmse"}
    simulation = of(dataset, model, ["mean_squared_error", "mean_absolute_error", "r2_score", root], loss="squared")
    models = models_of(simulation)
    found = simulation.evaluator(models)
    assert simulation.run().final["test_mean_squared_error"][0] < found.metrics["test_mean_squared_error"].min()
    for r, row in enumerate(models):
        predicted = outputs_of(simulation, row, x[50:]).numpy().reshape(1050, -1)
        target = y[50:].numpy().reshape(1050, -1)
        error = predicted - target
        for name, value in {
            "mean_squared_error": (error**2).mean(),
            "mean_absolute_error": np.abs(error).mean(),
            "rmse": (error**2).mean() ** 0.5,
            "r2_score": (1 - (error**2).sum(0) / ((target - target.mean(0)) ** 2).sum(0)).mean(),
        }.items():
            assert found.metrics[f"test_{name}"][r] == pytest.approx(value, rel=1e-6), name
    assert np.all(found.metrics["client_r2_score_worst10"] < found.metrics["train_r2_score"])  # both below zero


def test_a_score_that_one_sample_does_not_have_is_none_of_its_client():
    data = labelled(20)
    dataset = Dataset("numbers", data.train_x, data.train_x[:, :1], data.test_x, data.test_x[:, :1], loss="squared")
    dataset.owners = data.owners
    simulation = of(dataset, Score, ["r2_score"], loss="squared")
    values = simulation.evaluator(models_of(simulation)).client_metrics["r2_score"]
    np.testing.assert_array_equal(np.isnan(values), np.tile(np.array(SIZES) == 1, (len(SEEDS), 1)))


def test_nobody_is_warned_of_every_client_that_lacks_a_class():
    simulation = of(labelled(20), Linear, ["auroc", "average_precision"])
    with warnings.catch_warnings(record=True) as said:
        simulation.evaluator(models_of(simulation))
    assert not said


def test_a_metric_of_torchmetrics_does_not_ask_other_ranks():
    """All of them evaluate the whole test set: together they would count every sample several times."""
    import torchmetrics

    def others(value, group=None):
        pytest.fail("it asks other ranks")

    class Samples(torchmetrics.Metric):
        def __init__(self):
            super().__init__(distributed_available_fn=lambda: True, dist_sync_fn=others)
            self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, predictions, target):
            self.count += len(target)

        def compute(self):
            return self.count

    simulation = of(labelled(20), Linear, [Samples])
    assert simulation.evaluator(models_of(simulation)).metrics["test_Samples"].tolist() == [20.0] * len(SEEDS)


def test_a_metric_of_torchmetrics_moves_to_the_device_of_the_outputs():
    """The device 'meta' stands for a GPU; objects without a device stay what they are."""

    class Metric:
        device = torch.device("cpu")

        def to(self, device):
            moved = Metric()
            moved.device = device
            return moved

        def update(self, predictions, target):
            assert self.device == predictions.device

    accumulator = StreamedMetric(Metric())
    first = accumulator.metric
    accumulator.update(torch.zeros(2), torch.zeros(2))
    assert accumulator.metric is first
    accumulator.update(torch.zeros(2, device="meta"), torch.zeros(2, device="meta"))
    assert accumulator.metric.device.type == "meta"
