"""P-FedAvg's three aggregation schemes (p-fedavg §2.4)."""

from __future__ import annotations

from typing import Annotated

import torch

from fedsim.availability import Availability
from fedsim.core import checks
from fedsim.core.constraints import OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import State, Strategy

SAMPLING_SCHEMES = ("full", "I", "II")
AVERAGE_KINDS = ("weighted", "plain")
AVAILABILITY_BY_SCHEME = {"full": "full", "I": "multiset", "II": "uniform_k"}  # for which each is defined


class PFedAvg(Strategy[State]):
    """The next model is a weighted sum of the clients' *models*, with w_i the data fractions.

    'full': Σ_i w_i θ_i over all clients (availability=full). 'I': the unweighted mean over a multiset of K clients
    drawn with probabilities w_i (availability=multiset). 'II': Σ_{k∈S} w_k (m/K) θ_k over K clients drawn without
    replacement (availability=uniform_k); the weights need not sum to 1, as in the paper.

    Args:
        scheme: full, I or II.
        weighting: w_i: 'data' fractions, or 'uniform' 1/m.
        average: of full participation: 'weighted' by w_i, as in the paper; 'plain', 1/m for every client, as in its
            authors' program, while the objective and θ^PS keep w_i.
    """

    effective_if = (
        EffectiveIf(
            "average",
            lambda component, run: component.weighting == "data" and not run.has_equal_data_fractions,
            "strategy.weighting=data and clients that hold different numbers of samples",
        ),
    )

    def __init__(
        self,
        scheme: str = "full",
        weighting: Weighting = "data",
        average: Annotated[str, OneOf(*AVERAGE_KINDS)] = "weighted",
    ) -> None:
        self.scheme = checks.check_choice("scheme", str(scheme), SAMPLING_SCHEMES)
        self.weighting = weighting
        self.average = average
        if average == "plain" and scheme != "full":
            raise ConfigError(
                f"strategy.average=plain is for full participation; strategy.scheme={scheme} has its own rule"
            )

    def check(self, availability: Availability) -> None:
        if availability.law not in ("", AVAILABILITY_BY_SCHEME[self.scheme]):
            raise ConfigError(
                f"strategy.scheme={self.scheme} is defined under one law alone; "
                f"use availability={AVAILABILITY_BY_SCHEME[self.scheme]}: "
                f"under {type(availability).__name__} its weights do not sum to 1, and the model shrinks or grows"
            )
        if self.scheme == "I" and self.weighting != "data":
            raise ConfigError(
                "strategy.scheme=I draws clients by their data, so strategy.weighting=uniform does not apply; use data"
            )

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort = report.cohort
        if self.scheme == "I" or self.average == "plain":
            model = cohort.mean(report.end)
        else:
            weights = cohort.weights(self.weighting)
            if self.scheme == "II":
                num_drawn = cohort.sum(torch.ones_like(weights))  # K
                weights = weights * cohort.broadcast(cohort.federation.clients / num_drawn)
            model = cohort.sum(report.end, weights)
        return State(cohort.where_nonempty(model, state.model))
