"""FedAWE's formulas: FedAvg's biased limit, what the evaluated mean of clients' models is, what echoes and clip do.

Expectations over who takes part are exact: every trace of a few rounds is a replicate, weighed by its probability.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Population, Sine, Staircase
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import FedAvg, FedAvgAll, FedAWE, Strategy
from fedsim.studies.reproduce.recipe import load_recipe

TWO = [0.0, 100.0]


def traces(clients: int, rounds: int) -> np.ndarray:
    """[T, 2^(m·T), m]: all there are."""
    every = np.array(list(itertools.product((0, 1), repeat=clients * rounds)), dtype=np.int8)
    return every.reshape(-1, rounds, clients).swapaxes(0, 1)


def chance(counts: np.ndarray, p: list[float]) -> np.ndarray:
    """[R] probability of each trace."""
    return np.where(counts == 1, p, 1 - np.array(p)).prod((0, 2))


def simulation_of(
    points: list[float], strategy: Strategy, availability, lr: float, steps: int = 1, start: float = 0.0
) -> Simulation:
    """Quadratics ½(x − u_i)² under these traces, a replicate each."""
    rounds, replicates, clients = availability.script.shape
    return Simulation(
        Quadratics(clients, points=points),
        lambda: Mean((1,), start),
        clients=clients,
        availability=availability,
        strategy=strategy,
        local=SGD(lr=lr, steps=steps, batch_size=None),
        rounds=rounds,
        seeds=range(replicates),
        execution=Execution(dtype="float64"),
        evaluation=EvaluationOptions(every=rounds, of=["client_mean", "global"]),
    )


def naive(
    points: list[float], counts: np.ndarray, lr: float, clip: float, start: float
) -> tuple[np.ndarray, np.ndarray]:
    """x^T and every x_i^T of Algorithm 1 from x^0 = start, one trace [T, m] after the other, for one local step."""
    ends, models = [], []
    for trace in counts.swapaxes(0, 1):
        x, own, seen = start, np.full(len(points), start), np.full(len(points), -1)
        for t, active in enumerate(trace == 1):
            if active.any():
                update = np.mean((t - seen[active]) * lr * (own[active] - np.array(points)[active]))
                x = np.mean(own[active]) - update * min(1.0, clip / max(abs(update), 1e-300))
                own[active], seen[active] = x, t
        ends.append(x)
        models.append(own)
    return np.array(ends), np.array(models)


def played(simulation: Simulation, play) -> list[Tensor]:
    """[R, m] every client's model before the first round and after each."""
    clients = simulation.federation.clients
    rounds = list(play(simulation))
    states = [rounds[0].before, *(one.after for one in rounds)]
    return [state.models.reshape(-1, clients) for state in states]


def ended(simulation: Simulation, play) -> np.ndarray:
    """[R] x^T."""
    *_, last = play(simulation)
    return last.after.model[:, 0].numpy()


def limit(p: list[float], u: list[float]) -> tuple[float, float]:
    """lim E[x^t] of FedAvg over active clients by enumerating who takes part, and P(somebody does)."""
    somebody = mean = 0.0
    for active in itertools.product((0, 1), repeat=len(p)):
        weight = math.prod(q if a else 1 - q for q, a in zip(p, active, strict=True))
        if any(active):
            somebody += weight
            mean += weight * np.mean([v for v, a in zip(u, active, strict=True) if a])
    return mean / somebody, somebody


@pytest.mark.parametrize(("p", "steps"), [([0.1, 0.9], 1), ([0.7, 0.3], 3)])
def test_fedavg_goes_to_the_biased_limit_at_a_known_rate(p, steps, Scripted, play) -> None:
    """E[x^t] − x^∞ shrinks by 1 − P(A ≠ ∅)(1 − (1−η)^s) a round; x^∞ = Σ_A P(A) ū_A / P(A ≠ ∅), whatever η and s."""
    counts, lr = traces(2, 3), 0.3
    simulation = simulation_of(TWO, FedAvg(), Scripted(counts), lr, steps)
    found = chance(counts, p) @ ended(simulation, play)
    end, somebody = limit(p, TWO)
    factor = 1 - somebody * (1 - (1 - lr) ** steps)
    assert found == pytest.approx(end * (1 - factor**3), abs=1e-9)
    closed = (p[0] * TWO[0] * (1 - p[1] / 2) + p[1] * TWO[1] * (1 - p[0] / 2)) / (1 - (1 - p[0]) * (1 - p[1]))
    assert end == pytest.approx(closed, abs=1e-9)


