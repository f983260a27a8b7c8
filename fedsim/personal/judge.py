"""Losses and accuracies of one predictor per client, each on the client's own samples; batched over clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.client_samples import ClientSamples
from fedsim.evaluation import Evaluator, predicted
from fedsim.federation import Cohort
from fedsim.partition import Table

Predictor = list[tuple[Tensor, Tensor]]  # weights [n] and rows [n, d], whose outputs are summed

BLOCK = 4000  # samples of one forward pass


@dataclass
class Verdict:
    """One predictor's numbers, one per client [n]; NaN where the client has no samples, None without labels."""

    loss: Tensor
    accuracy: Tensor | None
    training_loss: Tensor


class Judge:
    """Judges predictors on validation and training samples that answer the judged model where data do.

    Args:
        evaluator: of the run.
        tables: the validation samples of each replicate; None for a stream, which draws the same for both.
        train_samples: most training samples of a client that are looked at.
    """

    def __init__(self, evaluator: Evaluator, tables: list[Table] | None, train_samples: int) -> None:
        self.evaluator = evaluator
        batches, dtype = evaluator.samples.batches, evaluator.model.dtype
        self.training = ClientSamples(batches, train_samples, dtype)
        self.validation = self.training if tables is None else ClientSamples(batches, None, dtype, tables)

    def __call__(self, predictor: Predictor, cohort: Cohort, deployed: Tensor) -> Verdict:
        """The cohort's predictors; `deployed` [n, d] moves the data where `shift.deploy` is 'round'."""
        loss, accuracy = self._on(self.validation, predictor, cohort, deployed)
        same = self.validation is self.training
        return Verdict(loss, accuracy, loss if same else self._on(self.training, predictor, cohort, deployed)[0])

    def _on(
        self, samples: ClientSamples, predictor: Predictor, cohort: Cohort, deployed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Mean loss [n] and accuracy [n] on these samples."""
        if not len(cohort):  # a rank may have none of them
            nobody = deployed.new_zeros(0)
            return nobody, nobody if self.evaluator.labelled else None
        losses, correct = [], []
        step = max(1, BLOCK // max(samples.width, 1))
        for first in range(0, len(cohort), step):
            pick = slice(first, first + step)
            part = [(weight[pick], rows[pick]) for weight, rows in predictor]
            batch = samples.batch(cohort.virtual[pick])
            shift = self.evaluator.shift
            if shift.active:
                mixed = torch.stack([weight[:, None] * rows for weight, rows in part]).sum(0)
                batch = vmap(shift.smooth)(batch, mixed if shift.deploy == "step" else deployed[pick])
            weight = batch["weight"]
            outputs = [self.evaluator.predict(rows, batch["x"], shared=False) for _, rows in part]
            output = sum(
                o * share.reshape(-1, *[1] * (o.dim() - 1)) for o, (share, _) in zip(outputs, part, strict=True)
            )
            assert isinstance(output, Tensor)
            flat = {name: value.flatten(0, 1) for name, value in batch.items() if value.dim() > 1}
            per_sample = self.evaluator.model.loss(output.flatten(0, 1), flat).reshape(weight.shape)
            losses.append(torch.where(weight > 0, per_sample * weight, 0).sum(1) / weight.sum(1))
            if self.evaluator.labelled:
                hits = (predicted(output) == batch["y"]) * weight
                correct.append(hits.sum(1) / weight.sum(1))
        return torch.cat(losses), torch.cat(correct) if correct else None
