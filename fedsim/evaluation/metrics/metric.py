"""One metric, checked on two and on three samples before it is used."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.core import targets
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import UNKNOWN_DIRECTION_TEXT
from fedsim.evaluation.metrics.entries import METRIC_DIRECTIONS, RequestedMetric
from fedsim.evaluation.metrics.named import PredictionTask, named_metric, prepare_torchmetrics_import
from fedsim.evaluation.metrics.tallies import (
    MetricAccumulator,
    PerSampleMetric,
    StreamedMetric,
    WholeSetMetric,
    scalar_result,
)
from fedsim.trainer.device_memory import is_out_of_memory


def _is_metric(candidate: Any) -> bool:
    """Return whether an object is a function of outputs and targets."""
    return list(inspect.signature(candidate).parameters)[:2] == ["preds", "target"]


# The modules of torchmetrics whose metrics need outputs and targets only; others download models.
TORCHMETRICS_DOMAINS = ("classification", "regression", "segmentation", "nominal", "clustering", "text.perplexity")
METRIC_KIND = targets.ComponentKind(
    "a metric",
    modules=tuple(
        f"torchmetrics.{prefix}{domain}" for prefix in ("", "functional.") for domain in TORCHMETRICS_DOMAINS
    ),
    reexporting_modules=(
        "torchmetrics",
        "torchmetrics.functional",
        "torchmetrics.text",
        "torchmetrics.functional.text",
    ),
    is_builder_function=_is_metric,
    built_in_bases=(torch.nn.Module,),
    allows_instances=True,
)


@dataclass
class Metric:
    """One checked metric.

    Attributes:
        column: its name in columns.
        label: the metric as written by a user.
        better_direction: 'higher' or 'lower'; None if unknown.
        accumulator: accumulator for one set, which is copied for further sets.
        min_samples: number of samples below which a set has no value.
        bytes_per_sample: stored bytes per sample of a set.
    """

    column: str
    label: str
    better_direction: str | None
    accumulator: MetricAccumulator
    min_samples: int = 1
    bytes_per_sample: float = 0

    @property
    def direction(self) -> str:
        """The direction, in words at the end of a column's description."""
        return f"; {self.better_direction} is better" if self.better_direction else UNKNOWN_DIRECTION_TEXT


def build_metric(entry: RequestedMetric, task: PredictionTask, output: Tensor, target: Tensor, dataset: str) -> Metric:
    """Build the metric and check it on two and on three samples."""
    if entry.name is not None:
        accumulator: MetricAccumulator = named_metric(entry.name, entry.arguments, task, dataset)
        implementation = getattr(accumulator, "metric", None)
    else:
        implementation = _user_implementation(entry)
        streams = all(callable(getattr(implementation, method, None)) for method in ("reset", "update", "compute"))
        if not streams and not callable(implementation):
            raise ConfigError("its objects are not callable and do not have reset, update and compute")
        accumulator = (
            StreamedMetric(implementation).new_like()
            if streams
            else _function_accumulator(implementation, output, target)
        )
    if isinstance(accumulator, StreamedMetric):
        _disable_metric_sync(accumulator.metric, output.device)
    original_tensors = output.clone(), target.clone()
    first_value, second_value = (_accumulated_value(accumulator, output, target) for _ in range(2))
    if not all(
        torch.equal(tensor_after, tensor_before)
        for tensor_after, tensor_before in zip((output, target), original_tensors, strict=True)
    ):
        raise ConfigError("it modifies its arguments; use a copy")
    if not torch.allclose(first_value, second_value, rtol=1e-5, atol=1e-8, equal_nan=True):
        raise ConfigError("it returns a different number every time")
    minimum_samples, bytes_each = 1, accumulator.stored_bytes() / len(output)
    try:
        _accumulated_value(accumulator, output[:1], target[:1])
    except Exception:  # a score that is undefined for a single sample
        minimum_samples = 2
    direction_by_flag = {True: METRIC_DIRECTIONS[0], False: METRIC_DIRECTIONS[1]}
    declared_direction = getattr(getattr(implementation, "func", implementation), "higher_is_better", None)
    better_direction = entry.better_direction or direction_by_flag.get(declared_direction)  # type: ignore[arg-type]
    return Metric(entry.column, entry.label, better_direction, accumulator, minimum_samples, bytes_each)


def _user_implementation(entry: RequestedMetric) -> Any:
    """A callable or object of the user, with its arguments."""
    target = entry.target
    if isinstance(target, str):
        try:
            if target.startswith("torchmetrics."):
                prepare_torchmetrics_import()
            target = targets.resolve_target("metrics: _target_", target, METRIC_KIND)
        except ConfigError:
            raise
        except Exception as error:  # a module may raise anything
            raise ConfigError(f"metrics: _target_={entry.target!r} cannot be imported ({error})") from error
    if not callable(target):
        raise ConfigError(f"metrics: _target_={entry.target!r} is a {type(target).__name__}; give a function or class")
    if inspect.isclass(target):
        return target(**entry.arguments)
    return functools.partial(target, **entry.arguments) if entry.arguments else target


def _function_accumulator(function: Callable[..., Any], output: Tensor, target: Tensor) -> MetricAccumulator:
    """A function of samples, if it returns one number per sample; else of whole sets."""
    index_sets = (torch.arange(2, device=output.device), torch.tensor([0, 1, 0], device=output.device))
    results = [function(output[indices], target[indices]) for indices in index_sets]
    if [getattr(value, "shape", None) for value in results] != [(2,), (3,)]:
        scalar_result(results[0])
        return WholeSetMetric(function)
    value_of_two, value_of_three = (torch.as_tensor(value).to(torch.float64) for value in results)
    if not torch.allclose(value_of_two, value_of_three[:2], rtol=1e-5, atol=1e-8, equal_nan=True):
        raise ConfigError("its value for a sample depends on the others; return one number for the whole set")
    return PerSampleMetric(function)


def _disable_metric_sync(metric: Any, device: torch.device) -> None:
    """Disable the synchronisation of a metric, since all ranks evaluate the whole set."""
    for name in ("sync_on_compute", "_to_sync"):
        if hasattr(metric, name):
            setattr(metric, name, False)
    if isinstance(metric, torch.nn.Module):
        metric.to(device)


def _accumulated_value(accumulator: MetricAccumulator, output: Tensor, target: Tensor) -> Tensor:
    accumulator.reset()
    accumulator.update(output, target)
    return accumulator.value()


@contextlib.contextmanager
def error_context(sentence: str) -> Iterator[None]:
    """Raise a metric's error as a ConfigError that starts with this sentence."""
    with torch.no_grad():
        try:
            yield
        except Exception as error:  # a user's function may raise anything
            no_room = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if no_room or (isinstance(error, ConfigError) and str(error).startswith("metrics: ")):
                raise
            raise ConfigError(f"{sentence}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
