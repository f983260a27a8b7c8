"""FedAvg that trusts clients less the longer they were away, as an example of client memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.core import Federation, Report
from fedsim.strategies import State, Strategy


@dataclass
class LastSeen(State):
    """Adds last_seen [R·m]: the round in which a client last took part; -1 before its first one."""

    last_seen: Tensor


class Recency(Strategy[LastSeen]):
    """x ← x − Σ_{i∈A} w_i G_i with w_i ∝ 1 / (rounds since client i last took part)."""

    def initial(self, model: Tensor, federation: Federation) -> LastSeen:
        return LastSeen(model, federation.zeros(dtype=torch.int64) - 1)

    def aggregate(self, state: LastSeen, report: Report, t: int) -> LastSeen:
        cohort = report.cohort
        absent_rounds = t - cohort.gather(state.last_seen)  # [n], at least 1
        update = cohort.mean(report.innovation, 1 / absent_rounds.to(report.innovation.dtype))
        cohort.scatter(state.last_seen, torch.full_like(absent_rounds, t))
        return replace(state, model=cohort.where_nonempty(state.model - update, state.model))