def test_fedavg_over_all_clients_is_slow_and_ends_at_the_mean_by_probabilities(Scripted, play) -> None:
    """x ← x + (1/m) Σ_A (x_i − x): E[x^t] shrinks its distance to Σ p_i u_i / Σ p_i by 1 − p̄ (1 − (1−η)^s) a round."""
    p, lr, steps, counts = [0.2, 0.9], 0.3, 2, traces(2, 3)
    found = chance(counts, p) @ ended(simulation_of(TWO, FedAvgAll(), Scripted(counts), lr, steps), play)
    factor = 1 - np.mean(p) * (1 - (1 - lr) ** steps)
    assert found == pytest.approx(np.dot(p, TWO) / sum(p) * (1 - factor**3), abs=1e-9)
    assert factor > 1 - limit(p, TWO)[1] * (1 - (1 - lr) ** steps)  # slower than over active clients


def test_three_clients_have_a_limit_of_their_own(Scripted, play) -> None:
    p, u, lr = [0.2, 0.5, 0.9], [3.0, -1.0, 7.0], 0.4
    counts = traces(3, 3)
    simulation = simulation_of(u, FedAvg(), Scripted(counts), lr)
    end, somebody = limit(p, u)
    expected = end * (1 - (1 - somebody * lr) ** 3)
    assert chance(counts, p) @ ended(simulation, play) == pytest.approx(expected, abs=1e-9)
    proportional = np.dot(p, u) / sum(p)
    assert abs(end - proportional) > 0.1  # p_i / Σ p_j (fedawe eq. 3) is close, not exact


def test_what_noise_leaves_where_probabilities_are_equal(Scripted, play) -> None:
    """E(x^t − x*)² from x* follows M ← (1 − P) M + P ((1−η)² M + η² v) to η v / (2 − η), where v is that of the mean
    of who is there, ¼(u₂ − u₁)² · 2(1 − p)/(2 − p)."""
    p, lr, counts = 0.3, 0.4, traces(2, 4)
    simulation = simulation_of(TWO, FedAvg(), Scripted(counts), lr, start=50.0)
    found = chance(counts, [p, p]) @ (ended(simulation, play) - 50) ** 2
    somebody, v, second = p * (2 - p), 2500 * 2 * (1 - p) / (2 - p), 0.0
    for _ in range(4):
        second = (1 - somebody) * second + somebody * ((1 - lr) ** 2 * second + lr**2 * v)
    assert found == pytest.approx(second, rel=1e-9)
    for _ in range(500):
        second = (1 - somebody) * second + somebody * ((1 - lr) ** 2 * second + lr**2 * v)
    assert second == pytest.approx(lr * v / (2 - lr), rel=1e-9)


def test_the_numbers_beside_figure_2_are_these_formulas() -> None:
    """|x^∞ − 50| off the diagonal, and on it the mean distance √(2/π) σ of a normal law with that variance."""
    recipe = load_recipe("fedawe/fig2")
    (lr,) = (float(word.partition("=")[2]) for word in recipe.base if word.startswith("lr="))
    values = (0.1, 0.3, 0.5, 0.7, 0.9)
    for p1, p2 in itertools.product(values, repeat=2):
        printed = recipe.paper_value("bias", {"p1": f"p1 = {p1}", "p2": f"p2 = {p2}"})
        end, _ = limit([p1, p2], TWO)
        noise = math.sqrt(2 / math.pi * lr / (2 - lr) * 2500 * 2 * (1 - p1) / (2 - p1))
        assert printed == pytest.approx(noise if p1 == p2 else abs(end - 50), abs=6e-4)


@pytest.mark.parametrize("clip", [None, 0.7])
def test_the_evaluated_mean_is_an_average_of_the_servers_past_models(clip, Scripted, play) -> None:
    """x̄^t = (1/m) Σ_i x^{τ_i + 1}, and a round moves it by |A|/m of what it moves the server's model from mean_A x_i:
    the clip bounds that."""
    counts = (np.random.default_rng(3).random((12, 4, 3)) < 0.4).astype(np.int8)
    simulation = simulation_of([1.0, -2.0, 6.0], FedAWE(clip=clip), Scripted(counts), 0.2)
    models = played(simulation, play)
    server = [one.after.model[:, 0] for one in play(simulation)]
    received = torch.zeros_like(models[0])
    for t, active in enumerate(torch.as_tensor(counts) == 1):
        received = torch.where(active, server[t][:, None], received)
        torch.testing.assert_close(models[t + 1].mean(1), received.mean(1))
        share, taking = active.double().mean(1), active.double().sum(1).clamp(min=1)
        step = torch.where(active.any(1), server[t] - (models[t] * active).sum(1) / taking, 0.0)
        torch.testing.assert_close(models[t + 1].mean(1) - models[t].mean(1), share * step)
        assert clip is None or (step.abs() <= clip + 1e-12).all()


