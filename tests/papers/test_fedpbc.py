"""What FedPBC's claims rest on: where x_PS, the mean of all clients and FedAvg end, and what jitter does to a link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import yaml
from exact_gossip import Exact, exact, exact_of_two_groups, noise_of_fedavg

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Groups, Jitter, Stationary
from fedsim.core import Federation
from fedsim.data.datasets import Quadratics, Synthetic
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import FedAvg, FedPBC, Strategy
from fedsim.studies.reproduce.recipe import recipe_folder

P, U = np.array([0.3, 0.3, 0.8]), np.array([[0.0], [1.0], [2.5]])
ETA, STEPS = 0.3, 2
C = 1 - (1 - ETA) ** STEPS
SEEN = range(8, 18)  # rounds over which models are averaged

PAIRS = {
    "p0 = p1 = 0.1": (0.1, 0.1),
    "p0 = p1 = 0.5": (0.5, 0.5),
    "p0 = 0.1, p1 = 0.5": (0.1, 0.5),
    "p0 = 0.1, p1 = 0.9": (0.1, 0.9),
}
UNEQUAL = ("p0 = 0.1, p1 = 0.5", "p0 = 0.1, p1 = 0.9")
RATE, LOCAL = 0.0003, 30


def three_clients(strategy: Strategy, replicates: int) -> Simulation:
    return Simulation(
        Quadratics(clients=3, points=U[:, 0].tolist()),
        Mean,
        clients=3,
        availability=Bernoulli(Groups(p=P.tolist())),
        strategy=strategy,
        local=SGD(lr=ETA, steps=STEPS, batch_size=None),
        seeds=range(replicates),
        execution=Execution(dtype="float64"),
    )


def averages(strategy: Strategy, play) -> dict[str, tuple[float, float]]:
    """(mean, standard error over independent replicates) of x_PS and of the clients' mean, averaged over SEEN."""
    simulation = three_clients(strategy, 200)
    seen: dict[str, list[np.ndarray]] = {"server": [], "clients": []}
    for played in play(simulation, SEEN.stop):
        if played.t in SEEN:
            seen["server"].append(played.after.model[:, 0].numpy())
            seen["clients"].append(simulation.strategy.client_mean(played.after, simulation.federation)[:, 0].numpy())
    found = {name: np.mean(values, axis=0) for name, values in seen.items()}
    return {name: (a.mean(), a.std(ddof=1) / len(a) ** 0.5) for name, a in found.items()}


