"""Who lies, and what: formulas, bounds, and that it follows neither availability nor company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core import ConfigError, rng
from fedsim.local import SGD
from fedsim.strategies import FedAvg, Median
from fedsim.uplink import TopK, Uplink
from fedsim.uplink.attack import ALIE, IPM, Attack, MinMax, MinSum, NoAttack, Noise, SignFlip

M, SEEDS, BAD = 5, (2, 9), [1, 3]
COUNTS = np.array([[list(map(int, word)) for word in one.split()] for one in
                   ("11111 01010 11101 00000 01101", "10110 10100 00000 00000 11111")]).swapaxes(0, 1)  # fmt: skip


@pytest.fixture(name="run")
def run_fixture(Scripted, Regression, regression_of):
    def build(attack: Attack | None, seeds=SEEDS, **options) -> Simulation:
        own = COUNTS[:, [SEEDS.index(s) for s in seeds]]
        given = {
            "strategy": FedAvg(),
            "execution": Execution(dtype="float64", executor="loop"),
            "seeds": seeds,
            "rounds": len(own),
        }
        return Simulation(
            regression_of((5, 2, 9, 1, 4)), Regression, clients=M, availability=Scripted(own),
            local=SGD(lr=0.05, steps=2, batch_size=None), attack=attack, **given | options,
        )  # fmt: skip

    return build


def crafted(kind: str, honest: np.ndarray, n: int) -> np.ndarray:
    mean = sum(honest) / len(honest)
    if kind == "alie":
        spread = np.sqrt(sum((honest - mean) ** 2) / (len(honest) - 1)) if len(honest) > 1 else 0 * mean
        return mean - 1.5 * spread
    if kind == "ipm":
        return -0.5 * mean
    along = -mean / np.sqrt(sum(mean**2))
    together, power = (max, 1) if kind == "min_max" else (sum, 2)

    def apart(row):
        return together(np.sqrt(sum((row - other) ** 2)) ** power for other in honest)

    most, gamma, step = max(map(apart, honest)), 0.0, 10.0
    while step > 1e-5:  # as the authors' program does
        gamma, step = (gamma + step if apart(mean + (gamma + step) * along) <= most else gamma), step / 2
    return mean + gamma * along


KINDS = {
    "sign_flip": lambda **who: SignFlip(2.0, **who),
    "noise": lambda **who: Noise(3.0, **who),
    "alie": lambda **who: ALIE(1.5, **who),
    "ipm": lambda **who: IPM(0.5, **who),
    "min_max": lambda **who: MinMax(**who),
    "min_sum": lambda **who: MinSum(**who),
}


@pytest.mark.parametrize("kind", KINDS)
def test_liars_send_what_the_formula_says_and_the_others_their_rows(kind, run, play):
    """Five rounds of unequal cohorts: one has nobody honest, in one nobody of a replicate lies, one is empty."""
    simulation = run(KINDS[kind](clients=BAD))
    for played in play(simulation):
        report, honest = played.report, played.report.start - played.report.carry["params"]
        assert torch.allclose(honest, report.innovation, atol=1e-12)  # `end` is what arrives
        who = report.cohort.virtual_client_index.numpy()
        true = simulation.trainer.run(report.start, report.cohort, played.t, played.before.model).innovation.numpy()
        for r in range(len(SEEDS)):
            mine = who // M == r
            lying = mine & np.isin(who % M, BAD)
            np.testing.assert_allclose(report.innovation.numpy()[mine & ~lying], true[mine & ~lying], atol=1e-14)
            sent, own, good = report.innovation.numpy()[lying], true[lying], true[mine & ~lying]
            if kind == "sign_flip":
                np.testing.assert_allclose(sent, -2 * own, atol=1e-12)
            elif kind == "noise":
                for row, v in zip(sent, who[lying], strict=True):
                    key = rng.row_keys(torch.tensor([SEEDS[r]]), rng.Purpose.UPLINK, torch.tensor([v % M]), played.t, 0)
                    noise = rng.normal(key[:, None], torch.arange(len(row)), torch.float64)[0]
                    np.testing.assert_allclose(row, 3 * noise, atol=1e-12)
            elif not len(good):
                np.testing.assert_allclose(sent, own, atol=1e-14)
            elif len(sent):
                wanted = crafted(kind, good, mine.sum())
                np.testing.assert_allclose(sent, np.tile(wanted, (len(sent), 1)), atol=1e-10)


@pytest.mark.parametrize(
    ("n", "f", "z"), [(25, 5, 0.2533), (50, 10, 0.2533), (20, 4, 0.1573), (60, 12, 0.2641), (10, 6, 0.0), (2, 1, 0.0)]
)
def test_how_much_is_a_little(n, f, z):
    assert ALIE.paper_z(n, f) == pytest.approx(z, abs=5e-5)


def test_under_the_mean_ipm_leaves_what_it_promises(run):
    """((n − f) − ε f) / n of the honest mean; attacks begin when they should."""
    honest = np.random.default_rng(0).standard_normal((5, 3))
    lie = IPM(0.5).attack_vector(torch.as_tensor(honest), 7).numpy()
    np.testing.assert_allclose((honest.sum(0) + 2 * lie) / 7, (5 - 0.5 * 2) / 7 * honest.mean(0))
    late = run(SignFlip(clients=BAD, since=len(COUNTS))).run().state.model
    assert torch.equal(late, run(None).run().state.model)
    assert torch.equal(late, run(NoAttack()).run().state.model)


def test_without_an_attack_no_client_is_byzantine():
    assert len(NoAttack().byzantine_clients(seed=3, clients=8)) == 0


@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
def test_min_max_is_no_farther_than_the_honest_are_from_one_another(direction):
    rows = torch.as_tensor(np.random.default_rng(1).standard_normal((6, 4)))
    far = (MinMax(direction).attack_vector(rows, 8) - rows).norm(dim=1).max()
    most = torch.cdist(rows, rows).max()
    assert most - 1e-3 < far <= most + 1e-9


@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
@pytest.mark.parametrize("attack", [MinMax, MinSum])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 50.0, 1e6])
def test_a_lie_follows_the_scale_of_the_rows(attack, direction, scale):
    rows = torch.as_tensor(np.random.default_rng(1).standard_normal((6, 4)) + 0.3)
    one, other = (attack(direction).attack_vector(of, 8) for of in (rows, scale * rows))
    torch.testing.assert_close(other / scale - rows.mean(0), one - rows.mean(0), rtol=1e-3, atol=1e-4)


def test_min_sum_is_no_farther_in_sum_than_one_of_them_and_no_farther_than_min_max():
    rows = torch.as_tensor(np.random.default_rng(1).standard_normal((6, 4)))
    sums = torch.cdist(rows, rows).square().sum(1)
    lie = MinSum().attack_vector(rows, 8)
    assert sums.max() - 1e-2 < (lie - rows).square().sum() <= sums.max() + 1e-9
    centre = rows.mean(0)
    assert (lie - centre).norm() < (MinMax().attack_vector(rows, 8) - centre).norm()


def test_who_lies_is_the_seeds_and_no_wild_row_moves_a_median(run):
    attack = Noise(1e6, fraction=0.4)
    one, other = attack.byzantine_clients(2, 100), attack.byzantine_clients(9, 100)
    assert len(one) == len(set(one)) == len(other) == 40
    assert (one != other).any()
    assert (attack.byzantine_clients(2, 100) == one).all()
    wild, mean = (run(Noise(1e6, clients=[1]), strategy=s, rounds=1).run().state.model for s in (Median(), FedAvg()))
    honest = run(None, strategy=Median(), rounds=1).run().state.model
    assert (wild[0] - honest[0]).abs().max() < 1
    assert mean[0].abs().max() > 1e4
    both = run(ALIE(fraction=0.4), uplink=Uplink(TopK(k=2))).run().state.model
    alone = run(ALIE(fraction=0.4), uplink=Uplink(TopK(k=2)), seeds=SEEDS[1:]).run().state.model
    torch.testing.assert_close(alone, both[1:], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"attack\.clients names client 7, but clients=5 end at 4"):
        run(Noise(clients=[7]))


def test_the_bound_of_min_max_is_where_the_farthest_honest_row_is_as_far_as_allowed() -> None:
    """max_i ‖μ + γ p − g_i‖ = `most`, for a direction of any length."""
    draw = torch.Generator().manual_seed(0)
    honest = torch.randn(6, 4, dtype=torch.float64, generator=draw)
    along, centre = 2.5 * torch.randn(4, dtype=torch.float64, generator=draw), honest.mean(0)
    most = torch.tensor(7.0, dtype=torch.float64)
    gamma = MinMax().bound(centre, along, honest, most)
    assert (centre + gamma * along - honest).norm(dim=1).max().item() == pytest.approx(7.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_min_sum_goes_as_far_as_the_sum_of_squared_distances_allows(seed):
    honest, along = torch.as_tensor(np.random.default_rng(seed).standard_normal((6, 4))).split([5, 1])
    centre, limit = honest[0], torch.tensor(200.0, dtype=torch.float64)
    reach = MinSum().bound(centre, along[0], honest, limit)
    assert float((centre + reach * along[0] - honest).square().sum()) == pytest.approx(200.0)
