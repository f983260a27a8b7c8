"""FedAvgM, FedNova, FedExP, FedDyn, FedDC: each against its formula, and where it must meet another one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import Naive, everybody, one_by_one, points, with_
from naive_strategies import BY_DATA, CLIENTS, STEPS, UNIFORM

from fedsim.core import ConfigError
from fedsim.local import SGD, Adam, Momentum
from fedsim.strategies import FedAvg, FedAvgM, FedDC, FedDyn, FedExP, FedNova, Scaffold


class NaiveFedAvgM(Naive):
    beta, eta = 0.5, 0.7

    def begin(self):
        self.velocity = np.zeros_like(self.model)

    def round(self, t, active):
        if active:
            self.velocity = self.beta * self.velocity + self.over({i: self.innovation(i, t) for i in active})
            self.model = self.model - self.eta * self.velocity


class NaiveFedNova(Naive):
    """`steps` of each client; its sum of weights in the running form of the authors' program."""

    eta, weights, steps, momentum, nesterov = 0.8, UNIFORM, (STEPS,) * CLIENTS, 0.0, False

    def round(self, t, active):
        total = sum(self.weights[i] for i in active)
        work, move = 0.0, np.zeros_like(self.model)
        for i in active:
            counter = normaliser = 0.0
            for rate in self.learner.rates(t, self.steps[i]):
                counter = self.momentum * counter + 1
                normaliser += rate * (1 + self.momentum * counter if self.nesterov else counter)
            g = self.innovation(i, t, steps=self.steps[i], momentum=self.momentum, nesterov=self.nesterov)
            work += self.weights[i] / total * normaliser
            move = move + self.weights[i] / total * g / normaliser
        self.model = self.model - self.eta * work * move


class NaiveFedExP(Naive):
    eps, average, weights = 0.01, True, UNIFORM

    def begin(self):
        self.iterate = self.model

    def round(self, t, active):
        if not active:
            return
        heard = {i: self.learner.innovation(i, self.iterate, t) for i in active}
        mean = self.over(heard, self.weights)
        squares = self.over({i: np.sum(g**2) for i, g in heard.items()}, self.weights)
        before, eta = self.iterate, max(1, squares / (2 * (np.sum(mean**2) + self.eps)))
        self.rates = [*getattr(self, "rates", []), eta]
        self.iterate = self.iterate - eta * mean
        self.model = (before + self.iterate) / 2 if self.average else self.iterate


class NaiveFedDyn(Naive):
    """As the paper writes it: g_i of clients, h of the server, which divides by m."""

    alpha, weights = 0.3, UNIFORM

    def begin(self):
        self.g, self.h = self.rows(), np.zeros_like(self.model)

    def round(self, t, active):
        if not active:
            return
        x, ends = self.model, {}
        for i in active:
            own = self.alpha / (CLIENTS * self.weights[i])
            ends[i] = self.learner.train(i, x, t, correction=-self.g[i], mu=own)
            self.g[i] = self.g[i] - own * (ends[i] - x)
            self.h = self.h - self.alpha / CLIENTS * (ends[i] - x)
        self.model = sum(ends.values()) / len(ends) - self.h / self.alpha


class NaiveFedDC(Naive):
    alpha = 0.2

    def begin(self):
        self.drift, self.control, self.mean_control = self.rows(), self.rows(), np.zeros_like(self.model)

    def round(self, t, active):
        if not active:
            return
        x, c, ends = self.model, self.mean_control, {}
        for i in active:
            # α (θ − x + b) = α (θ − x) + α b
            linear = c - self.control[i] + self.alpha * self.drift[i]
            ends[i] = self.learner.train(i, x, t, correction=linear, mu=self.alpha)
            new = self.control[i] - c + (x - ends[i]) / sum(self.learner.rates(t))
            self.mean_control = self.mean_control + (new - self.control[i]) / CLIENTS
            self.control[i], self.drift[i] = new, self.drift[i] + ends[i] - x
        self.model = sum(ends.values()) / len(ends) + sum(self.drift) / CLIENTS


CASES = {
    "fedavgm": (FedAvgM(0.7, 0.5), NaiveFedAvgM, {}),
    "fednova": (FedNova(0.8), NaiveFedNova, {"schedule": "step"}),
    "fedexp": (FedExP(0.01), NaiveFedExP, {}),
    "fedexp by data": (FedExP(0.01, False, "data"), with_(NaiveFedExP, average=False, weights=BY_DATA), {}),
    "feddyn": (FedDyn(0.3), NaiveFedDyn, {"schedule": "sqrt"}),
    "feddyn by data": (FedDyn(0.3, "data"), with_(NaiveFedDyn, weights=BY_DATA), {}),
    "feddc": (FedDC(0.2), NaiveFedDC, {"schedule": "step"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, options = CASES[name]
    found = follows(strategy, naive, **options)
    if name == "fedexp":
        assert min(found[0].rates) == 1 < max(found[0].rates)  # both sides of the maximum


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.6, False), (0.6, True)])
def test_fednova_divides_by_what_each_clients_steps_weigh(momentum, nesterov, follows, regression_of):
    """An epoch of batches of two is 2, 1, 4 and 1 steps; a client's samples are equal, so any batch is the full one."""
    dataset = regression_of((5, 2, 9, 1))
    first = torch.as_tensor(np.repeat((0, 5, 7, 16), (5, 2, 9, 1)))
    dataset.train_x, dataset.train_y = dataset.train_x[first], dataset.train_y[first]
    naive = with_(NaiveFedNova, steps=(2, 1, 4, 1), momentum=momentum, nesterov=nesterov, weights=BY_DATA)
    work = {"steps": None, "epochs": 1, "batch_size": 2}
    work |= {"momentum": momentum, "nesterov": nesterov} if momentum else {}
    rule = Momentum if momentum else SGD
    follows(FedNova(0.8, "data"), naive, schedule="step", dataset=dataset, rule=rule, work=work)


