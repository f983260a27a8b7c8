"""Noise client by client and node by node, in NumPy; how much of it the model has; ε of a run of secret coins."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from rows import COUNTS, FEDERATION, SEEDS, D, M, arrived, drawn, sent

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Full, Uniform
from fedsim.core import rng
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvgAll
from fedsim.uplink import Clip, GaussianNoise, Stage, TreeNoise, Uplink

QUIET = Tracking(progress="none", tensorboard=False)


def node(seed: int, *numbers: int) -> np.ndarray:
    """[d] a node of the tree of a seed: at its level and place."""
    key = rng.row_keys(torch.tensor([seed]), rng.Purpose.UPLINK, torch.tensor([-1]), -1, 0)
    for number in numbers:
        key = rng.fold_in(key, torch.tensor([number]))
    return rng.normal(key[:, None], torch.arange(D), torch.float64)[0].numpy()


def in_all(seed: int, k: int) -> np.ndarray:
    """[d] what the tree has added after k rounds that were not empty: a node for every one-bit of k."""
    found = np.zeros(D)
    for level in range(k.bit_length()):
        if k >> level & 1:  # the last whole node of 2^level rounds
            found = found + node(seed, level, k >> level)
    return found


def cut(row: np.ndarray, norm: float) -> np.ndarray:
    return row * min(1.0, norm / math.sqrt(sum(row**2)))


def test_a_rounds_rows_share_what_the_tree_adds_in_it() -> None:
    """Five rounds of unequal cohorts: an empty round adds nothing, replicate by replicate, and is not counted."""
    rounds = [0] * len(SEEDS)
    for t, found in enumerate(arrived(Uplink(TreeNoise(5.0, 0.7)))):
        for r, seed in enumerate(SEEDS):
            mine = [v for v in found if v // M == r]
            before, rounds[r] = rounds[r], rounds[r] + bool(mine)
            new = 0.7 * 5.0 * (in_all(seed, rounds[r]) - in_all(seed, before))
            for v in mine:
                np.testing.assert_allclose(found[v], cut(sent(t)[v], 5.0) + new / len(mine), atol=1e-10)
    assert rounds == [4, 3]


def test_noise_follows_the_norm_that_follows_a_noisy_count() -> None:
    """Clip by C, noise of z_Δ C in the sum, and C by the count of rows within it plus σ_b of its own."""
    chain = Uplink(GaussianNoise(6.0, quantile=0.4, rate=0.3, count_noise=1.5, multiplier=0.7))
    chain.setup(FEDERATION, Bernoulli(Uniform(0.5)).bind(FEDERATION))
    norm, z = [6.0] * len(SEEDS), (0.7**-2 - 3.0**-2) ** -0.5
    for t, found in enumerate(arrived(chain, COUNTS)):
        for r, seed in enumerate(SEEDS):
            mine, now = [v for v in found if v // M == r], norm[r]
            for v in mine:
                noise = rng.normal(drawn(v, t), torch.arange(D), torch.float64)[0].numpy()
                wanted = cut(sent(t)[v], now) + z * now / math.sqrt(len(mine)) * noise
                np.testing.assert_allclose(found[v], wanted, atol=1e-10)
            if mine:
                key = rng.row_keys(torch.tensor([seed]), rng.Purpose.UPLINK, torch.tensor([-1]), t, 0)
                counted = 1.5 * rng.normal(key, torch.zeros(1, dtype=torch.int64), torch.float64).item()
                counted += sum(np.linalg.norm(sent(t)[v]) <= now for v in mine)
                norm[r] = now * math.exp(-0.3 * (counted / 2 - 0.4))
    assert norm[0] != norm[1] != 6.0


def simulation(stage: Stage, availability=None, rounds: int = 1, dimension: int = 3000, clients: int = 10):
    return Simulation(
        Quadratics(clients=clients, dimension=dimension), Mean, clients=clients, availability=availability or Full(),
        rounds=rounds, strategy=FedAvgAll(0.5), local=SGD(lr=0.1, steps=1), uplink=Uplink(stage), seeds=(1, 2),
        execution=Execution(dtype="float64"),
    )  # fmt: skip


@pytest.mark.parametrize(("per", "rows"), [("round", 1), ("client", 10)])
def test_the_model_has_noise_of_the_servers_rate_times_z_c_over_all_clients(per, rows) -> None:
    """η_g z C / m in every column, √n times that where each of n rows has its own; five standard errors."""
    noisy, plain = (simulation(s).run().state.model for s in (GaussianNoise(2.0, multiplier=1.5, per=per), Clip(2.0)))
    wanted = 0.5 * 1.5 * 2.0 / 10 * math.sqrt(rows)
    for one in noisy - plain:
        assert abs(one.square().mean().item() / wanted**2 - 1) < 5 * math.sqrt(2 / len(one))
    assert abs(torch.corrcoef(noisy - plain)[0, 1]) < 5 / math.sqrt(3000)


def test_no_noise_and_no_bound_are_a_sum_over_all_clients(play) -> None:
    """z → 0 and C = ∞: x − (η_g / m) Σ_{i∈A} G_i, divided by all and not by those who came."""
    made = simulation(GaussianNoise(1e6, multiplier=1e-300), Bernoulli(Uniform(0.5)), 3, 5)
    bare = simulation(Clip(1e6), Bernoulli(Uniform(0.5)), 3, 5)
    for one, other in zip(play(made), play(bare), strict=True):
        torch.testing.assert_close(one.after.model, other.after.model, rtol=0, atol=1e-14)
        wanted = one.before.model - 0.5 / 10 * one.report.cohort.sum(one.report.innovation)
        torch.testing.assert_close(one.after.model, wanted, rtol=0, atol=1e-14)


def renyi(q: float, z: float, order: int) -> float:
    """Of one round of Poisson sampling at a whole order (Mironov, Talwar and Zhang 2019, §3.3)."""
    terms = [
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * z * z)
        for k in range(order + 1)
    ]  # fmt: skip
    most = max(terms)
    return (most + math.log(sum(math.exp(term - most) for term in terms))) / (order - 1)


@pytest.mark.slow
def test_epsilon_of_a_run_of_secret_coins_is_the_accountants(tmp_path) -> None:
    """A run's summary says what the library says of 4 rounds of its coins; that is no more than the plain bound over
    whole orders, 4 ε_α + log(1/δ)/(α − 1), of which it is the sharper form."""
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    z, q, rounds, delta = 3.0, 0.3, 4, 1e-5
    simulation(GaussianNoise(multiplier=z), Bernoulli(Uniform(q)), rounds, 5, 200).run(tmp_path, tracking=QUIET)
    said = json.loads((tmp_path / "summary.json").read_text())["privacy"]
    accountant = rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), rounds)
    assert said["epsilon"] == pytest.approx(accountant.get_epsilon(delta), rel=1e-12)
    assert said["delta"] == pytest.approx(delta)
    bound = min(rounds * renyi(q, z, order) + math.log(1 / delta) / (order - 1) for order in range(2, 64))
    assert 0.5 * bound < said["epsilon"] <= bound
