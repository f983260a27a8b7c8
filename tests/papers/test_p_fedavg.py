"""P-FedAvg's formulas: whose mean and variance a sampling scheme has, its theorems' bound, what unequal weights break.

Mean estimation is linear: in a round of E steps client i maps θ to A_i θ + B_i, A_i = Π (1 − η (1 − ε_i)). So the first
two moments of θ_t over who is drawn follow an exact recursion. It is compared with the simulation, every trace of draws
being a replicate weighed by its probability, and then says what holds for thousands of rounds.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import rng
from fedsim.core.heterogeneity import match_moments
from fedsim.data.datasets import GaussianMean
from fedsim.data.datasets.gaussian import draw_dirichlet_weights
from fedsim.local import SGD, Constant, Inverse
from fedsim.models import Mean
from fedsim.shift import Location
from fedsim.strategies import PFedAvg
from fedsim.studies.reproduce.recipe import recipe_folder

STABLE = 100.0  # θ^PS = m̄ / (1 − ε̄), with m̄ = 10 and ε̄ = 0.9
MU = 0.1  # μ̃ = 1 − ε̄
N, E = 25, 5
BETA, GAMMA = 100.0, 1e4  # the rate β / (t + γ) of the authors' program


class Clients:
    """ε_i and m_i as the recipes draw them."""

    def __init__(
        self, count: int = N, shift: float = 0.1, data: float = 0.6, weights: np.ndarray | None = None
    ) -> None:
        self.p = np.full(count, 1 / count) if weights is None else weights
        epsilons = rng.generator(0, rng.Purpose.SHIFT).standard_normal(count)
        means = rng.generator(0, rng.Purpose.DATA).standard_normal(count)
        self.epsilons = match_moments("shift.variance", 0.9, shift, self.p, epsilons)
        self.means = match_moments("dataset.variance", 10.0, data, self.p, means)

    @property
    def pull(self) -> np.ndarray:
        """m_i − (1 − ε_i) θ^PS: minus client i's gradient where training should rest; Σ p_i of it is 0."""
        return self.means - (1 - self.epsilons) * STABLE

    def round(self, t: int, steps: int = E, beta: float = BETA, gamma: float = GAMMA) -> tuple[np.ndarray, np.ndarray]:
        """(A_i, B_i) of round t."""
        slope, offset = np.ones(len(self.p)), np.zeros(len(self.p))
        for k in range(steps):
            rate = beta / (t * steps + k + gamma)
            kept = 1 - rate * (1 - self.epsilons)
            slope, offset = kept * slope, kept * offset + rate * self.means
        return slope, offset


def moments(
    clients: Clients,
    scheme: str,
    drawn: int,
    rounds: int,
    start: float = 10.0,
    beta: float = BETA,
    gamma: float = GAMMA,
) -> tuple[np.ndarray, np.ndarray]:
    """E θ_t and Var θ_t over who is drawn, for t = 0 … rounds, of the schemes of p-fedavg §2.4."""
    p, count = clients.p, len(clients.p)
    mean, second, path = start, start**2, [(start, 0.0)]
    for t in range(rounds):
        slope, offset = clients.round(t, beta=beta, gamma=gamma)
        squares = slope**2 * second + 2 * slope * offset * mean + offset**2  # E w_i²
        both = (p @ slope) ** 2 * second + 2 * (p @ slope) * (p @ offset) * mean + (p @ offset) ** 2  # E (Σ p_i w_i)²
        mean = p @ slope * mean + p @ offset
        if scheme == "full":
            second = both
        elif scheme == "I":  # K independent draws: 1/K of the spread of one
            second = both + (p @ squares - both) / drawn
        else:  # the mean of K of N numbers N p_i w_i, drawn without replacement
            own = count * p**2 @ squares
            second = both + (count - drawn) / (drawn * (count - 1)) * (own - both)
        path.append((mean, second - mean**2))
    return tuple(np.array(path).T)


