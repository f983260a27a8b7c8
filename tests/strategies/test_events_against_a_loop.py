"""Event-driven runs beside a loop in plain Python: one client, one arrival and one vector at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from library import points
from naive_strategies import CLIENTS, LRS, SEEDS, SIZES, STEPS, Learner

from fedsim.availability.clock import Events, Work
from fedsim.local import SGD
from fedsim.run.tracking import Tracking
from fedsim.strategies import ACE, ACED, AFACD, CA2FL, FedAsync, FedAvg, FedBuff

UPDATES = 12
SPEEDS = [0.02, 0.11, 0.013, 0.3]  # seconds per sample
QUIET = Tracking(progress="none", tensorboard=False)
EVERYBODY = np.ones((UPDATES, len(SEEDS), CLIENTS), dtype=np.int8)
SOMETIMES = (np.random.default_rng(2).random(EVERYBODY.shape) < 0.6).astype(np.int8)


class Uneven(Work):
    """1 to 3 steps, by round and client."""

    def steps(self, t, virtual, load):
        return steps_of(t, virtual % CLIENTS)


def steps_of(t, client):
    return 1 + (t + client) % STEPS


class Loop:
    """One replicate. Durations, the order of starts and failures are the clock's; all else is done here."""

    size = 1  # arrivals per server update

    def __init__(self, x, learner, replicate, clock, counts, uneven=False):
        self.model, self.learner, self.clock, self.counts, self.uneven = x, learner, clock, counts, uneven
        self.replicate, self.now, self.flight, self.models, self.times = replicate, 0.0, {}, [], []
        self.remember()

    def remember(self):
        """Memory of the strategy."""

    def steps(self, i, t):
        return steps_of(t, i) if self.uneven else STEPS

    def seconds(self, i, t):
        one = np.array([self.replicate * CLIENTS + i])
        return (
            self.steps(i, t) * SIZES[i] * self.clock.times(t, one, 0, 0).sample[0] + self.clock.pause_seconds(t, one)[0]
        )

    def order(self, t):
        everybody = self.replicate * CLIENTS + np.arange(CLIENTS)
        return self.clock.start_order(t, everybody)

    def start(self, t, rested):
        for i in self.order(t):
            room = self.clock.concurrency is None or len(self.flight) < self.clock.concurrency
            if self.counts[t, i] and i not in self.flight and i in rested and room:
                lost = self.clock.failure_fractions(t, np.array([self.replicate * CLIENTS + i]))[0]
                due = self.now + self.seconds(i, t) * min(lost, 1.0)
                self.flight[i] = (due, t, self.model, math.isfinite(lost))
                rested.remove(i)

    def run(self):
        came = []
        for t in range(UPDATES):
            rested, opened, anybody = set(range(CLIENTS)) - set(self.flight) - {i for i, *_ in came}, self.now, False
            over = False
            while len(came) < self.size:
                self.start(t, rested)
                ends = opened + (self.clock.deadline or math.inf)
                if not self.flight:
                    over = bool(self.clock.deadline) and not anybody
                    break
                anybody = True
                i = min(self.flight, key=lambda i: (self.flight[i][0], i))
                if self.flight[i][0] > ends:
                    over = True
                    break
                due, began, model, fails = self.flight.pop(i)
                self.now = max(self.now, due)
                if not fails:
                    end = self.learner.train(i, model, began, steps=self.steps(i, began))
                    came.append((i, began, model - end, end, self.learner.lr * self.steps(i, began)))
            self.now = ends if over else self.now
            if over or len(came) == self.size:
                rows = [(i, t - began, *row) for i, began, *row in came]
                for row in rows:
                    self.arrive(*row)
                self.update(rows)
                self.now += self.clock.server if rows else 0.0
                came = []
            self.models.append(self.model)
            self.times.append(self.now)
        return self

    def arrive(self, i, d, gain, end, rates):
        """An update is here."""

    def update(self, came):
        """The server's step."""


class LoopFedAsync(Loop):
    form = "model"

    def arrive(self, i, d, gain, end, rates):
        alpha = 0.6 * (1 + d) ** -0.5
        self.model = (1 - alpha) * self.model + alpha * end if self.form == "model" else self.model - alpha * gain


class LoopDifference(LoopFedAsync):
    form = "difference"


class LoopFedBuff(Loop):
    size = 3

    def remember(self):
        self.buffer = []

    def arrive(self, i, d, gain, end, rates):
        self.buffer.append((1 + d) ** -0.5 * gain)
        if len(self.buffer) == 3:
            self.model = self.model - 0.7 / 3 * sum(self.buffer)
            self.buffer = []


class LoopFedAvg(Loop):
    size = 2

    def update(self, came):
        if came:
            self.model = self.model - 0.8 * np.mean([gain for _, _, gain, _, _ in came], axis=0)


class LoopAFACD(Loop):
    size = 2

    def update(self, came):
        if came:
            self.model = self.model - 0.1 * np.mean([gain / rates for _, _, gain, _, rates in came], axis=0)


class LoopCA2FL(Loop):
    """v = h̄ + (1/|S|) Σ_{i∈S} (Δ_i − h_i), then h_i = Δ_i."""

    size = 2

    def remember(self):
        self.memory = [np.zeros_like(self.model) for _ in range(CLIENTS)]

    def update(self, came):
        if came:
            calibrated = sum(gain - self.memory[i] for i, _, gain, _, _ in came) / len(came)
            self.model = self.model - 0.5 * (sum(self.memory) / CLIENTS + calibrated)
            for i, _, gain, _, _ in came:
                self.memory[i] = gain


