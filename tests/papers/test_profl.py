"""The formulas behind the verdicts on ProFL: why what it claims holds or does not (docs/claims/profl.md)."""

from __future__ import annotations

import functools
import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
import yaml

from fedsim import Execution, Simulation
from fedsim.availability import UniformK
from fedsim.data.datasets import BinaryGaussians, Dataset, HousePrices, PricingGroups
from fedsim.evaluation.performative import Risk, optimal_point
from fedsim.local import PFL, ProFL
from fedsim.local.estimators import LeastSquaresEstimator, MeanEstimator
from fedsim.local.history import DeploymentHistory
from fedsim.local.robust_gradient import GradientOutlierFilter
from fedsim.local.sample_size import AdaptiveSampleSize
from fedsim.models import Linear, Mean
from fedsim.shift import Contribution, GroupMean, Response
from fedsim.studies.reproduce.recipe import recipe_folder

DOUBLE = Execution(dtype="float64")
PHI = NormalDist().cdf


def accuracy(weight: float, bias: float, gamma: tuple[float, float] = (0.02, 3.0), std: float = 0.5) -> float:
    """Of the sign of w x + b on x | 1 ~ N(−1 − γ₁ w, σ²), x | 0 ~ N(1 − γ₀ w, σ²), the law of profl Table 4."""
    scores = [
        (weight * centre + bias) / (abs(weight) * std) for centre in (1 - gamma[0] * weight, -1 - gamma[1] * weight)
    ]
    return 0.5 * (PHI(scores[1]) + PHI(-scores[0]))


def test_with_one_feature_no_linear_classifier_passes_phi_of_two() -> None:
    """Table 2, same laws: the best accuracy is that of the unmoved classes, Φ(1/σ) = 97.7 %, and 99.23 % is printed."""
    weights, places = np.linspace(-4, 4, 200), np.linspace(-10, 10, 201)
    best = max(accuracy(w, -w * x) for w in weights for x in places)
    assert best < PHI(2)
    assert best > PHI(2) - 0.01
    assert accuracy(-1e-9, 0.0) == pytest.approx(PHI(2))
    data, theta = BinaryGaussians(1), torch.tensor([-0.4, 0.1], dtype=torch.float64)
    simulation = Simulation(data, Linear, clients=1, shift=GroupMean((0.02, 3.0), 0.0), execution=DOUBLE)
    drawn = data.exact(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 40_000, torch.float64)
    zero = torch.zeros((), dtype=torch.int64)
    moved = simulation.shift({"x": drawn["x"][0], "y": drawn["y"][0], "client": zero, "row": zero}, theta)
    right = ((moved["x"][:, 0] * theta[0] + theta[1] > 0) == (moved["y"] == 1)).double().mean().item()
    expected = accuracy(-0.4, 0.1)
    assert abs(right - expected) < 5 * math.sqrt(expected * (1 - expected) / 40_000)


def test_the_least_loss_of_house_prices_grows_by_the_variance_of_the_sensitivities() -> None:
    """Table 1, not halved: E[x²] θ² Var(γ) at the same θ, and at the best θ within a tenth of that."""
    square, ridge = (5 / 3) ** 2 + 1, 10 / 3
    midpoints = {alpha: [1.5 + alpha * (2 * k - 9) / 10 for k in range(10)] for alpha in (0.0, 0.25, 0.5)}
    least, at = {}, {}
    for alpha, gammas in midpoints.items():
        simulation = Simulation(
            HousePrices(10), functools.partial(Linear, bias=False), clients=10, shift=Response(gammas, 0.0),
            ridge=ridge, execution=DOUBLE,
        )  # fmt: skip
        risk = Risk(simulation.model, simulation.shift, simulation.data, samples=50)  # moments are exact
        at[alpha] = optimal_point(risk, [torch.zeros(1, dtype=torch.float64)])
        least[alpha] = 2 * risk.performative_risk(at[alpha]).item()
        up = [1 + g for g in gammas]
        assert at[alpha].item() == pytest.approx(5 / 3 * sum(up) / (sum(u * u for u in up) + 10 * ridge / square))
        same = 2 * risk.performative_risk(at[0.0]).item()
        assert same - least[0.0] == pytest.approx(square * at[0.0].item() ** 2 * np.var(gammas), abs=1e-9)
        assert least[alpha] - least[0.0] == pytest.approx(same - least[0.0], rel=0.1, abs=1e-12)
    assert least[0.25] - least[0.0] == pytest.approx(0.03, abs=0.005)  # the paper's ProFL: 5.59 − 5.56
    assert least[0.5] - least[0.0] == pytest.approx(0.11, abs=0.005)  # 5.67 − 5.56; its PG: 6.32 − 5.56


