"""What servers must be by algebra: limits on quadratics, steps without bias, maps of a whole cycle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from library import Line, Naive, everybody, one_by_one, points, script, with_
from naive_strategies import BY_DATA, CLIENTS, LRS, Learner

from fedsim import Execution, Simulation
from fedsim.availability import Cyclic, UniformK
from fedsim.core import Federation, Report
from fedsim.data.datasets import Dataset
from fedsim.local import SAM, SGD
from fedsim.models import Mean
from fedsim.strategies import (
    AFL,
    AREA,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedStale,
    Median,
    MimiC,
    PowerOfChoice,
    Strategy,
)
from fedsim.strategies.fedstale import FedStaleState

U = [-1.0, 0.5, 3.0, 4.0]


def told(strategy: Strategy, state, federation: Federation, counts, innovation, probabilities=1.0, t=0):
    """The state after a round in which those who are there have moved by these rows [m, d]."""
    cohort = federation.make_cohort(np.array(counts), np.broadcast_to(probabilities, np.shape(counts)), t)
    start = cohort.broadcast(state.model)
    own = torch.as_tensor(innovation)[cohort.client_index]
    nothing = torch.zeros(len(cohort), dtype=start.dtype)
    return strategy.aggregate(state, Report(cohort, start, {"params": start - own}, nothing, nothing, nothing, 0), t)


def test_fedavgm_on_a_constant_slope_steps_by_one_over_one_minus_beta() -> None:
    """v_t = Ḡ (1 − β^{t+1}) / (1 − β) → Ḡ / (1 − β)."""
    strategy, federation = FedAvgM(0.5, 0.8), Federation((0,), 3, np.ones(3), dtype=torch.float64)
    state = strategy.initial(torch.zeros(1, 1, dtype=torch.float64), federation)
    for t in range(40):
        before = state.model.item()
        state = told(strategy, state, federation, [[1, 1, 1]], [[1.0], [2.0], [6.0]], t=t)
        assert before - state.model.item() == pytest.approx(0.5 * 3 * (1 - 0.8 ** (t + 1)) / 0.2, abs=1e-12)


def test_feddyn_with_exact_minima_and_alpha_one_is_there_at_once_and_whoever_comes_in_the_end() -> None:
    """x¹ − ū = (x⁰ − ū)(α − 1)/(α + 1). A step of rate 1/(1 + α) is a client's minimum."""
    rule, mean = SGD(lr=0.5, steps=1), float(np.mean(U))
    assert one_by_one(points(FedDyn(1.0), U, rule), 10.0, 1) == pytest.approx([mean], abs=1e-12)
    some = points(FedDyn(1.0), U, rule, availability=UniformK(2))
    found = one_by_one(some, 10.0, 25)
    assert found[-1] == pytest.approx(mean, abs=1e-3)
    assert abs(found[0] - mean) > 0.1


