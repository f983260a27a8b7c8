"""The adaptive window: each round against its formula, and what ADWIN finds in stationary and in changed losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from library import Naive, with_
from naive_strategies import BY_DATA, UNIFORM, script

from fedsim.core import ConfigError
from fedsim.strategies import AdaptiveWindow, FedAvg


def has_cut(rounds: list[list[float]], delta: float) -> bool:
    """Whether ADWIN cuts these rounds of values: the formula of its authors' experiments."""
    values = [value for one in rounds for value in one]
    variance = sum((value - sum(values) / len(values)) ** 2 for value in values) / len(values)
    for cut in range(1, len(rounds)):
        first, second = ([value for one in part for value in one] for part in (rounds[:cut], rounds[cut:]))
        m = 1 / (1 / len(first) + 1 / len(second))
        log = math.log(2 * math.log(len(values)) / delta)
        bound = math.sqrt(2 / m * variance * log) + 2 / (3 * m) * log
        if abs(sum(first) / len(first) - sum(second) / len(second)) >= bound:
            return True
    return False


class NaiveAdaptiveWindow(Naive):
    """A list of lists of losses, from which the first is dropped as long as there is a cut."""

    delta, largest, longest, power, eta, weights = 0.9, 1.0, 30, 0.5, 1.0, UNIFORM

    def begin(self):
        self.rounds, self.lengths = [], []

    def mean_loss(self, i, t):
        ends = [self.learner.train(i, self.model, t, steps=steps) for steps in range(len(self.learner.rates(t)))]
        return sum(self.learner.loss(i, x) for x in ends) / len(ends)

    def round(self, t, active):
        if not active:
            return
        self.rounds.append([min(self.mean_loss(i, t), self.largest) / self.largest for i in active])
        self.rounds = self.rounds[-self.longest :]
        while has_cut(self.rounds, self.delta):
            self.rounds.pop(0)
        self.lengths.append(len(self.rounds))
        step = self.over({i: self.innovation(i, t) for i in active}, self.weights)
        self.model = self.model - self.eta * len(self.rounds) ** -self.power * step


CASES = {
    "growing": (AdaptiveWindow(0.9, 1.0, 30), NaiveAdaptiveWindow, [8, 8]),
    "short, by data": (
        AdaptiveWindow(0.9, 0.3, 4, 1.0, 0.7, "data"),
        with_(NaiveAdaptiveWindow, largest=0.3, longest=4, power=1.0, eta=0.7, weights=BY_DATA), [4, 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, lengths = CASES[name]
    found = follows(strategy, naive, counts=script())
    assert [one.lengths[-1] for one in found] == lengths


def test_windows_are_cut_as_by_a_loop_over_values():
    """The windows of three replicates with changes of another size each; clients come and go."""
    draw, strategy, cuts = np.random.default_rng(3), AdaptiveWindow(0.3, 1.0, 20), 0
    window, naive = torch.zeros(3, 20, 3, dtype=torch.float64), [[], [], []]
    for t in range(45):
        newest = []
        for rounds, change in zip(naive, (0.3, 0.6, 0.8), strict=True):
            rounds.append(list(0.2 * draw.random(draw.integers(1, 12)) + change * (t // 15 % 2)))
            newest.append([len(rounds[-1]), sum(rounds[-1]), sum(value**2 for value in rounds[-1])])
            del rounds[:-20]
            while has_cut(rounds, 0.3):
                del rounds[0]
                cuts += 1
        window = strategy.stationary_window(torch.cat([window[:, 1:], torch.tensor(newest).double()[:, None]], 1))
        assert (window[:, :, 0] > 0).sum(1).tolist() == list(map(len, naive))
    assert cuts > 30


def test_power_0_is_fedavg(models):
    one = AdaptiveWindow(power=0.0, server_lr=0.7, weighting="data")
    torch.testing.assert_close(models(one), models(FedAvg(server_lr=0.7, weighting="data")), rtol=0, atol=1e-13)


CLIENTS, REPLICATES = 10, 200


def lengths_of(strategy: AdaptiveWindow, chances: list[float]) -> torch.Tensor:
    """[T, replicates] the window's length after each round; clients' losses are 1 with these chances, else 0."""
    draw, lengths = np.random.default_rng(0), []
    window = torch.zeros(REPLICATES, strategy.max_window, 3, dtype=torch.float64)
    for chance in chances:
        total = torch.as_tensor(draw.binomial(CLIENTS, chance, REPLICATES), dtype=torch.float64)
        newest = torch.stack(
            [torch.full_like(total, CLIENTS), total, total], 1
        )  # the squares of 0 and 1 are themselves
        window = strategy.stationary_window(torch.cat([window[:, 1:], newest[:, None]], 1))
        lengths.append((window[:, :, 0] > 0).sum(1))
    return torch.stack(lengths)


def test_a_stationary_loss_raises_no_more_false_alarms_than_its_confidence():
    """Of 200 replicates with 60 rounds each, fewer than δ have an alarm."""
    lengths = lengths_of(AdaptiveWindow(delta=0.05, max_loss=1.0), [0.3] * 60)
    assert (lengths[-1] < 60).double().mean() <= 0.05


def test_a_change_is_found_within_five_rounds_and_most_of_what_came_before_is_dropped():
    lengths = lengths_of(AdaptiveWindow(delta=0.05, max_loss=1.0), [0.3] * 40 + [0.8] * 8)
    assert (lengths[44] < 45).all()
    assert (lengths[-1] <= 20).all()
    assert lengths[-1].double().mean() < 12


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"delta": 1.0}, "delta=1"), ({"delta": 0.0}, "delta=0"), ({"max_loss": 0.0}, "max_loss=0"),
     ({"max_window": 1}, "max_window=1")],
)  # fmt: skip
def test_settings_without_meaning_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        AdaptiveWindow(**settings)
