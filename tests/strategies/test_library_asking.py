"""q-FFL, AFL, MimeLite, which ask clients what all their data say: each against its formula, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from library import Naive, everybody, one_by_one, points, with_
from naive_strategies import BY_DATA, CLIENTS, UNIFORM

from fedsim.local import SGD
from fedsim.strategies import AFL, QFFL, FedAvg, MimeLite
from fedsim.strategies.afl import project_onto_simplex


class NaiveQFFL(Naive):
    q = 2.0

    def round(self, t, active):
        x, rate, up, down = self.model, self.learner.rates(t)[0], 0.0, 0.0
        for i in active:
            loss, g = self.learner.loss(i, x) + 1e-10, self.innovation(i, t) / rate
            up = up + loss**self.q * g
            down += self.q * loss ** (self.q - 1) * np.sum(g**2) + loss**self.q / rate
        if active:
            self.model = x - up / down


class NaiveAFL(Naive):
    """The projection by bisection on τ: Σ max(v − τ, 0) is what those who are there had."""

    eta, step, averaged = 0.9, 0.3, True

    def begin(self):
        self.iterate, self.mixture, self.heard = self.model, list(UNIFORM), [self.model]

    def round(self, t, active):
        if not active:
            return
        x, total = self.iterate, sum(self.mixture[i] for i in active)
        moves = sum(self.mixture[i] * self.learner.innovation(i, x, t) for i in active)
        self.iterate = x - self.eta * moves / total
        wished = {i: self.mixture[i] + self.step * self.learner.loss(i, x) for i in active}
        low, high = min(wished.values()) - 1, max(wished.values())
        for _ in range(100):
            middle = (low + high) / 2
            much = sum(max(v - middle, 0) for v in wished.values()) > total
            low, high = (middle, high) if much else (low, middle)
        for i, v in wished.items():
            self.mixture[i] = max(v - low, 0)
        self.heard.append(self.iterate)
        self.model = sum(self.heard[1:]) / (len(self.heard) - 1) if self.averaged else self.iterate


class NaiveMimeLite(Naive):
    beta, eta, weights = 0.6, 0.8, UNIFORM

    def begin(self):
        self.momentum = np.zeros_like(self.model)

    def round(self, t, active):
        if not active:
            return
        heard = {i: self.innovation(i, t, correction=self.beta * self.momentum) for i in active}
        gradient = self.over({i: self.learner.gradient(i, self.model) for i in active}, self.weights)
        self.model = self.model - self.eta * self.over(heard, self.weights)
        self.momentum = gradient + self.beta * self.momentum


CASES = {
    "q_ffl": (QFFL(2.0), NaiveQFFL),
    "q_ffl, q < 1": (QFFL(0.3), with_(NaiveQFFL, q=0.3)),
    "afl": (AFL(0.9, 0.3), NaiveAFL),
    "afl, last": (AFL(0.9, 0.02, average=False), with_(NaiveAFL, step=0.02, averaged=False)),
    "mime_lite": (MimeLite(0.8, 0.6), NaiveMimeLite),
    "mime_lite by data": (MimeLite(0.8, 0.6, "data"), with_(NaiveMimeLite, weights=BY_DATA)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    found = follows(*CASES[name], schedule="step" if "mime" in name else "constant")
    if name == "afl":
        assert any(share == 0 for one in found for share in one.mixture)  # the projection cuts
        assert sum(found[0].mixture) == pytest.approx(1)


def test_with_q_zero_q_ffl_is_fedavg(models):
    torch.testing.assert_close(models(QFFL(0.0)), models(FedAvg()), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("q", "end"), [(0, 0.66667), (1, 0.557507), (5, 0.515748)])
def test_q_ffl_on_three_points_stands_still_where_its_objective_is_least(q, end):
    """Clients at 0, 1, 1: x^∞ = 1 / (1 + 2^{−1/(2q+1)}), on the way to ½."""
    closed = 1 / (1 + 2 ** (-1 / (2 * q + 1)))
    assert closed == pytest.approx(end, abs=1e-5)
    simulation = points(QFFL(float(q)), [0.0, 1.0, 1.0], SGD(lr=0.1, steps=1))
    assert one_by_one(simulation, closed, 1) == pytest.approx([closed], abs=1e-8)
    assert one_by_one(simulation, closed + 0.1, 1)[0] < closed + 0.1


def test_afl_stands_still_where_two_clients_are_equally_bad():
    """F_i = ½ (x − u_i)²: the saddle is at the middle, with λ = ½; elsewhere the worse client gains."""
    simulation = points(AFL(average=False), [0.0, 2.0], SGD(lr=0.1, steps=1))
    assert one_by_one(simulation, 1.0, 3) == pytest.approx([1.0] * 3, abs=1e-12)
    before, after = one_by_one(simulation, 1.5, 2)
    assert 1.0 < after < before < 1.5


def test_afl_goes_on_when_all_who_are_there_count_for_nothing(federated, play):
    """A mixture of nobody moves nothing, and stays one: a sum of 0 has one point on its simplex."""
    simulation = federated(AFL(0.9, 0.3, average=False), counts=everybody())
    cohort = simulation.federation.make_cohort(everybody()[0], everybody()[0], 0)
    values, before = torch.ones(len(cohort), dtype=torch.float64), torch.zeros(len(cohort), dtype=torch.float64)
    assert (project_onto_simplex(cohort, values, before) == 0).all()
    assert project_onto_simplex(cohort, values * math.nan, before + 1 / CLIENTS).isnan().all()


def test_mime_lite_without_momentum_is_fedavg_and_with_one_full_step_is_centralised_momentum(models, federated, play):
    """s = 1, η_g = 1, full batches: x ← x − η (ḡ + β z), z ← ḡ + β z: PyTorch's SGD on the mean loss."""
    torch.testing.assert_close(models(MimeLite(momentum=0.0)), models(FedAvg()), rtol=0, atol=1e-13)
    simulation = federated(MimeLite(1.0, 0.9), counts=everybody(), work={"steps": 1})
    data, x = simulation.dataset, simulation.initial_state().model[0].clone().requires_grad_()
    optimiser = torch.optim.SGD([x], lr=simulation.trainer.local_rule.rates[0], momentum=0.9)
    for played in play(simulation):
        error = (data.train_x @ x[:-1] + x[-1] - data.train_y).square() / 2
        loss = sum(error[data.owners == i].mean() for i in range(CLIENTS)) / CLIENTS
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        torch.testing.assert_close(played.after.model[0], x.detach(), rtol=0, atol=1e-10)


def test_what_clients_answer_knows_the_columns_that_stay_with_them(federated, play):
    """The bias stays: every client's loss and gradient are those of the shared weights beside its own bias."""
    from fedsim.models.selectors import ByName

    simulation = federated(QFFL(1.0), columns=ByName(stays=["bias"]))
    *_, last = play(simulation)
    cohort = last.report.cohort
    found = simulation.federation.full_data_oracle(cohort, last.after.model)
    own = cohort.gather(simulation.trainer.last_initial_memory.clients["own columns"])
    data = simulation.dataset
    assert found.gradient.shape == (len(cohort), 3)
    for row, (client, replicate) in enumerate(zip(cohort.client_index, cohort.replicate_index, strict=True)):
        mine = data.owners == client
        error = data.train_x[mine] @ last.after.model[replicate] + own[row] - data.train_y[mine]
        torch.testing.assert_close(found.loss[row], error.square().mean() / 2)
        torch.testing.assert_close(found.gradient[row], error @ data.train_x[mine] / len(error))