def test_the_factors_of_theorem_5_10_in_the_recipe_of_figure_3_are_the_formulas() -> None:
    """(1 − ρη)^(t R/2) with ρ = min_i E[x²] (1 + γ_i)² + λ, the least curvature of a client's performative risk."""
    square, ridge, rate, steps = (5 / 3) ** 2 + 1, 10 / 3, 0.001, 5
    least_gammas = {"enrolment 1": 1.5, "α = 0.1": 1.4, "α = 1": 0.5}
    recipe = yaml.safe_load((recipe_folder() / "profl" / "fig3.yaml").read_text(encoding="utf-8"))
    comparisons = [each for each in recipe["comparisons"] if each.get("statement") == "thm510-rate"]
    assert len(comparisons) == 6
    for comparison in comparisons:
        window = recipe["measures"][comparison["measure"]]["window"]
        curvature = square * (1 + least_gammas[comparison["where"]["setting"]]) ** 2 + ridge
        assert comparison["times"] == pytest.approx((1 - rate * curvature) ** (window[0] * steps / 2), abs=6e-5)
    for gamma in least_gammas.values():
        simulation = Simulation(
            HousePrices(1), functools.partial(Linear, bias=False), clients=1, shift=Response([gamma], 0.0),
            ridge=ridge, execution=DOUBLE,
        )  # fmt: skip
        risk = Risk(simulation.model, simulation.shift, simulation.data, samples=50)
        at = [risk.performative_risk(torch.tensor([theta], dtype=torch.float64)).item() for theta in (0.0, 1.0, 2.0)]
        assert at[0] - 2 * at[1] + at[2] == pytest.approx(square * (1 + gamma) ** 2 + ridge)


