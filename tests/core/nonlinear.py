"""Strategies that are no weighted sums: what every replicate's rows have to be together for."""

from __future__ import annotations

import torch

from fedsim.strategies import PerReplicateStrategy, State, Strategy


class Krum(Strategy[State]):
    """x ← the arrival nearest to its k − f − 2 nearest neighbours (Blanchard et al. 2017), by distances
    and `map_replicates`."""

    def __init__(self, outliers: int = 1) -> None:
        self.outliers = outliers

    def aggregate(self, state, report, t):
        cohort = report.cohort

        def chosen(rows):
            apart = torch.cdist(rows, rows).sort(1).values
            return rows[apart[:, : max(len(rows) - self.outliers - 1, 1)].sum(1).argmin()]

        return State(cohort.where_nonempty(cohort.map_replicates(chosen, report.end), state.model))


class MedianMomentum(PerReplicateStrategy):
    """v ← β v + median_i G_i, x ← x − v, as far as clients' own models have not gone elsewhere."""

    def memory(self, model):
        return {"velocity": torch.zeros_like(model), "rounds": torch.zeros((), dtype=torch.int64)}

    def next_model(self, model, rows, memory, t):
        memory["velocity"] = 0.5 * memory["velocity"] + rows.innovation.quantile(0.5, 0)
        memory["rounds"] = memory["rounds"] + 1
        own = rows.client_memory("personal").mean(0)
        return model - memory["velocity"] - 0.1 * rows.data_fraction.sum() * (model - own)
