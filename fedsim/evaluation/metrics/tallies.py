"""Three kinds of accumulators, which compute a metric of a whole set from its batches."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError

MetricFunction = Callable[[Tensor, Tensor], Any]  # (output, target) → a number, or one per sample [B]


class MetricAccumulator(ABC):
    """One metric of one set."""

    def new_like(self) -> MetricAccumulator:
        """A new tally of the same metric, for another set."""
        accumulator = copy.copy(self)
        accumulator.reset()
        return accumulator

    @abstractmethod
    def reset(self) -> None:
        """Clear the accumulated values."""

    @abstractmethod
    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Add outputs and targets [B, …]; only `PerSampleMetric` accepts weights [B]."""

    @abstractmethod
    def value(self) -> Tensor:
        """[] float64, the metric of all batches so far."""

    def stored_bytes(self) -> int:
        """Bytes of stored outputs and targets."""
        return 0


class PerSampleMetric(MetricAccumulator):
    """The mean of a function with one number per sample."""

    def __init__(self, function: MetricFunction) -> None:
        self.function = function
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0

    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        values = torch.as_tensor(self.function(output, target), device=output.device).to(torch.float64)
        weight = torch.ones_like(values) if weight is None else weight.to(torch.float64)
        self.total, self.weight = self.total + (values * weight).sum(), self.weight + weight.sum()

    def value(self) -> Tensor:
        return torch.as_tensor(self.total / self.weight)


class WholeSetMetric(MetricAccumulator):
    """A function of a whole set: outputs are stored until the set is complete."""

    def __init__(self, function: MetricFunction) -> None:
        self.function = function
        self.reset()

    def reset(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        self.pairs.append((output, target))

    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for pair in self.pairs for tensor in pair)

    def value(self) -> Tensor:
        output, target = (torch.cat(batches) for batches in zip(*self.pairs, strict=True))
        return scalar_result(self.function(output, target))


class StreamedMetric(MetricAccumulator):
    """An object with `reset`, `update(output, target)` and `compute()`, such as a metric of torchmetrics."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def new_like(self) -> StreamedMetric:
        accumulator = copy.copy(self)
        accumulator.metric = copy.deepcopy(self.metric)
        accumulator.reset()
        return accumulator

    def reset(self) -> None:
        self.metric.reset()

    def update(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        self.update_metric(output, target)

    def update_metric(self, predictions: Tensor, target: Tensor) -> None:
        """Add a batch; a metric of torchmetrics moves to its device first."""
        device = predictions.device
        if getattr(self.metric, "device", device) != device and hasattr(self.metric, "to"):
            self.metric = self.metric.to(device)
        self.metric.update(predictions, target)

    def value(self) -> Tensor:
        return scalar_result(self.metric.compute())

    def stored_bytes(self) -> int:
        states = getattr(self.metric, "metric_state", {}).values()  # lists in torchmetrics' classes
        return sum(tensor.nbytes for state in states if isinstance(state, list) for tensor in state)


def scalar_result(result: Any) -> Tensor:
    """[] float64 of a metric's result.

    Raises:
        ConfigError: it is not a single number.
    """
    try:
        value = result if isinstance(result, Tensor) else torch.as_tensor(result, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"it returns a {type(result).__name__} instead of a number") from None
    if value.numel() != 1 or value.is_complex():
        raise ConfigError(f"it returns shape {list(value.shape)} instead of a number")
    return value.detach().reshape(()).to(torch.float64)