@pytest.mark.parametrize("p", [0.2, 0.6])
def test_models_of_k_rounds_ago_weigh_p_times_1_minus_p_to_the_k(p, Scripted, play) -> None:
    """P(t − 1 − τ_i(t) = k) = p (1−p)^k: the mean over clients is an exponential average of parameter 1 − p."""
    counts = traces(1, 6)
    *_, last = play(simulation_of([1.0], FedAWE(), Scripted(counts), 0.1))
    age, weight = 5 - last.after.last_seen.numpy(), chance(counts, [p])
    for k in range(6):
        assert weight[age == k].sum() == pytest.approx(p * (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_the_mean_has_less_noise_and_lags(clip, Scripted) -> None:
    """E(x̄^T − x*)² and E(x^T − x*)² over all 64 traces, as columns of a run and by Algorithm 1 trace by trace: begun
    at the optimum, where only noise is, x̄ is nearer; begun far from it x is."""
    p, counts, lr = [0.3, 0.7], traces(2, 3), 0.1
    weight = chance(counts, p)
    for start, nearer in ((50.0, "distance_to_optimum"), (0.0, "global_distance_to_optimum")):
        run = simulation_of(TWO, FedAWE(clip=clip), Scripted(counts), lr, start=start).run()
        x, models = naive(TWO, counts, lr, clip or math.inf, start)
        second = {}
        for column, exact in (("distance_to_optimum", models.mean(1)), ("global_distance_to_optimum", x)):
            second[column] = weight @ np.array([row[column] for row in run.history[-len(weight) :]]) ** 2
            assert second[column] == pytest.approx(weight @ (exact - 50) ** 2, rel=1e-6)
        assert min(second, key=second.get) == nearer


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.4, 0.8])
def test_echoes_of_rare_clients_are_unstable_at_rates_that_suit_others(p, Scripted, play) -> None:
    """A client that comes with probability p multiplies its error by 1 − ηk, k geometric; in mean square by
    1 − 2η/p + η²(2−p)/p², which is below 1 only for η < 2p/(2−p): without the clip the rarest client sets the rate."""
    longest = 30
    counts = np.zeros((longest, longest, 1), dtype=np.int8)
    counts[np.arange(longest), np.arange(longest)] = (
        1  # replicate k comes in round k for the first time, and then never
    )
    weight = p * (1 - p) ** np.arange(longest)
    critical = 2 * p / (2 - p)
    for lr in (0.5 * critical, critical, 1.5 * critical):
        simulation = simulation_of([0.0], FedAWE(), Scripted(counts), lr, start=1.0)
        second = weight @ ended(simulation, play) ** 2
        assert second == pytest.approx(1 - 2 * lr / p + lr**2 * (2 - p) / p**2, abs=1e-3)
        assert second == pytest.approx(1, abs=1e-3) if lr == critical else (second < 1) == (lr < critical)


@pytest.mark.parametrize(("clipped", "most"), [("step", 0.5), ("mean", 1.5)])
def test_the_clip_bounds_every_round_whatever_the_rate(clipped, most, Scripted, play) -> None:
    """‖x^{t+1} − mean_A x_i^t‖ ≤ c, or η_g c: a model far away needs rounds in proportion to its distance."""
    counts = (np.random.default_rng(1).random((40, 5, 3)) < 0.2).astype(np.int8)
    strategy = FedAWE(server_lr=3.0, clip=0.5, clipped=clipped)
    models = played(simulation_of([40.0, 60.0, 50.0], strategy, Scripted(counts), 0.9), play)
    travelled = 0.0
    for t, active in enumerate(counts == 1):
        travelled = travelled + most * active.mean(1)
        assert (models[t + 1].abs().amax(1).numpy() <= most * (t + 1) + 1e-9).all()
        assert (models[t + 1].mean(1).numpy() <= travelled + 1e-9).all()
    np.testing.assert_allclose(models[-1].mean(1).numpy(), travelled)  # still on its way: every round was clipped
    unclipped = played(simulation_of([40.0, 60.0, 50.0], FedAWE(3.0), Scripted(counts), 0.9), play)
    assert unclipped[-1].abs().max() > 1e3


@pytest.mark.parametrize(
    ("trajectory", "age", "square"), [(Staircase(period=20), 7.99, 96.1), (Sine(period=20), 7.10, 82.1)]
)
def test_clients_were_away_longest_at_the_end_of_a_cycle(trajectory, age, square) -> None:
    """The mean of t − τ(t) and of its square in the phase that `fedawe/lemma2` sees: within 2 % of the largest, below
    Lemma 2's bounds 1/δ and 2/δ². A' = 1 with probability p, and A + 1 otherwise."""
    client = Population(seeds=(0,), clients=1)
    probabilities = [trajectory.at(t, np.array([[0.25]]), client).item() for t in range(20)]
    assert min(probabilities) == pytest.approx(0.1)
    moments = [(1.0, 1.0)]
    for p in 60 * probabilities:
        mean, second = moments[-1]
        moments.append((1 + (1 - p) * mean, 1 + (1 - p) * (second + 2 * mean)))
    assert moments[-1] == pytest.approx((age, square), rel=1e-3)
    largest = np.max(moments[-20:], axis=0)
    assert (np.array(moments[-1]) >= 0.98 * largest).all()
    assert (largest < [10, 200]).all()
