"""Attacks with a memory or on samples: mimic against a plain loop, label flip against data with other labels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core import ConfigError, rng
from fedsim.core.memory import Memory
from fedsim.data.contamination import LabelFlip as WrongLabels
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.strategies import FedAvg, LocalOnly
from fedsim.uplink.attack import LabelFlip, Mimic

M, SEEDS, BAD, WARMUP = 5, (2, 9), [1, 3], 3
COUNTS = np.array([[list(map(int, word)) for word in one.split()] for one in
                   ("11111 01010 10111 11101 11011", "10110 00000 11110 11111 01011")]).swapaxes(0, 1)  # fmt: skip
SIZES, DOUBLE = (5, 2, 9, 1, 4), Execution(dtype="float64", executor="loop")


def test_mimic_copies_who_stands_out_as_a_plain_loop_has_it(Scripted, Regression, regression_of):
    """Five rounds: one of liars alone, one empty for a replicate, one after the warm-up without the chosen client."""
    attack = Mimic(WARMUP, clients=BAD)
    simulation = Simulation(
        regression_of(SIZES), Regression, clients=M, availability=Scripted(COUNTS), seeds=SEEDS, rounds=5,
        local=SGD(lr=0.05, steps=2, batch_size=None), attack=attack, execution=DOUBLE,
    )  # fmt: skip
    state, memory = simulation.initial_state(), Memory()
    simulation.uplink.add_stage_memory(memory, simulation.federation, state.model)
    seeds, columns = torch.tensor(SEEDS), torch.arange(state.model.shape[1])
    keys = rng.row_keys(seeds, rng.Purpose.UPLINK, torch.full_like(seeds, -1), -1, 0)
    z = [one / np.linalg.norm(one) for one in rng.normal(keys[:, None], columns, torch.float64).numpy()]
    score, copied = np.zeros((2, M)), set()
    for t in range(5):
        cohort = simulation.availability.sample(t)
        start = simulation.strategy.start(state, cohort)
        report = simulation.trainer.run(start, cohort, t, state.model)
        true, found = report.innovation.numpy(), simulation.uplink(report, memory)
        for r in range(2):
            there = {int(v) % M: g for v, g in zip(cohort.host_index.virtual_clients, true, strict=True) if v // M == r}
            honest = {i: g for i, g in there.items() if i not in BAD}
            if t < WARMUP:
                if len(honest) > 1:
                    mean = sum(honest.values()) / len(honest)
                    moved = sum((g - mean) * ((g - mean) @ z[r]) for g in honest.values())
                    z[r] = moved / np.linalg.norm(moved)
                for i, g in there.items():
                    score[r, i] += z[r] @ g
            for i, g in there.items():
                wanted = g
                if i in BAD and honest:
                    whom = max(honest, key=lambda j, r=r: score[r, j])
                    copied.add((r, whom))
                    wanted = honest[whom]
                place = list(cohort.host_index.virtual_clients).index(r * M + i)
                np.testing.assert_allclose(found.innovation[place], wanted, atol=1e-12, err_msg=f"{t}, {r}, {i}")
        state = simulation.strategy.aggregate(state, found, t)
    np.testing.assert_allclose(memory.uplink["0 score"].reshape(2, M), score, atol=1e-12)
    assert len(copied) > 2  # the next best, where the first is away
    with pytest.raises(ConfigError, match=r"warmup=0"):
        Mimic(0)


def classes() -> Dataset:
    draw, owners = np.random.default_rng(0), np.repeat(np.arange(M), SIZES)
    x, y = draw.standard_normal((len(owners), 3)), draw.integers(0, 3, len(owners))
    return Dataset("classes", torch.as_tensor(x), torch.as_tensor(y), classes=3, owners=torch.as_tensor(owners))


@pytest.fixture(name="models")
def models_fixture(Scripted, play):
    """[T, R, d] of five rounds on three classes, after each."""

    def run(attack=None, data=None, seeds=SEEDS, **options):
        given = {"strategy": FedAvg(), "execution": DOUBLE, "local": SGD(lr=0.3, steps=3, batch_size=2)} | options
        simulation = Simulation(
            data or classes(), Linear, clients=M, seeds=seeds, rounds=5, attack=attack,
            availability=Scripted(COUNTS[:, [SEEDS.index(seed) for seed in seeds]]), **given,
        )  # fmt: skip
        return torch.stack([played.after.model for played in play(simulation)])

    return run


@pytest.mark.parametrize("executor", ["loop", "vmap", "fused"])
def test_who_flips_labels_trains_on_the_others(executor, models):
    """As data with C − 1 − y do, and everybody else as ever; before `since` nobody does."""
    wrong = classes()
    liars = torch.isin(wrong.owners, torch.tensor(BAD))
    wrong.train_y = torch.where(liars, 2 - wrong.train_y, wrong.train_y)
    how = {"execution": dataclasses.replace(DOUBLE, executor=executor)}
    flipped, other, plain = models(LabelFlip(clients=BAD), **how), models(data=wrong, **how), models(**how)
    torch.testing.assert_close(flipped, other, rtol=0, atol=1e-13)
    assert not torch.allclose(flipped[0], plain[0])
    late = models(LabelFlip(clients=BAD, since=2), **how)
    assert torch.equal(late[:2], plain[:2])
    assert not torch.allclose(late[2:], plain[2:])


def test_every_replicate_has_its_liars_and_wrong_labels_stay_wrong(models):
    """Drawn by the seed; labels that are wrong anyway are flipped from what they became."""
    attack = LabelFlip(fraction=0.4)
    whole = models(attack)
    assert (attack.byzantine_clients(2, M) != attack.byzantine_clients(9, M)).any()
    torch.testing.assert_close(models(attack, seeds=SEEDS[1:])[:, 0], whole[:, 1], rtol=0, atol=1e-12)
    rotten = {"contamination": WrongLabels(0.5)}
    both = models(LabelFlip(clients=BAD), **rotten)
    assert not torch.allclose(both, models(**rotten))
    assert torch.equal(models(LabelFlip(clients=BAD, since=9), **rotten), models(**rotten))
    assert torch.equal(models(LabelFlip(clients=BAD), strategy=LocalOnly()), models(strategy=LocalOnly()))


def test_what_has_no_labels_to_flip_is_refused(regression_of, Regression):
    with pytest.raises(ConfigError, match=r"attack=label_flip needs one class for a sample"):
        Simulation(regression_of(SIZES), Regression, clients=M, attack=LabelFlip())
    newcomers = {"personal": Personal(newcomers=1), "partition": Natural(validation=0.4)}
    with pytest.raises(ConfigError, match=r"attack=label_flip does not apply to clients that join later"):
        Simulation(classes(), Linear, clients=M, attack=LabelFlip(), **newcomers)