def test_afls_saddle_leans_towards_who_is_worse_off_everywhere() -> None:
    """F_i = ½ (x − u_i)² + b_i, a client's points lying √(2 b_i) to both sides: (u₁ + u₂)/2 + (b₂ − b₁)/(u₂ − u₁) with
    the λ at which ∇ Σ λ_i F_i vanishes."""
    u, b = np.array([0.0, 2.0]), np.array([0.1, 0.7])
    x = np.concatenate([mean + np.sqrt(2 * more) * np.array([-1, 1]) for mean, more in zip(u, b, strict=True)])
    owners = torch.tensor([0, 0, 1, 1])
    data = Dataset("pairs", torch.as_tensor(x)[:, None], loss="half_squared_distance", owners=owners)
    simulation = Simulation(
        data, Mean, clients=2, strategy=AFL(average=False), local=SGD(lr=0.1, steps=1, batch_size=None),
        execution=Execution(dtype="float64"),
    )  # fmt: skip
    saddle = u.mean() + (b[1] - b[0]) / (u[1] - u[0])
    strategy, cohort = simulation.strategy, simulation.federation.make_cohort(np.ones((1, 2)), np.ones((1, 2)), 0)
    state = strategy.initial(torch.full((1, 1), saddle, dtype=torch.float64), simulation.federation)
    state.mixture.copy_(torch.tensor([u[1] - saddle, saddle - u[0]], dtype=torch.float64) / 2)
    kept = state.mixture.clone()
    for t in range(3):
        report = simulation.trainer.run(strategy.start(state, cohort), cohort, t, state.model)
        state = strategy.aggregate(state, report, t)
    assert state.model.item() == pytest.approx(saddle, abs=1e-12)
    torch.testing.assert_close(state.mixture, kept, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_fedstale_with_known_probabilities_has_no_bias_whatever_it_remembers(beta, weighting) -> None:
    """E v = Σ_i w_i G_i over all 2^m outcomes, a replicate each; but for the empty one, which does nothing."""
    p, sizes = np.array([0.9, 0.2, 0.5]), np.array([1, 5, 2])
    outcomes = np.array(list(itertools.product((0, 1), repeat=3)))
    chance = np.where(outcomes, p, 1 - p).prod(1)
    federation = Federation(tuple(range(8)), 3, np.tile(sizes, 8), dtype=torch.float64)
    strategy = FedStale(beta, 0.7, "known", None, weighting)
    state = strategy.initial(torch.zeros(8, 2, dtype=torch.float64), federation)
    stale, fresh = np.array([[3.0, -1], [0.5, 2], [7, 7]]), np.array([[1.0, 4], [-2, 0.3], [5, -6]])
    weights = sizes / 8 if weighting == "data" else np.full(3, 1 / 3)
    assert isinstance(state, FedStaleState)
    state.memory.copy_(torch.as_tensor(np.tile(stale, (8, 1))))
    state.mean.copy_(torch.as_tensor(weights @ stale).expand(8, -1))
    found = told(strategy, state, federation, outcomes, fresh, p).model.numpy()
    empty = -0.7 * beta * chance[0] * weights @ stale  # what an empty round would have moved
    np.testing.assert_allclose(chance @ found + empty, -0.7 * weights @ fresh, atol=1e-12)


def resting(data: Dataset, lr: float, weights) -> tuple[np.ndarray, list[np.ndarray]]:
    """Where everybody's local training leads back to on average, and where it leads each: training is affine."""
    learner, d = Learner(data, lr, lambda t, k, s: 1.0), data.train_x.shape[1] + 1
    offsets = [learner.train(i, np.zeros(d), 0) for i in range(CLIENTS)]
    maps = [np.stack([learner.train(i, e, 0) - b for e in np.eye(d)], 1) for i, b in enumerate(offsets)]
    mean = sum(w * a for w, a in zip(weights, maps, strict=True))
    x = np.linalg.solve(np.eye(d) - mean, sum(w * b for w, b in zip(weights, offsets, strict=True)))
    return x, [a @ x + b for a, b in zip(maps, offsets, strict=True)]


@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_with_several_steps_area_rests_where_fedavg_of_everybody_does(weighting, federated) -> None:
    """Curvatures differ, so that this is no minimum of the mean loss: it is FedAvg's, whoever comes."""
    moved = {}
    for strategy, counts in ((AREA(weighting), script()), (FedAvg(1.0, weighting), everybody()),
                             (FedAvg(1.0, weighting), script())):  # fmt: skip
        simulation = federated(strategy, counts=counts)
        weights = BY_DATA if weighting == "data" else [1 / CLIENTS] * CLIENTS
        x, ends = zip(*(resting(simulation.dataset, lr, weights) for lr in LRS), strict=True)
        start = torch.as_tensor(np.stack(x))
        state = strategy.initial(start.clone(), simulation.federation)
        if isinstance(strategy, AREA):
            state.models.copy_(torch.as_tensor(np.concatenate(ends)))
        for t in range(5):
            cohort = simulation.availability.sample(t)
            report = simulation.trainer.run(strategy.start(state, cohort), cohort, t, state.model)
            state = strategy.aggregate(state, report, t)
        moved[type(strategy).__name__, bool((counts == 1).all())] = (state.model - start).abs().max().item()
    assert moved["AREA", False] < 1e-12
    assert moved["FedAvg", True] < 1e-12
    assert moved["FedAvg", False] > 1e-2


def test_mimics_equality_needs_one_curvature(models) -> None:
    """With it every round is that of everybody (test_facts_of_remembering); here clients' curvatures differ."""
    whole = models(FedAvg(), counts=everybody())
    found = models(MimiC())
    torch.testing.assert_close(found[0], whole[0], rtol=0, atol=1e-12)  # its first round is everybody's
    assert not torch.allclose(found[1], whole[1], atol=1e-3)


@pytest.mark.parametrize("eta", [0.1, 0.4])
def test_a_cycle_of_groups_is_an_affine_map_that_leans_to_who_came_last(eta) -> None:
    """One step on ½ (x − u_i)²: x ← (1 − η)^K x + …, at rest where x = Σ_k (1 − η)^{K−1−k} ū_k / Σ_k (1 − η)^{K−1−k},
    ū_k the mean of the k-th group to come; groups of one mean have none to lean to."""
    u, groups = [0.0, 2.0, 3.0, 5.0, -1.0, -7.0], 3
    means = np.array([1.0, 4.0, -4.0])
    shares = (1 - eta) ** np.arange(groups)[::-1]
    rest = shares @ means / shares.sum()
    simulation = points(FedAvg(), u, SGD(lr=eta, steps=1), availability=Cyclic(groups))
    for start in (rest, 10.0):
        end = one_by_one(simulation, start, groups)[-1]
        assert end - rest == pytest.approx((1 - eta) ** groups * (start - rest), abs=1e-12)
    assert abs(rest - np.mean(u)) > 0.1
    even = points(FedAvg(), [0.0, 2.0, -4.0, 6.0, 1.0, 1.0], SGD(lr=eta, steps=1), availability=Cyclic(groups))
    assert one_by_one(even, 1.0, groups) == pytest.approx([1.0] * groups, abs=1e-12)


def test_power_of_choice_without_choice_draws_by_data() -> None:
    """d = k: who trains is drawn by w_i, whatever the losses; five standard errors."""
    replicates, sizes = 3000, np.array([6, 3, 1])
    federation = Federation(tuple(range(replicates)), 3, np.tile(sizes, replicates))
    strategy = PowerOfChoice(1, 1, "last")
    state = strategy.initial(torch.zeros(replicates, 1), federation)
    state.losses.copy_(torch.tensor([0.1, 5.0, 9.0]).repeat(replicates))
    everyone = np.ones((replicates, 3))
    share = (
        np.bincount(strategy.cohort(state, federation.make_cohort(everyone, everyone, 4)).host_index.rows % 3)
        / replicates
    )
    law = sizes / 10
    assert (np.abs(share - law) < 5 * np.sqrt(law * (1 - law) / replicates)).all()


def test_the_median_of_three_replicates_is_three_medians_and_buckets_of_one_and_all_are_rule_and_mean() -> None:
    def run(strategy: Strategy, seeds=(1, 2, 3)) -> torch.Tensor:
        draw = np.random.default_rng(0)
        x, owners = torch.as_tensor(draw.standard_normal((30, 2))), torch.arange(30) % 5
        data = Dataset("few", x, x.sum(1), loss="squared", owners=owners)
        rule = SGD(lr=0.1, steps=3, batch_size=2)
        return Simulation(
            data, Line, clients=5, strategy=strategy, local=rule, seeds=seeds, rounds=3, availability=UniformK(3),
            execution=Execution(dtype="float64"),
        ).run().state.model  # fmt: skip

    whole = run(Median(0.7))
    for r, seed in enumerate((1, 2, 3)):
        torch.testing.assert_close(run(Median(0.7), (seed,))[0], whole[r], rtol=0, atol=1e-12)
    assert torch.equal(run(Median(0.7, bucket=1)), whole)
    torch.testing.assert_close(run(Median(0.7, bucket=3)), run(FedAvg(0.7)), rtol=0, atol=1e-12)
    assert not torch.allclose(whole, run(FedAvg(0.7)), atol=1e-3)


class NaiveSAM(Naive):
    rho, adaptive = 0.2, False

    def round(self, t, active):
        ends = {}
        for i in active:
            x = self.model
            for rate in self.learner.rates(t):
                scale = abs(x) + 0.01 if self.adaptive else np.ones_like(x)
                g = self.learner.gradient(i, x)
                top = x + self.rho * scale**2 * g / np.linalg.norm(scale * g)
                x = x - rate * self.learner.gradient(i, top)
            ends[i] = x
        self.model = self.over(ends) if ends else self.model


@pytest.mark.parametrize("adaptive", [False, True])
def test_every_round_of_fedsam_follows_the_formula(adaptive, follows) -> None:
    work = {"rho": 0.2, "adaptive": adaptive}
    follows(FedAvg(), with_(NaiveSAM, adaptive=adaptive), rule=SAM, work=work, schedule="sqrt")