def distances(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """E (θ_t − θ^PS)²."""
    return (mean - STABLE) ** 2 + variance


def simulated(clients: Clients, scheme: str, counts: np.ndarray, Scripted) -> np.ndarray:
    """[R] θ after the rounds of these counts [T, R, m]; data without noise, steps that are large enough to be seen."""
    rounds, replicates, count = counts.shape
    data = GaussianMean(count, std=0.0, means=clients.means.tolist())
    data.weights = clients.p
    simulation = Simulation(
        data,
        lambda: Mean((1,), 10.0),
        clients=count,
        availability=Scripted(counts),
        strategy=PFedAvg(scheme),
        shift=Location(epsilons=clients.epsilons.tolist(), references="none"),
        local=SGD(lr=30.0, steps=E, batch_size=1, schedule=Inverse(100.0)),
        rounds=rounds,
        seeds=range(replicates),
        execution=Execution(dtype="float64"),
        evaluation=EvaluationOptions(every=rounds),
    )
    return simulation.run().state.model[:, 0].numpy()


def draws(scheme: str, drawn: int, p: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Every trace of draws: counts [T, R, m] and the probability [R] of each."""
    count = len(p)
    if scheme == "I":
        single = list(itertools.product(range(count), repeat=drawn))
        chances = [math.prod(p[i] for i in each) for each in single]
    else:
        single = list(itertools.combinations(range(count), drawn))
        chances = [1 / len(single)] * len(single)
    rows = np.array([np.bincount(each, minlength=count) for each in single])
    traces = list(itertools.product(range(len(single)), repeat=rounds))
    return np.stack([rows[list(trace)] for trace in traces], 1), np.array(
        [math.prod(chances[i] for i in trace) for trace in traces]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("scheme", "drawn"), [("I", 1), ("I", 2), ("II", 1), ("II", 2), ("II", 3), ("II", 4)])
def test_the_mean_model_is_the_same_whoever_is_drawn(scheme, drawn, Scripted) -> None:
    """E θ_t is full participation's in schemes I and II, for every K; Var θ_t is Lemma D.6 before its bounds."""
    uneven = np.array([0.1, 0.2, 0.3, 0.4]) if scheme == "I" else None
    clients = Clients(4, weights=uneven)
    full = simulated(clients, "full", np.ones((2, 1, 4), int), Scripted)[0]
    counts, chances = draws(scheme, drawn, clients.p, rounds=2)
    found = simulated(clients, scheme, counts, Scripted)
    mean = chances @ found
    assert mean == pytest.approx(full, rel=1e-12)
    expected = moments(clients, scheme, drawn, 2, beta=30.0, gamma=100.0)
    assert mean == pytest.approx(expected[0][-1], rel=1e-12)
    assert chances @ (found - mean) ** 2 == pytest.approx(expected[1][-1], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("beta", "gamma", "rounds"), [(100.0, 1e4, 6000), (20.0, 1e3, 4000)])
def test_what_sampling_leaves_has_a_closed_form(beta, gamma, rounds) -> None:
    """(E/K) Σ p_i (m_i − (1 − ε_i) θ^PS)² β² / ((2 μ̃ β − 1)(t + γ)) in scheme I, and (N − K) / (N − 1) of it in II."""
    clients, drawn = Clients(), 20
    closed = E / drawn * clients.p @ clients.pull**2 * beta**2 / ((2 * MU * beta - 1) * (rounds * E + gamma))
    for scheme, factor in (("I", 1.0), ("II", (N - drawn) / (N - 1))):
        variance = moments(clients, scheme, drawn, rounds, beta=beta, gamma=gamma)[1][-1]
        assert variance == pytest.approx(factor * closed, rel=0.02)
    assert clients.p @ clients.pull == pytest.approx(0, abs=1e-9)


def test_scheme_one_does_not_mind_unequal_weights() -> None:
    """Its noise is that of equal weights where Σ p_i (m_i − (1 − ε_i) θ^PS)² is the same."""
    uneven = Clients(weights=draw_dirichlet_weights(N, 0.0005, 0))
    found = moments(uneven, "I", 20, 1000)[1][-1] / (uneven.p @ uneven.pull**2)
    assert found == pytest.approx(
        moments(Clients(), "I", 20, 1000)[1][-1] / (Clients().p @ Clients().pull ** 2), rel=0.01
    )


@pytest.mark.parametrize("shift", [0.01, 0.1, 0.6])
def test_the_mean_square_keeps_the_theorems_bound(shift) -> None:
    """(t + γ) E d² ≤ γ d₀² in all schemes: Theorems 3.1 to 3.3 with the least v that they allow."""
    for beta, gamma, start in ((BETA, GAMMA, 10.0), (20.0, 1e3, 0.0)):
        for scheme in ("full", "I", "II"):
            square = distances(*moments(Clients(shift=shift), scheme, 20, 1000, start, beta, gamma))
            scaled = (np.arange(1001) * E + gamma) * square
            assert scaled.max() == scaled[0]


def test_more_clients_never_slow_scheme_two_down() -> None:
    """E d_t² falls with K at every t. Who first passes a distance is chance: the mean of five replicates of K = 10 does
    before K = 25 in about every second draw, and where it then stays tells them apart."""
    clients, rounds = Clients(), 900
    squares = np.array([distances(*moments(clients, "II", k, rounds)) for k in (5, 10, 15, 20, 25)])
    assert (np.diff(squares[:, 1:], axis=0) < 0).all()
    draw, theta, groups = np.random.default_rng(0), np.full(500, 10.0), []
    for t in range(rounds):
        slope, offset = clients.round(t)
        chosen = np.argpartition(draw.random((500, N)), 9, axis=1)[:, :10]
        theta = slope[chosen].mean(1) * theta + offset[chosen].mean(1)
        groups.append(np.abs(theta - STABLE).reshape(100, 5).mean(1))
    all_of_them = np.sqrt(squares[-1])  # no draw is left: the distance itself
    first = (np.array(groups) <= 10).argmax(0)
    assert 0.3 < (first < (all_of_them[1:] <= 10).argmax()).mean() < 0.7
    assert np.mean(groups[-1]) > 2 * all_of_them[-1]


def test_unequal_weights_break_scheme_two_more_the_smaller_the_rate() -> None:
    """Each aggregation multiplies by S = (N/K) Σ_{k∈S} p_k, with E S = 1 and Var S = N² (N − K) Var(p) / (K (N − 1)).

    So E d² grows without end where 2 η E μ̃ < Var S, and log S, of negative mean, takes the typical model to 0.
    """
    p, drawn = np.array([0.05, 0.15, 0.2, 0.6]), 2
    sums = np.array([4 / drawn * sum(p[list(each)]) for each in itertools.combinations(range(4), drawn)])
    assert sums.mean() == pytest.approx(1)
    assert sums.var() == pytest.approx(4**2 * (4 - drawn) / (drawn * (4 - 1)) * p.var())
    assert np.log(sums).mean() < 0

    uneven = Clients(weights=draw_dirichlet_weights(N, 0.01, 0))
    spread = N**2 * (N - 20) / (20 * (N - 1)) * uneven.p.var()
    for beta in (5.0, 100.0):  # the paper's rate, and the usual one
        assert 2 * beta / GAMMA * E * MU < spread
        mean, variance = moments(uneven, "II", 20, 1000, beta=beta)
        assert mean[-1] == pytest.approx(moments(uneven, "full", N, 1000, beta=beta)[0][-1])  # the mean is right
        assert variance[-1] > variance[500] > 100 * STABLE**2
    large, small = (moments(uneven, "II", 20, 1000, beta=b)[1] for b in (4000.0, 100.0))
    assert spread < 2 * 4000 / GAMMA * E * MU
    assert large[100] < small[100]


def test_a_constant_rate_rests_elsewhere() -> None:
    """At Σ b_i m_i / Σ b_i (1 − ε_i), b_i = (1 − (1 − η (1 − ε_i))^E) / (1 − ε_i): 10.0 beyond θ^PS in Fig. 6."""
    clients, rate, steps = Clients(), 0.02, 10
    a = 1 - clients.epsilons
    b = (1 - (1 - rate * a) ** steps) / a
    rest = b @ clients.means / (b @ a)
    assert rest - STABLE == pytest.approx(10.0, abs=0.05)
    first_order = rate * (steps - 1) / (2 * MU) * -np.mean(a * clients.pull)
    assert rest - STABLE == pytest.approx(first_order, rel=0.2)
    simulation = Simulation(
        GaussianMean(N, std=0.0, means=clients.means.tolist()),
        lambda: Mean((1,), float(rest)),
        clients=N,
        strategy=PFedAvg(),
        shift=Location(epsilons=clients.epsilons.tolist(), references="none"),
        local=SGD(lr=rate, steps=steps, batch_size=1, schedule=Constant()),
        rounds=3,
        execution=Execution(dtype="float64"),
    )
    assert float(simulation.run().state.model) == pytest.approx(rest, rel=1e-7)  # rates are single precision


@pytest.mark.parametrize("drawn", [1, 2, 3])
def test_drawing_clients_multiplies_the_noise_of_batches_whatever_the_batch(drawn) -> None:
    """Independent noise of clients that are alike, of variance s² in each, is s²/N in the mean of all, 1 + (N − 1)/K
    times that in the mean over a multiset of K, and N/K times over a set of K. s², which falls with the batch, cancels.
    """
    p = np.full(4, 0.25)
    for scheme, factor in (("I", 1 + 3 / drawn), ("II", 4 / drawn)):
        counts, chances = draws(scheme, drawn, p, rounds=1)
        assert chances @ ((counts[0] / drawn) ** 2).sum(1) == pytest.approx(factor / 4)


def test_full_participation_averaged_plainly_rests_elsewhere() -> None:
    """As in the authors' program (strategy.average=plain): at Σ m_i / Σ (1 − ε_i) for one local step, which is θ^PS
    only where all p_i are equal. With Fig. 1's weights, as unequal as the program's, that is 2.6 away."""
    weights = draw_dirichlet_weights(N, 0.0005, 0)
    clients = Clients(shift=0.01, data=0.0, weights=weights)
    rest = clients.means.sum() / (1 - clients.epsilons).sum()
    assert weights.var() == pytest.approx(0.00037, abs=0.000005)
    assert rest - STABLE == pytest.approx(-2.6, abs=0.05)
    data = GaussianMean(N, std=0.0, means=clients.means.tolist())
    data.weights = weights
    for average, expected in (("weighted", STABLE), ("plain", rest)):
        simulation = Simulation(
            data,
            lambda: Mean((1,), 90.0),
            clients=N,
            strategy=PFedAvg(average=average),
            shift=Location(epsilons=clients.epsilons.tolist()),
            local=SGD(lr=1.0, steps=1, batch_size=1, schedule=Constant()),
            rounds=300,
            execution=Execution(dtype="float64"),
            evaluation=EvaluationOptions(every=300),
        )
        state = simulation.run().state
        assert float(simulation.references["distance_to_ps"]) == pytest.approx(STABLE, rel=1e-6)
        assert float(state.model) == pytest.approx(expected, rel=1e-6)


def test_scaled_objectives_have_the_same_stable_point() -> None:
    """g_i = p_i N f_i (§3.2) is on mean estimation a client with 1 − ε_i and m_i multiplied by N p_i, as Fig. 7's
    recipe lists them: the plain mean then rests where the weighted one does, and moves there at any rate."""
    weights = draw_dirichlet_weights(N, 0.01, 0)
    clients = Clients(weights=weights)
    slopes, means = N * weights * (1 - clients.epsilons), N * weights * clients.means
    assert means.sum() / slopes.sum() == pytest.approx(STABLE)
    overrides = content_of("p_fedavg/fig7")["axes"]["scheme"]["II, scaled objectives"]
    listed = dict(override.split("=", 1) for override in overrides)
    assert json.loads(listed["dataset.means"]) == pytest.approx(means.tolist(), rel=1e-6, abs=1e-9)
    assert json.loads(listed["shift.epsilons"]) == pytest.approx((1 - slopes).tolist(), rel=1e-6, abs=1e-9)
    remains = math.prod(1 - 5 / (t + GAMMA) * MU for t in range(10_000))  # of 90 after the figure's local steps
    assert remains == pytest.approx(0.71, abs=0.005)


def test_a_stable_point_may_exist_above_proposition_2_8s_threshold() -> None:
    """ε = 2 and −2, whose sizes average 2 (Assumption 2.3 bounds distances), above μ/L = 1: the signs cancel in Φ,
    which is constant, so that one retraining reaches θ^PS = m̄."""
    simulation = Simulation(
        GaussianMean(2, std=0.0, means=[5.0, 15.0]),
        lambda: Mean((1,), -1000.0),
        clients=2,
        strategy=PFedAvg(),
        shift=Location(epsilons=[2.0, -2.0]),
        local=SGD(lr=1.0, steps=1, batch_size=1, schedule=Constant()),
        rounds=1,
        execution=Execution(dtype="float64"),
    )
    assert float(simulation.run().state.model) == pytest.approx(10, abs=1e-9)
    assert float(simulation.references["distance_to_ps"]) == pytest.approx(10, abs=1e-9)


def test_example_2_7_prints_coefficients_of_risks_as_gradients() -> None:
    """Two clients with ε = ±½ and no mean: ∇f_i = (1 − ε_i) θ is θ/2, 3θ/2 and θ on average; printed are θ times the
    coefficients of the risks, ½ (1 − ε_i)² = 1/8, 9/8. Assumption 2.6 holds with ς = ½, and gradients are unbounded."""
    epsilons, theta = np.array([0.5, -0.5]), np.linspace(-50, 50, 101)
    gradients = (1 - epsilons)[:, None] * theta
    assert gradients[:, -1] / theta[-1] == pytest.approx([0.5, 1.5])
    assert gradients.mean(0)[-1] / theta[-1] == pytest.approx(1)
    assert (1 - epsilons) ** 2 / 2 == pytest.approx([1 / 8, 9 / 8])
    assert ((gradients.mean(0) - gradients) ** 2 <= 0.5**2 * (1 + theta**2)).all()
    assert ((gradients.mean(0) - gradients) ** 2 > 0.49**2 * (1 + theta**2)).any()
    assert (np.diff((gradients**2)[:, theta >= 0]) > 0).all()


def test_the_theorems_own_gamma_is_out_of_reach() -> None:
    """γ ≥ 2 / (μ̃ η̂_0) with the constants of §3, for every δ that leaves μ̃ > 0, in Fig. 1's setting: 9·10¹¹ steps.

    ς² is the least that Assumption 2.6 allows, the largest of b_i² + (ε_i − ε̄)²."""
    clients = Clients(shift=0.01, data=0.0)
    noise, largest = 0.001**2, clients.epsilons.max()
    dissimilarity = (clients.pull**2 + (clients.epsilons - 0.9) ** 2).max()
    gammas = []
    for delta in np.linspace(0.001, 0.11, 110):
        mu = 1 - 0.9 * (1 + delta)
        c1, c2 = (1 + largest) ** 2 / (2 * delta * 0.9), 4 * (noise + (1 + largest) ** 2)
        c3 = 6 * (2 * noise + 3 * (1 + largest) ** 2)
        c4 = 16 * noise + 12 * dissimilarity + (8 * noise + 12 * dissimilarity) / 90**2
        rate = mu / (2 * noise + (c1 * c3 + c2 / 6) * c4 * (2 * E**2 - E) * math.log(E))
        gammas.append(2 / (mu * rate))
    assert min(gammas) == pytest.approx(9e11, rel=0.05)


def content_of(recipe: str) -> dict[str, Any]:
    """The recipe's content as it stands in its file."""
    return dict(yaml.safe_load((recipe_folder() / f"{recipe}.yaml").read_text(encoding="utf-8")))