class LoopACE(Loop):
    """u_i = Δ_i, x ← x − η (1/m) Σ_j u_j over those heard from at most `oldest` server updates ago."""

    oldest = math.inf

    def remember(self):
        self.memory, self.began = {}, {}

    def arrive(self, i, d, gain, end, rates):
        self.memory[i], self.began[i] = gain, len(self.models) - d

    def update(self, came):
        recent = [u for i, u in self.memory.items() if len(self.models) - self.began[i] <= self.oldest]
        if came and self.oldest == math.inf:
            self.model = self.model - 0.5 * sum(recent) / CLIENTS
        elif came:
            self.model = self.model - (0.5 * np.mean(recent, axis=0) if recent else 0.0)


class LoopACED(LoopACE):
    oldest = 3


CASES = {
    "fedasync": (FedAsync, LoopFedAsync),
    "fedasync in differences": (lambda: FedAsync(form="difference"), LoopDifference),
    "fedbuff": (lambda: FedBuff(3, 0.7), LoopFedBuff),
    "fedavg over arrivals": (lambda: FedAvg(0.8), LoopFedAvg),
    "afa_cd": (lambda: AFACD(0.1), LoopAFACD),
    "ca2fl": (lambda: CA2FL(2, 0.5), LoopCA2FL),
    "ace": (lambda: ACE(0.5), LoopACE),
    "aced": (lambda: ACED(0.5, max_staleness=3), LoopACED),
}
CLOCKS = {
    "all": {},
    "jitter": {"jitter": 1.0, "server": 0.01},
    "two at a time": {"jitter": 1.0, "concurrency": 2},
    "failures": {"jitter": 0.5, "failure": 0.4},
    "pauses": {"jitter": 0.5, "failure": 0.4, "rejoin": 0.3},
}


def check(regression, name, counts=EVERYBODY, work=None, **clock):
    """Models after every update and virtual seconds, of the run and of the loop, differ by rounding."""
    strategy, kind = CASES[name]
    own = {"arrivals": kind.size} if name in ("fedavg over arrivals", "afa_cd") else {}
    given = {"work": work} if work else {}
    simulation = regression(strategy(), counts, clock=Events(SPEEDS, **own, **clock), **given)
    simulation.rounds = UPDATES
    models, times, pace = [], [], simulation.round_clock
    aggregate = simulation.strategy.aggregate

    def noting(state, report, t):
        state = aggregate(state, report, t)
        models.append(state.model.clone().numpy())
        times.append(pace.seconds.copy())
        return state

    simulation.strategy.aggregate = noting
    start = simulation.initial_state().model.numpy()
    simulation.run(tracking=QUIET)
    rate = simulation.trainer.local_rule.schedule.factor
    for r in range(len(SEEDS)):
        learner = Learner(simulation.dataset, LRS[r], rate)
        loop = kind(start[r], learner, r, pace.clock, counts[:, r], uneven=work is not None).run()
        found = np.array(models)[:, r]
        assert not np.allclose(found[-1], start[r], atol=1e-3)
        np.testing.assert_allclose(found, loop.models, atol=1e-12, rtol=0)
        np.testing.assert_allclose(np.array(times)[:, r], loop.times, rtol=1e-12)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("name", ["fedasync", "fedbuff"])
def test_models_and_times_as_the_formula_says_in_a_loop_over_arrivals(regression, name, clock):
    check(regression, name, **CLOCKS[clock])


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("fedasync", "fedbuff")])
def test_each_further_strategy_follows_the_formula_in_a_loop_over_arrivals(regression, name):
    check(regression, name, **CLOCKS["jitter"])


def test_clients_that_are_away_do_not_start(regression):
    check(regression, "fedasync", SOMETIMES, jitter=1.0)


def test_clients_that_do_unequal_numbers_of_steps_take_unequal_times(regression):
    check(regression, "afa_cd", work=Uneven())


def test_the_server_steps_at_the_deadline_with_what_has_arrived(regression):
    check(regression, "fedavg over arrivals", jitter=1.0, deadline=0.4)


def test_work_computed_at_the_start_or_when_it_is_needed_is_the_same(regression):
    """Samples are drawn by the model a client started from, not by when its work is computed."""

    def models(lazy):
        rule = {"batch_size": 2}
        simulation = regression(FedAsync(), EVERYBODY, "step", clock=Events(SPEEDS, jitter=1.0), rule=rule)
        calls, run = [], simulation.trainer.run_local_steps
        simulation.delayed_updates.is_computed_lazily = lazy
        simulation.trainer.run_local_steps = lambda work: calls.append(len(work)) or run(work)
        return simulation.run(tracking=QUIET).state.model, calls

    (lazily, few), (eagerly, many) = models(True), models(False)
    assert torch.allclose(lazily, eagerly, atol=1e-13, rtol=0)
    assert len(few) < len(many)


@pytest.mark.parametrize(
    ("strategy", "rest"), [(FedAsync(0.1, "constant", form="difference"), 0.2), (ACE(0.1), 0.5), (CA2FL(1, 0.1), 0.5)]
)
def test_fast_clients_bias_fedasync_and_not_strategies_that_remember_all(strategy, rest):
    """Two parabolas with minima 0 and 1; the client of the first is four times as fast: Σ μ_i c_i / Σ μ_i = 0.2."""
    rule = SGD(lr=0.5, steps=1, batch_size=None)
    simulation = points(strategy, [0.0, 1.0], rule, seeds=(0,), rounds=160, clock=Events([0.1, 0.41]))
    assert simulation.run(tracking=QUIET).state.model.item() == pytest.approx(rest, abs=0.07)
