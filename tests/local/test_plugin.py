"""Plug-in optimisation: the regression of the first stage by NumPy, and where the second ends, right or wrong."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import Dataset, GaussianMean, PricingGroups
from fedsim.local import PlugIn
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Contribution, GroupMean, Location, Response
from fedsim.strategies import FedAWE

QUIET = Tracking(progress="none", tensorboard=False)
EPSILONS, MEANS, SEEDS, LR = [0.5, -0.4, 0.8], [1.0, -2.0, 4.0], (3, 5), 0.3
WEAK = np.array(EPSILONS)
OPTIMAL = ((1 - WEAK) * MEANS).mean() / ((1 - WEAK) ** 2).mean()


def game(rule, std=0.0, **options) -> Simulation:
    options = {"shift": Location(epsilons=EPSILONS), "execution": Execution(dtype="float64"), "rounds": 60} | options
    data = GaussianMean(clients=3, means=MEANS, std=std)
    return Simulation(data, functools.partial(Mean, start=2.0), clients=3, local=rule, **options)


def point(seed: int, t: int, number: int) -> float:
    key = rng.row_keys(torch.tensor(seed), rng.Purpose.POINT, torch.tensor(t))
    return rng.normal(rng.fold_in(key, number), torch.arange(1), torch.float64).item()


@pytest.mark.parametrize("shared", [False, True])
def test_equations_that_just_fit_are_not_refused(shared, monkeypatch) -> None:
    """Of each client, and with `shared` of all once more: a matrix of p + 1 rows and columns, and two right sides."""
    simulation = game(PlugIn(3, shared=shared, lr=LR, steps=1, batch_size=5), 1.5)
    rule, federation = simulation.trainer.local_rule, simulation.federation
    size, p = rule.trained + 1, rule.estimator.size
    needed = (
        federation.num_memory_rows * (2 if shared else 1) * (size * size + 2 * size * p) * federation.dtype.itemsize
    )
    monkeypatch.setattr("fedsim.local.plugin.capacity_bytes", lambda device, storage: needed)
    rule.memory(federation, rule.trained)
    monkeypatch.setattr("fedsim.local.plugin.capacity_bytes", lambda device, storage: needed - 1)
    with pytest.raises(ConfigError, match="local=plugin needs 0 GiB for the equations"):
        rule.memory(federation, rule.trained)


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("shared", [False, True])
def test_both_stages_by_hand(shared, executor, play, Scripted) -> None:
    """Clients that come at different times, noisy draws, a box: Θ's middle is 1, and points are kept inside."""
    counts = np.array(
        [[[1, 1, 0]] * 2, [[1, 0, 0], [0, 0, 0]], [[0, 0, 0]] * 2, [[1, 1, 1]] * 2, [[0, 1, 1]] * 2, [[1, 0, 1]] * 2]
    )
    rule = PlugIn(3, 2.0, shared, lr=LR, steps=2, batch_size=5, box=[-2, 4])
    simulation = game(rule, 1.5, rounds=6, seeds=SEEDS, availability=Scripted(counts),
                      execution=Execution(executor, dtype="float64"))  # fmt: skip
    own: dict[int, list[tuple[float, float]]] = {row: [] for row in range(6)}
    pooled: list[list[tuple[float, float]]] = [[], []]
    steps = [0] * 6
    for played in play(simulation):
        cohort, ends, told = played.report.cohort, [[], []], [[], []]
        for position, row in enumerate(cohort.host_index.rows):
            replicate, client = divmod(int(row), 3)
            chunk = simulation.trainer.batches.plan(cohort, played.t).chunk(np.array([position]))
            theta, learns = played.before.model[replicate, 0].item(), steps[row] < 3
            known = pooled[replicate] if shared else own[row]
            slope = np.polyfit(*np.array(known).T, 1)[0] if len(known) > 1 else 0.0
            for k in range(2):
                z = chunk.batch(k, 0, 1, torch.float64)["x"].numpy().ravel()
                deployed = np.clip(1 + 2 * point(SEEDS[replicate], played.t, k), -2, 4) if learns else 1.0
                z = z + EPSILONS[client] * deployed
                if learns:
                    told[replicate].append((deployed, z.mean()))
                    own[row].append((deployed, z.mean()))
                else:
                    answered = z + slope * (theta - 1)
                    theta = np.clip(theta - LR * (1 - slope) * (theta - answered).mean(), -2, 4)
            steps[row] += 2
            assert played.report.end[position, 0].item() == pytest.approx(theta, abs=1e-10)
            ends[replicate].append(theta)
        for r in range(2):
            pooled[r] += told[r]
            expected = np.mean(ends[r]) if ends[r] else played.before.model[r, 0].item()
            assert played.after.model[r, 0].item() == pytest.approx(expected, abs=1e-10)


