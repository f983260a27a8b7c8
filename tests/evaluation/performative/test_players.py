"""The game of several players: its three points in closed form, the solvers, and the play that goes to each of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import Market, Pricing
from fedsim.evaluation.performative import Risk, nash_point, optimal_point, stable_point
from fedsim.evaluation.personal import Personal
from fedsim.local import PFL, Play, PoFL
from fedsim.models import Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Demand, Players
from fedsim.strategies import FedAvg, FedAvgAll

QUIET = Tracking(progress="none", tensorboard=False)
GAMMAS, KAPPA, COST = [1.5, 2.0, 3.0], [[0, 0.4, -0.2], [0.9, 0, 0.1], [0.3, 0.5, 0]], 0.5
CONCEPTS = {"stable": "distance_to_ps", "nash": "distance_to_nash", "social": "distance_to_po"}


def equilibria(a: np.ndarray, gammas, kappa, cost: float) -> dict[str, np.ndarray]:
    """[m, d] each, from the means of the base demands [m, d]."""
    own, others = np.diag(gammas), np.array(kappa)
    sides = {
        "stable": own - others,
        "nash": 2 * own - others,
        "social": 2 * own - others - others.T,
    }
    return {name: np.linalg.solve(side + cost * np.eye(len(a)), a) for name, side in sides.items()}


def game(rule, goods=1, std=0.0, shift=None, **options) -> Simulation:
    options = {"strategy": FedAvgAll(server_lr=3.0), "rounds": 60, "evaluation": EvaluationOptions(every=60)} | options
    shift = Players(GAMMAS, 0.0, KAPPA, **(shift or {}))
    data = Market(3, goods, cost=COST, std=std)
    options = {"execution": Execution(dtype="float64")} | options
    return Simulation(data, functools.partial(Mean, start=1.0), clients=3, local=rule, shift=shift, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(8))
def test_the_three_points_in_closed_form(case) -> None:
    draw = np.random.default_rng(case)
    gammas, cost, goods = draw.uniform(0.8, 3, 3).tolist(), draw.uniform(0, 1), 1 + case % 2
    coupling = (draw.uniform(-0.3, 0.3, (3, 3)) * (1 - np.eye(3))).tolist()
    data, shift = Market(3, goods, cost=cost), Players(gammas, 0.0, coupling)
    simulation = Simulation(data, Mean, clients=3, shift=shift)
    risk = Risk(simulation.model, simulation.shift, simulation.data, 0)
    start = torch.ones(3 * goods, dtype=torch.float64)
    expected = equilibria(data.means.numpy(), gammas, coupling, cost)
    np.testing.assert_allclose(stable_point(risk, start).reshape(3, goods), expected["stable"], atol=1e-6)
    np.testing.assert_allclose(nash_point(risk, start).reshape(3, goods), expected["nash"], atol=1e-6)
    np.testing.assert_allclose(optimal_point(risk, [start]).reshape(3, goods), expected["social"], atol=1e-6)


def test_one_player_is_that_of_demands() -> None:
    """m = 1 and no costs: θ^PS = a/γ, and Nash = social = θ^PO = a/2γ, of shift=demand."""
    market = Simulation(Market(1, 1, cost=0.0), Mean, clients=1, shift=Players(2.0, 0.0, 0.0))
    demand = Simulation(Pricing(1, 1, 4.0, 8.0), Mean, clients=1, shift=Demand(2.0, 0.0))
    found = {**market.references}
    for name in ("distance_to_ps", "distance_to_po"):
        torch.testing.assert_close(found[name], demand.references[name])
    torch.testing.assert_close(found["distance_to_nash"], found["distance_to_po"])
    assert "distance_to_nash" not in demand.references


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slopes", ["known", "learnt"])
@pytest.mark.parametrize("concept", CONCEPTS)
def test_play_goes_to_its_point(concept, slopes) -> None:
    """Without noise in demands, even where how they answer is learnt. Some rounds miss some players; not on the way to
    the social optimum, where only the sum of all gradients vanishes."""
    share = 1.0 if concept == "social" else 0.8
    rule = Play(concept, slopes, explore=8, lr=0.2, steps=1, batch_size=2)
    simulation = game(rule, goods=2 if concept == "nash" else 1, availability=Bernoulli(Uniform(share)))
    if slopes == "learnt" and concept != "stable":
        simulation.trainer.local_rule.spread = 1e-3
    final = simulation.run(tracking=QUIET).final
    found = {name: final[column][0] for name, column in CONCEPTS.items()}
    assert found[concept] < 5e-3 < 0.1 < min(value for name, value in found.items() if name != concept)


def point(seed: int, t: int, number: int, p: int) -> np.ndarray:
    key = rng.row_keys(torch.tensor(seed), rng.Purpose.POINT, torch.tensor(t))
    return rng.normal(rng.fold_in(key, number), torch.arange(p), torch.float64).numpy()


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(("concept", "slopes"), [("stable", "known"), ("nash", "learnt"), ("social", "learnt"),
                                                ("nash", "known"), ("social", "known")])  # fmt: skip
@pytest.mark.sampled(2)
def test_every_step_by_hand(concept, slopes, executor, play, Scripted) -> None:
    """Noisy demands, players that come at different times, several steps on what others decided at the start."""
    counts = np.array([[[1, 1, 1]] * 2, [[1, 0, 0], [0, 0, 0]], [[0, 0, 0]] * 2, [[1, 1, 1]] * 2, [[0, 1, 1]] * 2])
    rule = Play(concept, slopes, 4, 0.3, lr=0.1, steps=2, batch_size=5)
    simulation = game(rule, 1, 1.0, rounds=5, seeds=(3, 5), availability=Scripted(counts),
                      execution=Execution(executor, dtype="float64"))  # fmt: skip
    told: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {row: [] for row in range(6)}
    learns = slopes == "learnt" and concept != "stable"
    for played in play(simulation):
        cohort, steps = played.report.cohort, np.zeros((2, 3))
        for position, row in enumerate(cohort.host_index.rows):
            replicate, client = divmod(int(row), 3)
            chunk = simulation.trainer.batches.plan(cohort, played.t).chunk(np.array([position]))
            start = played.before.model[replicate].numpy()
            theta, own = start.copy(), np.eye(3)[client]
            answer = np.array(KAPPA[client]) - GAMMAS[client] * own
            for k in range(2):
                deployed = theta + (0.3 * point((3, 5)[replicate], played.t, k, 3) if learns else 0.0)
                z = chunk.batch(k, 0, 1, torch.float64)["x"].numpy()[0] + own * (answer @ deployed)
                slope = answer if not learns else np.zeros(3)
                if learns:
                    told[row].append((np.r_[1, deployed], z.mean(0)[client]))
                    if len(told[row]) >= 4:
                        left, right = (np.array(part) for part in zip(*told[row], strict=True))
                        slope = np.linalg.lstsq(left, right, rcond=None)[0][1:]
                gradient = (COST * theta[client] - z.mean(0)[client]) * own
                if concept != "stable":
                    gradient -= theta[client] * slope * (own if concept == "nash" else 1)
                theta = theta - 0.1 * gradient
            np.testing.assert_allclose(played.report.end[position], theta, atol=1e-10)
            steps[replicate] += theta - start
        np.testing.assert_allclose(played.after.model, played.before.model.numpy() + steps, atol=1e-10)


@pytest.mark.slow
def test_rules_that_estimate_for_everybody_go_to_the_social_optimum_and_descent_to_the_stable_one() -> None:
    """PoFL's sum of performative gradients is the gradient of the sum; repeated descent is play on given data."""
    final = game(PoFL(history=6, lr=0.1, steps=1, batch_size=8), std=1e-5).run(tracking=QUIET).final
    assert final["distance_to_po"][0] < 0.02 < 0.1 < final["distance_to_nash"][0]
    rules = PFL(lr=0.1, steps=1, batch_size=4), Play("stable", lr=0.1, steps=1, batch_size=4)
    ends = [game(rule, rounds=9).run(tracking=QUIET).state.model for rule in rules]
    assert torch.equal(*ends)


