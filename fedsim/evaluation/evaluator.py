"""How good the current models are: on the test set, and on every client's own data, batched over replicates."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedsim.evaluation.columns import MEASURED
from fedsim.evaluation.metrics import Metrics, target_of
from fedsim.evaluation.optimum import optimum
from fedsim.models import RowModel
from fedsim.models.calling import Inputs
from fedsim.models.losses import UNLABELLED, correctly, weighted_mean
from fedsim.samples import ClientData, ClientSamples
from fedsim.shift import Shift

TEST_BATCH = 1000  # samples of one forward pass, all replicates sharing them


@dataclass
class Measured:
    """What one evaluation found, on the host.

    Attributes:
        metrics: name → [R].
        client_accuracy: [R, m'] accuracy on each evaluated client's own data, or None without labels.
        client_metrics: name → [R, m'] of the metrics that a user adds, NaN where a client has none.
        histograms: name → one number per client, of more that was measured.
    """

    metrics: dict[str, np.ndarray]
    client_accuracy: np.ndarray | None
    client_metrics: dict[str, np.ndarray] = field(default_factory=dict)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)


class Evaluator:
    """Evaluates models [R, d].

    Args:
        model, data, shift: of the run.
        client_samples: samples of its own data on which a client is evaluated; the same in every evaluation. Those of a
            stream have the moments of its law (`Stream.exact`).
        loop: look at one model after the other, also where they could be vmapped.
        max_clients: clients evaluated on their own data; a larger population is thinned evenly.
        metrics: those that a user adds.
    """

    def __init__(
        self,
        model: RowModel,
        data: ClientData,
        shift: Shift,
        client_samples: int = 20,
        max_clients: int = 1000,
        loop: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        federation = data.federation
        self.model, self.data, self.federation, self.shift = model, data, federation, shift
        self.dataset = data.dataset
        self.metrics = metrics or Metrics((), model, data)
        self.references: dict[str, Tensor] = {}
        alone = model.convolutional and model.device.type == "cpu"
        self.loop = loop or alone or model.traits.evaluation_unvmapped is not None
        self.labelled = self.dataset.classes is not None and model.loss not in UNLABELLED
        m, device = federation.clients, federation.device
        everyone = torch.linspace(0, m - 1, min(m, max_clients), device=device).round().to(torch.int64)
        self.everyone = everyone.cpu().numpy()  # whose own data are looked at
        self.ranks, self.count = federation.ranks, len(everyone)
        self.clients = everyone[self.ranks.share]  # data are everywhere: ranks share the work evenly, whoever is whose
        self.samples = ClientSamples(data, client_samples, model.dtype)
        weights = federation.client_weights[:, self.everyone]
        uniform = federation.weighting == "uniform"
        self.weights = None if uniform else torch.tensor(weights, dtype=model.dtype, device=device)
        self.optimum = None if shift.active else optimum(data, model)

    @property
    def columns(self) -> set[str]:
        """Those that this evaluator measures."""
        absent = set()
        if self.dataset.test_x is None:
            absent |= {"test_loss", "test_accuracy"}
        if not self.labelled:
            absent |= {"test_accuracy", "train_accuracy", "client_accuracy_worst10"}
        if not self.labelled or self.dataset.test_owners is None:
            absent |= {"test_accuracy_by_client"}
        if self.optimum is None:
            absent |= {"distance_to_optimum"}
        if not self.shift.active:
            absent |= {"performative_loss", "performative_risk", "decoupled_loss"}
        absent |= {"distance_to_ps", "distance_to_po"} - self.references.keys()
        return MEASURED.keys() - absent

    def added(self, of: str = "") -> dict[str, str]:
        """Columns of the metrics that a user adds → what they are; `of`: of which model."""
        return self.metrics.columns(self.dataset.test_x is not None, of)

    @torch.no_grad()
    def __call__(self, models: Tensor, deployed: Tensor | None = None) -> Measured:
        """Evaluate the models [R, d]; everything leaves the device in one transfer.

        `deployed` [R, d] is what the server deployed last, by default the models themselves.
        """
        found, added = self._on_test(models) if self.dataset.test_x is not None else ({}, {})
        losses, correct, own = self._on_clients(models, models, self.metrics if len(self.metrics) else None)
        found["train_loss"] = weighted_mean(losses, self.weights)
        if correct is not None:
            found["train_accuracy"] = weighted_mean(correct, self.weights)
            lowest = max(1, correct.shape[1] // 10)
            found["client_accuracy_worst10"] = correct.sort(dim=1).values[:, :lowest].mean(1)
        if self.optimum is not None:
            found["distance_to_optimum"] = (models - self.optimum.to(models.dtype)).norm(dim=1)
        if self.shift.active:
            found["performative_loss"] = found["train_loss"]
            found["performative_risk"] = found["train_loss"] + 0.5 * self.model.ridge * models.square().sum(1)
            before = losses if deployed is None else self._on_clients(models, deployed)[0]
            found["decoupled_loss"] = weighted_mean(before, self.weights)
            for name, point in self.references.items():
                found[name] = (models - point.to(models)).norm(dim=1)
        parts = [torch.stack(list(found.values()))] + ([correct.T] if correct is not None else [])
        host = torch.cat(parts).cpu().numpy()
        metrics = dict(zip(found, host[: len(found)], strict=True))
        each = {}
        if own is not None:
            added |= self.metrics.over_clients(own, self.weights)
            each = {name: values.cpu().numpy() for name, values in zip(self.metrics.names, own, strict=True)}
        metrics |= {name: values.cpu().numpy() for name, values in added.items()}
        return Measured(metrics, host[len(found) :].T if correct is not None else None, each)

    def predict(self, models: Tensor, x: Inputs, shared: bool, weight: Tensor | None = None) -> Tensor:
        """[R, d] and inputs [B, …] (shared) or [R, B, …] → outputs [R, B, …]; `weight` [R, B] is 0 for padding, which a
        model whose outputs depend on a whole batch must not see."""

        def of_row(r: int) -> Inputs:
            return x if shared else tree_map(lambda value: value[r], x)

        if weight is not None and self.model.traits.evaluation_mixes:
            return torch.stack([self._unpadded(row, of_row(r), weight[r] > 0) for r, row in enumerate(models)])
        if self.loop:
            return torch.stack([self.model.evaluate(row, of_row(r)) for r, row in enumerate(models)])
        return vmap(self.model.evaluate, in_dims=(0, None if shared else 0))(models, x)

    def _unpadded(self, row: Tensor, x: Inputs, there: Tensor) -> Tensor:
        """Outputs for one client's inputs [B, …], zero where nothing is there [B]."""
        own = self.model.evaluate(row, tree_map(lambda value: value[there], x))
        return own.new_zeros(len(there), *own.shape[1:]).index_put((there,), own)

    def _on_test(self, models: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean loss on the whole test set; accuracy where there are labels, also by whom samples were held out of. And
        what a user adds: since some of it does not add up over batches, every rank sees them all for it."""
        data, dtype = self.dataset, self.model.dtype
        assert data.test_x is not None
        owners = data.test_owners if self.labelled else None
        count = 0 if owners is None else data.natural_clients or 0
        total = torch.zeros(2 + count, len(models), dtype=dtype, device=models.device)
        every = range(0, len(data.test_x), TEST_BATCH)
        mine, pooled = every[self.ranks.share], self.metrics.pooled(len(models))
        for start in every if len(self.metrics) else mine:
            pick = slice(start, start + TEST_BATCH)
            x = data.prepare(data.test_x[pick].to(models.device), dtype)
            batch = {"x": x} | data.further(data.test_more, pick, dtype)
            if data.test_y is not None:
                batch["y"] = data.test_y[pick]
            outputs = self.predict(models, self.model.call.inputs(batch), shared=True)
            pooled.update(outputs, target_of(batch))
            if start not in mine:
                continue
            total[0] += torch.stack([self.model.loss(out, batch).sum() for out in outputs])
            if self.labelled:
                labels = batch["y"].expand(len(models), *batch["y"].shape)
                correct = correctly(outputs, labels, 2)
                total[1] += correct.sum(1)
                if owners is not None:
                    total[2:].index_add_(0, owners[pick], correct.T)
        total = self.ranks.sum(total)
        found = {"test_loss": total[0] / len(data.test_x)}
        if self.labelled:
            found["test_accuracy"] = total[1] / len(data.test_x)
        if owners is not None:
            held = torch.bincount(owners, minlength=count)
            found["test_accuracy_by_client"] = (total[2:][held > 0] / held[held > 0, None]).mean(0)
        return found, pooled.values()

    def _on_clients(
        self, models: Tensor, deployed: Tensor, metrics: Metrics | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Mean loss [R, m'], accuracy [R, m'] and metrics [K, R, m'] of every client on its own samples, as they answer
        to `deployed`."""
        replicates = len(models)
        step = max(1, TEST_BATCH * 4 // (replicates * self.samples.width))
        losses, correct, added = [], [], []
        for start in range(0, len(self.clients), step):
            batch = self._client_batch(slice(start, start + step))
            if self.shift.active:
                batch = self._shifted(batch, deployed)
            weight = batch["weight"]
            flat = {name: value.flatten(1, 2) for name, value in batch.items() if value.dim() > 2}
            if self.model.traits.evaluation_mixes:
                own = models[:, None].expand(-1, weight.shape[1], -1).flatten(0, 1)
                inputs = tree_map(lambda value: value.flatten(0, 1), self.model.call.inputs(batch))
                apart = self.predict(own, inputs, shared=False, weight=weight.flatten(0, 1))
                outputs = apart.flatten(0, 1).unflatten(0, (len(models), -1))
            else:
                outputs = self.predict(models, self.model.call.inputs(flat), shared=False)
            per_sample = torch.stack(
                [self.model.loss(out, {k: v[r] for k, v in flat.items()}) for r, out in enumerate(outputs)]
            )
            losses.append(weighted_mean(per_sample.reshape(weight.shape), weight))
            if self.labelled:
                correct.append(weighted_mean(correctly(outputs, flat["y"], 2).reshape(weight.shape), weight))
            if metrics is not None:
                clients = outputs.unflatten(1, weight.shape[1:]).flatten(0, 1)
                found = metrics.of_clients(clients, target_of(batch).flatten(0, 1), weight.flatten(0, 1))
                added.append(found.unflatten(1, weight.shape[:2]))
        parts = (torch.cat(values, -1) if values else None for values in (losses, correct, added))
        loss, accuracy, metric = (None if values is None else self._everybody(values) for values in parts)
        assert loss is not None
        return loss, accuracy, metric

    def _everybody(self, found: Tensor) -> Tensor:
        """[…, m''] of this rank's share of the clients → […, m'] of all that are evaluated."""
        if self.ranks.count == 1:
            return found
        whole = found.new_zeros(*found.shape[:-1], self.count)
        whole[..., self.ranks.share] = found
        return self.ranks.sum(whole)

    def _client_batch(self, pick: slice) -> dict[str, Tensor]:
        """x [R, c, q, …], y [R, c, q], weight [R, c, q], client and row [R, c] of some clients."""
        first = torch.arange(self.federation.replicates, device=self.clients.device)[:, None] * self.federation.clients
        rows = first + self.clients[pick]
        flat = self.samples.batch(rows.reshape(-1))
        return {name: value.reshape(*rows.shape, *value.shape[1:]) for name, value in flat.items()}

    def _shifted(self, batch: dict[str, Tensor], models: Tensor) -> dict[str, Tensor]:
        """Every client's samples, after the models were deployed."""
        per_client = vmap(self.shift.smooth, in_dims=(0, None))
        return vmap(per_client, in_dims=(0, 0))(batch, models)