def at_rest(clients: int, shared: bool, steps: int = 3000, length: int = 10, seed: int = 0) -> float:
    """Root mean square of the mean model of clients at rest (θ* = 0, f' = 0): θ_i ← θ_i − η (h θ_i + s_i u), where s_i
    is eq. 6 on white errors of f̂, the client's own or the mean of the last round's; three steps a round."""
    draw = np.random.default_rng(seed)
    eta, pull, moment = 0.01, 5.0, 1.0
    models, errors = (0.01 * draw.standard_normal((length, clients)) for _ in range(2))
    theta, common, seen = np.zeros(clients), 0.0, []
    for step in range(steps):
        error = draw.standard_normal(clients)
        away = models - theta
        own = ((errors - error) * away).sum(0) / (away**2).sum(0)
        models[step % length], errors[step % length] = theta, error
        theta = (
            theta - eta * (pull * theta + (common if shared else own) * moment) + 1e-6 * draw.standard_normal(clients)
        )
        if step % 3 == 2:
            common, theta = own.mean(), np.full(clients, theta.mean())
            seen.append(theta[0])
    return float(np.sqrt(np.mean(np.square(seen[len(seen) // 4 :]))))


def test_at_rest_a_shared_slope_averages_less_error_than_aggregation_does() -> None:
    """Fig. 1b: models at rest are moved by the slopes' errors, and a slope is the worse the less they move. With slopes
    of their own clients move apart, and their mean by N^(−1/2) of that; with a shared one all move together, by a
    mean error of N^(−1/4)."""
    own, shared = (
        [float(np.mean([at_rest(clients, way, seed=s) for s in range(3)])) for clients in (16, 100)]
        for way in (False, True)
    )
    assert own[0] / own[1] == pytest.approx((100 / 16) ** 0.5, rel=0.15)
    assert shared[0] / shared[1] == pytest.approx((100 / 16) ** 0.25, rel=0.15)
    assert shared[1] > 2 * own[1]


def test_the_bound_on_the_sample_size_grows_without_limit_at_rest() -> None:
    """Fig. 1c: n ‖Δθ‖² → 2 ℓ² H σ² log(2/φ) / Φ as the window's models come together, whatever Φ and M."""
    one = functools.partial(torch.full, (1,), dtype=torch.float64)
    slope = torch.full((1, 2, 1), 3.0, dtype=torch.float64)
    for history, tolerance, bend in ((100, 0.05, 0.0), (20, 0.1, 4.0)):
        limit = 2 * 1.4**2 * history * 0.25 * math.log(2 / 0.05) / tolerance
        asked = []
        for scale in 10.0 ** -np.arange(3, 7):
            moved = torch.full((1, history, 1), scale / math.sqrt(history), dtype=torch.float64)
            size = AdaptiveSampleSize(10**17, tolerance, 0.05, None)
            arguments = (one(0.001), one(1.4), one(2.0)[:, None], slope, moved, one(0.25), one(bend))
            asked.append(size(history, *arguments, min_samples=3).item())
        assert asked == sorted(asked)
        assert asked[-1] * 1e-12 == pytest.approx(limit, rel=1e-4)


def test_the_filter_finds_no_gap_once_foreign_samples_are_nearly_half() -> None:
    """Fig. 1a: clean scores are (ϵ/(1 − ϵ))² of the foreign ones. At ϵ = 0.4 there are sparse bins between, at 0.44
    none, and all are kept; of draws of 500, each foreign with probability 0.4, a fifth have 42 % or more."""
    draw = np.random.default_rng(0)
    for share, found in ((0.2, True), (0.4, True), (0.44, False), (0.48, False)):
        foreign = int(500 * share)
        gradients = draw.standard_normal((40, 500, 5))
        gradients[:, :foreign] += 25.0
        kept = GradientOutlierFilter()(torch.as_tensor(gradients), torch.ones(40, 500, dtype=torch.bool))
        assert bool(kept[:, :foreign].any()) != found
        assert kept[:, foreign:].double().mean() > 0.98
    assert 0.15 < (draw.binomial(500, 0.4, 100_000) >= 210).mean() < 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "bounded"), [pytest.param(0.001, False, marks=pytest.mark.slow), (0.01, True), (0.03, True)]
)
def test_before_the_window_is_full_large_rates_run_into_the_bound(lr: float, bounded: bool, play) -> None:
    """Fig. 2b: H = 20 steps along the mean demand Σ_k ν_k(θ) μ_k, as PFL takes them; with a growing window, one."""
    data = PricingGroups(4, [2.0, 10.0], std=1.0, loss="negative_revenue")
    shift = Contribution("budget", budget=5.0, box=[0, 0.475], references="none")
    model = functools.partial(Mean, start=0.25)
    ends = {}
    for growing in (False, True):
        rule = ProFL(lr=lr, steps=5, batch_size=2500, history=20, robust=False, box=[0, 0.475], growing=growing)
        simulation = Simulation(data, model, clients=4, local=rule, shift=shift, rounds=4, execution=DOUBLE)
        ends[growing] = [played.after.model.item() for played in play(simulation)]
    price = 0.25
    for _ in range(20):
        left = np.array([5 - price * 2, 5 - price * 10])
        price = min(price + lr * float(left @ [2, 10]) / left.sum(), 0.475)
    assert ends[False][-1] == pytest.approx(price, abs=0.01)
    assert (price == 0.475) == bounded
    assert ends[True][-1] < 0.475


def slopes(length: int, bend: float, noise: float, draws: int = 20_000) -> np.ndarray:
    """f̂'(θ⁰) − f'(θ⁰) by eq. 6, of f = θ + ½ bend θ² with errors of f̂, for models at rest: θ^k ~ N(0, 1)."""
    draw = np.random.default_rng(length)
    theta = draw.standard_normal((draws, length + 1, 1))
    f = theta + 0.5 * bend * theta**2 + noise * draw.standard_normal(theta.shape)
    found = DeploymentHistory(length + 1).regression(torch.as_tensor(theta), torch.as_tensor(f)).numpy()[:, 0, 0]
    return found - (1 + bend * theta[:, 0, 0])


def test_at_rest_a_long_window_is_not_biased_by_curvature_and_averages_more_noise() -> None:
    """Fig. 2c: the bias ½ f″ E[Σδ³/Σδ²], δ = θ^k − θ⁰, vanishes by symmetry at every H; the variance falls with H."""
    spread = []
    for length in (4, 20, 100):
        off = slopes(length, bend=2.0, noise=0.0)
        assert abs(off.mean()) < 5 * off.std() / math.sqrt(len(off))
        spread.append(slopes(length, bend=0.0, noise=1.0).var())
    assert spread[0] > spread[1] > spread[2]


@pytest.mark.parametrize(("samples", "enrolled"), [(5, 2), (50, 2), (50, 1)])
def test_pfls_mean_path_depends_neither_on_samples_nor_on_enrolment(samples: int, enrolled: int, play) -> None:
    """Figs. 3a and 4a: E θ ← θ − η (((1 + γ̄) E[x²] + λ) θ − E[x²] ā) for every n and k; 100 replicates, to 5 σ."""
    square, ridge, gammas, rate = (5 / 3) ** 2 + 1, 10 / 3, [1.5, 1.8], 0.02
    model = functools.partial(Linear, bias=False)
    simulation = Simulation(
        HousePrices(2), model, clients=2, local=PFL(lr=rate, steps=1, batch_size=samples), ridge=ridge, rounds=5,
        availability=UniformK(enrolled), shift=Response(gammas, 0.0, references="none"), execution=DOUBLE,
        seeds=range(100),
    )  # fmt: skip
    played = list(play(simulation))
    expected = played[0].before.model.mean().item()
    for part in played:
        expected -= rate * (((1 + np.mean(gammas)) * square + ridge) * expected - square * 5 / 3)
        end = part.after.model[:, 0]
        assert abs(end.mean().item() - expected) < 5 * end.std().item() / 10


def test_the_filter_cuts_the_clean_tail_on_which_the_second_term_lives() -> None:
    """Table 1: on clean house prices at θ^PO, u = mean ℓ x (y − f̂ x)/σ² of what Robust Gradient keeps is a fifth short
    of u."""
    draw, theta, gamma = np.random.default_rng(0), 0.584, 1.5
    x = 5 / 3 + draw.standard_normal((200, 500))
    y = (5 / 3 - gamma * theta) * x + 2.0333 * draw.standard_normal(x.shape)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    losses, gradients = 0.5 * (theta * x - y) ** 2, ((theta * x - y) * x)[:, :, None]
    everybody = torch.ones(x.shape, dtype=torch.bool)
    kept = GradientOutlierFilter()(gradients, everybody)
    assert 0.9 < kept.double().mean() < 0.999
    estimator, found = LeastSquaresEstimator(1), []
    for mask in (everybody, kept):
        batch, weight = {"x": x[:, :, None], "y": y}, mask.double()
        f = estimator.estimate_statistic(batch, weight, torch.zeros(200, 1))
        found.append(estimator.score_function_gradient(batch, weight, f, losses).mean().item())
    assert found[1] / found[0] == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(("rare", "far"), [(0.0, 0.0), (0.01, 10.0), (0.002, 40.0)])
def test_the_second_terms_variance_is_that_of_the_features_kurtosis(rare: float, far: float) -> None:
    """Table 2, Credit: for a loss θz with z of variance 1 and kurtosis κ, n Var(û) = θ² (κ − 1), to a fifth."""
    draw, n, theta = np.random.default_rng(0), 2000, 0.5
    z = draw.standard_normal((2000, n)) + far * (draw.random((2000, n)) < rare) * draw.choice([-1.0, 1.0], (2000, n))
    variance, fourth = 1 + rare * far**2, 3 + rare * (6 * far**2 + far**4)
    estimator, x = MeanEstimator("x", 1, known_variance=variance), torch.as_tensor(z)
    batch, weight = {"x": x[:, :, None]}, torch.ones_like(x)
    u = estimator.score_function_gradient(
        batch, weight, estimator.estimate_statistic(batch, weight, torch.zeros(2000, 1)), theta * x
    )
    assert u.mean().item() == pytest.approx(theta, rel=0.05)
    assert n * u.var().item() == pytest.approx(theta**2 * (fourth / variance**2 - 1), rel=0.2)


def test_fedavgs_bias_may_move_pfl_towards_the_optimal_point() -> None:
    """Ours: five clients with γ = 2.25 and p = 0.2, five with 0.75 and 0.8, times a sine; weights by enumeration."""
    square, ridge, a = (5 / 3) ** 2 + 1, 10 / 3, 5 / 3
    weights = np.zeros(2)
    for t in range(20):
        p = np.array([0.2, 0.8]) * (0.3 * math.sin(2 * math.pi * t / 20) + 0.7)
        counts = [[math.comb(5, k) * q**k * (1 - q) ** (5 - k) for k in range(6)] for q in p]
        for i, j in itertools.product(range(6), range(6)):
            if i + j:
                weights += counts[0][i] * counts[1][j] * np.array([i, j]) / (i + j)
    weights /= weights.sum()
    up = np.array([3.25, 1.75])
    stable, there = (a * square / (w @ up * square + ridge) for w in (np.full(2, 0.5), weights))
    optimal = up.mean() * a * square / ((up**2).mean() * square + ridge)
    assert (stable, there, optimal) == pytest.approx((0.493, 0.573, 0.541), abs=0.001)
    assert abs(there - optimal) < abs(stable - optimal)


def test_where_nothing_answers_and_all_samples_are_used_profl_is_pfl() -> None:
    """Fig. 6a: f̂ is the same at every step, so Δf = 0 and L̂₂ = 0, bit for bit."""
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((60, 3))), torch.as_tensor(draw.integers(0, 2, 60))
    data = Dataset("still", x, y, classes=2, loss="logistic", owners=torch.arange(3).repeat_interleave(20))
    ends = []
    for rule in (PFL, functools.partial(ProFL, history=2, robust=False)):
        local = rule(lr=0.3, steps=4, batch_size=None)
        shift = GroupMean((0.0, 0.0), 0.0, references="none")
        run = Simulation(data, Linear, clients=3, local=local, shift=shift, rounds=4, execution=DOUBLE).run()
        ends.append(run.state.model)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