def test_three_clients_exactly():
    """The numbers of the page on claims: x_PS 1.646, the mean of all clients 7/6, which is the optimum."""
    found = exact(U, P, C)
    assert found.server()[0] == pytest.approx(1.646, abs=5e-4)
    assert found.clients().mean() == pytest.approx(7 / 6, abs=1e-12)
    assert found.optimum[0] == pytest.approx(7 / 6, abs=1e-12)
    assert found.fedavg()[0] == pytest.approx(1.795, abs=5e-4)
    *_, (last, server) = found.rounds(200)
    np.testing.assert_allclose(last, found.clients(), atol=1e-12)
    np.testing.assert_allclose(server, found.server(), atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compute", ["all", "active"])
def test_fedpbcs_server_ends_where_the_formula_says(compute, play):
    """E x_PS = Σ_A P(A | A ≠ ∅) mean_A((1−c)z + cu), z = (I − (1−c)EW)⁻¹ c EW u; which is not the optimum."""
    found, seen = exact(U, P, C), averages(FedPBC(compute=compute), play)
    expected = [pair for t, pair in enumerate(found.rounds(SEEN.stop, compute)) if t in SEEN]
    server, error = seen["server"]
    assert error < 0.025
    assert abs(server - np.mean([x for _, x in expected])) < 5 * error
    assert abs(found.server(compute) - found.optimum)[0] > 15 * error
    clients, error = seen["clients"]
    assert abs(clients - np.mean([z.mean() for z, _ in expected])) < 5 * error + 1e-12
    assert (abs(found.clients(compute).mean() - found.optimum[0]) < 1e-12) == (compute == "all")


def test_fedavg_ends_where_proposition_1_says(play):
    """lim = Σ_i p_i u_i [1 + Σ_{j≥2} (−1)^{j+1}/j Σ_{S ∌ i, |S| = j−1} Π_{z∈S} p_z] / (1 − Π(1 − p_i)), written out."""
    (p, q, r), total = P, 0.0
    for own, u, (a, b) in ((p, U[0, 0], (q, r)), (q, U[1, 0], (p, r)), (r, U[2, 0], (p, q))):
        total += own * u * (1 - (a + b) / 2 + a * b / 3)
    limit = total / (1 - (1 - p) * (1 - q) * (1 - r))
    assert exact(U, P, C).fedavg()[0] == pytest.approx(limit, abs=1e-12)
    kept = [(1 - C) ** (t + 1) for t in SEEN]  # of the zero it began with, but for rounds in which nobody was linked
    server, error = averages(FedAvg(), play)["server"]
    assert error < 0.025
    assert abs(server - limit) < 5 * error + limit * np.mean(kept)


def test_the_mean_of_all_clients_is_gradient_descent_whoever_is_linked(play):
    """W is doubly stochastic in every round, not only in expectation: x̄^t = (1 − (1−c)^t) x* without any noise."""
    simulation = three_clients(FedPBC(), 20)
    for played in play(simulation, 25):
        mean = simulation.strategy.client_mean(played.after, simulation.federation)
        expected = (1 - (1 - C) ** (played.t + 1)) * U.mean()
        np.testing.assert_allclose(mean, np.full_like(mean, expected), atol=1e-12)


def test_x_ps_goes_from_the_optimum_to_fedavgs_limit_as_the_steps_grow():
    """Its distance to the optimum is 0 for c → 0, in proportion to c, grows with c, and is FedAvg's at c = 1, where
    nothing of what clients had heard from one another is left; FedAvg's does not depend on c."""
    distance = {c: np.linalg.norm(at(c).server() - at(c).optimum) for c in (1e-6, 1e-5, 0.01, 0.1, 0.5, 1.0)}
    assert list(distance.values()) == sorted(distance.values())
    assert distance[1e-5] / distance[1e-6] == pytest.approx(10, rel=1e-3)
    assert distance[1.0] == pytest.approx(np.linalg.norm(at(1.0).fedavg() - at(1.0).optimum), abs=1e-12)
    np.testing.assert_allclose(at(0.5).fedavg(), at(0.01).fedavg(), atol=1e-12)
    shares = [np.linalg.norm(at(c).server() - at(c).optimum) / distance[1.0] for c in map(in_25_steps, RATES)]
    assert shares == pytest.approx([0.22, 0.60, 0.76, 0.97], abs=0.005)


RATES = (0.001, 0.005, 0.01, 0.05)


def in_25_steps(rate: float) -> float:
    """c of Fig. 3's local work, on losses of curvature one."""
    return 1 - (1 - rate) ** 25


def at(c: float) -> Exact:
    """30 clients as in Fig. 3, linked with 0.05 and 0.9, with quadratic losses."""
    u = np.arange(30.0)[:, None]
    return exact_of_two_groups(u, (15, 15), (0.05, 0.9), c)


def test_pooled_samples_may_weigh_clients_as_fedavg_does():
    """In draws 1 and 3 of Fig. 3 the weight of the often linked clients among all samples is nearer to that in FedAvg's
    limit, Σ P(A) 1{i ∈ A}/|A|, than to the half that they have in the objective; in draw 2 it is not."""
    fedavg = at(0.01).average[15:].sum()
    assert fedavg == pytest.approx(0.95, abs=0.005)
    shares = []
    for seed in range(3):
        test_owners = Synthetic(30, max_samples=None, test_fraction=0.1, seed=seed).test_owners
        assert test_owners is not None
        shares.append(float((test_owners >= 15).float().mean()))
    assert [abs(share - fedavg) < abs(share - 0.5) for share in shares] == [True, False, True]
    assert shares == pytest.approx([0.80, 0.41, 0.85], abs=0.01)


def test_few_held_out_samples_decide_the_accuracy_by_client():
    """Half of the clients hold out 11 samples or fewer: one of these is 0.3 points or more of the mean over clients."""
    for seed in range(3):
        test_owners = Synthetic(30, max_samples=None, test_fraction=0.1, seed=seed).test_owners
        assert test_owners is not None
        half = np.sort(np.bincount(test_owners, minlength=30))[:15]
        assert half.max() <= 11
        assert (100 / 30 / half).min() >= 0.3


def test_groups_are_counted_as_sets_are():
    u = np.random.default_rng(0).normal(size=(6, 2))
    sets, groups = exact(u, np.repeat([0.3, 0.8], (4, 2)), 0.2), exact_of_two_groups(u, (4, 2), (0.3, 0.8), 0.2)
    np.testing.assert_allclose(groups.pairs, sets.pairs, atol=1e-14)
    np.testing.assert_allclose(groups.average, sets.average, atol=1e-14)
    for compute in ("all", "active"):
        np.testing.assert_allclose(groups.server(compute), sets.server(compute), atol=1e-14)


def of_the_paper(links: str) -> Exact:
    """Fig. 2's clients."""
    u = Quadratics(100).train_x.numpy()
    return exact_of_two_groups(u, (50, 50), PAIRS[links], 1 - (1 - RATE) ** LOCAL)


def away(model: np.ndarray, found: Exact) -> float:
    return float(np.linalg.norm(model - found.optimum))


def test_thirty_steps_at_the_papers_rate_are_one_at_the_recipes(play):
    """With all data in every batch ½‖x − u‖² makes s steps at η one at 1 − (1−η)^s, under any strategy."""
    for name in ("fig2a", "fig2b"):
        base = content_of(name)["base"]
        assert "local_steps=1" in base
        assert f"lr={1 - (1 - RATE) ** LOCAL!r}" in base
    ends = []
    for lr, steps in ((RATE, LOCAL), (1 - (1 - RATE) ** LOCAL, 1)):
        simulation = Simulation(
            Quadratics(clients=6, dimension=3),
            Mean,
            clients=6,
            availability=Bernoulli(Groups(0.1, 0.9)),
            strategy=FedPBC(),
            local=SGD(lr=lr, steps=steps, batch_size=None),
            execution=Execution(dtype="float64"),
        )
        *_, last = play(simulation, 12)
        ends.append(last.after.models)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-14)
    assert ends[0].abs().max() > 1e-3


