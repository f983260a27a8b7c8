"""A server learning rate that decreases within ADWIN's window of stationary losses (Bifet and Gavaldà, SDM 2007)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedsim.core.constraints import IntegerAtLeast, NonNegative, Positive, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State


@dataclass
class AdaptiveWindowState(State):
    """Adds window [R, max_window, 3]: of each round in the window, the newest last, the number of participating clients
    and the sums of their losses and squared losses; 0 for rounds that are not in the window."""

    window: Tensor


class AdaptiveWindow(ServerRateStrategy[AdaptiveWindowState]):
    """x ← x − η_g |W|^{−p} mean_A G_i, weighted by w_i, where |W| is the number of rounds in a window that ADWIN keeps.

    ADWIN (here the values are the participating clients' training losses, clipped to [0, max_loss] and divided by
    max_loss, and W is cut between rounds) drops the oldest rounds of W until no cut W = W₀ W₁ has |mean(W₀) − mean(W₁)|
    ≥ ε; ε = √(2 σ² ln(2/δ') / m) + 2 ln(2/δ') / (3 m), σ² the variance of W, 1/m = 1/n₀ + 1/n₁ of n₀ and n₁ values, δ'
    = δ / ln(n₀ + n₁). Where losses are stationary W grows, and the smaller steps average out the noise of the updates;
    where they change, in training or after a drift of the data, W and with it the step begin anew. The use of |W| for a
    learning rate is this library's; the test is that of the authors' experiments, whose values are independent.

    The window has no more than `max_window` rounds, so the learning rate is at least η_g max_window^{−p}. Empty rounds
    are not in it. Memory: 3 · max_window numbers on the server.

    Args:
        delta: δ, confidence of the test: smaller values detect later, and raise fewer false alarms.
        max_loss: largest loss that the test distinguishes; not below what losses are after a drift.
        max_window: largest number of rounds in the window.
        power: p; 0 is FedAvg, 1 a running mean of the models that clients send within the window.
        server_lr: η_g, or a list of one per seed.
        weighting: w_i of the mean: 'uniform' 1/m, or 'data' fractions. The test weighs clients alike.
    """

    effective_if = tuple(
        EffectiveIf(name, lambda component, run: component.power > 0, "{at}.power above 0")
        for name in ("delta", "max_loss", "max_window")
    )

    server_sees = "mean"
    side_information = "the training losses of the participating clients go up as they are"

    def __init__(
        self,
        delta: Positive = 0.05,
        max_loss: Positive = 3.0,
        max_window: Annotated[int, IntegerAtLeast(2)] = 64,
        power: NonNegative = 0.5,
        server_lr: PositivePerSeed = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        if delta >= 1:
            raise ConfigError(key="delta", value=delta, needs="is a probability, and must be below 1")
        self.delta, self.max_loss, self.max_window = delta, max_loss, max_window
        self.power, self.weighting = power, weighting

    def initial(self, model: Tensor, federation: Federation) -> AdaptiveWindowState:
        return AdaptiveWindowState(model, model.new_zeros(len(model), self.max_window, 3))

    def aggregate(self, state: AdaptiveWindowState, report: Report, t: int) -> AdaptiveWindowState:
        cohort, value = report.cohort, report.loss.clamp(0, self.max_loss) / self.max_loss
        newest = cohort.sum(torch.stack([torch.ones_like(value), value, value.square()], dim=1))
        window = self.stationary_window(torch.cat([state.window[:, 1:], newest[:, None].to(state.window.dtype)], dim=1))
        rounds = (window[:, :, 0] > 0).sum(1, keepdim=True).clamp(min=1).to(state.model.dtype)
        step = self.server_lr * rounds**-self.power * self.mean(cohort, report.innovation)
        return AdaptiveWindowState(state.model - step, cohort.where_nonempty(window, state.window))

    def stationary_window(self, window: Tensor) -> Tensor:
        """[R, T, 3] the longest end of the window that has no cut at which both parts differ."""
        prefix = pad(window.cumsum(1), (0, 0, 1, 0))  # [R, T + 1, 3]
        older, newer = prefix[:, None] - prefix[:, :, None], prefix[:, -1:] - prefix  # of start and cut; of cut
        count, total, squares = newer.unbind(2)  # [R, T + 1] of the windows from each start
        n0, n1 = older[..., 0], newer[:, None, :, 0]
        variance = (squares / count.clamp(min=1) - (total / count.clamp(min=1)).square()).clamp(min=0)[:, :, None]
        log = (2 / self.delta * count.clamp(min=2).log()).log()[:, :, None]
        inverse_m = 1 / n0.clamp(min=1) + 1 / n1.clamp(min=1)
        bound = (2 * inverse_m * variance * log).sqrt() + 2 / 3 * inverse_m * log
        gap = (older[..., 1] / n0.clamp(min=1) - newer[:, None, :, 1] / n1.clamp(min=1)).abs()
        differs = ((n0 > 0) & (n1 > 0) & (gap >= bound)).any(2)  # [R, T + 1]; never at the last, which holds no round
        first = differs.to(torch.uint8).argmin(1, keepdim=True)
        return window * (torch.arange(window.shape[1], device=window.device) >= first)[:, :, None]
