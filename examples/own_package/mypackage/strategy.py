"""Federated averaging with momentum on the server, as an example of a strategy of one's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.core import Federation, Report
from fedsim.core.constraints import Fraction, Positive
from fedsim.strategies import State, Strategy


@dataclass
class Velocity(State):
    """Adds the velocity [R, d]. Tensors of the state are checkpointed."""

    velocity: Tensor


class ServerMomentum(Strategy[Velocity]):
    """v ← β v + mean_{i∈A} G_i; x ← x − η_g v (Hsu et al. 2019). A round in which nobody takes part changes nothing.

    Args:
        server_lr: η_g.
        momentum: β.
    """

    def __init__(self, server_lr: Positive = 1.0, momentum: Fraction = 0.9) -> None:
        self.server_lr = server_lr
        self.momentum = momentum

    def initial(self, model: Tensor, federation: Federation) -> Velocity:
        return Velocity(model, torch.zeros_like(model))

    def aggregate(self, state: Velocity, report: Report, t: int) -> Velocity:
        cohort = report.cohort
        velocity = self.momentum * state.velocity + cohort.mean(report.innovation)
        return replace(
            state,
            model=cohort.where_nonempty(state.model - self.server_lr * velocity, state.model),
            velocity=cohort.where_nonempty(velocity, state.velocity),
        )
