"""Newcomers: clients that join after training, receive the last model and fine-tune it (apfl App. B.4, Fig. 6)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import torch

from fedsim.core.columns import AVERAGED_COLUMNS_ENTRY
from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory
from fedsim.evaluation.personal.options import Personal
from fedsim.evaluation.personal.personal_models import PersonalModelComputer, single_model_predictor
from fedsim.evaluation.personal.scores import MODEL_DESCRIPTIONS, ClientScorer, WeightedRows, summarise_over_clients
from fedsim.local import LocalRule
from fedsim.strategies import State, Strategy
from fedsim.trainer import TrainerFactory

Epoch = dict[str, Any]


class NewcomerEvaluator:
    """The last clients, which did not participate in training. They start from x^T (if the server has several models,
    from the one with the lowest loss for them) with new client memory (a personal model starts as x^T) and a new
    learning-rate schedule whose rounds are their epochs, and train locally. 'localized' is the model after their local
    steps (plain ones with `personal.localize=sgd`), 'personal' the personal model of the rule.

    Args:
        options: number of newcomers and epochs.
        members: the federation that trained.
        strategy: of the run; newcomers receive what it sends to the local rule besides the model, as clients without
            stored memory.
        trainer_of: makes trainers of all clients, newcomers included.
        rule: of the run.
        scores: scores models of all clients.
    """

    def __init__(
        self,
        options: Personal,
        members: Federation,
        strategy: Strategy[Any],
        trainer_of: TrainerFactory,
        rule: LocalRule,
        scores: ClientScorer,
    ) -> None:
        self.options, self.members, self.strategy, self.scores = options, members, strategy, scores
        epoch = copy.copy(rule)
        epoch.work = scores.evaluator.data.one_epoch_work(rule.work)
        self.trainer = trainer_of(epoch)
        self.own_models = PersonalModelComputer(self.trainer, strategy, trainer_of, options.localize)

    @torch.no_grad()
    def __call__(self, state: State, trained: Memory) -> list[Epoch]:
        """Return the results after 0, 1, … epochs: 'epoch', and for each model and measure the mean over newcomers of
        each replicate [R].

        `trained` is the members' memory, whose averaged columns newcomers receive with the model.
        """
        federation, model = self.scores.evaluator.federation, state.model
        counts = np.zeros((federation.num_replicates, federation.clients))
        counts[:, federation.clients - self.options.newcomers :] = 1
        cohort = federation.make_cohort(counts, np.ones_like(counts))
        memory, columns = self.trainer.initial_memory(model), self.trainer.model.columns
        memory.server |= {name: value for name, value in trained.server.items() if name == AVERAGED_COLUMNS_ENTRY}
        start_tensors = self.strategy.start(self._extend_state(state), cohort)
        start = dict(start_tensors) if isinstance(start_tensors, dict) else {"params": start_tensors}
        start |= {} if self.strategy.clustered else {"params": cohort.broadcast(model)}
        first_rows = full_rows = plain_rows = columns.full_rows(start["params"], cohort, memory)
        epochs = []
        for epoch in range(self.options.newcomer_epochs + 1):
            predictors: dict[str, WeightedRows] = {
                "global": single_model_predictor(first_rows),
                "localized": single_model_predictor(plain_rows),
            }
            if self.own_models.rule_has_personal_model or self.own_models.adaptation_trainer is not None:
                predictors["personal"] = self.own_models.personal(
                    full_rows, cohort, epoch, model, memory.gather(cohort), memory
                )
            epochs.append({"epoch": epoch} | self._replicate_mean_scores(predictors, cohort, first_rows))
            if epoch < self.options.newcomer_epochs:
                if self.own_models.sgd_trainer is not None:
                    plain_rows = self.own_models.rows_after_plain_steps(
                        columns.select_shared(plain_rows), cohort, epoch, model, memory
                    )
                carry = start | {"params": columns.select_shared(full_rows)}
                full_rows = self.trainer.run(carry, cohort, epoch, model, memory).end_rows_with_private_columns
                plain_rows = full_rows if self.own_models.sgd_trainer is None else plain_rows
        return epochs

    def _extend_state(self, state: State) -> State:
        """The state extended by newcomers: their per-client entries are those before round 0, everything else is as
        after training.
        """
        initial_state, initial_training_state = (
            self.strategy.initial(state.model, f) for f in (self.scores.evaluator.federation, self.members)
        )
        longer_fields = {
            f.name: getattr(initial_state, f.name)
            for f in dataclasses.fields(state)
            if getattr(initial_state, f.name).shape[:1] != getattr(initial_training_state, f.name).shape[:1]
        }
        return dataclasses.replace(state, **longer_fields)

    def _replicate_mean_scores(
        self, predictors: dict[str, WeightedRows], cohort: Cohort, deployed: torch.Tensor
    ) -> Epoch:
        """Means per replicate, plain numbers for summary.json; `deployed` [n, d] shifts the data if used."""
        means: Epoch = {}
        for name in (name for name in MODEL_DESCRIPTIONS if name in predictors):
            scores = self.scores(predictors[name], cohort, deployed)
            for measure in self.scores.names:
                values, _, bounds = cohort.all_gather_host(scores[measure].cpu().numpy())
                replicate_values = [values[a:b] for a, b in itertools.pairwise(bounds)]
                means[f"{name}_{measure}"] = [
                    summarise_over_clients(value, measure)[measure] for value in replicate_values
                ]
        return means
