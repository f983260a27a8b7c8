"""Metrics that cannot be measured are refused before anything is written, in one sentence that says why."""

from __future__ import annotations

import sys

import own_metrics as own
import pytest
from own_metrics import CLASSES, Score, labelled, models_of, of, outputs_of

from fedsim import ConfigError, Simulation
from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.evaluation.metrics import collection
from fedsim.models import Linear
from fedsim.shift import Contribution

import_torchvision()  # torchmetrics imports it, and it may need help
pytest.importorskip("torchmetrics")

REFUSED = {
    "unknown": (["f1_scor"], "'f1_scor' is not a metric of torchmetrics .*; did you mean 'f1_score'"),
    "of strings": (["bleu_score"], "'bleu_score' is not a metric"),
    "argument": ([{"name": "f1_score", "avrage": "macro"}], "no argument 'avrage'; did you mean 'average'"),
    "value": ([{"name": "f1_score", "average": "median"}], r"f1_score does not take average='median' \("),
    "no option": ([{"name": "accuracy", "top_k": 9, "column": "x"}], r"accuracy does not take top_k=9 \("),
    "several numbers": ([{"name": "recall", "average": "none"}], "returns shape .* instead of a number"),
    "per class": ([{"name": "auroc", "average": "none"}], "one number per class; set average=macro"),
    "a curve": (["roc"], "returns a tuple instead of a number"),
    "other task": (["mean_squared_error"], r"does not fit outputs \[4\] and targets \[\] of dataset=labels"),
    "twice": (["auroc", "auroc"], "auroc is the name of two metrics; choose another with"),
    "taken": (["accuracy"], "accuracy is the name of a built-in column"),
    "taken too": ([{"name": "recall", "column": "accuracy_median"}], "accuracy_median is the name of a built-in"),
    "no name": ([{"name": "recall", "column": "a b"}], "column='a b' must consist of letters"),
    "no direction": ([{"name": "recall", "better": "up"}], "better='up' is unknown; choose one of higher, lower"),
    "no list": ("auroc", "metrics='auroc' must be a list of names of torchmetrics' metrics"),
    "no metric": ([1], "metrics: 1 is not a metric; give names of"),
    "both": ([{"name": "recall", "_target_": "own_metrics.spread"}], "is not a metric; give names of"),
    "nowhere": ([{"_target_": "nowhere.at_all"}], "_target_='nowhere.at_all' cannot be imported"),
    "no function": ([{"_target_": "torch.pi"}], "_target_='torch.pi' is not a metric that configurations may build"),
    "own argument": ([{"_target_": "own_metrics.margin", "width": 3}], r"margin\(width=3\) does not fit .*'width'"),
    "writes": ([own.sloppy], "modifies its arguments; use a copy"),
    "draws": ([own.by_chance], "returns a different number every time"),
    "company": ([own.ranks], "depends on the others; return one number for the whole set"),
    "many": ([own.per_class], r"returns shape \[4\] instead of a number"),
    "mere object": ([{"_target_": "own_metrics.Largest", "powr": 2}], "'powr'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_sentence(case: str):
    metrics, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said) as refused:
        of(labelled(20), Linear, metrics)
    assert str(refused.value).startswith("metrics")
    assert "\n" not in str(refused.value)


def test_a_function_that_fails_on_a_clients_samples_is_named():
    simulation = of(labelled(20), Linear, [own.picky])
    with pytest.raises(ConfigError, match=r"metrics: own_metrics\.picky failed: a class is missing"):
        simulation.run()


def test_labels_are_needed_for_metrics_of_labels():
    data = labelled(20)
    dataset = Dataset("numbers", data.train_x, data.train_x[:, 0], loss="squared", owners=data.owners)
    for name in ("auroc", "perplexity"):
        with pytest.raises(ConfigError, match=f"metrics: {name} "):
            of(dataset, Score, [name], loss="squared")


def test_without_torchmetrics_the_extra_is_named_and_functions_still_work(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"metrics: auroc .* not installed; pip install 'fedsim-torch\[metrics\]'"):
        of(labelled(20), Linear, ["auroc"])
    assert "test_margin" in of(labelled(20), Linear, [own.margin]).evaluator.user_metric_columns()


def test_more_outputs_than_may_be_kept_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Three replicates' 20 outputs: four scores and a label of 8 bytes; calibration keeps two numbers of each."""
    monkeypatch.setattr(collection, "MAX_STORED_BYTES", 8 * 3 * 20 * (CLASSES + 1) - 1)
    bounded = {"name": "auroc", "thresholds": 50}
    of(labelled(20), Linear, [bounded, own.margin, own.Largest, "calibration_error"])
    for metric, remedy in (("auroc", "add thresholds=200"), (own.spread, r"return one number per sample, \[B\]")):
        with pytest.raises(ConfigError, match=f"GiB for the test set's 60 outputs, more than 1; {remedy}"):
            of(labelled(20), Linear, [metric])
    monkeypatch.setattr(collection, "MAX_STORED_BYTES", 8 * 3 * 20 * (CLASSES + 1))
    of(labelled(20), Linear, ["auroc", own.spread])


def test_where_a_shift_weighs_samples_only_numbers_per_sample_will_do():
    """Groups of stored samples weigh by what is drawn to the model."""
    dataset = labelled(20)

    def simulation(metric) -> Simulation:
        shift = Contribution("loss", constant=0.5)
        return of(dataset, Linear, [metric], shift=shift, partition=Natural())

    weighed = simulation(own.margin)
    models = models_of(weighed)
    found = weighed.evaluator(models).client_metrics["margin"]
    batch = weighed.evaluator._shifted_batch(
        weighed.evaluator._client_batch(weighed.evaluator.samples, slice(0, 3), 0), models
    )
    for r, row in enumerate(models):
        for i in range(3):
            x, y, weight = (batch[name][r, i] for name in ("x", "y", "weight"))
            values = own.margin(outputs_of(weighed, row, x), y)
            assert found[r, i] == pytest.approx((values * weight).sum().item() / weight.sum().item(), abs=1e-12)
    with pytest.raises(
        ConfigError, match="the shift gives them weights; use a function that returns one number per sample"
    ):
        simulation("auroc").run()
