"""Metrics of torchmetrics by the names of its functions, with outputs and targets in the required format. The class
that belongs to each function is used, since it processes a set in batches and has a direction. The task and the numbers
of classes or labels are those of the run. Scores are converted to probabilities in double precision here, since
torchmetrics interprets a batch of scores that happen to lie in [0, 1] as probabilities.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.torchvision_import import import_torchvision
from fedsim.evaluation.metrics.tallies import StreamedMetric
from fedsim.models.losses import IGNORED_LABEL

BINARY, MULTICLASS, MULTILABEL = "binary", "multiclass", "multilabel"
OUTPUT_TARGET_PARAMETERS = (
    ["preds", "target"],
    ["preds", "targets"],
)  # parameters of a function of outputs and targets
UNSETTABLE_ARGUMENTS = ("validate_args", "sync_on_compute")  # arguments that a user cannot set


@dataclass(frozen=True)
class PredictionTask:
    """The task given by outputs and targets.

    Attributes:
        kind: 'binary', 'multiclass' or 'multilabel'; None for regression.
        size: number of classes, labels or targets.
        positions: whether labels belong to positions, some of which may have none.
    """

    kind: str | None = None
    size: int = 1
    positions: bool = False

    @classmethod
    def from_tensors(cls, output: Tensor, target: Tensor, labelled: bool) -> PredictionTask:
        """The task of outputs [B, …, C], [B, …, 1] or [B, k] and targets [B, …]; `labelled`: whether targets are
        labels.
        """
        if not labelled:
            return cls(None, output[0].numel())
        if target.is_floating_point() and target.dim() > 1:
            return cls(MULTILABEL, output.shape[-1])
        kind = BINARY if output.shape[-1] == 1 else MULTICLASS
        return cls(kind, max(2, output.shape[-1]), target.dim() > 1)

    def probabilities(self, output: Tensor, metric_task: str | None) -> Tensor:
        """Return probabilities in the form that the metric's task needs: [B, …], [B, k] or [B, C, …] float64."""
        scores = output.to(torch.float64)
        if self.kind == MULTILABEL:
            return scores.sigmoid()
        if self.kind == BINARY:
            positive_probability = scores[..., 0].sigmoid()
            return (
                torch.stack([1 - positive_probability, positive_probability], 1)
                if metric_task == MULTICLASS
                else positive_probability
            )
        class_probabilities = scores.softmax(-1)
        return (
            class_probabilities[..., 1]
            if metric_task == BINARY and self.size == 2
            else class_probabilities.movedim(-1, 1)
        )