def test_the_thresholds_of_fig_2a_are_the_formulas():
    """By Jensen E‖x − x*‖ lies between ‖E x − x*‖ and √(‖E x − x*‖² + tr Var x)."""
    c, start = 1 - (1 - RATE) ** LOCAL, np.linalg.norm(of_the_paper(UNEQUAL[0]).optimum)
    (biased,) = compared("fig2a", "below", algorithm="FedPBC", links=["p0 = 0.1, p1 = 0.9"])
    assert biased["statement"] == "fig2a-unbiased"
    assert biased["than"] == pytest.approx(away(of_the_paper(UNEQUAL[1]).server(), of_the_paper(UNEQUAL[1])), rel=1e-4)
    for links in UNEQUAL:
        expected = of_the_paper(links)
        (limit,) = compared("fig2a", "near", algorithm="FedAvg", links=[links])
        least = away(expected.fedavg(), expected)
        most = float(np.hypot(least, noise_of_fedavg(expected.u, (50, 50), PAIRS[links], c)))
        assert limit["than"] == pytest.approx((least + most) / 2, abs=1e-6)
        assert most - least < limit["within"] < 0.011 * least
        assert least > 3 * 0.0523
    for links in set(PAIRS) - set(UNEQUAL):
        expected = of_the_paper(links)
        (noise,) = compared("fig2a", "near", algorithm="FedAvg", links=[links])
        assert away(expected.fedavg(), expected) < 1e-12
        assert away(expected.server(), expected) < 1e-12
        assert noise["than"] == pytest.approx(noise_of_fedavg(expected.u, (50, 50), PAIRS[links], c), rel=1e-4)
    assert start / 10 == pytest.approx(0.0523, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("links", UNEQUAL)
def test_the_thresholds_of_fig_2b_are_the_formulas(links):
    """Where only the linked compute, both models are still on their way after 4000 rounds: the exact means of rounds
    3510 to 4000, and the least distance among them."""
    found, least = of_the_paper(links), {"server": np.inf, "clients": np.inf}
    for t, (clients, server) in enumerate(found.rounds(4000, "active"), 1):
        if t > 3500:
            least["server"] = min(least["server"], away(server, found))
            least["clients"] = min(least["clients"], away(clients.mean(0), found))
    near = compared("fig2b", "near", algorithm="FedPBC, only the linked compute", links=[links])
    thresholds = {"clients" if "mean" in each["measure"] else "server": each["than"] for each in near}
    assert thresholds == pytest.approx(least, rel=1e-4)
    assert least["clients"] > 0.99 * away(found.fedavg(), found)


def test_theorem_1s_rates_are_those_of_its_recipe():
    """η = c0 √(m / (s T)) is 0.0003 for T = 4,000, and s steps at it are one at 1 − (1 − η)^s."""
    for label, overrides in content_of("theorem1")["axes"]["T"].items():
        rounds = int(label.removeprefix("T = "))
        rate = RATE * (4000 / rounds) ** 0.5
        assert overrides == [f"rounds={rounds}", f"lr={1 - (1 - rate) ** LOCAL!r}"]


@pytest.mark.parametrize("links", PAIRS)
def test_lemma_1_holds_for_the_links_of_fig_2(links):
    """ρ, the second eigenvalue of E W² = EW, is at most 1 − c⁴ (1 − (1 − c)^m)² / 8, and the entries of E W² are, as in
    the proof, at least c² (1 − (1 − c)^m) / m."""
    least, clients = min(PAIRS[links]), 100
    mixing = of_the_paper(links).mixing
    assert mixing.min() >= least**2 * (1 - (1 - least) ** clients) / clients
    rho = float(np.linalg.eigvalsh(mixing)[-2])
    assert 0 < rho <= 1 - least**4 * (1 - (1 - least) ** clients) ** 2 / 8


def content_of(recipe: str) -> dict[str, Any]:
    """A recipe's content as it stands in its file."""
    return dict(yaml.safe_load((recipe_folder() / f"fedpbc/{recipe}.yaml").read_text(encoding="utf-8")))


def compared(recipe: str, relation: str, algorithm: str, links: list[str]) -> list[dict[str, Any]]:
    """Its comparisons of this algorithm with a number at these links."""
    return [
        each
        for each in content_of(recipe)["comparisons"]
        if each["is"] == relation
        and each["of"] == {"algorithm": algorithm}
        and each.get("where", {}).get("links") == links
        and isinstance(each.get("than"), float)
    ]


@pytest.mark.parametrize("links", PAIRS)
def test_theorem_1_asks_for_smaller_rates_than_the_paper_takes(links):
    """It needs η ≤ 1/(ρ s³) and η ≤ (1−√ρ)/(6√(2ρ) L s²), ρ the second eigenvalue of E W² = E W: W is a projection."""
    rho = float(np.linalg.eigvalsh(of_the_paper(links).mixing)[-2])
    assert 4 / (rho * LOCAL**3) < RATE
    assert 5 * (1 - rho**0.5) / (6 * (2 * rho) ** 0.5 * LOCAL**2) < RATE


def test_a_link_with_jitter_is_a_link_without():
    """P(on) = E[p + X] = p and rounds and clients stay independent: Fig. 3b's law of the links is Fig. 3a's."""
    federation = Federation((0, 1), 1000, np.zeros(2000, dtype=np.int64))
    for trajectory in (Stationary(), Jitter(0.02)):
        process = Bernoulli(Groups(0.05, 0.9), trajectory)
        process.bind(federation)
        links = np.stack([process.counts(t) for t in range(200)]).reshape(200, 2, 2, 500)  # [T, R, group, clients]
        for group, p in enumerate((0.05, 0.9)):
            on = links[:, :, group].astype(float)
            assert abs(on.mean() - p) < 5 * (p * (1 - p) / on.size) ** 0.5
            for pair in ((on[1:], on[:-1]), (on[..., 1:], on[..., :-1])):
                together = np.mean((pair[0] - p) * (pair[1] - p)) / (p * (1 - p))
                assert abs(together) < 5 / pair[0].size ** 0.5
