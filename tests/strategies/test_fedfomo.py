"""FedFomo against its formula, and clients that it keeps apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.core import rng
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import FedFomo, LocalOnly

SEEDS = (3, 5)
SIZES, OFFSETS = (10, 14, 1, 9, 12), (0.0, 0.4, 0.2, -0.5, 0.1)  # client 2 has no validation sample
WORDS = ("11111 10110 00000 01011 11010", "01101 11111 01110 00000 10011")
COUNTS = np.array([[list(map(int, word)) for word in one.split()] for one in WORDS]).swapaxes(0, 1)  # [T, R, m]
LR, STEPS = 0.3, 2


def samples(sizes=SIZES, offsets=OFFSETS, width: float = 1.0) -> Dataset:
    """f_i(x) = ½ mean ‖x − z‖² over the client's points around its offset."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    draw = [np.random.default_rng(i).standard_normal((size, 2)) for i, size in enumerate(sizes)]
    x = torch.as_tensor(width * np.concatenate(draw) + np.array(offsets)[owners, None])
    return Dataset("points", x, loss="half_squared_distance", owners=torch.as_tensor(owners))


@pytest.fixture(name="fomo_of")
def fomo_of_fixture(Scripted):
    def of(strategy, data=None, counts=COUNTS, **options) -> Simulation:
        data = data or samples()
        given = {
            "partition": Natural(validation=0.3), "seeds": SEEDS, "rounds": len(counts),
            "evaluation": EvaluationOptions(every=100), "execution": Execution("loop", dtype="float64"),
        }  # fmt: skip
        return Simulation(
            data, Mean, clients=counts.shape[2], availability=Scripted(counts), strategy=strategy,
            local=SGD(lr=LR, steps=STEPS, batch_size=None), **given | options,
        )  # fmt: skip

    return of


class NaiveFedFomo:
    """One replicate."""

    def __init__(self, simulation, replicate: int, downloads: int, exploration: float, decay: float) -> None:
        self.x, self.table = simulation.dataset.train_x.numpy(), simulation.partition_tables[replicate]
        self.seed, self.m = SEEDS[replicate], simulation.federation.clients
        self.downloads, self.exploration, self.decay = downloads, exploration, decay
        self.models, self.affinity = np.zeros((self.m, 2)), np.zeros((self.m, self.m))

    def points(self, i: int, table) -> np.ndarray:
        return self.x[np.asarray(table.order)[table.offsets[i] : table.offsets[i + 1]]]

    def loss(self, i: int, model: np.ndarray) -> float:
        return float(np.mean([0.5 * np.sum((model - z) ** 2) for z in self.points(i, self.table.validation)]))

    def round(self, t: int, active: list[int]) -> None:
        ends = {}
        for i in active:
            ends[i] = self.models[i]
            for _ in range(STEPS):
                ends[i] = ends[i] - LR * (ends[i] - self.points(i, self.table).mean(0))
        before = self.models.copy()
        for i in active:
            if not len(self.points(i, self.table.validation)):
                self.models[i] = ends[i]
                continue
            key = rng.row_keys(torch.tensor([self.seed]), rng.Purpose.STRATEGY, torch.tensor([i]), t)
            random = rng.uniform(key, torch.arange(self.m + 1), torch.float64)
            explores = random[self.m] < max(self.exploration - self.decay * t, 0)
            order = [(0.0 if explores else -self.affinity[i, j], random[j], j) for j in active if j != i]
            chosen = [j for _, _, j in sorted(order)][: self.downloads]
            weights = {
                j: (self.loss(i, before[i]) - self.loss(i, ends[j])) / np.linalg.norm(ends[j] - before[i])
                for j in [i, *chosen]
            }
            for j in chosen:
                self.affinity[i, j] += weights[j]
            positive = {j: weight for j, weight in weights.items() if weight > 0}
            for j, weight in positive.items():
                self.models[i] = self.models[i] + weight / sum(positive.values()) * (ends[j] - before[i])