class TorchMetric(StreamedMetric):
    """A metric of torchmetrics.

    Args:
        metric: an object of its class.
        task: of the run.
        metric_task: task of the metric.
        scores: whether it needs scores [B, positions, C]: perplexity.
    """

    def __init__(self, metric: Any, task: PredictionTask, metric_task: str | None, scores: bool) -> None:
        super().__init__(metric)
        self.task, self.metric_task, self.scores = task, metric_task, scores

    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        self.update_metric(*self.torchmetrics_inputs(output, target))

    def torchmetrics_inputs(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions and targets in the shapes that torchmetrics needs; contiguous, since it uses views."""
        if self.task.kind is None:
            matrices = (value.to(torch.float64).reshape(len(value), -1) for value in (output, target))
            preds, target = (value[:, 0] if value.shape[1] == 1 else value for value in matrices)
            return preds.contiguous(), target.contiguous()
        target = (target > 0.5).to(torch.int64) if target.is_floating_point() else target.to(torch.int64)
        if self.scores:
            return output.to(torch.float64).reshape(len(output), -1, output.shape[-1]), target.reshape(len(output), -1)
        return self.task.probabilities(output, self.metric_task).contiguous(), target


class RankedTorchMetric(TorchMetric):
    """AUROC or average precision, which is undefined for classes with no positive or no negative samples. torchmetrics
    returns 0 in that case, which would bias means over clients that lack classes. Averages here are over classes for
    which it is defined.

    Args:
        average: over classes, 'macro' or 'weighted' by their samples; None for a single score.
        negatives: whether it needs negative samples too, as AUROC does.
    """

    def __init__(
        self, metric: Any, task: PredictionTask, metric_task: str | None, average: str | None, negatives: bool
    ) -> None:
        super().__init__(metric, task, metric_task, scores=False)
        self.average, self.negatives = average, negatives
        self._reset_counts()

    def _reset_counts(self) -> None:
        self.positive: Tensor | int = 0
        self.count: Tensor | int = 0

    def reset(self) -> None:
        super().reset()
        self._reset_counts()

    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        preds, target = self.torchmetrics_inputs(output, target)
        self.update_metric(preds, target)
        valid_mask = target != (self.metric.ignore_index if self.metric.ignore_index is not None else IGNORED_LABEL)
        if self.average is None:
            positive, count = (target == 1).sum(), valid_mask.sum()
        elif self.metric_task == MULTICLASS:
            positive, count = torch.bincount(target[valid_mask], minlength=preds.shape[1]), valid_mask.sum()
        else:
            positive, count = ((target == 1) & valid_mask).sum(0), valid_mask.sum(0)
        self.positive, self.count = self.positive + positive, self.count + count

    def value(self) -> Tensor:
        positive = torch.as_tensor(self.positive)
        is_defined = (positive > 0) & (positive < self.count) if self.negatives else positive > 0
        class_scores = self.metric.compute().to(torch.float64)
        weight = is_defined * (positive if self.average == "weighted" else torch.ones_like(positive))
        return (torch.where(is_defined, class_scores, 0) * weight).sum() / weight.sum()


RANKED_METRIC_NEEDS_NEGATIVES = {"auroc": True, "average_precision": False}  # name → whether it needs negative samples


def named_metric(name: str, settings: Mapping[str, Any], task: PredictionTask, dataset: str) -> StreamedMetric:
    """The metric for a task.

    Raises:
        ConfigError: unknown name or argument, or torchmetrics is not installed.
    """
    function, metric_class = _lookup_metric(name)
    argument_names = [
        key for key in list(inspect.signature(function).parameters)[2:] if key not in UNSETTABLE_ARGUMENTS
    ]
    _check_arguments(name, settings, argument_names)
    if task.kind is None and "task" in argument_names:
        raise ConfigError(f"metrics: {name} needs labels, but the targets of dataset={dataset} are not labels")
    if name == "perplexity" and task.kind != MULTICLASS:
        raise ConfigError(
            f"metrics: perplexity needs scores of several classes, which models for dataset={dataset} do not have"
        )
    metric_task = settings.get("task", task.kind)
    filled_arguments = _task_arguments(metric_class, argument_names, task, metric_task)
    arguments = {**filled_arguments, **settings}

    def build(**constructor_options: Any) -> Any:
        try:
            instance = metric_class(**(arguments | constructor_options))
        except (TypeError, ValueError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            argument_text = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            raise ConfigError(f"metrics: {name} does not take {argument_text or 'this task'} ({reason})") from error
        return instance.set_dtype(torch.float64)

    metric = build()
    if name not in RANKED_METRIC_NEEDS_NEGATIVES:
        return TorchMetric(metric, task, metric_task, name == "perplexity")
    average = None if metric_task == BINARY else arguments.get("average", "macro")
    if average in ("none", None) and metric_task != BINARY:
        raise ConfigError(f"metrics: {name} with average={average} returns one number per class; set average=macro")
    if average == "micro":
        return RankedTorchMetric(metric, task, metric_task, None, RANKED_METRIC_NEEDS_NEGATIVES[name])
    if average:  # per class, since the mean must exclude classes without samples
        metric = build(average="none")
    return RankedTorchMetric(metric, task, metric_task, average, RANKED_METRIC_NEEDS_NEGATIVES[name])


def _check_arguments(name: str, given_arguments: Mapping[str, Any], argument_names: list[str]) -> None:
    for key in given_arguments:
        if key not in argument_names:
            alternatives = f"; it has {', '.join(argument_names)}" if argument_names else ""
            raise ConfigError(
                f"metrics: {name} has no argument "
                f"{key!r}{checks.nearest_name_hint(key, argument_names) or alternatives}"
            )


def _task_arguments(
    metric_class: Any, argument_names: list[str], task: PredictionTask, metric_task: str | None
) -> dict[str, Any]:
    """The metric's arguments that follow from the task."""
    filled_arguments: dict[str, Any] = {"task": task.kind}
    if metric_task == MULTICLASS:
        filled_arguments["num_classes"] = task.size
    if metric_task == MULTILABEL:
        filled_arguments["num_labels"] = task.size
    if task.positions:
        filled_arguments["ignore_index"] = IGNORED_LABEL
    names = set(argument_names)
    if task.kind is None and "num_outputs" in inspect.signature(metric_class).parameters.keys() - names:
        # a function of torchmetrics infers the number of outputs, its class needs it as argument
        filled_arguments["num_outputs"] = task.size
        names.add("num_outputs")
    return {key: value for key, value in filled_arguments.items() if key in names and value is not None}


def prepare_torchmetrics_import() -> None:
    """Prepare the import of torchmetrics: it imports torchvision, which may need a workaround, and it repeats a warning
    for every client that lacks a class.
    """
    import_torchvision()
    warnings.filterwarnings("ignore", module=r"torchmetrics\.")


def _lookup_metric(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function of torchmetrics with this name, and its class."""
    try:
        prepare_torchmetrics_import()
        import torchmetrics.classification
        import torchmetrics.functional
        import torchmetrics.regression
        import torchmetrics.text
    except ImportError as error:
        raise ConfigError(
            f"metrics: {name} is a metric of torchmetrics, which is not installed; pip install "
            "'fedsim-torch[metrics]', or use your own function with _target_"
        ) from error
    classes = {
        class_name.lower(): getattr(package, class_name)
        for package in (torchmetrics.classification, torchmetrics.regression)
        for class_name in torchmetrics.__all__
        if hasattr(package, class_name)
    } | {"perplexity": torchmetrics.text.Perplexity}
    functions = {}
    for function_name in torchmetrics.functional.__all__:
        function, metric_class = (
            getattr(torchmetrics.functional, function_name),
            classes.get(function_name.replace("_", "")),
        )
        if metric_class is not None and list(inspect.signature(function).parameters)[:2] in OUTPUT_TARGET_PARAMETERS:
            functions[function_name] = function, metric_class
    if name not in functions:
        suggestion_text = checks.nearest_name_hint(name, functions) or f"; it has {', '.join(functions)}"
        raise ConfigError(f"metrics: {name!r} is not a metric of torchmetrics for outputs and targets{suggestion_text}")
    return functions[name]
