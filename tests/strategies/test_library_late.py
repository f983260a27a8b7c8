"""Rows that arrive late: FedAsync, FedBuff, AFA, delayed gradients, beside a naive loop and where they meet others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from library import Naive, points, with_
from naive_strategies import CLIENTS, SEEDS, STEPS

from fedsim import ConfigError, Execution
from fedsim.availability import Multiset
from fedsim.availability.clock import ConstantDelay, Delay, GeometricDelay, LognormalDelay, NoDelay, UniformDelay, Work
from fedsim.local import SGD
from fedsim.strategies import (
    AFACD,
    AFACS,
    MIFA,
    FedAsync,
    FedAvg,
    FedAvgAll,
    FedAvgM,
    FedBuff,
    FedNova,
    FedOpt,
    FedProx,
)

TAKES = np.random.default_rng(3).integers(0, 4, (9, len(SEEDS), CLIENTS))  # rounds to arrival


class Written(Delay):
    """It is written down when a row arrives."""

    def rounds(self, t, virtual):
        return TAKES[t].reshape(-1)[virtual]


class Uneven(Work):
    """1 to 3 steps, by round and client."""

    def steps(self, t, virtual, load):
        return steps_of(t, virtual % CLIENTS)


def steps_of(t, client):
    return 1 + (t + client) % STEPS


class Late(Naive):
    """Clients begin with today's model, are busy, and arrive."""

    uneven = False

    def begin(self):
        self.way, self.replicate = [], SEEDS.index(self.seed)
        self.remember()

    def remember(self):
        """Memory of the strategy."""

    def round(self, t, active):
        busy = {i for _, i, *_ in self.way}
        for i in active:
            if i not in busy:
                steps = steps_of(t, i) if self.uneven else STEPS
                end = self.learner.train(i, self.model, t, steps=steps)
                due = t + TAKES[t, self.replicate, i]
                self.way.append((due, i, t, self.model, end, self.learner.lr * steps))
        came = sorted((row for row in self.way if row[0] == t), key=lambda row: row[1])
        self.way = [row for row in self.way if row[0] > t]
        self.arrive([(i, t - began, start - end, end, rates) for _, i, began, start, end, rates in came])

    def arrive(self, rows):
        raise NotImplementedError


class NaiveFedAvg(Late):
    def arrive(self, rows):
        if rows:
            self.model = self.model - 0.8 * np.mean([gain for _, _, gain, _, _ in rows], axis=0)


class NaiveDelayedGradient(Late):
    def arrive(self, rows):
        for _, _, gain, _, _ in rows:
            self.model = self.model - 0.8 / CLIENTS * gain


class NaiveFedAsync(Late):
    form = "model"

    def arrive(self, rows):
        for _, d, gain, end, _ in rows:
            alpha = 0.6 * (1 + d) ** -0.5
            self.model = (1 - alpha) * self.model + alpha * end if self.form == "model" else self.model - alpha * gain


class NaiveHinge(Late):
    def arrive(self, rows):
        for _, d, _, end, _ in rows:
            alpha = 0.6 * (1.0 if d <= 1 else 1 / (3 * (d - 1) + 1))
            self.model = (1 - alpha) * self.model + alpha * end


class NaiveFedBuff(Late):
    size = 3

    def remember(self):
        self.buffer, self.waiting = np.zeros_like(self.model), 0

    def arrive(self, rows):
        for _, d, gain, _, _ in rows:
            self.buffer, self.waiting = self.buffer + (1 + d) ** -0.5 * gain, self.waiting + 1
            if self.waiting == self.size:
                self.model = self.model - 0.7 / self.size * self.buffer
                self.remember()


class NaiveAFACD(Late):
    def arrive(self, rows):
        if rows:
            self.model = self.model - 0.1 * np.mean([gain / rates for _, _, gain, _, rates in rows], axis=0)


class NaiveAFACS(Late):
    def remember(self):
        self.memory = self.rows()

    def arrive(self, rows):
        for i, _, gain, _, rates in rows:
            self.memory[i] = gain / rates
        self.model = self.model - 0.1 * np.mean(self.memory, axis=0)


