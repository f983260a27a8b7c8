"""Windows, learnt frequencies, selections: each strategy against its formula, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import Naive, everybody, one_by_one, points, with_
from naive_strategies import BY_DATA, CLIENTS, SIZES, STEPS, UNIFORM

from fedsim.core import ConfigError
from fedsim.local import SGD, Momentum
from fedsim.strategies import (
    MIFA,
    AmplifiedFedAvg,
    AmplifiedScaffold,
    Debiasing,
    FedAvg,
    FedLaAvg,
    Oort,
    PowerOfChoice,
    Scaffold,
)


class NaiveAmplifiedFedAvg(Naive):
    window, gamma, weights = 2, 1.4, UNIFORM

    def begin(self):
        self.anchor = self.model

    def round(self, t, active):
        if active:
            self.model = self.model - self.over({i: self.innovation(i, t) for i in active}, self.weights)
        if t % self.window == self.window - 1:
            self.model = self.anchor = self.anchor + self.gamma * (self.model - self.anchor)


class NaiveAmplifiedScaffold(NaiveAmplifiedFedAvg):
    """Gradients are written down one by one."""

    renewed = 2

    def begin(self):
        super().begin()
        self.memory, self.taken = self.rows(), [[] for _ in range(CLIENTS)]

    def innovation(self, i, t):
        c = sum(w * own for w, own in zip(self.weights, self.memory, strict=True))
        x = self.model
        for rate in self.learner.rates(t):
            gradient = self.learner.gradient(i, x)
            self.taken[i].append((rate, gradient))
            x = x - rate * (gradient - self.memory[i] + c)
        return self.model - x

    def round(self, t, active):
        super().round(t, active)
        if t % self.renewed == self.renewed - 1:
            for i, taken in enumerate(self.taken):
                if taken:
                    self.memory[i] = sum(r * g for r, g in taken) / sum(r for r, _ in taken)
            self.taken = [[] for _ in range(CLIENTS)]


class NaiveDebiasing(Naive):
    eta, cap, weights = 1.0, np.inf, UNIFORM

    def begin(self):
        self.taken = [0] * CLIENTS

    def round(self, t, active):
        for i in active:
            self.taken[i] += 1
        x, start = self.model, self.model
        for i in active:
            scale, own = min(self.cap, self.weights[i] * sum(self.taken) / self.taken[i]), start
            for rate in self.learner.rates(t):
                own = own - rate * scale * self.learner.gradient(i, own)
            x = x - self.eta * (t + 1) / sum(self.taken) * (start - own)
        self.model = x


class NaiveFedLaAvg(Naive):
    k, eta, collect, weights = 1, 1.0, 0, UNIFORM

    def begin(self):
        self.memory, self.last_seen = self.rows(), [-1] * CLIENTS

    def round(self, t, active):
        rate = self.learner.rates(t)[0]
        for i in sorted(active, key=lambda i: (self.last_seen[i], self.tie(i, t)))[: self.k]:
            x = self.model
            for step in self.learner.rates(t):
                x = x - step * self.weights[i] * CLIENTS * self.learner.gradient(i, x)
            self.memory[i], self.last_seen[i] = (self.model - x) / rate, t
        if t >= self.collect:
            self.model = self.model - self.eta * rate * sum(self.memory) / CLIENTS


class NaivePowerOfChoice(Naive):
    k, asked, eta = 1, True, 1.0

    def begin(self):
        self.last = [np.inf] * CLIENTS

    def round(self, t, active):
        losses = {i: self.learner.loss(i, self.model) if self.asked else self.last[i] for i in active}
        heard = {}
        for i in sorted(active, key=lambda i: (-losses[i], self.tie(i, t)))[: self.k]:
            heard[i], self.last[i] = trained(self.learner, i, self.model, t)
        if heard:
            self.model = self.model - self.eta * self.over(heard)


class NaiveOort(Naive):
    """Nothing at random: everybody is new in the first two rounds, and later the best are taken."""

    k, weights = 2, UNIFORM

    def begin(self):
        self.utility, self.last_seen = [0.0] * CLIENTS, [-1] * CLIENTS

    def round(self, t, active):
        chosen = active
        if len(active) > self.k:
            top = np.quantile([self.utility[i] for i in active], 0.9)
            capped = {i: min(self.utility[i], top) for i in active}
            low, high = min(capped.values()), max(capped.values())
            bonus = {i: np.sqrt(0.1 * np.log(t + 1) / (self.last_seen[i] + 1)) for i in active}
            chosen = sorted(active, key=lambda i: -((capped[i] - low) / (high - low) + bonus[i]))[: self.k]
        heard = {}
        for i in chosen:
            heard[i], loss = trained(self.learner, i, self.model, t)
            self.utility[i], self.last_seen[i] = SIZES[i] * STEPS * loss, t
        self.model = self.model - self.over(heard, self.weights) if heard else self.model


def trained(learner, i: int, x: np.ndarray, t: int) -> tuple[np.ndarray, float]:
    """A client's innovation, and its mean loss on the way."""
    start, losses = x, []
    for rate in learner.rates(t):
        losses.append(learner.loss(i, x))
        x = x - rate * learner.gradient(i, x)
    return start - x, float(np.mean(losses))


