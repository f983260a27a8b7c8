"""Amplified FedAvg: the update of a window of rounds is amplified at its end (Wang and Ji, NeurIPS 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.core.constraints import Count, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation, Weighting
from fedsim.core.per_seed import NumberOrPerSeed, as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.strategy import State, Strategy


@dataclass
class AmplifiedFedAvgState(State):
    """Adds anchor [R, d]: z, the model after the last amplification."""

    anchor: Tensor


class AmplifiedFedAvg(Strategy[AmplifiedFedAvgState]):
    """x ← x − mean_{i∈A} G_i in every round; after every P rounds x ← z + γ (x − z), and then z ← x.

    A window as long as the period of availability weights all clients equally: with small local learning rates and a
    large γ, the order in which clients participate has little effect. γ = 1 is FedAvg, P = 1 is FedAvg with η_g = γ. An
    empty round does not change the model, but counts towards P. The authors use P = 500, γ = 10. Memory: one model on
    the server.

    Args:
        window: P, rounds.
        amplification: γ, or a list of one per seed.
        weighting: of the mean: 'uniform', or 'data' fractions.
    """

    effective_if = (
        EffectiveIf("window", lambda component, run: component.window <= run.rounds, "as many rounds as {at}.window"),
        EffectiveIf(
            "amplification", lambda component, run: component.window <= run.rounds, "as many rounds as {at}.window"
        ),
    )

    def __init__(
        self, window: Count = 10, amplification: PositivePerSeed = 1.5, weighting: Weighting = "uniform"
    ) -> None:
        self.window = window
        self.amplification = as_per_seed(amplification)
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> AmplifiedFedAvgState:
        return AmplifiedFedAvgState(model, model.clone())

    def aggregate(self, state: AmplifiedFedAvgState, report: Report, t: int) -> AmplifiedFedAvgState:
        cohort = report.cohort
        model = state.model - cohort.mean(report.innovation, cohort.weights(self.weighting))
        return AmplifiedFedAvgState(
            *amplified_models(model, state.anchor, self.amplification, ends_window=(t + 1) % self.window == 0)
        )


def amplified_models(
    model: Tensor, anchor: Tensor, factor: NumberOrPerSeed, ends_window: bool
) -> tuple[Tensor, Tensor]:
    """x and z after a round, which may be the last of its window."""
    if not ends_window:
        return model, anchor
    model = anchor + factor * (model - anchor)
    return model, model.clone()