def test_the_weight_of_seven_steps_with_momentum_is_the_papers():
    """[s − ρ (1 − ρ^s) / (1 − ρ)] / (1 − ρ) at ρ = 0.9, s = 7."""
    closed = (7 - 0.9 * (1 - 0.9**7) / 0.1) / 0.1
    assert sum(Momentum(momentum=0.9).gradient_weight(k) for k in range(7)) == pytest.approx(closed)
    assert closed == pytest.approx(23.0467, abs=1e-4)


@pytest.mark.parametrize("rule", [SGD, Momentum])
def test_with_equal_work_fednova_is_fedavg(rule, models):
    one, other = (models(strategy(0.7, "data"), rule=rule, schedule="step") for strategy in (FedNova, FedAvg))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", [Adam, lambda **options: Momentum(state="client", **options)])
def test_fednova_refuses_rules_whose_moves_are_no_sums_of_gradients(rule, federated):
    with pytest.raises(ConfigError, match=r"strategy=FedNova.*local=(Adam|Momentum).*use local=sgd"):
        federated(FedNova(), rule=rule)


def test_fednova_of_unequal_steps_ends_where_fedavg_does_not():
    """At Σ c_i u_i / Σ c_i, c_i = 1 − (1 − η)^{s_i}, FedAvg stands still, FedNova with c_i / s_i, on ½ ‖x − u_i‖²."""
    u, steps, lr = np.array([-1.0, 0.5, 3.0, 4.0]), np.array([1, 2, 5, 10]), 0.1
    c = 1 - (1 - lr) ** steps
    for strategy, weight, end in ((FedAvg(), c, 2.83441), (FedNova(), c / steps, 1.32658)):
        simulation = points(strategy, u, SGD(lr=lr, steps=10))
        simulation.trainer.batches.data.workload = Work(steps)(simulation.trainer.batches.data.workload)
        stands = np.sum(weight * u) / np.sum(weight)
        assert stands == pytest.approx(end, abs=1e-5)
        assert one_by_one(simulation, stands, 1) == pytest.approx([stands], abs=1e-12)
        assert abs(one_by_one(simulation, stands + 1, 1)[0] - stands) < 0.9


class Work:
    """Clients' own numbers of steps in the place of everybody's."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, workload):
        def of(work, rows):
            load = workload(work, rows)
            load.steps = self.steps[rows]
            return load

        return of


def test_without_momentum_fedavgm_is_fedavg(models):
    assert torch.equal(models(FedAvgM(momentum=0.0)), models(FedAvg()))
    assert not torch.equal(models(FedAvgM()), models(FedAvg()))


def test_fedexp_meets_fedavg_where_clients_agree_and_goes_half_of_n_where_they_are_orthogonal(federated, play):
    """n equal G_i give ½, which the maximum makes 1; n orthogonal ones of equal length n/2."""
    strategy = FedExP(eps=0.0, average=False)
    simulation = federated(strategy, counts=everybody())
    before = simulation.initial_state()
    played = next(play(simulation))
    report = played.report
    report.__dict__["innovation"] = torch.ones_like(report.start)
    after = strategy.aggregate(before, report, 0)
    torch.testing.assert_close(after.iterate, before.iterate - 1)
    report.__dict__["innovation"] = torch.eye(4, dtype=torch.float64).repeat(2, 1)
    after = strategy.aggregate(before, report, 0)
    torch.testing.assert_close(after.iterate, before.iterate - CLIENTS / 2 * torch.full_like(before.iterate, 1 / 4))


def test_feddyn_with_exact_local_minima_contracts_as_its_algebra_says():
    """x^{t+1} of full participation from x⁰ = 10 with α = 0.1: −5.2273, 1.0021, 1.5684 → ū = 1.625. A step of rate
    1 / (1 + α) minimises a quadratic exactly."""
    u = [-1.0, 0.5, 3.0, 4.0]
    found = one_by_one(points(FedDyn(0.1), u, SGD(lr=1 / 1.1, steps=1)), 10.0, 12)
    np.testing.assert_allclose(found[:3], [-5.2273, 1.0021, 1.5684], atol=1e-4)
    assert found[-1] == pytest.approx(1.625, abs=1e-8)


def test_feddc_without_its_penalty_trains_as_scaffold_does(federated, play):
    """α = 0: SCAFFOLD's local rule, to the bit in the first two rounds: the servers differ, the client models do not
    until they begin elsewhere."""
    one, other = (next(play(federated(strategy))) for strategy in (FedDC(alpha=0.0), Scaffold()))
    torch.testing.assert_close(one.report.end, other.report.end, rtol=0, atol=1e-14)
    torch.testing.assert_close(one.after.control, other.after.memory, rtol=0, atol=1e-13)
