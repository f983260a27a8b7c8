"""A query of a strategy to clients in addition to training: loss and gradient of all their data at a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.federation import Cohort, FullDataGradients
from fedsim.data.samples import Batch
from fedsim.local import LocalRule
from fedsim.local.rule import Carry, Objective
from fedsim.trainer.trainer import Trainer
from fedsim.trainer.trainers import TrainerFactory

FULL_GRADIENT_NAME = "gradient of all data"


class FullGradientRule(LocalRule):
    """A local rule that computes loss and gradient on all of the client's data and changes nothing."""

    supported_keys = frozenset({FULL_GRADIENT_NAME})

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | {FULL_GRADIENT_NAME: gradient}, loss


class FullDataQuery:
    """Queries clients in the middle of a run, with their private columns and with data that react.

    All of a client's samples are one batch, as a pass would meet them (augmented, under the shift, contaminated); of a
    stream it is one of the batches that training draws.

    Args:
        trainer: of the run, whose memory of clients is looked at.
        query_trainer: a trainer of the same clients with `FullGradientRule`.
    """

    def __init__(self, trainer: Trainer, query_trainer: Trainer) -> None:
        self.trainer, self.query_trainer = trainer, query_trainer

    @classmethod
    def from_trainer(cls, trainers: TrainerFactory, trainer: Trainer) -> FullDataQuery:
        """Build the query next to a trainer that `trainers` made; they make another trainer for it."""
        size = trainer.local_rule.work.batch_size if trainers.data.dataset.stream else None
        return cls(trainer, trainers(FullGradientRule(lr=1.0, steps=1, batch_size=size)))

    def __call__(self, cohort: Cohort, models: Tensor) -> FullDataGradients:
        """Return losses and gradients of the cohort's clients at their replicate's model [R, d]."""
        model = self.trainer.model
        rows = cohort.broadcast(models)
        start: dict[str, Any] = {"params": rows, FULL_GRADIENT_NAME: rows.new_zeros(len(cohort), model.dimension)}
        rule_memory = self.trainer.last_initial_memory
        memory = None if rule_memory is None else rule_memory.read_only_copy()
        report = self.query_trainer.run(start, cohort, cohort.round, models, memory)
        return FullDataGradients(report.loss, model.columns.select_shared(report.carry[FULL_GRADIENT_NAME]))
