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
        client_samples: samples of its own data on which a client is evaluated; the same in every evaluation.
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
        self.loop = model.convolutional and model.device.type == "cpu"
        self.labelled = self.dataset.classes is not None
        m, device = federation.clients, federation.device
        self.clients = torch.linspace(0, m - 1, min(m, max_clients), device=device).round().to(torch.int64)
        replicate = torch.arange(federation.replicates, device=device)[:, None]
        seeds = federation.seed_of_replicate[replicate].expand(-1, len(self.clients))
        self.keys = rng.row_keys(seeds, rng.Purpose.EVALUATION, self.clients.expand_as(seeds))
        if self.dataset.stream:
            self.width = client_samples
            self.valid = torch.ones(*seeds.shape, client_samples, dtype=model.dtype, device=device)
        else:
            self.numbers, self.valid = self._subsample(replicate * m + self.clients, client_samples)
            self.width = self.numbers.shape[2]

    def _subsample(self, rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Numbers of up to `most` samples of each row, [R, m', q], and which entries are real.

        A client with more samples is thinned evenly along its shuffled share.
        """
        held = torch.as_tensor(self.federation.sizes, device=rows.device)[rows][..., None]
        slot = torch.arange(min(most, int(held.max())), device=rows.device)
        taken = held.clamp(max=len(slot))
        own = torch.where(slot < taken, slot * held // taken, 0)
        numbers = self.batches.order[self.batches.offsets[rows][..., None] + own]
        return numbers, (slot < taken).to(self.model.dtype)

    @torch.no_grad()
    def __call__(self, models: Tensor) -> Evaluation:
        """Evaluate the models [R, d]; everything leaves the device in one transfer."""
        found = self._on_test(models) if self.dataset.test_x is not None else {}
        losses, correct = self._on_clients(models)
        found["train_loss"] = losses.mean(1)
        if correct is not None:
            found["train_accuracy"] = correct.mean(1)
            lowest = max(1, correct.shape[1] // 10)
            found["client_accuracy_worst10"] = correct.sort(dim=1).values[:, :lowest].mean(1)
        if self.dataset.optimum is not None and not self.shift.active:
            optimum = self.dataset.optimum.to(models.dtype)
            found["distance_to_optimum"] = (models - optimum).norm(dim=1)
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
                total[1] += (outputs.argmax(2) == batch["y"]).sum(1)
        total /= len(data.test_x)
        return {"test_loss": total[0]} | ({"test_accuracy": total[1]} if self.labelled else {})

    def _on_clients(self, models: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean loss [R, m'] and accuracy [R, m'] of every client on its own samples."""
        replicates, count = len(models), len(self.clients)
        step = max(1, TEST_BATCH * 4 // (replicates * self.width))
        losses, correct = [], []
        for start in range(0, count, step):
            pick = slice(start, start + step)
            batch = self._client_batch(pick)
            if self.shift.active:
                batch = self._shifted(batch, models)
            flat = {name: value.flatten(1, 2) for name, value in batch.items() if name != "client"}
            outputs = self._predict(models, flat["x"], shared=False)
            shape = (replicates, -1, self.width)
            per_sample = torch.stack(
                [self.model.loss(out, {k: v[r] for k, v in flat.items()}) for r, out in enumerate(outputs)]
            )
            valid = self.valid[:, pick]
            losses.append((per_sample.reshape(shape) * valid).sum(2) / valid.sum(2))
            if self.labelled:
                hits = (outputs.argmax(2) == flat["y"]).reshape(shape)
                correct.append((hits * valid).sum(2) / valid.sum(2))
        return torch.cat(losses, 1), torch.cat(correct, 1) if correct else None

    def _client_batch(self, pick: slice) -> dict[str, Tensor]:
        """x [R, c, q, …], y [R, c, q], client [R, c] of some clients."""
        dtype = self.model.dtype
        clients = self.clients[pick].expand(self.federation.replicates, -1)
        if self.dataset.stream:
            flat = self.dataset.draw(clients.reshape(-1), self.keys[:, pick].reshape(-1), self.width, dtype)
            return {"x": flat.reshape(*clients.shape, *flat.shape[1:]), "client": clients}
        batch = self.batches.gather(self.numbers[:, pick], dtype)
        return batch | {"x": self.dataset.prepare(batch["x"], dtype), "client": clients}

    def _shifted(self, batch: dict[str, Tensor], models: Tensor) -> dict[str, Tensor]:
        """Every client's samples, after the evaluated model was deployed."""
        per_client = vmap(self.shift, in_dims=(0, None))
        return vmap(per_client, in_dims=(0, 0))(batch, models)
