"""FedAU: weights estimated from the intervals between a client's participations (Wang & Ji, ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.core.constraints import Count, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State


class IntervalCounters(Protocol):
    """What is known of every client's intervals, [R·m] each."""

    mean_interval: Tensor
    intervals: Tensor
    current: Tensor


def initial_counters(model: Tensor, federation: Federation) -> tuple[Tensor, Tensor, Tensor]:
    """The counters before round 0."""
    zeros = torch.zeros(federation.num_memory_rows, dtype=model.dtype, device=model.device)
    return torch.ones_like(zeros), zeros, zeros.clone()


def updated_interval_counters(
    state: IntervalCounters, cohort: Cohort, cutoff: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The counters after a round with this cohort: an interval closes when the client takes part, or when its absence
    reaches `cutoff` rounds."""
    current_interval = state.current + 1
    closes_mask = torch.zeros_like(current_interval, dtype=torch.bool) if cutoff is None else current_interval >= cutoff
    closes_mask[cohort.rows] = True
    intervals = state.intervals + closes_mask
    mean = (state.mean_interval * state.intervals + current_interval) / intervals.clamp(min=1)
    mean = torch.where(closes_mask, mean, state.mean_interval)
    return mean, intervals, torch.where(closes_mask, 0.0, current_interval)


@dataclass
class FedAUState(State):
    """Attributes (all [R·m]):

    mean_interval: ω_i, the mean of the client's closed participation intervals; 1 before the first closes.
    intervals: M_i, how many have closed.
    current: S_i, rounds since the last one closed.
    """

    mean_interval: Tensor
    intervals: Tensor
    current: Tensor


class FedAU(ServerRateStrategy[FedAUState]):
    """x ← x − η_g Σ_{i∈A} w_i ω_i^t G_i, with ω_i^t the mean of the intervals completed *before* this round. An
    interval ends when the client participates, or when its absence reaches `cutoff` rounds. Empty rounds count too:
    intervals measure time, not updates. Memory: three numbers per client.

    Args:
        server_lr: η_g, or a list of one per seed.
        cutoff: K (50 in the papers).
        weighting: w_i: 'uniform' 1/m, as in the papers, or 'data' fractions.
    """

    effective_if = (
        EffectiveIf(
            "cutoff",
            lambda component, run: run.may_clients_be_absent and component.cutoff < run.rounds,
            "clients that miss more rounds in a row, in a run that is longer",
        ),
    )

    def __init__(self, server_lr: PositivePerSeed = 1.0, cutoff: Count = 50, weighting: Weighting = "uniform") -> None:
        super().__init__(server_lr)
        self.cutoff = cutoff
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> FedAUState:
        return FedAUState(model, *initial_counters(model, federation))

    def aggregate(self, state: FedAUState, report: Report, t: int) -> FedAUState:
        cohort = report.cohort
        weights = state.mean_interval[cohort.rows] / cohort.federation.clients
        if self.weighting == "data":
            weights = state.mean_interval[cohort.rows] * cohort.weights("data")
        step = cohort.sum(report.innovation, weights)
        return FedAUState(state.model - self.server_lr * step, *updated_interval_counters(state, cohort, self.cutoff))
