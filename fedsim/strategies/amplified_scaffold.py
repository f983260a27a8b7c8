"""Amplified SCAFFOLD: control variates and amplification by windows of rounds (Crawshaw and Liu, NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.core.constraints import Count, OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.amplified_fedavg import amplified_models
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients, update_memory_and_mean

CORRECTION_INTERVALS = ("period", "round")


@dataclass
class AmplifiedScaffoldState(RememberedUpdates):
    """Attributes:

    anchor: [R, d] z, the model after the last amplification.
    gradients: [R·m, d] of each client the raw gradients of its local steps in this window, times their rates, summed.
    rates: [R·m] those rates, summed.
    """

    anchor: Tensor
    gradients: Tensor
    rates: Tensor


class AmplifiedScaffold(RemembersClients[AmplifiedScaffoldState]):
    """Local steps follow g − c_i + c; x ← x − mean_{i∈A} G_i. After every P rounds x ← z + γ (x − z), z ← x, and for
    all clients that participated in the window c_i ← the mean of all their gradients g in it; c = Σ_i w_i c_i.

    If learning rates change within a window, gradients are weighted by their rates. P should be a multiple of the
    period of availability. With P = 1 it is SCAFFOLD with η_g = γ. An empty round does not change the model, but counts
    towards P. Memory: two rows per client, one of them for the window's sum. Runs under local=sgd, whose carry takes
    the correction.

    Args:
        window: P, rounds.
        amplification: γ, or a list of one per seed; the authors' program divides its local learning rate by γ.
        correction: c_i are updated after every 'period' of P rounds, or in every 'round', as in SCAFFOLD.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
        memory_dtype: of the stored c_i: same, float32, float16 or bfloat16.
    """

    effective_if = (
        EffectiveIf(
            "amplification", lambda component, run: component.window <= run.rounds, "as many rounds as {at}.window"
        ),
    )

    vectors_down = vectors_up = 2

    def __init__(
        self,
        window: Count = 10,
        amplification: PositivePerSeed = 1.5,
        correction: Annotated[str, OneOf(*CORRECTION_INTERVALS)] = "period",
        weighting: Weighting = "uniform",
        memory_dtype: MemoryDtype = "same",
    ) -> None:
        super().__init__(1.0, memory_dtype, weighting)
        self.window = window
        self.amplification = as_per_seed(amplification)
        self.renewed = self.window if correction == "period" else 1

    def initial(self, model: Tensor, federation: Federation) -> AmplifiedScaffoldState:
        sums = federation.zeros(model.shape[1], dtype=model.dtype), federation.zeros(dtype=model.dtype)
        return AmplifiedScaffoldState(model, *self.empty(model, federation), model.clone(), *sums)

    def start(self, state: AmplifiedScaffoldState, cohort: Cohort) -> dict[str, Tensor]:
        correction = cohort.broadcast(state.mean) - self.remembered_rows(state, cohort)
        return {"params": cohort.broadcast(state.model), "correction": correction}

    def aggregate(self, state: AmplifiedScaffoldState, report: Report, t: int) -> AmplifiedScaffoldState:
        cohort, rates = report.cohort, report.lr_sum
        raw = report.innovation - rates[:, None] * report.carry["correction"]  # Σ η_l g
        cohort.scatter(state.gradients, cohort.gather(state.gradients) + raw)
        state.rates[cohort.rows] += rates
        model = state.model - self.mean(cohort, report.innovation)
        model, anchor = amplified_models(
            model, state.anchor, self.amplification, ends_window=(t + 1) % self.window == 0
        )
        mean = self._new_control_variates(state, cohort.federation, t) if (t + 1) % self.renewed == 0 else state.mean
        return AmplifiedScaffoldState(model, state.memory, mean, anchor, state.gradients, state.rates)

    def _new_control_variates(self, state: AmplifiedScaffoldState, federation: Federation, t: int) -> Tensor:
        """The control variates of all who came since the last time, and with them c [R, d], which is returned. The
        host waits."""
        rows = np.flatnonzero(state.rates.cpu().numpy())
        participants_cohort = Cohort(federation, rows, np.ones(len(rows)), np.ones(len(rows)), t)
        gradients = participants_cohort.gather(state.gradients)
        mean_variate = update_memory_and_mean(
            state.memory,
            state.mean,
            participants_cohort,
            gradients / participants_cohort.gather(state.rates)[:, None],
            self.weighting,
        )
        participants_cohort.scatter(state.gradients, torch.zeros_like(gradients))
        state.rates.zero_()
        return mean_variate
