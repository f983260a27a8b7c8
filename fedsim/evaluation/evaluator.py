"""Evaluates the current models: on the test set, on every client's own data, and on held-out samples of each client.

All replicates go through one forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedsim.core.errors import ConfigError
from fedsim.data.samples import ClientData, ClientSamples
from fedsim.evaluation.columns import MEASURED_COLUMNS
from fedsim.evaluation.drifting_test_set import DriftingTestSet
from fedsim.evaluation.measured import (
    TEST,
    TRAINING,
    VALIDATION,
    WORST_DECILE_SUFFIX,
    EvaluationResult,
    client_spread_columns,
    spread_description,
)
from fedsim.evaluation.metrics import UserMetrics, target_of
from fedsim.evaluation.optimum import optimum
from fedsim.evaluation.performative.references import References
from fedsim.models import StatelessModel
from fedsim.models.calling import Inputs
from fedsim.models.losses import correct_share, weighted_mean
from fedsim.shift import Shift

TEST_BATCH_SIZE = 1000  # samples of one forward pass, shared by all replicates


class ExtraMetrics(Protocol):
    """Columns that higher layers measure; `columns`: name → description."""

    columns: dict[str, str]

    def __call__(self, models: Tensor, t: int = 0) -> dict[str, np.ndarray]:
        """Column → [R], of models [R, d] on the data of round t."""


class Evaluator:
    """Evaluates models [R, d].

    Args:
        model, data, shift: of the run.
        client_samples: samples of its own data on which a client is evaluated, the same in every evaluation. Those of a
            stream have the moments of its law (`StreamDataset.exact`).
        loop: evaluate models one by one, even if they could be vmapped.
        max_clients: clients evaluated on their own data; of a larger population, an evenly spaced subset.
        metrics: metrics of the user.
        validation: the clients' validation samples, if models are evaluated on them.
        spreads: additional measures of the spread over clients, see `fedsim.evaluation.spread`.
    """

    def __init__(
        self,
        model: StatelessModel,
        data: ClientData,
        shift: Shift,
        client_samples: int = 20,
        max_clients: int = 1000,
        loop: bool = False,
        metrics: UserMetrics | None = None,
        validation: ClientData | None = None,
        spreads: Sequence[str] = (),
    ) -> None:
        federation = data.federation
        self.model, self.data, self.federation, self.shift = model, data, federation, shift
        self.dataset = data.dataset
        self.metrics = metrics or UserMetrics((), model, data)
        self.references = References()
        self.test_set = DriftingTestSet(data)
        if data.drift.uses_importance_weights and len(self.metrics) and self.dataset.test_x is not None:
            raise ConfigError(
                f"metrics={self.metrics.names}: drift.moves=labels gives the samples of the test set weights, which "
                "these metrics do not use; remove them, or use moves=features"
            )
        self.extra_metrics: ExtraMetrics | None = None  # additional metrics of models
        convolutional_on_cpu = model.convolutional and model.device.type == "cpu"
        self.loop = loop or convolutional_on_cpu or model.traits.evaluation_unvmapped is not None
        self.labelled = model.labelled
        m, device = federation.clients, federation.device
        evaluated_clients = torch.linspace(0, m - 1, min(m, max_clients), device=device).round().to(torch.int64)
        self.evaluated_clients = evaluated_clients.cpu().numpy()  # clients evaluated on their own data
        self.ranks, self.count = federation.ranks, len(evaluated_clients)
        self.clients = evaluated_clients[
            self.ranks.client_slice
        ]  # all ranks have the data, so they divide the work evenly
        self.samples = ClientSamples(data, client_samples, model.dtype)
        self.validation = None if validation is None else ClientSamples(validation, None, model.dtype)
        self.spreads, self.measure_name = spreads, "accuracy" if self.labelled else "loss"
        weights = federation.client_weights[:, self.evaluated_clients]
        uniform = federation.weighting == "uniform"
        self.weights = None if uniform else torch.tensor(weights, dtype=model.dtype, device=device)
        self.optimum = None if shift.active or data.drift.active else optimum(data, model)

    @property
    def columns(self) -> set[str]:
        """The columns that this evaluator measures."""
        absent_columns = set()
        if self.dataset.test_x is None:
            absent_columns |= {"test_loss", "test_accuracy"}
        if not self.labelled:
            absent_columns |= {"test_accuracy", "train_accuracy", "client_accuracy_worst10"}
        unused_score = "loss" if self.labelled else "accuracy"  # columns that are not numbers of clients
        absent_columns |= {f"{VALIDATION.format(unused_score)}_{WORST_DECILE_SUFFIX}"} | (
            set() if self.labelled else {"validation_accuracy"}
        )
        for measure_name in ("loss", "accuracy"):
            if measure_name == unused_score or self.dataset.test_owners is None or self.dataset.test_x is None:
                absent_columns |= {TEST.format(measure_name), f"{TEST.format(measure_name)}_{WORST_DECILE_SUFFIX}"}
            if self.validation is None:
                absent_columns |= {
                    VALIDATION.format(measure_name),
                    f"{VALIDATION.format(measure_name)}_{WORST_DECILE_SUFFIX}",
                }
        if self.optimum is None:
            absent_columns |= {"distance_to_optimum"}
        if not self.shift.active:
            absent_columns |= {"performative_loss", "performative_risk", "decoupled_loss"}
        absent_columns |= {
            "distance_to_ps",
            "distance_to_po",
            "distance_to_nash",
            "tracking_error",
        } - self.references.keys()
        return MEASURED_COLUMNS.keys() - absent_columns

    def user_metric_columns(self, measure_name: str = "") -> dict[str, str]:
        """Columns of the user's metrics → descriptions; `measure_name`: of which model."""
        descriptions = {
            f"{self.primary_client_column}_{name}": spread_description(name, self.primary_client_column) + measure_name
            for name in self.spreads
        }
        if self.extra_metrics is not None:
            descriptions |= {
                name: f"{description}{measure_name}" for name, description in self.extra_metrics.columns.items()
            }
        return self.metrics.columns(self.dataset.test_x is not None, measure_name) | descriptions

    @property
    def primary_client_column(self) -> str:
        """The column of the most relevant per-client numbers: on the test set, else on validation samples, else on
        training data.
        """
        if self.dataset.test_owners is not None and self.dataset.test_x is not None:
            return TEST.format(self.measure_name)
        return self.own_data_column

    @property
    def own_data_column(self) -> str:
        """The column of the most relevant per-client numbers without the test set, whose owners need not be the
        run's clients."""
        return (TRAINING if self.validation is None else VALIDATION).format(self.measure_name)

    @torch.no_grad()
    def __call__(self, models: Tensor, deployed: Tensor | None = None, t: int = 0) -> EvaluationResult:
        """Evaluate the models [R, d]; all results leave the device in one transfer.

        Args:
            models: [R, d].
            deployed: [R, d] what the server deployed last, by default the models themselves.
            t: the round whose law the samples have, if the data drift.
        """
        by_client: dict[str, Tensor] = {}
        results, user_metrics = (
            self._evaluate_test_set(models, by_client, t) if self.dataset.test_x is not None else ({}, {})
        )
        if self.validation is not None:
            loss, accuracy, _ = self._evaluate_clients(self.validation, models, models, t)
            results["validation_loss"] = loss.nanmean(1)
            if accuracy is not None:
                results["validation_accuracy"] = accuracy.nanmean(1)
            by_client[VALIDATION.format(self.measure_name)] = loss if accuracy is None else accuracy
        losses, correct, client_metrics = self._evaluate_clients(self.samples, models, models, t, self.metrics or None)
        by_client[TRAINING.format(self.measure_name)] = losses if correct is None else correct
        results["train_loss"] = weighted_mean(losses, self.weights)
        if correct is not None:
            results["train_accuracy"] = weighted_mean(correct, self.weights)
            worst_count = max(1, correct.shape[1] // 10)
            results["client_accuracy_worst10"] = correct.sort(dim=1).values[:, :worst_count].mean(1)
        if self.optimum is not None:
            results["distance_to_optimum"] = (models - self.optimum.to(models.dtype)).norm(dim=1)
        if self.shift.active:
            results["performative_loss"] = results["train_loss"]
            results["performative_risk"] = results["train_loss"] + 0.5 * self.model.ridge * models.square().sum(1)
            losses_before_shift = (
                losses if deployed is None else self._evaluate_clients(self.samples, models, deployed, t)[0]
            )
            results["decoupled_loss"] = weighted_mean(losses_before_shift, self.weights)
        for name, point in self.references.at(t).items():
            results[name] = (models - point.to(models)).norm(dim=1)
        blocks = [
            torch.stack(list(results.values())),
            losses.T,
            *(client_values.T for client_values in by_client.values()),
        ]
        of_run, client_loss, *client_numbers = np.split(
            torch.cat(blocks).cpu().numpy(), np.cumsum([len(p) for p in blocks])[:-1]
        )
        metrics = dict(zip(results, of_run, strict=True))
        client_scores = {name: numbers.T for name, numbers in zip(by_client, client_numbers, strict=True)}
        spread_pairs = [(name, WORST_DECILE_SUFFIX) for name in client_scores if name in MEASURED_COLUMNS] + [
            (self.primary_client_column, name) for name in self.spreads
        ]
        metrics |= client_spread_columns(client_scores, spread_pairs)
        client_values = {}
        if client_metrics is not None:
            user_metrics |= self.metrics.over_clients(client_metrics, self.weights)
            client_values = {
                name: values.cpu().numpy() for name, values in zip(self.metrics.names, client_metrics, strict=True)
            }
        metrics |= {name: values.cpu().numpy() for name, values in user_metrics.items()}
        metrics |= {} if self.extra_metrics is None else self.extra_metrics(models, t)
        accuracy = None if correct is None else client_scores[TRAINING.format("accuracy")]
        return EvaluationResult(metrics, accuracy, client_values, by_client=client_scores, client_loss=client_loss.T)

    def predict(self, models: Tensor, x: Inputs, has_shared_inputs: bool, weight: Tensor | None = None) -> Tensor:
        """[R, d] and inputs [B, …] (shared) or [R, B, …] → outputs [R, B, …]; `weight` [R, B] is 0 for padding, which
        is removed for models whose outputs depend on the whole batch.
        """

        def of_row(r: int) -> Inputs:
            return x if has_shared_inputs else tree_map(lambda value: value[r], x)

        if weight is not None and self.model.traits.evaluation_mixes_samples:
            return torch.stack(
                [self._zero_padded_outputs(row, of_row(r), weight[r] > 0) for r, row in enumerate(models)]
            )
        if self.loop:
            return torch.stack([self.model.evaluate(row, of_row(r)) for r, row in enumerate(models)])
        return vmap(self.model.evaluate, in_dims=(0, None if has_shared_inputs else 0))(models, x)

    def _zero_padded_outputs(self, row: Tensor, x: Inputs, mask: Tensor) -> Tensor:
        """Outputs for one client's inputs [B, …], zero for padding [B]."""
        outputs = self.model.evaluate(row, tree_map(lambda value: value[mask], x))
        return outputs.new_zeros(len(mask), *outputs.shape[1:]).index_put((mask,), outputs)

    def _evaluate_test_set(
        self, models: Tensor, by_client: dict[str, Tensor], t: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean loss on the whole test set, accuracy if there are labels, and both by owner of the samples. Also the
        user's metrics: since some are not sums over batches, every rank evaluates all batches for them.
        """
        data, dtype = self.dataset, self.model.dtype
        assert data.test_x is not None
        owners = data.test_owners
        count = 0 if owners is None else data.natural_clients or 0
        rows = 2 + count + count * self.data.drift.uses_importance_weights
        total = torch.zeros(rows, len(models), dtype=dtype, device=models.device)
        by_owner, weights = total[2 : 2 + count], total[2 + count :]  # views; weights are those of a drift of labels
        batch_starts = range(0, len(data.test_x), TEST_BATCH_SIZE)
        local_starts, pooled_metrics = (
            batch_starts[self.ranks.client_slice],
            self.metrics.pooled_accumulator(len(models)),
        )
        for start in batch_starts if len(self.metrics) else local_starts:
            row_selection = slice(start, start + TEST_BATCH_SIZE)
            x = data.prepare(data.test_x[row_selection].to(models.device), dtype)
            batch = {"x": x} | data.extra_inputs(data.test_more, row_selection, dtype)
            if data.test_y is not None:
                batch["y"] = data.test_y[row_selection]
            drifted_batches = self.test_set.batches(batch, start, t)
            has_shared_inputs, batches = drifted_batches is None, drifted_batches or [batch] * len(models)
            if not self.model.tensor_output:
                total[0] += torch.stack(
                    [
                        self.model.mean_loss(self.model.evaluate(row, self.model.call.inputs(b)), b)
                        for row, b in zip(models, batches, strict=True)
                    ]
                ) * (len(x) if start in local_starts else 0)
                continue
            stacked = (
                batch if has_shared_inputs else {name: torch.stack([b[name] for b in batches]) for name in batches[0]}
            )
            outputs = self.predict(models, self.model.call.inputs(stacked), has_shared_inputs=has_shared_inputs)
            pooled_metrics.update(outputs, [target_of(batch) for batch in batches])
            if start not in local_starts:
                continue
            # A loss over the batch is assigned to each of its samples.
            losses = [
                self.model.loss(model_output, b).expand(len(x))
                for model_output, b in zip(outputs, batches, strict=True)
            ]
            weight = None if has_shared_inputs else stacked.get("weight")
            numbers = torch.stack(losses)
            total[0] += weighted(numbers, weight).sum(1)
            if self.labelled:
                labels = batch["y"].expand(len(models), *batch["y"].shape) if has_shared_inputs else stacked["y"]
                numbers = correct_share(self.model.scores(outputs, 2), labels, 2)
                total[1] += weighted(numbers, weight).sum(1)
            if owners is not None:
                by_owner.index_add_(0, owners[row_selection], weighted(numbers, weight).T.to(dtype))
                if weight is not None:
                    weights.index_add_(0, owners[row_selection], weight.T.to(dtype))
        self.ranks.all_reduce_sum(total)  # in place
        results = {"test_loss": total[0] / len(data.test_x)}
        if self.labelled:
            results["test_accuracy"] = total[1] / len(data.test_x)
        if owners is not None:
            sample_counts = torch.bincount(owners, minlength=count)
            sums = weights if bool(weights.any()) else sample_counts[:, None]
            # 0/0 is NaN for clients without held-out samples.
            by_client[TEST.format(self.measure_name)] = (by_owner / sums).T
            results[TEST.format(self.measure_name)] = (by_owner[sample_counts > 0] / sums[sample_counts > 0]).mean(0)
        return results, pooled_metrics.values()

    def _evaluate_clients(
        self, samples: ClientSamples, models: Tensor, deployed: Tensor, t: int, metrics: UserMetrics | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Mean loss [R, m'], accuracy [R, m'] and metrics [K, R, m'] of every client on its own samples of round t,
        shifted by `deployed`.
        """
        replicates = len(models)
        step = max(1, TEST_BATCH_SIZE * 4 // (replicates * samples.width))
        losses, correct, added_metrics = [], [], []
        for start in range(0, len(self.clients), step):
            batch = self._client_batch(samples, slice(start, start + step), t)
            if self.shift.active:
                batch = self._shifted_batch(batch, deployed)
            weight = batch["weight"]
            if not self.model.tensor_output:
                losses.append(self._losses_one_by_one(models, batch, weight))
                continue
            flat = {name: value.flatten(1, 2) for name, value in batch.items() if value.dim() > 2}
            if self.model.traits.evaluation_mixes_samples:
                client_models = models[:, None].expand(-1, weight.shape[1], -1).flatten(0, 1)
                inputs = tree_map(lambda value: value.flatten(0, 1), self.model.call.inputs(batch))
                client_outputs = self.predict(
                    client_models, inputs, has_shared_inputs=False, weight=weight.flatten(0, 1)
                )
                outputs = client_outputs.flatten(0, 1).unflatten(0, (len(models), -1))
            else:
                outputs = self.predict(models, self.model.call.inputs(flat), has_shared_inputs=False)
            per_sample = torch.stack(
                [
                    self.model.client_sample_losses(
                        row_output.unflatten(0, weight.shape[1:]),
                        {k: v[r] for k, v in batch.items() if v.dim() > 2},
                        weight[r],
                    )
                    for r, row_output in enumerate(outputs)
                ]
            )
            losses.append(weighted_mean(per_sample.reshape(weight.shape), weight))
            if self.labelled:
                correct.append(
                    weighted_mean(
                        correct_share(self.model.scores(outputs, 2), flat["y"], 2).reshape(weight.shape), weight
                    )
                )
            if metrics is not None:
                clients = outputs.unflatten(1, weight.shape[1:]).flatten(0, 1)
                metric_values = metrics.client_metrics(clients, target_of(batch).flatten(0, 1), weight.flatten(0, 1))
                added_metrics.append(metric_values.unflatten(1, weight.shape[:2]))
        client_values = (torch.cat(values, -1) if values else None for values in (losses, correct, added_metrics))
        loss, accuracy, metric = (
            None if values is None else self._all_gather_clients(values) for values in client_values
        )
        assert loss is not None
        return loss, accuracy, metric

    def _losses_one_by_one(self, models: Tensor, batch: dict[str, Tensor], weight: Tensor) -> Tensor:
        """Loss [R, c] of clients for models whose outputs are not tensors: one model and one client at a time."""
        losses = torch.full(weight.shape[:2], torch.nan, dtype=self.model.dtype, device=weight.device)
        for r, c in itertools.product(range(weight.shape[0]), range(weight.shape[1])):
            is_sample = weight[r, c] > 0
            if not bool(is_sample.any()):
                continue
            client_batch = {name: value[r, c][is_sample] for name, value in batch.items() if value.dim() > 2}
            output = self.model.evaluate(models[r], self.model.call.inputs(client_batch))
            losses[r, c] = self.model.mean_loss(output, client_batch | {"weight": weight[r, c][is_sample]})
        return losses

    def _all_gather_clients(self, local_values: Tensor) -> Tensor:
        """[…, m''] of this rank's share of the clients → […, m'] of all evaluated clients."""
        if self.ranks.num_ranks == 1:
            return local_values
        all_values = local_values.new_zeros(*local_values.shape[:-1], self.count)
        all_values[..., self.ranks.client_slice] = local_values
        return self.ranks.all_reduce_sum(all_values)

    def _client_batch(self, samples: ClientSamples, row_selection: slice, t: int) -> dict[str, Tensor]:
        """x [R, c, q, …], y [R, c, q], weight [R, c, q], client and row [R, c] of some clients in round t."""
        first_clients = (
            torch.arange(self.federation.num_replicates, device=self.clients.device)[:, None] * self.federation.clients
        )
        rows = first_clients + self.clients[row_selection]
        flat = samples.batch(rows.reshape(-1), t)
        return {name: value.reshape(*rows.shape, *value.shape[1:]) for name, value in flat.items()}

    def _shifted_batch(self, batch: dict[str, Tensor], models: Tensor) -> dict[str, Tensor]:
        """Every client's samples after deployment of the models."""
        if not self.shift.runs_unpadded:
            per_client = vmap(self.shift.respond_differentiably, in_dims=(0, None))
            return vmap(per_client, in_dims=(0, 0))(batch, models)
        replicates, clients = batch["weight"].shape[:2]
        flat = {name: value.flatten(0, 1) for name, value in batch.items()}
        shifted_samples = self.shift.respond_differentiably_all(flat, models.repeat_interleave(clients, dim=0))
        return {name: value.unflatten(0, (replicates, clients)) for name, value in shifted_samples.items()}


def weighted(numbers: Tensor, weight: Tensor | None) -> Tensor:
    """Numbers of samples, times their weights if they have any."""
    return numbers if weight is None else numbers * weight