CASES = {"all": (9, 0.0, 0.0), "two of them": (2, 0.0, 0.0), "exploring": (1, 0.6, 0.1)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, fomo_of, play):
    simulation = fomo_of(FedFomo(*CASES[name]))
    naive = [NaiveFedFomo(simulation, replicate, *CASES[name]) for replicate in (0, 1)]
    for played in play(simulation):
        for replicate, one in enumerate(naive):
            one.round(played.t, list(np.flatnonzero(COUNTS[played.t][replicate])))
            for of in ("models", "affinity"):
                found = getattr(played.after, of).unflatten(0, (2, -1))[replicate]
                np.testing.assert_allclose(found, getattr(one, of), rtol=0, atol=1e-10)
            np.testing.assert_allclose(played.after.model[replicate], one.models.mean(0), rtol=0, atol=1e-10)
    assert all(one.affinity.max() > 0 > one.affinity.min() for one in naive)


@pytest.mark.slow
def test_models_that_do_not_lower_the_loss_change_nothing(fomo_of, play):
    """Of two populations far apart, with x⁰ between them: the other population's models raise the loss."""
    data = samples((10, 14, 11, 9), (-20.0, -20.2, 20.0, 19.8), width=0.1)
    simulation = fomo_of(FedFomo(9), data, np.ones((6, 2, 4), dtype=int))
    apart = np.array([[a == b for b in (0, 0, 1, 1)] for a in (0, 0, 1, 1)])
    naive = NaiveFedFomo(simulation, 0, 9, 0.0, 0.0)
    for played in play(simulation):
        affinity = played.after.affinity.unflatten(0, (2, 4)).numpy()
        for one in affinity:
            assert (one[~apart] < 0).all()
            assert (one[apart & ~np.eye(4, dtype=bool)] > 0).all()
        ends = [played.report.end[:4][group] for group in ([0, 1], [2, 3])]
        for i, found in enumerate(played.after.models[:4]):  # on the line between the two models of its population
            one, other = ends[i // 2]
            share = ((found - other) @ (one - other)) / (one - other).square().sum()
            assert -1e-9 < share < 1 + 1e-9
            torch.testing.assert_close(found, share * one + (1 - share) * other, rtol=0, atol=1e-9)
    assert naive.m == 4


@pytest.mark.slow
def test_a_lone_client_trains_as_long_as_its_validation_loss_falls(fomo_of, play):
    data, counts = samples((20,), (4.0,)), np.ones((12, 2, 1), dtype=int)
    losses = []
    simulation, alone = fomo_of(FedFomo(), data, counts), fomo_of(LocalOnly(), data, counts)
    naive = NaiveFedFomo(simulation, 0, 5, 0.3, 0.05)
    for played, trained in zip(play(simulation), play(alone), strict=True):
        losses.append(naive.loss(0, played.after.models[0].numpy()))
        if torch.equal(played.before.models[0], trained.before.models[0]):
            end = trained.after.models[0]
            lower = naive.loss(0, end.numpy()) < naive.loss(0, played.before.models[0].numpy())
            torch.testing.assert_close(played.after.models[0], end if lower else played.before.models[0])
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_replicates_stay_apart(fomo_of, tmp_path, Scripted):
    def strategy():
        return FedFomo(2, 0.5, 0.1)

    whole = fomo_of(strategy()).run().state
    fomo_of(strategy(), rounds=3).run(tmp_path)
    resumed = fomo_of(strategy()).run(tmp_path, resume=True).state
    alone = fomo_of(strategy(), counts=COUNTS[:, 1:], seeds=SEEDS[1:]).run().state
    for name in ("model", "models", "affinity"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))
        torch.testing.assert_close(
            getattr(alone, name), getattr(whole, name).unflatten(0, (2, -1))[1], rtol=0, atol=1e-12
        ) if name != "model" else None


def test_without_validation_samples_it_is_refused(fomo_of):
    with pytest.raises(ConfigError, match=r"strategy=FedFomo compares models.*set partition\.validation=0\.2"):
        fomo_of(FedFomo(), partition=Natural())
