"""The user-defined metrics of a run, on test sets and on single clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.samples import ClientData
from fedsim.evaluation.metrics.entries import METRIC_DIRECTIONS, parse_metrics
from fedsim.evaluation.metrics.metric import Metric, build_metric, error_context
from fedsim.evaluation.metrics.named import RANKED_METRIC_NEEDS_NEGATIVES, PredictionTask
from fedsim.evaluation.metrics.tallies import PerSampleMetric
from fedsim.models import StatelessModel

MAX_STORED_BYTES = 2**30  # bytes of outputs that each metric of a whole test set may store
WORST_CLIENTS_DIVISOR = 10  # the worst clients are one in this many


class UserMetrics:
    """The metrics that a user adds to losses and accuracies.

    Args:
        metric_config: see `EvaluationOptions.metrics`.
        model, data: of the run.

    Raises:
        ConfigError: a metric is unknown, has other arguments, or does not fit the run's outputs and targets.
    """

    def __init__(self, metric_config: Any, model: StatelessModel, data: ClientData) -> None:
        self.metrics: list[Metric] = []
        if not (metric_entries := parse_metrics(metric_config)):
            return
        pair, federation, dataset = data.two_samples(model.dtype), data.federation, data.dataset
        row = model.initial([federation.seeds[0]])[0]
        row = row + 0.1 * torch.sin(torch.arange(len(row), device=row.device) + 1).to(row)  # some start at zero
        with torch.no_grad():
            output = model.evaluate(row, model.call.inputs(pair))
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"metrics need a tensor, and the model returns {type(output).__name__}; name its output by model.output"
            )
        target, labelled = target_of(pair), model.labelled
        task = PredictionTask.from_tensors(output, target, labelled)
        for entry in metric_entries:
            shapes = f"outputs {list(output.shape[1:])} and targets {list(target.shape[1:])}"
            with error_context(f"metrics: {entry.label} does not fit {shapes} of dataset={dataset.name}"):
                metric = build_metric(entry, task, output, target, dataset.name)
            count = federation.num_replicates * (0 if dataset.test_x is None else len(dataset.test_x))
            if count * metric.bytes_per_sample > MAX_STORED_BYTES:
                remedy = "return one number per sample, [B], or use a class with update and compute"
                if entry.name is not None:
                    remedy = "add thresholds=200" if entry.name in RANKED_METRIC_NEEDS_NEGATIVES else "remove it"
                raise ConfigError(
                    f"metrics: {entry.label} would store {count * metric.bytes_per_sample / 2**30:.2g} GiB for the "
                    f"test set's {count} outputs, more than 1; {remedy}"
                )
            self.metrics.append(metric)

    def __len__(self) -> int:
        return len(self.metrics)

    @property
    def names(self) -> list[str]:
        """The names of the metrics in columns."""
        return [metric.column for metric in self.metrics]

    def columns(self, test: bool, measure_name: str = "") -> dict[str, str]:
        """Columns of an evaluated model → descriptions; `test`: whether there is a test set; `measure_name`: of which
        model."""
        descriptions: dict[str, str] = {}
        for metric in self.metrics:
            label = metric.label
            columns = {f"test_{metric.column}": f"{label} of the whole test set"} if test else {}
            columns[f"train_{metric.column}"] = (
                f"mean over clients of {label} on (a subsample of) the client's own data"
            )
            if metric.better_direction:
                columns[f"client_{metric.column}_worst10"] = (
                    f"mean of {label} over the tenth of the clients where it is worst"
                )
            descriptions |= {
                name: f"{description}{measure_name}{metric.direction}" for name, description in columns.items()
            }
        return descriptions

    def measures(self, measure_name: str) -> dict[str, str]:
        """Measures of a client's own model on its validation samples → descriptions; worst tenth if directed."""
        descriptions: dict[str, str] = {}
        for metric in self.metrics:
            name, label = f"validation_{metric.column}", metric.label
            measures = {
                name: f"mean over clients of {label} on the client's own validation samples",
                f"{name}_median": f"median over clients of {label} on the client's own validation samples",
            }
            if metric.better_direction:
                measures[f"{name}_worst10"] = f"mean of {label} over the tenth of the clients where it is worst"
            descriptions |= {
                measure: f"{description}{measure_name}{metric.direction}" for measure, description in measures.items()
            }
        return descriptions

    def over_clients(self, values: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
        """Metrics of clients [K, R, m'], NaN if undefined → columns [R]; `weights` [R, m'] of the objective."""
        columns = {}
        for metric, client_values in zip(self.metrics, values, strict=True):
            is_defined = ~client_values.isnan()
            shares = is_defined if weights is None else is_defined * weights.to(client_values)
            columns[f"train_{metric.column}"] = (torch.where(is_defined, client_values, 0) * shares).sum(
                1
            ) / shares.sum(1)
            if metric.better_direction:
                sign = 1 if metric.better_direction == METRIC_DIRECTIONS[0] else -1
                ordered = sign * (sign * client_values).sort(dim=1).values  # the worst first, NaN last
                worst_count = (is_defined.sum(1) // WORST_CLIENTS_DIVISOR).clamp(min=1)
                worst_mask = torch.arange(client_values.shape[1], device=client_values.device) < worst_count[:, None]
                columns[f"client_{metric.column}_worst10"] = torch.where(worst_mask, ordered, 0).sum(1) / worst_count
        return columns

    def client_metrics(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """[K, n] float64 of clients' outputs and targets [n, q, …]; `weight` [n, q] is 0 for padding."""
        host = weight.cpu()
        has_nan_outputs = (output.isnan().reshape(*weight.shape, -1).any(2) & (weight > 0)).any(1).cpu()
        values = torch.full((len(self.metrics), len(output)), torch.nan, dtype=torch.float64, device=output.device)
        for k, metric in enumerate(self.metrics):
            with error_context(f"metrics: {metric.label} failed"):
                for i, weights in enumerate(host):
                    sample_indices = (weights > 0).nonzero()[:, 0]
                    if len(sample_indices) < metric.min_samples or has_nan_outputs[i]:
                        continue
                    equal_weights = bool((weights[sample_indices] == weights[sample_indices[0]]).all())
                    if not equal_weights and not isinstance(metric.accumulator, PerSampleMetric):
                        raise ConfigError(
                            f"metrics: {metric.label} weights a client's samples equally, but the shift gives them "
                            "weights; use a function that returns one number per sample, [B]"
                        )
                    device_indices = sample_indices.to(output.device)
                    metric.accumulator.reset()
                    metric.accumulator.update(
                        output[i, device_indices], target[i, device_indices], weight[i, device_indices]
                    )
                    values[k, i] = metric.accumulator.value()
        return values

    def pooled_accumulator(self, replicates: int) -> PooledMetricAccumulator:
        """The accumulator of every replicate's metrics on one set."""
        return PooledMetricAccumulator(self, replicates)


class PooledMetricAccumulator:
    """Metrics [R] of a whole set, whose batches all replicates process together."""

    def __init__(self, metrics: UserMetrics, replicates: int) -> None:
        self.metrics = metrics
        self.accumulators = [[metric.accumulator.new_like() for _ in range(replicates)] for metric in metrics.metrics]
        self.has_nan_outputs = torch.zeros(replicates, dtype=torch.bool)

    def update(self, outputs: Tensor, targets: Sequence[Tensor]) -> None:
        """Add outputs [R, B, …] of a batch, and the targets [B, …] of each replicate."""
        self.has_nan_outputs |= outputs.flatten(1).isnan().any(1).cpu()
        for metric, accumulators in zip(self.metrics.metrics, self.accumulators, strict=True):
            with error_context(f"metrics: {metric.label} failed"):
                for accumulator, output, target, has_nan_outputs in zip(
                    accumulators, outputs, targets, self.has_nan_outputs, strict=True
                ):
                    if not has_nan_outputs:
                        accumulator.update(output, target)

    def values(self) -> dict[str, Tensor]:
        """Column → [R] float64 on the host; NaN for a model with NaN outputs."""
        columns = {}
        for metric, accumulators in zip(self.metrics.metrics, self.accumulators, strict=True):
            with error_context(f"metrics: {metric.label} failed"):
                replicate_values = [
                    torch.tensor(torch.nan, dtype=torch.float64) if has_nan_outputs else accumulator.value().cpu()
                    for accumulator, has_nan_outputs in zip(accumulators, self.has_nan_outputs, strict=True)
                ]
                columns[f"test_{metric.column}"] = torch.stack(replicate_values)
        return columns


def target_of(batch: Mapping[str, Tensor]) -> Tensor:
    """The target of outputs: y, or the sample itself if there is none."""
    return batch["y"] if "y" in batch else batch["x"]