CASES = {
    "fedavg": (lambda: FedAvg(0.8), NaiveFedAvg),
    "delayed gradient": (lambda: FedAvgAll(0.8), NaiveDelayedGradient),
    "fedasync": (FedAsync, NaiveFedAsync),
    "fedasync in differences": (lambda: FedAsync(form="difference"), with_(NaiveFedAsync, form="difference")),
    "fedasync with a hinge": (lambda: FedAsync(discount="hinge", a=3.0, b=1.0), NaiveHinge),
    "fedbuff": (lambda: FedBuff(3, 0.7), NaiveFedBuff),
    "fedbuff of one": (lambda: FedBuff(1, 0.7), with_(NaiveFedBuff, size=1)),
    "afa_cd": (lambda: AFACD(0.1), NaiveAFACD),
    "afa_cs": (lambda: AFACS(0.1), NaiveAFACS),
}
LATE = {  # whatever allows it
    "fedavg": lambda: FedAvg(0.8, "data"),
    "fedavg_all": FedAvgAll,
    "fedavgm": FedAvgM,
    "fedopt": FedOpt,
    "fedprox": FedProx,
    "fednova": FedNova,
    "mifa": lambda: MIFA(0.8, "gradient"),
    "fedasync": FedAsync,
    "fedbuff": lambda: FedBuff(2),
    "afa_cd": lambda: AFACD(weighting="data"),
    "afa_cs": lambda: AFACS(weighting="data"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(follows, name):
    strategy, naive = CASES[name]
    follows(strategy(), naive, delay=Written())


@pytest.mark.parametrize("name", ["afa_cd", "afa_cs", "fedbuff"])
def test_with_uneven_work_too(follows, name):
    strategy, naive = CASES[name]
    follows(strategy(), with_(naive, uneven=True), delay=Written(), work=None, clients_work=Uneven())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LATE)
def test_a_delay_of_no_rounds_is_none_bit_for_bit(models, name):
    plain, late = models(LATE[name]()), models(LATE[name](), delay=ConstantDelay(0))
    assert torch.equal(plain, late)
    assert not torch.equal(plain, models(LATE[name](), delay=ConstantDelay(1)))


def test_fedbuff_of_one_is_fedasync_in_differences(models):
    one, other = (models(s, delay=Written()) for s in (FedBuff(1, 0.6), FedAsync(0.6, form="difference")))
    assert torch.allclose(one, other, atol=1e-12)
    assert not torch.allclose(one, models(FedAsync(0.6), delay=Written()), atol=1e-6)


def test_without_delay_a_full_buffer_is_fedavg_and_equal_steps_make_afa_fedavg_and_mifa(models):
    everybody = np.ones((5, 2, CLIENTS), dtype=np.int8)
    mean = models(FedAvg(0.7), counts=everybody)
    assert torch.allclose(models(FedBuff(CLIENTS, 0.7), counts=everybody), mean, atol=1e-12)
    rates = {"seeds": SEEDS[:1]}  # of one rate, 0.05
    assert torch.allclose(models(AFACD(0.05 * STEPS), **rates), models(FedAvg(), **rates), atol=1e-12)
    cs, mifa = models(AFACS(0.05 * STEPS), **rates), models(MIFA(1.0, "gradient"), **rates)
    assert torch.allclose(cs, mifa, atol=1e-12)


def test_delayed_gradients_on_a_parabola(play, Scripted):
    """d + 1 = 2 clients in turn, F = ½ x²: x_{t+1} = x_t − η' x_{t−1}, η' = η_l η_g / m."""
    counts = [[[t % 2 == 0, t % 2 == 1]] for t in range(12)]

    class Turns(Written):
        def rounds(self, t, virtual):
            return np.ones(len(virtual), dtype=np.int64)

    rule = SGD(lr=0.4, steps=1, batch_size=None)
    simulation = points(
        FedAvgAll(), [0.0, 0.0], rule, seeds=(0,), rounds=12, delay=Turns(),
        availability=Scripted(np.array(counts, dtype=np.int8)),
    )  # fmt: skip
    simulation.initial_state = lambda: simulation.strategy.initial(
        torch.ones(1, 1, dtype=torch.float64), simulation.federation
    )
    found = [played.after.model.item() for played in play(simulation)]
    x = [1.0, 1.0]  # nothing arrives in round 0
    while len(x) < 13:
        x.append(x[-1] - 0.2 * x[-2])
    assert found == pytest.approx(x[1:])


@pytest.mark.parametrize("place", ["host", "disk"])
def test_memory_elsewhere_changes_nothing(models, place):
    plain = models(AFACS(), delay=Written())
    where = Execution(dtype="float64", chunk=3, memory=place)
    assert torch.equal(plain, models(AFACS(), delay=Written(), execution=where))


def test_there_are_as_many_rows_as_are_under_way(federated):
    simulation = federated(FedBuff(2), delay=Written())
    state, strategy = simulation.initial_state(), simulation.strategy
    memory = simulation.trainer.initial_memory(state.model)
    busy = set()
    for t in range(5):
        active = simulation.delayed_updates.idle_clients(simulation.availability.sample(t), memory)
        assert not busy & set(active.host_index.virtual_clients.tolist())
        report = simulation.trainer.run(strategy.start(state, active), active, t, state.model, memory)
        state = strategy.aggregate(state, simulation.delayed_updates(report, memory), t)
        began = {v: t + TAKES[t].reshape(-1)[v] for v in active.host_index.virtual_clients.tolist()}
        due = dict(zip(memory.in_flight["virtual"].tolist(), memory.in_flight["due"].tolist(), strict=True))
        assert {v: at for v, at in began.items() if at > t}.items() <= due.items()
        assert all(at > t for at in due.values())
        assert {len(rows) for rows in memory.in_flight.values()} == {len(due)}
        busy = set(due)


def test_laws_have_their_means(federated):
    """10⁵ draws, to five standard errors."""

    class Many:
        seeds, clients = (5,), 100_000

    everyone = np.arange(100_000)

    def drawn(law):
        law.setup(Many)
        return law.rounds(3, everyone)

    geometric = drawn(GeometricDelay(1.5))
    assert abs(geometric.mean() - 1.5) < 5 * math.sqrt(1.5 * 2.5 / 1e5)
    assert abs((geometric == 0).mean() - 0.4) < 5 * math.sqrt(0.24 / 1e5)
    uniform = drawn(UniformDelay(1, 3))
    assert set(uniform.tolist()) == {1, 2, 3}
    assert abs(uniform.mean() - 2) < 5 * math.sqrt(2 / 3 / 1e5)
    lognormal = drawn(LognormalDelay(20.0, 0.5))
    assert abs(lognormal.mean() + 0.5 - 20) < 5 * 10 / math.sqrt(1e5) + 0.05  # rounding down takes about a half
    assert drawn(ConstantDelay([0, 2])).reshape(2, -1).mean(1).tolist() == [0, 2]
    assert not np.array_equal(geometric, GeometricDelay.rounds(_set(GeometricDelay(1.5), Many), 4, everyone))


def _set(law, federation):
    law.setup(federation)
    return law


def test_what_has_no_meaning_is_refused(federated):
    from fedsim.strategies import FedDyn, Oort

    for strategy in (FedDyn(0.1), Oort(2)):
        with pytest.raises(ConfigError, match="is not defined for rows that started from an older model"):
            federated(strategy, delay=ConstantDelay(1), ridge=0.1 if isinstance(strategy, Oort) else 0.0)
    federated(FedDyn(0.1), delay=NoDelay())
    with pytest.raises(ConfigError, match=r"least=4 exceeds most=2"):
        UniformDelay(4, 2)
    with pytest.raises(ConfigError, match=r"alpha=1\.5 must lie between 0 and 1"):
        FedAsync(1.5)
    with pytest.raises(ConfigError, match="counts rows one by one"):
        FedBuff().check(Multiset(2))