def test_a_true_model_without_noise_ends_at_the_performative_optimum(play) -> None:
    *_, last = play(game(PlugIn(3, lr=0.8, steps=1, batch_size=2)))
    assert last.after.model.item() == pytest.approx(OPTIMAL, abs=1e-9)


@pytest.mark.slow
def test_one_answer_for_unequal_clients_ends_at_the_stable_point_of_the_example(play) -> None:
    """B̂ = ε̄ for everybody: Σ_i (1 − ε̄)((1 − ε̄)θ − m_i) = 0 at m̄/(1 − ε̄), which is θ^PS, far from θ^PO."""
    *_, last = play(game(PlugIn(3, shared=True, lr=0.8, steps=1, batch_size=2)))
    assert last.after.model.item() == pytest.approx(np.mean(MEANS) / (1 - WEAK.mean()), abs=1e-9)
    assert abs(last.after.model.item() - OPTIMAL) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("kind", ["group_mean", "coefficients"])
def test_means_of_classes_and_coefficients_are_learnt_too(kind, executor, play) -> None:
    """Stored data, all of them a step: what answers is linear in θ, and found exactly."""
    draw = np.random.default_rng(0)
    x, owners = torch.as_tensor(draw.standard_normal((15, 2))), torch.arange(15) % 3
    if kind == "group_mean":
        y, shift, options = torch.arange(15) // 3 % 2, GroupMean([0.1, 0.8], 0.2), {"classes": 2, "loss": "logistic"}
    else:
        y, shift, options = x @ torch.tensor([1.0, -2.0], dtype=x.dtype), Response(0.6, 0.3), {"loss": "squared"}
    data = Dataset("few", x, y, owners=owners, **options)
    rule = PlugIn(4, lr=1.0 if kind == "group_mean" else 0.3, steps=1, batch_size=None)
    simulation = Simulation(data, functools.partial(Linear, bias=False), clients=3, local=rule, shift=shift, ridge=0.1,
                            rounds=120, execution=Execution(executor, dtype="float64"))  # fmt: skip
    *_, last = play(simulation)
    optimal = simulation.references["distance_to_po"]
    torch.testing.assert_close(last.after.model, optimal, rtol=0, atol=1e-7)
    assert (optimal - simulation.references["distance_to_ps"]).norm() > 0.05


def test_it_is_alone_what_it_is_in_company_and_interrupted_what_it_is_in_one_go(tmp_path) -> None:
    def run(seeds, folder=None, rounds=6, resume=False):
        rule = PlugIn(3, shared=True, lr=0.1, steps=2, batch_size=4)
        simulation = game(
            rule, 1.0, seeds=seeds, strategy=FedAWE(), availability=Bernoulli(Uniform(0.6)), rounds=rounds
        )
        return simulation.run(folder, resume=resume, tracking=QUIET).state.models

    both = run((3, 5), tmp_path / "straight")
    torch.testing.assert_close(run((5,)), both[3:], rtol=0, atol=1e-10)
    run((3, 5), tmp_path / "parts", 3)
    assert torch.equal(run((3, 5), tmp_path / "parts", resume=True), both)


def test_what_cannot_be_learnt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local\.explore=1 .* give at least 2"):
        game(PlugIn(1))
    with pytest.raises(ConfigError, match=r"local=plugin .* shift\.deploy=step"):
        game(PlugIn(), shift=Location(deploy="round"))
    with pytest.raises(ConfigError, match=r"local=plugin .* local=pfl"):
        game(PlugIn(), shift=None)
    with pytest.raises(ConfigError, match=r"Contribution moves fractions .* local=profl"):
        Simulation(PricingGroups(clients=2), Mean, clients=2, local=PlugIn(), shift=Contribution())
    with pytest.raises(ConfigError, match=r"spread"):
        PlugIn(spread=0.0)
