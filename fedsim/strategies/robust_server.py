"""A server optimiser (momentum or adaptive) applied to a robust aggregate instead of the mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.column_names import ColumnsByName
from fedsim.core.errors import ConfigError, prefix_error_keys
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.local import LocalRule
from fedsim.strategies.fedopt import FedOpt
from fedsim.strategies.per_replicate import ReplicateRows
from fedsim.strategies.robust import Median, Robust
from fedsim.strategies.strategy import State, Strategy


class RobustServer(Strategy[State]):
    """The server strategy receives the same row for every participating client: the robust aggregate of all rows. It
    therefore uses, for example, a median in place of the mean.

    If fewer clients participate than the rule needs, nothing changes. With strategy.server=fedavg the strategy is the
    rule itself.

    Args:
        rule: a subclass of `Robust`; its own server learning rate is 1.
        server: a strategy that uses only the mean of the clients' rows: fedavg, fedprox, fedavgm or fedopt.
    """

    def __init__(self, rule: Robust | None = None, server: Strategy[Any] | None = None) -> None:
        self.rule = rule or Median()
        self.server: Strategy[Any] = server or FedOpt()
        if not isinstance(self.rule, Robust):
            raise ConfigError(
                f"{{rule}} is a {type(self.rule).__name__}; give one of fedsim.strategies.Robust", mentions=("rule",)
            )
        name = type(self.server).__name__
        if self.server.server_sees != "mean":
            raise ConfigError(
                f"{{server}}={name} does more with clients' rows than take their mean; use fedopt", mentions=("server",)
            )
        if self.rule.server_lr != 1:
            raise ConfigError(
                f"{{rule.server_lr}}={self.rule.server_lr} must be 1: the rate is the server's",
                mentions=("rule.server_lr",),
            )
        if self.server.weighting != "uniform":
            raise ConfigError(
                f"{{server.weighting}}={self.server.weighting} has no effect for a server that receives the same row "
                "for every client; give it to {rule}, or use uniform",
                mentions=("server.weighting", "rule"),
            )
        self.weighting = self.rule.weighting

    def check(self, availability: Availability) -> None:
        for part_name, strategy in (("rule", self.rule), ("server", self.server)):
            with prefix_error_keys(part_name):
                strategy.check(availability)

    def check_local(self, local_rule: LocalRule) -> None:
        self.server.check_local(local_rule)

    def check_columns(self, columns: ColumnsByName) -> None:
        self.server.check_columns(columns)

    def initial(self, model: Tensor, federation: Federation) -> State:
        server_state, rule_memory = self.server.initial(model, federation), self.rule.initial(model, federation)
        aggregate_fields = {
            f.name: getattr(rule_memory, f.name) for f in dataclasses.fields(rule_memory) if f.name != "model"
        }
        kind = dataclasses.make_dataclass(
            "RobustServerState", [(name, Tensor) for name in aggregate_fields], bases=(type(server_state),)
        )
        state: State = kind(
            **{f.name: getattr(server_state, f.name) for f in dataclasses.fields(server_state)}, **aggregate_fields
        )
        return state

    def start(self, state: State, cohort: Cohort) -> Tensor | dict[str, Tensor]:
        return self.server.start(state, cohort)

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort, memory_by_name, aggregates, has_aggregate = report.cohort, dict[str, list[Tensor]](), [], []
        state_fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        of_rule = self.rule.memory(state.model[0]).keys()
        memory: dict[str, list[Tensor]] = {name: [] for name in of_rule}
        for replicate, replicate_clients in enumerate(cohort.split_by_replicate(cohort.client_index)):
            rule_memory = {name: state_fields[name][replicate] for name in of_rule}
            rows = ReplicateRows(report, replicate, memory_by_name)
            aggregated = self.rule.robust_aggregate(rows, rule_memory, t) if len(replicate_clients) else None
            has_aggregate.append(aggregated is not None)
            aggregates.append(torch.zeros_like(state.model[replicate]) if aggregated is None else aggregated)
            for name in of_rule:
                memory[name].append(rule_memory[name])
        server_report = dataclasses.replace(report, received=cohort.broadcast(torch.stack(aggregates)))
        server_state = self.server.aggregate(state, server_report, t)
        has_aggregate_mask = torch.tensor(has_aggregate, device=state.model.device)
        server_fields = {name: getattr(server_state, name) for name in state_fields if name not in of_rule}
        server_fields |= {name: torch.stack(rows) for name, rows in memory.items()}
        updated_fields = {
            n: torch.where(has_aggregate_mask.reshape(-1, *[1] * (v.dim() - 1)), v, state_fields[n])
            for n, v in server_fields.items()
        }
        return dataclasses.replace(state, **updated_fields)
