"""Clipping and noise: formulas, variances, and what privacy may be claimed of a run."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch
from rows import COUNTS, FEDERATION, SEEDS, D, M, arrived, drawn, sent, through

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, ClassCorrelated, Cyclic, Full, Groups, Multiset, Uniform, UniformK
from fedsim.core import ConfigError, Federation, Memory, rng
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import MIFA, FedAvg, FedAvgAll, FedNova, MimeLite, Oort, PowerOfChoice, Scaffold
from fedsim.uplink import QSGD, Clip, GaussianNoise, Stage, TopK, TreeNoise, Uplink, accounting


def bound_to(stage: Stage, p: float = 0.5, federation: Federation = FEDERATION) -> Uplink:
    """A chain that knows its clients, of whom p are expected."""
    chain = Uplink(stage)
    chain.setup(federation, Bernoulli(Uniform(p)).bind(federation))
    return chain


def clipped(row: np.ndarray, norm: float) -> np.ndarray:
    length = math.sqrt(sum(row**2))
    return row * min(1.0, norm / length)


def test_rows_are_no_longer_than_the_norm():
    for t, found in enumerate(arrived(bound_to(Clip(9.0)))):
        for v, row in found.items():
            np.testing.assert_allclose(row, clipped(sent(t)[v], 9.0), atol=1e-12)
    assert arrived(bound_to(Clip(1e9)))[0][0].tolist() == sent(0)[0].tolist()


def test_the_norm_follows_the_quantile_of_those_that_are_expected():
    """C ← C exp(−η (b̃ − γ)), b̃ of the expected two clients; an empty round leaves it, replicate by replicate."""
    norm = [4.0] * len(SEEDS)
    for t, found in enumerate(arrived(bound_to(Clip(4.0, quantile=0.4, rate=0.3)))):
        now = list(norm)
        for r in range(len(SEEDS)):
            mine = [v for v in found if v // M == r]
            for v in mine:
                np.testing.assert_allclose(found[v], clipped(sent(t)[v], now[r]), atol=1e-10)
            if mine:
                within = sum(np.linalg.norm(sent(t)[v]) <= now[r] for v in mine)
                norm[r] = now[r] * math.exp(-0.3 * (within / 2 - 0.4))
    assert norm[0] != norm[1] != 4.0


@pytest.mark.parametrize("per", ["round", "client"])
def test_noise_is_that_of_each_client_and_round(per):
    """z C per row, or its part of z C in the sum; a client drawn twice brings its part twice."""
    counts = COUNTS * np.array([2, 1, 1, 3])
    for t, found in enumerate(arrived(bound_to(GaussianNoise(5.0, multiplier=0.7, per=per)), counts)):
        for v, row in found.items():
            noise = rng.normal(drawn(v, t), torch.arange(D), torch.float64)[0].numpy()
            share = (
                1.0
                if per == "client"
                else 1 / math.sqrt(sum(counts[t].reshape(-1)[u] ** 2 for u in found if u // M == v // M))
            )
            np.testing.assert_allclose(row, clipped(sent(t)[v], 5.0) + 0.7 * 5.0 * share * noise, atol=1e-10)


@pytest.mark.parametrize("n", [1, 3, 40])
def test_the_sum_of_a_round_has_the_same_noise_however_many_come(n):
    """Its variance is (z C)² within five standard errors, over 4000 columns."""
    d, federation = 4000, Federation((1,), 40, np.ones(40), dtype=torch.float64)
    cohort = federation.make_cohort((np.arange(40) < n)[None] * 1, np.ones((1, 40)))
    got = through(
        bound_to(GaussianNoise(2.0, multiplier=1.5), 0.5, federation), torch.zeros(n, d).double(), cohort, Memory()
    )
    assert abs(got.sum(0).square().mean() / 9.0 - 1) < 5 * math.sqrt(2 / d)


def test_the_noise_of_a_count_is_made_up_for_in_the_rows():
    assert GaussianNoise(quantile=0.5, count_noise=10.0).of_rows == pytest.approx(1.0012523, abs=1e-7)
    assert GaussianNoise(quantile=0.5).of_rows == GaussianNoise(count_noise=10.0).of_rows == 1.0
    with pytest.raises(ConfigError, match=r"count_noise=0\.4 leaves nothing of .*it must be above 0\.5"):
        GaussianNoise(quantile=0.5, count_noise=0.4)


def test_the_trees_noise_in_all_that_arrived_is_that_of_few_nodes():
    """After k rounds with somebody the sum has as many nodes as k has one-bits, each of variance (z C)²."""
    d, federation = 3000, Federation((1, 2), 2, np.ones(4), dtype=torch.float64)
    chain, memory, total = bound_to(TreeNoise(1.0, 2.0), 0.5, federation), Memory(), torch.zeros(2, d).double()
    chain.add_stage_memory(memory, federation, total)
    after = [0, 0]
    for t in range(7):
        counts = np.array([[1, t % 2], [int(t != 3), 1 - t % 2 if t != 3 else 0]])
        cohort = federation.make_cohort(counts, np.ones((2, 2)), t)
        total = total + cohort.sum(through(chain, torch.zeros(len(cohort), d).double(), cohort, memory))
        after = [k + int(own.any()) for k, own in zip(after, counts, strict=True)]
        for r, k in enumerate(after):
            nodes = bin(k).count("1")
            assert abs(total[r].square().mean() / (4.0 * nodes) - 1) < 5 * math.sqrt(2 / d), (t, r)
    assert after == [7, 6]
    assert abs((total[0] * total[1]).mean()) < 5 * 4 * math.sqrt(6 / d)


def test_bytes_of_noisy_rows():
    assert Uplink(TopK(k=10), GaussianNoise()).code(1000, 4).bytes == 80  # the server adds it
    assert Uplink(TopK(k=10), GaussianNoise(per="client")).code(1000, 4).bytes == 4000
    assert Uplink(Clip(), QSGD(1), TreeNoise()).code(1000, 4).bytes == 254


def simulation(stage: Stage, availability=None, strategy=None, local=None, rounds: int = 3, **options) -> Simulation:
    return Simulation(
        Quadratics(clients=10), Mean, clients=10, availability=availability or Full(), rounds=rounds,
        strategy=strategy or FedAvg(), local=local or SGD(lr=0.1, steps=1), uplink=Uplink(stage),
        execution=Execution(dtype="float64"), **options,
    )  # fmt: skip


def test_noise_on_the_model_is_what_it_says_it_is():
    """η_g z C / n in every column; replicates alone as together."""
    plain = simulation(Clip(1e9), seeds=(1, 2)).run().state.model
    noisy = simulation(GaussianNoise(1e9, multiplier=1e-10), seeds=(1, 2)).run().state.model
    assert 1e-4 < (noisy - plain).abs().max() < 0.3
    alone = simulation(GaussianNoise(1e9, multiplier=1e-10), seeds=(2,)).run().state.model
    torch.testing.assert_close(alone[0], noisy[1], rtol=0, atol=1e-12)


SUM = FedAvgAll()
CLAIMS = {  # availability, strategy, options of the stage: the sampling, the multiplier
    "secret coins": (Bernoulli(Uniform(0.3)), SUM, {}, "poisson", 2.0),
    "coins of several kinds": (Bernoulli(Groups(0.2, 0.7)), SUM, {}, "poisson", 2.0),
    "coins, but divided by those who came": (Bernoulli(Uniform(0.3)), FedAvg(), {}, "known", 2.0),
    "coins that follow the data": (Bernoulli(Uniform(0.3)), SUM, {}, "poisson", 2.0),
    "k of m": (UniformK(4), FedAvg(), {}, "without_replacement", 1.0),
    "everybody": (Full(), FedAvg(), {}, "known", 2.0),
    "in turn": (Cyclic(2), FedAvg(), {}, "known", 2.0),
    "rows by themselves": (Bernoulli(Uniform(0.3)), MIFA(), {"per": "client"}, "known", 1.0),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_mechanism_is_that_of_the_sampling(name, monkeypatch):
    availability, strategy, options, sampling, z = CLAIMS[name]
    met = []
    monkeypatch.setattr(accounting, "epsilon_of", lambda *arguments: met.append(arguments) or 1.5)
    made = simulation(GaussianNoise(multiplier=2.0, **options), availability, strategy)
    if name == "coins that follow the data":
        monkeypatch.setattr(made.availability, "base", ClassCorrelated())
        sampling = "known"
    said = made.privacy(100)
    ((about, delta, rounds),) = met
    assert (about.sampling, about.sum_multiplier, delta, rounds) == (sampling, z, 1e-5, 100)
    assert (about.relation == accounting.NEIGHBOURS_REPLACE_ONE) == (
        sampling == "without_replacement" or "per" in options
    )
    if sampling == "without_replacement":
        assert (about.clients, about.num_drawn) == (10, 4)
    if sampling == "poisson":  # of an empty round, with one client less, a hundred times
        q, least = (0.3, 0.7**9) if name == "secret coins" else (0.7, 0.8**5 * 0.3**4)
        assert about.q == q
        whole = 1e-5 + (1 + math.exp(1.5)) * 100 * least
        assert said.delta == pytest.approx(whole) if whole < 1 else said.epsilon is None
    else:
        assert (said.epsilon, said.delta) == (1.5, 1e-5)
        assert said.statement.startswith("ε = 1.5 at δ = 1e-05 after 100 rounds (RDP): ")
    assert made.privacy(0) is None


@pytest.mark.parametrize(
    ("stage", "options", "why"),
    [
        (GaussianNoise(), {"strategy": MIFA()}, "only the sum has the noise; set per=client"),
        (GaussianNoise(), {"strategy": FedAvg(weighting="data")}, "more of the rows than their sum"),
        (GaussianNoise(), {"strategy": FedNova()}, "more of the rows than their sum"),
        (GaussianNoise(), {"strategy": Scaffold()}, "further vectors go up without noise"),
        (GaussianNoise(), {"strategy": MimeLite()}, "asks clients for losses and gradients"),
        (GaussianNoise(), {"strategy": Oort(2)}, "losses go up as they are"),
        (GaussianNoise(), {"strategy": PowerOfChoice(1, 2, "last")}, "losses go up as they are"),
        (GaussianNoise(), {"availability": Multiset(3)}, "a client that is drawn twice in a round counts twice"),
        (GaussianNoise(quantile=0.5), {}, "the clipping norm adapts to counts that have no noise"),
        (TreeNoise(), {}, "a bound on how often a client participates"),
    ],
)
def test_where_nothing_can_be_claimed_it_says_why(stage, options, why):
    said = simulation(stage, **options).privacy(10)
    assert said.epsilon is None
    assert said.statement.startswith("no ε is claimed: ")
    assert why in said.statement


def test_without_noise_nothing_is_said_and_without_the_library_how_to_get_it(monkeypatch):
    assert simulation(Clip()).privacy(10) is None
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert (
        simulation(GaussianNoise()).privacy(10).statement.startswith("ε is not computed without dp-accounting: install")
    )


def test_the_summary_of_a_run_says_epsilon_and_its_relation(tmp_path):
    simulation(GaussianNoise(multiplier=20.0), rounds=4).run(tmp_path)
    said = json.loads((tmp_path / "summary.json").read_text())["privacy"]
    assert 0 < said["epsilon"] < 1
    assert (said["relation"], said["sampling"]) == ("one client's rows replaced by zeros", "known")