PAIRS = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])[:, None].repeat(2, 1)
GREEDY = {"clip": 0.9, "explore": 0.0, "explore_least": 0.0, "cutoff": 1.0}
CASES = {
    "amplified_fedavg": (AmplifiedFedAvg(2, 1.4), NaiveAmplifiedFedAvg, {"schedule": "sqrt"}),
    "amplified_fedavg by data": (
        AmplifiedFedAvg(3, 2.0, "data"), with_(NaiveAmplifiedFedAvg, window=3, gamma=2.0, weights=BY_DATA), {},
    ),
    "amplified_scaffold": (AmplifiedScaffold(2, 1.4), NaiveAmplifiedScaffold, {"schedule": "step"}),
    "amplified_scaffold, round, by data": (
        AmplifiedScaffold(2, 1.4, "round", "data"), with_(NaiveAmplifiedScaffold, renewed=1, weights=BY_DATA), {},
    ),
    "debiasing": (Debiasing(), NaiveDebiasing, {}),
    "debiasing, capped, by data": (
        Debiasing(0.7, 1.2, "data"), with_(NaiveDebiasing, eta=0.7, cap=1.2, weights=BY_DATA), {"schedule": "step"},
    ),
    "fedlaavg": (FedLaAvg(0.25), NaiveFedLaAvg, {"schedule": "sqrt"}),
    "fedlaavg by data, collects": (
        FedLaAvg(0.5, collect=2, server_lr=0.8, weighting="data"),
        with_(NaiveFedLaAvg, k=2, eta=0.8, collect=2, weights=BY_DATA), {},
    ),
    "power_of_choice": (PowerOfChoice(1, 4), NaivePowerOfChoice, {"schedule": "sqrt"}),
    "power_of_choice, last": (
        PowerOfChoice(2, 4, "last", 0.8), with_(NaivePowerOfChoice, k=2, asked=False, eta=0.8), {"counts": everybody()},
    ),
    "oort": (Oort(2, **GREEDY), NaiveOort, {"counts": PAIRS}),
    "oort by data": (Oort(2, weighting="data", **GREEDY), with_(NaiveOort, weights=BY_DATA), {"counts": PAIRS}),
}  # fmt: skip
SAME = {"rtol": 0, "atol": 1e-12}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, options = CASES[name]
    follows(strategy, naive, **options)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (AmplifiedFedAvg(3, 1.0), FedAvg()),
        (AmplifiedFedAvg(1, 1.7), FedAvg(1.7)),
        (AmplifiedScaffold(1, 1.7), Scaffold(1.7)),
        (AmplifiedScaffold(3, 1.0, "round"), Scaffold()),
        (FedLaAvg(select="all"), MIFA(memory="gradient")),
        (PowerOfChoice(4, 4), FedAvg()),
        (Oort(4), FedAvg()),
    ],
)
def test_it_is_another_one_where_it_adds_nothing(one, other, models):
    torch.testing.assert_close(models(one, schedule="step"), models(other, schedule="step"), **SAME)


def test_with_everybody_there_debiasing_is_fedavg(models):
    torch.testing.assert_close(models(Debiasing(), counts=everybody()), models(FedAvg(), counts=everybody()), **SAME)


def test_debiasing_ends_where_clients_count_alike_and_fedavg_where_they_come_often(Scripted):
    """One client comes every round, the others in turn; ½ (x − u_i)², one small local step."""
    u, turns = [4.0, 0.0, 1.0, -1.0], [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    counts = np.tile(np.array(turns)[:, None], (7, 1, 1))
    for strategy, end in ((Debiasing(), 1.0), (FedAvg(), 2.0)):
        simulation = points(strategy, u, SGD(lr=0.25, steps=1), availability=Scripted(counts))
        assert np.mean(one_by_one(simulation, 1.5, 21)[-3:]) == pytest.approx(end, abs=0.15)


def test_fedlaavg_asks_everybody_in_turn(federated, play):
    """All are there, one of four takes part: the one that did so longest ago; who begins is drawn for each seed."""
    asked = [
        played.report.cohort.client_index.tolist() for played in play(federated(FedLaAvg(0.25), counts=everybody()))
    ]
    for turns in zip(*asked, strict=True):
        assert sorted(turns[:4]) == [0, 1, 2, 3]
        assert turns[4] == turns[0]


def test_only_the_candidates_are_asked_and_only_the_chosen_train(federated, play):
    simulation = federated(PowerOfChoice(1, 2), counts=everybody())
    asked, ask = [], simulation.federation.full_data_oracle
    simulation.federation.full_data_oracle = lambda cohort, model: asked.append(cohort) or ask(cohort, model)
    played = list(play(simulation))
    simulation.federation.full_data_oracle = ask
    for some, one in zip(asked, played, strict=True):
        assert np.bincount(some.host_index.rows // CLIENTS).tolist() == [2, 2]
        assert np.bincount(one.report.cohort.host_index.rows // CLIENTS).tolist() == [1, 1]
        assert set(one.report.cohort.host_index.rows) < set(some.host_index.rows)


@pytest.mark.parametrize("kind", [Debiasing, AmplifiedScaffold])
def test_a_rule_that_ignores_what_it_is_handed_is_refused(kind, federated):
    with pytest.raises(ConfigError, match=r"strategy=(Debiasing hands scale|AmplifiedScaffold hands correction)"):
        federated(kind(), rule=Momentum).run()


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: AmplifiedFedAvg(window=0), r"window=0"),
        (lambda: AmplifiedFedAvg(amplification=-1), r"amplification=-1"),
        (lambda: AmplifiedScaffold(correction="window"), r"correction='window'.*period, round"),
        (lambda: Debiasing(cap=0), r"cap=0"),
        (lambda: FedLaAvg(fraction=0.0), r"fraction=0"),
        (lambda: FedLaAvg(select="last"), r"select='last'.*longest, random, all"),
        (lambda: PowerOfChoice(3, 2), r"candidates=2.*k=3.*give 3"),
        (lambda: PowerOfChoice(loss="mean"), r"loss='mean'.*asked, last"),
        (lambda: Oort(explore=2.0), r"explore=2"),
    ],
)
def test_impossible_settings_name_their_key(build, key):
    with pytest.raises(ConfigError, match=key):
        build()