@pytest.mark.slow
def test_it_is_alone_what_it_is_in_company_and_interrupted_what_it_is_in_one_go(tmp_path) -> None:
    def run(seeds, folder=None, rounds=6, resume=False):
        rule = Play(explore=4, lr=0.1, steps=2, batch_size=4)
        simulation = game(rule, 1, 1.0, seeds=seeds, availability=Bernoulli(Uniform(0.6)), rounds=rounds)
        return simulation.run(folder, resume=resume, tracking=QUIET).state.model

    both = run((3, 5), tmp_path / "straight")
    torch.testing.assert_close(run((5,)), both[1:], rtol=0, atol=1e-9)
    run((3, 5), tmp_path / "parts", 3)
    assert torch.equal(run((3, 5), tmp_path / "parts", resume=True), both)


def test_what_is_no_game_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local=play is a game.* dataset=market"):
        Simulation(Pricing(2, 2), Mean, clients=2, local=Play(), shift=Demand())
    with pytest.raises(ConfigError, match=r"local=play is a game.* shift\.deploy=step"):
        game(Play(), shift={"deploy": "round"})
    with pytest.raises(ConfigError, match=r"shift=players needs players.* dataset=market"):
        Simulation(Pricing(2, 2), Mean, clients=2, shift=Players())
    with pytest.raises(ConfigError, match=r"local\.explore=3 .* give at least 4"):
        game(Play(explore=3))
    with pytest.raises(ConfigError, match=r"dataset\.cost"):
        game(Play(), ridge=0.1)
    with pytest.raises(ConfigError, match=r"no newcomers"):
        game(Play(), personal=Personal(newcomers=1), strategy=FedAvg())
    for coupling in ([[0, 1], [1, 0]], [[1, 0, 0]] * 3, [1, 2, 3]):
        with pytest.raises(ConfigError, match=r"shift\.coupling"):
            Simulation(Market(3), Mean, clients=3, shift=Players(coupling=coupling))
    for key, value in {"concept": "pareto", "slopes": "guessed", "spread": 0}.items():
        with pytest.raises(ConfigError, match=rf"^{key}="):
            Play(**{key: value})


def test_the_equilibrium_is_left_out_where_gradient_play_would_not_stay() -> None:
    """Demands that answer others more than oneself: (λ + 2γ_i) x_i − Σ κ x_j has a negative eigenvalue."""
    simulation = Simulation(Market(3, cost=0.0), Mean, clients=3, shift=Players(0.5, 0.0, 4.0))
    assert "distance_to_nash" not in simulation.references
    assert "no Nash equilibrium" in simulation.references.summary()["nash"]["verdict"][0]
