"""The three models of a client: the server's model, that model after local steps, and its personal one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core.columns import AVERAGED_COLUMNS_ENTRY, OWN_COLUMNS_ENTRY
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.evaluation.personal.scores import WeightedRows
from fedsim.local import SGD, LocalRule
from fedsim.strategies import Strategy
from fedsim.strategies.strategy import KeepsClientModels
from fedsim.trainer import Trainer


def single_model_predictor(rows: Tensor) -> WeightedRows:
    """A predictor of one row [n, d] per client."""
    return [(torch.ones_like(rows[:, 0]), rows)]


def make_plain_sgd(rule: LocalRule) -> SGD:
    """SGD with the rule's work, rates, schedule, clip and weight decay."""
    options = {name: getattr(rule, name) for name in ("weight_decay", "clip") if hasattr(rule, name)}
    sgd = SGD(lr=rule.rates, schedule=rule.schedule, **options)
    sgd.work = rule.work
    return sgd


class PersonalModelComputer:
    """Computes a cohort's models from the clients' memory.

    Args:
        trainer: of the run.
        strategy: of the run.
        trainer_of: a trainer for another local rule.
        localize: see `Personal`.
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy[Any],
        trainer_of: Callable[[LocalRule], Trainer],
        localize: str = "rule",
    ) -> None:
        self.trainer, self.rule = trainer, trainer.local_rule
        self.rule_has_personal_model = type(self.rule).personal is not LocalRule.personal
        adaptation = self.rule.adaptation_rule()
        self.adaptation_trainer = None if adaptation is None else trainer_of(adaptation)
        has_own_columns = len(trainer.model.columns.private) > 0
        if has_own_columns and localize == "sgd":
            raise ConfigError(
                "personal.localize=sgd does not support columns that stay with the client; use localize=rule"
            )
        self.sgd_trainer = trainer_of(make_plain_sgd(self.rule)) if localize == "sgd" else None
        self.keeps_models = isinstance(strategy, KeepsClientModels) or strategy.clustered or has_own_columns

    @property
    def has_personal(self) -> bool:
        """Whether clients have personal models."""
        return self.rule_has_personal_model or self.adaptation_trainer is not None or self.keeps_models

    def personal(
        self, rows: Tensor, cohort: Cohort, t: int, model: Tensor, remembered: dict[str, Tensor], memory: Memory
    ) -> WeightedRows:
        """The personal models of clients with rows [n, d] in round t, server models [R, d_s] and client memory name →
        [n, …]. `memory` is that of the run, which contains clients' own columns.
        """
        if self.rule_has_personal_model:
            predictor: WeightedRows = vmap(self.rule.personal)({"params": rows} | remembered)  # type: ignore[assignment]
            return predictor
        if self.adaptation_trainer is not None:
            rule_memory = self.adaptation_trainer.initial_memory(model)
            for rule_entries, stored_entries in (
                (rule_memory.clients, memory.clients),
                (rule_memory.server, memory.server),
            ):
                rule_entries |= {
                    name: value
                    for name, value in stored_entries.items()
                    if name in (OWN_COLUMNS_ENTRY, AVERAGED_COLUMNS_ENTRY)
                }
            rule_memory.writable = False
            shared_rows = self.adaptation_trainer.model.columns.select_shared(rows)
            return single_model_predictor(
                self.adaptation_trainer.run(shared_rows, cohort, t, model, rule_memory).end_rows_with_private_columns
            )
        return single_model_predictor(rows)

    def rows_after_local_steps(
        self, start: dict[str, Tensor], cohort: Cohort, t: int, model: Tensor, memory: Memory
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows [n, d] of clients after the local steps of round t from the carry `start`, and the resulting client
        memory.
        """
        rule_memory = memory.read_only_copy()
        return self.trainer.run(
            start, cohort, t, model, rule_memory
        ).end_rows_with_private_columns, rule_memory.pending_writes

    def rows_after_plain_steps(self, rows: Tensor, cohort: Cohort, t: int, model: Tensor, memory: Memory) -> Tensor:
        """Rows [n, d] after the plain steps of round t from the communicated columns [n, d_s]; `memory` determines the
        reaction of the data.
        """
        assert self.sgd_trainer is not None
        return self.sgd_trainer.run(rows, cohort, t, model, memory.read_only_copy()).end_rows_with_private_columns
