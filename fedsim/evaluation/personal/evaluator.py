"""Scores every client's global, localized and personal model, at every evaluation of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory
from fedsim.evaluation.columns import columns_of_other_model
from fedsim.evaluation.personal.options import Personal
from fedsim.evaluation.personal.personal_models import PersonalModelComputer, single_model_predictor
from fedsim.evaluation.personal.scores import (
    MODEL_DESCRIPTIONS,
    PERSONAL_COLUMNS,
    VALIDATED_CLIENTS_COLUMN,
    ClientScorer,
    WeightedRows,
    personal_measure_names,
    summarise_over_clients,
)
from fedsim.strategies import State, Strategy

CLIENTS_PER_BLOCK = 256  # clients whose models are computed and scored together


class PersonalEvaluator:
    """Three models per client on its own validation samples, for the clients selected by `options.over`.

    Args:
        options: see `Personal`.
        federation: clients and replicates.
        strategy: defines clients' start rows.
        own_models: computes the models.
        scores: scores them.
        byzantine: [R · m] which clients an attack makes Byzantine; None without an attack.
    """

    def __init__(
        self,
        options: Personal,
        federation: Federation,
        strategy: Strategy[Any],
        own_models: PersonalModelComputer,
        scores: ClientScorer,
        byzantine: np.ndarray | None = None,
    ) -> None:
        self.options, self.federation, self.strategy = options, federation, strategy
        self.own_models, self.scores, self.byzantine = own_models, scores, byzantine
        self.models = [name for name in MODEL_DESCRIPTIONS if name != "personal" or own_models.has_personal]

    @property
    def columns(self) -> dict[str, str]:
        """Additional columns of metrics.csv in this run → descriptions."""
        if self.options.over == "none":
            return {}
        evaluator, descriptions = self.scores.evaluator, dict[str, str]()
        for model in self.models:
            descriptions |= {
                name: PERSONAL_COLUMNS[name]
                for name in columns_of_other_model(model, personal_measure_names(evaluator.labelled)).values()
            }
            user_measures = evaluator.metrics.measures(f", of {MODEL_DESCRIPTIONS[model]}")
            descriptions |= {
                name: user_measures[measure] for measure, name in columns_of_other_model(model, user_measures).items()
            }
        return descriptions | {VALIDATED_CLIENTS_COLUMN: PERSONAL_COLUMNS[VALIDATED_CLIENTS_COLUMN]}

    @torch.no_grad()
    def __call__(
        self, state: State, memory: Memory, t: int, online: Cohort | None
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Metrics, name → [R], and one number per client for histograms, at the start of round t.

        Args:
            state: of the strategy.
            memory: of rule and shift; read only.
            t: the next round, on whose batches the localized models train.
            online: participants of the last round; None before the first.
        """
        cohort = self._scored_cohort(online, t)
        score_blocks: dict[str, list[Tensor]] = {}
        for first_row in range(0, len(cohort), CLIENTS_PER_BLOCK):
            block = cohort.subset(np.arange(first_row, min(first_row + CLIENTS_PER_BLOCK, len(cohort))))
            for name, values in self._scores_of_clients(state, memory, t, block).items():
                score_blocks.setdefault(name, []).append(values)
        names = [f"{model}_{measure}" for model in self.models for measure in self.scores.names]
        host = np.zeros((len(names), 0))
        if score_blocks:
            host = torch.stack([torch.cat(score_blocks[name]) for name in names]).cpu().numpy()
        host, _, bounds = cohort.all_gather_host(host)
        return self._reduce_over_clients(dict(zip(names, host, strict=True)), bounds)

    def _scored_cohort(self, online: Cohort | None, t: int) -> Cohort:
        """Rows of the scored clients; the data on which a strategy lets them choose a model are those of round t."""
        federation, options = self.federation, self.options
        counts = np.zeros((federation.num_replicates, federation.clients))
        if options.over == "honest" and self.byzantine is not None:
            counts.reshape(-1)[~self.byzantine] = 1
        elif options.over == "all" or online is None:
            counts[:] = 1
        else:
            counts.reshape(-1)[online.host_index.virtual_clients[online.host_index.multiplicity > 0]] = 1
        return federation.make_cohort(counts, np.ones_like(counts), t)

    def _scores_of_clients(self, state: State, memory: Memory, t: int, block: Cohort) -> dict[str, Tensor]:
        """'model measure' → [n] for some clients."""
        start = self.strategy.start(state, block)
        carry = dict(start) if isinstance(start, dict) else {"params": start}
        columns, predictors = self.own_models.trainer.model.columns, dict[str, WeightedRows]()
        deployed = block.broadcast(columns.full_server_rows(state.model, memory, self.federation))
        predictors["global"] = single_model_predictor(deployed)
        start_rows = columns.full_rows(carry["params"], block, memory)
        client_state, at_end = (
            (start_rows, memory.gather(block)),
            self.options.at == "end" and "personal" in self.models,
        )
        if at_end or self.own_models.sgd_trainer is None:
            end_state = self.own_models.rows_after_local_steps(carry, block, t, state.model, memory)
            predictors["localized"] = single_model_predictor(end_state[0])
            client_state = end_state if at_end else client_state
        if self.own_models.sgd_trainer is not None:
            predictors["localized"] = single_model_predictor(
                self.own_models.rows_after_plain_steps(carry["params"], block, t, state.model, memory)
            )
        if "personal" in self.models:
            predictors["personal"] = self.own_models.personal(
                client_state[0], block, t, state.model, client_state[1], memory
            )
        return {
            f"{model}_{measure}": values
            for model, predictor in predictors.items()
            for measure, values in self.scores(predictor, block, deployed, t).items()
        }

    def _reduce_over_clients(
        self, host: dict[str, np.ndarray], bounds: Sequence[int]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Means, medians and worst tenths per replicate, and the numbers per client."""
        rows: list[dict[str, float]] = []
        for a, b in itertools.pairwise(bounds):
            row = {VALIDATED_CLIENTS_COLUMN: float(np.sum(~np.isnan(host["global_validation_loss"][a:b])))}
            for name, values in host.items():
                metric = self.scores.metric_by_measure.get(name.partition("_")[2])
                row |= summarise_over_clients(values[a:b], name, metric.better_direction if metric else None)
            rows.append(row)
        metrics = {name: np.array([row[name] for row in rows]) for name in self.columns}
        measure = "validation_accuracy" if self.scores.evaluator.labelled else "validation_loss"
        histograms = {f"{m} {measure.replace('_', ' ')}": host[f"{m}_{measure}"] for m in self.models}
        user_measures = self.scores.metric_by_measure
        histograms |= {f"{m} {n.replace('_', ' ')}": host[f"{m}_{n}"] for m in self.models for n in user_measures}
        return metrics, {name: values[~np.isnan(values)] for name, values in histograms.items()}
