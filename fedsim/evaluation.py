"""How good the current models are: on the test set, and on every client's own data, batched over replicates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim import rng
from fedsim.federation import Federation
from fedsim.models import RowModel
from fedsim.models.losses import UNLABELLED
from fedsim.shift import Shift
from fedsim.trainer import Batches

TEST_BATCH = 1000  # samples of one forward pass, all replicates sharing them

COLUMNS = {
    "round": "completed rounds; 0 is the initial model",
    "seed": "seed of the replicate",
    "test_loss": "mean loss of the evaluated model on the test set",
    "test_accuracy": "fraction of the test set classified correctly",
    "train_loss": "mean over clients of the mean loss on (a subsample of) the client's own, shifted, data",
    "train_accuracy": "mean over clients of the accuracy on (a subsample of) the client's own data",
    "client_accuracy_worst10": "mean of the lowest tenth of the clients' accuracies",
    "distance_to_optimum": "Euclidean distance of the evaluated model to the closed-form optimum",
    "performative_loss": "train_loss by another name: the loss of the evaluated model on data that answer it",
    "performative_risk": "performative_loss and the ridge λ/2 ‖θ‖²: what θ^PO minimises",
    "decoupled_loss": "loss of the evaluated model on the clients' data as they answered the server's last deployment: "
    "its model before the last round, or the running mean of its models where shift.inertia and deploy=round say so",
    "distance_to_ps": "Euclidean distance of the evaluated model to the performatively stable point",
    "distance_to_po": "Euclidean distance of the evaluated model to the performatively optimal point",
    "active_clients": "clients the server heard in the last round",
    "mean_active_clients": "the same, averaged over the rounds since the previous row",
    "samples": "training samples this replicate has processed so far",
    "seconds": "wall time of training and evaluation so far, resumed parts included",
}


@dataclass
class Evaluation:
    """One evaluation, on the host.

    Attributes:
        metrics: name → [R].
        client_accuracy: [R, m'] accuracy on each evaluated client's own data, or None without labels.
    """

    metrics: dict[str, np.ndarray]
    client_accuracy: np.ndarray | None


class Evaluator:
    """Evaluates models [R, d].

    Args:
        model, batches, federation, shift: of the run.
        client_samples: samples of its own data on which a client is evaluated; the same in every evaluation. Those of a
            stream have the moments of its law (`Stream.exact`).
        max_clients: clients evaluated on their own data; a larger population is thinned evenly.
    """

    def __init__(
        self,
        model: RowModel,
        batches: Batches,
        federation: Federation,
        shift: Shift,
        client_samples: int = 20,
        max_clients: int = 1000,
    ) -> None:
        self.model, self.batches, self.federation, self.shift = model, batches, federation, shift
        self.dataset = batches.dataset
        self.references: dict[str, Tensor] = {}
        self.loop = model.convolutional and model.device.type == "cpu"
        self.labelled = self.dataset.classes is not None and model.loss not in UNLABELLED
        m, device = federation.clients, federation.device
        self.clients = torch.linspace(0, m - 1, min(m, max_clients), device=device).round().to(torch.int64)
        replicate = torch.arange(federation.replicates, device=device)[:, None]
        seeds = federation.seed_of_replicate[replicate].expand(-1, len(self.clients))
        self.keys = rng.row_keys(seeds, rng.Purpose.EVALUATION, self.clients.expand_as(seeds))
        if self.dataset.stream:
            self.width = self.dataset.exact_size(client_samples)
            self.valid = torch.ones(*seeds.shape, self.width, dtype=model.dtype, device=device)
        else:
            self.numbers, real = batches.subsample(replicate * m + self.clients, client_samples)
            self.valid = real.to(model.dtype)
            self.width = self.numbers.shape[2]

    @torch.no_grad()
    def __call__(self, models: Tensor, deployed: Tensor | None = None) -> Evaluation:
        """Evaluate the models [R, d]; everything leaves the device in one transfer.

        `deployed` [R, d] is what the server deployed last, by default the models themselves.
        """
        found = self._on_test(models) if self.dataset.test_x is not None else {}
        losses, correct = self._on_clients(models, models)
        found["train_loss"] = losses.mean(1)
        if correct is not None:
            found["train_accuracy"] = correct.mean(1)
            lowest = max(1, correct.shape[1] // 10)
            found["client_accuracy_worst10"] = correct.sort(dim=1).values[:, :lowest].mean(1)
        if self.dataset.optimum is not None and not self.shift.active:
            optimum = self.dataset.optimum.to(models.dtype)
            found["distance_to_optimum"] = (models - optimum).norm(dim=1)
        if self.shift.active:
            found["performative_loss"] = found["train_loss"]
            found["performative_risk"] = found["train_loss"] + 0.5 * self.model.ridge * models.square().sum(1)
            before = losses if deployed is None else self._on_clients(models, deployed)[0]
            found["decoupled_loss"] = before.mean(1)
            for name, point in self.references.items():
                found[name] = (models - point.to(models)).norm(dim=1)
        parts = [torch.stack(list(found.values()))] + ([correct.T] if correct is not None else [])
        host = torch.cat(parts).cpu().numpy()
        metrics = dict(zip(found, host[: len(found)], strict=True))
        return Evaluation(metrics, host[len(found) :].T if correct is not None else None)

    def _predict(self, models: Tensor, x: Tensor, shared: bool) -> Tensor:
        """[R, d] and x [B, …] (shared) or [R, B, …] → outputs [R, B, …]."""
        if self.loop:
            return torch.stack([self.model.evaluate(row, x if shared else x[r]) for r, row in enumerate(models)])
        return vmap(self.model.evaluate, in_dims=(0, None if shared else 0))(models, x)

    def _on_test(self, models: Tensor) -> dict[str, Tensor]:
        """Mean loss, and accuracy where there are labels, on the whole test set."""
        data, dtype = self.dataset, self.model.dtype
        assert data.test_x is not None
        total = torch.zeros(2, len(models), dtype=dtype, device=models.device)
        for start in range(0, len(data.test_x), TEST_BATCH):
            batch = {"x": data.prepare(data.test_x[start : start + TEST_BATCH], dtype)}
            if data.test_y is not None:
                batch["y"] = data.test_y[start : start + TEST_BATCH]
            outputs = self._predict(models, batch["x"], shared=True)
            total[0] += torch.stack([self.model.loss(out, batch).sum() for out in outputs])
            if self.labelled:
                total[1] += (predicted(outputs) == batch["y"]).sum(1)
        total /= len(data.test_x)
        return {"test_loss": total[0]} | ({"test_accuracy": total[1]} if self.labelled else {})

    def _on_clients(self, models: Tensor, deployed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean loss [R, m'] and accuracy [R, m'] of every client on its own samples, as they answer to `deployed`."""
        replicates, count = len(models), len(self.clients)
        step = max(1, TEST_BATCH * 4 // (replicates * self.width))
        losses, correct = [], []
        for start in range(0, count, step):
            batch = self._client_batch(slice(start, start + step))
            if self.shift.active:
                batch = self._shifted(batch, deployed)
            weight = batch["weight"]
            flat = {name: value.flatten(1, 2) for name, value in batch.items() if value.dim() > 2}
            outputs = self._predict(models, flat["x"], shared=False)
            per_sample = torch.stack(
                [self.model.loss(out, {k: v[r] for k, v in flat.items()}) for r, out in enumerate(outputs)]
            )
            losses.append((per_sample.reshape(weight.shape) * weight).sum(2) / weight.sum(2))
            if self.labelled:
                hits = (predicted(outputs) == flat["y"]).reshape(weight.shape)
                correct.append((hits * weight).sum(2) / weight.sum(2))
        return torch.cat(losses, 1), torch.cat(correct, 1) if correct else None

    def _client_batch(self, pick: slice) -> dict[str, Tensor]:
        """x [R, c, q, …], y [R, c, q], weight [R, c, q], client and row [R, c] of some clients."""
        dtype, federation = self.model.dtype, self.federation
        clients = self.clients[pick].expand(federation.replicates, -1)
        first = torch.arange(federation.replicates, device=clients.device)[:, None] * federation.clients
        if self.dataset.stream:
            flat = self.dataset.exact(clients.reshape(-1), self.keys[:, pick].reshape(-1), self.width, dtype)
            batch = {name: value.reshape(*clients.shape, *value.shape[1:]) for name, value in flat.items()}
        else:
            batch = self.batches.gather(self.numbers[:, pick], dtype)
            batch["x"] = self.dataset.prepare(batch["x"], dtype)
        return batch | {"weight": self.valid[:, pick], "client": clients, "row": first + clients}

    def _shifted(self, batch: dict[str, Tensor], models: Tensor) -> dict[str, Tensor]:
        """Every client's samples, after the models were deployed."""
        per_client = vmap(self.shift.smooth, in_dims=(0, None))
        return vmap(per_client, in_dims=(0, 0))(batch, models)


def predicted(outputs: Tensor) -> Tensor:
    """The class of the largest output [..., C]; of a single, logistic one [..., 1], its sign."""
    return (outputs[..., 0] > 0).to(torch.int64) if outputs.shape[-1] == 1 else outputs.argmax(-1)
