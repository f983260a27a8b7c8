"""Scaffnew: random skipping of communication, corrected by control variates (Mishchenko et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.constraints import PositiveFraction
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.local import LocalRule
from fedsim.strategies.strategy import State, Strategy


@dataclass
class ScaffnewState(State):
    """Adds the control variates h_i, [R·m, d]; their (weighted) sum over a replicate is zero."""

    control: Tensor


class Scaffnew(Strategy[ScaffnewState]):
    """ProxSkip for federations: local steps follow g − h_i; then x^{t+1} = mean x_i over all, and
    h_i ← h_i + (ϱ/γ) (x^{t+1} − x_i), γ the local rate.

    The paper averages after each local step with probability ϱ, with one draw for all clients: a round is the sequence
    of local steps between two averages, whose number is drawn by work=geometric. With a fixed number s and ϱ = 1/s it
    is SCAFFOLD. The paper's theorem is for full participation; with `require_full: false` the mean and the updates of
    h_i are over available clients, which keeps the sum of the h_i. Memory: one row per client. Requires local=sgd,
    whose carry takes the correction.

    Args:
        probability: ϱ; use 1/local_steps with work=geometric; None: 1/s, where s is the number of steps of the round.
        require_full: whether availability processes other than full raise an error.
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = (
        EffectiveIf(
            "require_full",
            lambda component, run: run.availability.law != "full",
            "an availability process other than full",
        ),
    )

    def __init__(
        self, probability: PositiveFraction | None = None, require_full: bool = True, weighting: Weighting = "uniform"
    ) -> None:
        self.probability = probability
        self.require_full = require_full
        self.weighting = weighting

    def check(self, availability: Availability) -> None:
        if self.require_full and availability.law != "full":
            raise ConfigError(
                "strategy=scaffnew needs full participation; use availability=full, or "
                "strategy.require_full=false, of which the theorem says nothing"
            )

    def check_local(self, local_rule: LocalRule) -> None:
        if not local_rule.schedule.steady:
            raise ConfigError(
                "strategy=scaffnew divides by the rate of a round, and local.schedule moves it within one; use "
                "local/schedule=constant, or one by rounds"
            )

    def initial(self, model: Tensor, federation: Federation) -> ScaffnewState:
        return ScaffnewState(model, federation.zeros(model.shape[1]))

    def start(self, state: ScaffnewState, cohort: Cohort) -> dict[str, Tensor]:
        return {"params": cohort.broadcast(state.model), "correction": -cohort.gather(state.control)}

    def aggregate(self, state: ScaffnewState, report: Report, t: int) -> ScaffnewState:
        cohort, p = report.cohort, self.probability
        model = cohort.where_nonempty(self.mean(cohort, report.end), state.model)
        ratio = 1 / report.lr_sum if p is None else p / cohort.broadcast(report.lr)  # ϱ/γ, [n]
        correction = ratio[:, None] * (cohort.broadcast(model) - report.end)
        taking_part = (cohort.multiplicity > 0)[:, None]
        control = cohort.gather(state.control)
        cohort.scatter(state.control, torch.where(taking_part, control + correction, control))
        return ScaffnewState(model, state.control)
