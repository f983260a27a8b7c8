"""Strategies with memory, adaptive servers and local corrections: each against its formula, round by round."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from naive_strategies import (
    BY_DATA,
    CLIENTS,
    LRS,
    ROUNDS,
    SCHEDULES,
    SEEDS,
    SIZES,
    UNIFORM,
    Learner,
    NaiveF3AST,
    NaiveFedAU,
    NaiveFedOpt,
    NaiveFedProx,
    NaiveFedVARP,
    NaiveMIFA,
    NaivePFedAvg,
    NaiveScaffold,
    script,
)

from fedsim import Execution
from fedsim.availability import Full, Multiset, UniformK
from fedsim.strategies import F3AST, MIFA, FedAU, FedOpt, FedProx, FedVARP, PFedAvg, Scaffold


def drawn_script() -> np.ndarray:
    """Five draws with replacement a round, with the same empty rounds."""
    counts = np.random.default_rng(6).multinomial(5, BY_DATA, (ROUNDS, len(SEEDS)))
    counts[2] = counts[6, 1] = 0
    assert counts.max() > 1
    return counts


def pairs_script() -> np.ndarray:
    """Two of four clients a round, with the same empty rounds."""
    draw = np.random.default_rng(7)
    counts = np.zeros((ROUNDS, len(SEEDS), CLIENTS), dtype=np.int8)
    for one in counts.reshape(-1, CLIENTS):
        one[draw.permutation(CLIENTS)[:2]] = 1
    counts[2] = counts[6, 1] = 0
    return counts


@dataclasses.dataclass
class Case:
    """A strategy, its formula, the schedule, and who takes part (the script unless said)."""

    strategy: object
    naive: object
    schedule: str = "constant"
    availability: object = None


def case(strategy, naive, *args, schedule="constant", availability=None, **kwargs) -> Case:
    return Case(strategy, lambda x, learner: naive(x, learner, *args, **kwargs), schedule, availability)


def fedopt(optimizer: str, eta: float = 0.1, beta1: float = 0.8, beta2: float = 0.9, tau: float = 0.05) -> Case:
    return case(FedOpt(optimizer, eta, beta1, beta2, tau), NaiveFedOpt, optimizer, eta, beta1, beta2, tau)


CASES = {
    "fedau": case(FedAU(), NaiveFedAU, 1.0, 50),
    "fedau cutoff": case(FedAU(server_lr=0.4, cutoff=3), NaiveFedAU, 0.4, 3),
    "fedau cutoff 1": case(FedAU(cutoff=1), NaiveFedAU, 1.0, 1),
    "f3ast": case(F3AST(), NaiveF3AST, 1.0, 0.001, UNIFORM),
    "f3ast by data": case(F3AST(0.5, 0.2, weighting="data"), NaiveF3AST, 0.5, 0.2, BY_DATA),
    "f3ast beta 1": case(F3AST(0.5, 1.0), NaiveF3AST, 0.5, 1.0, UNIFORM),
    "f3ast k=1": case(F3AST(0.5, 0.3, k=1), NaiveF3AST, 0.5, 0.3, UNIFORM, 1),
    "f3ast k=2 by data": case(F3AST(0.5, 0.3, 2, "data"), NaiveF3AST, 0.5, 0.3, BY_DATA, 2),
    "mifa": case(MIFA(), NaiveMIFA, 1.0),
    "mifa decaying": case(MIFA(0.7), NaiveMIFA, 0.7, schedule="sqrt"),
    "mifa gradient": case(MIFA(0.7, "gradient"), NaiveMIFA, 0.7, True, schedule="sqrt"),
    "mifa gradient per step": case(MIFA(0.7, "gradient"), NaiveMIFA, 0.7, True, schedule="step"),
    "mifa waits": case(MIFA(0.7, wait_for_all=True), NaiveMIFA, 0.7, wait=True),
    "mifa gradient waits": case(MIFA(1.0, "gradient", True), NaiveMIFA, 1.0, True, True, schedule="sqrt"),
    "fedvarp": case(FedVARP(), NaiveFedVARP, 1.0),
    "fedvarp server_lr": case(FedVARP(0.6), NaiveFedVARP, 0.6, schedule="sqrt"),
    "scaffold": case(Scaffold(), NaiveScaffold, 1.0),
    "scaffold per step": case(Scaffold(0.8), NaiveScaffold, 0.8, schedule="step"),
    "fedprox": case(FedProx(0.5), NaiveFedProx, 1.0, 0.5, UNIFORM),
    "fedprox by data": case(FedProx(2.0, 0.7, "data"), NaiveFedProx, 0.7, 2.0, BY_DATA, schedule="step"),
    "adam": fedopt("adam"),
    "yogi": fedopt("yogi"),
    "adagrad": fedopt("adagrad"),
    "p_fedavg full": case(PFedAvg("full"), NaivePFedAvg, "full", BY_DATA, availability=Full),
    "p_fedavg full uniform": case(PFedAvg("full", "uniform"), NaivePFedAvg, "full", UNIFORM, availability=Full),
    "p_fedavg I": case(PFedAvg("I"), NaivePFedAvg, "I", availability=lambda: Multiset(5)),
    "p_fedavg I, empty rounds": case(PFedAvg("I"), NaivePFedAvg, "I", availability=drawn_script),
    "p_fedavg II": case(PFedAvg("II"), NaivePFedAvg, "II", BY_DATA, availability=lambda: UniformK(2)),
    "p_fedavg II, empty rounds": case(PFedAvg("II"), NaivePFedAvg, "II", BY_DATA, availability=pairs_script),
    "p_fedavg II uniform": case(
        PFedAvg("II", "uniform"), NaivePFedAvg, "II", UNIFORM, availability=lambda: UniformK(3)
    ),
}


def compare(simulation, naive, play) -> None:
    """Every round: the model, and every field of the state that the naive version keeps too."""
    counted = 0
    for played in play(simulation):
        counts = simulation.availability.counts(played.t)
        for r, one in enumerate(naive):
            one.round(played.t, counts[r])
            for field in dataclasses.fields(played.after):
                if not hasattr(one, field.name):
                    continue
                kept = getattr(played.after, field.name)
                kept = kept[r * CLIENTS : (r + 1) * CLIENTS] if len(kept) > len(SEEDS) else kept[r]
                where = f"round {played.t}, {field.name}"
                np.testing.assert_allclose(kept, np.array(getattr(one, field.name)), atol=1e-8, rtol=0, err_msg=where)
                counted += 1
    assert counted >= ROUNDS * len(SEEDS)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_every_round_follows_the_formula(name, executor, play, regression):
    one = CASES[name]
    availability = None if one.availability is None else one.availability()
    execution = Execution(executor, chunk=3, dtype="float64")
    simulation = regression(one.strategy, availability, one.schedule, execution=execution)
    starts = simulation.initial_state().model.numpy()
    assert not np.allclose(*starts)
    rate = SCHEDULES[one.schedule][1]
    naive = [one.naive(x, Learner(simulation.dataset, lr, rate)) for x, lr in zip(starts, LRS, strict=True)]
    for each, seed in zip(naive, simulation.federation.seeds, strict=True):
        each.seed = seed
    compare(simulation, naive, play)


def test_the_script_holds_what_the_formulas_must_survive():
    """An empty round, one empty for one replicate, absences beyond the cutoff, a client that comes late."""
    counts = script()
    assert not counts[2].any()
    assert counts[6, 0].any()
    assert not counts[6, 1].any()
    runs = [len(gap) for row in counts.reshape(ROUNDS, -1).T for gap in "".join(map(str, row)).split("1")]
    assert max(runs) > 3
    assert counts[:, 0].any(0).all()
    assert not counts[:5, 0, 3].any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("schedule", ["constant", "step"])
@pytest.mark.parametrize("kind", ["scaffold", "fedprox"])
def test_clients_that_take_different_numbers_of_steps(kind, schedule, executor, play, regression, regression_of):
    """One epoch of batches of two: 2, 1, 4 and 1 steps. A client's samples are equal, so any batch is the full one."""
    dataset = regression_of(SIZES)
    first = torch.as_tensor(np.repeat(np.cumsum((0, *SIZES[:-1])), SIZES))
    dataset.train_x, dataset.train_y = dataset.train_x[first], dataset.train_y[first]
    strategy = Scaffold(0.8) if kind == "scaffold" else FedProx(0.5, weighting="data")
    rule = {"steps": None, "epochs": 1, "batch_size": 2}
    execution = Execution(executor, chunk=3, dtype="float64")
    simulation = regression(strategy, None, schedule, dataset, execution=execution, rule=rule)
    naive = []
    for x, lr in zip(simulation.initial_state().model.numpy(), LRS, strict=True):
        learner = Learner(dataset, lr, SCHEDULES[schedule][1])
        steps = (2, 1, 4, 1)
        naive.append(
            NaiveScaffold(x, learner, 0.8, steps)
            if kind == "scaffold"
            else NaiveFedProx(x, learner, 1.0, 0.5, BY_DATA, steps)
        )
    compare(simulation, naive, play)


def test_mifas_gradient_memory_divides_by_the_rate_of_the_round_also_with_epochs(play, regression, regression_of):
    """One epoch of three equal batches is three steps: the schedule has made 3t of them when round t begins."""
    dataset = regression_of((6, 6, 6, 6))
    first = torch.as_tensor(np.repeat(np.arange(0, 24, 6), 6))
    dataset.train_x, dataset.train_y = dataset.train_x[first], dataset.train_y[first]
    rule = {"steps": None, "epochs": 1, "batch_size": 2}
    simulation = regression(MIFA(0.7, "gradient"), None, "step", dataset, rule=rule)
    for played in play(simulation):
        expected = torch.tensor(LRS, dtype=torch.float64) * 0.95 ** (3 * played.t)
        torch.testing.assert_close(played.report.lr, expected, msg=f"round {played.t}")
    starts = simulation.initial_state().model.numpy()
    learners = [Learner(dataset, lr, SCHEDULES["step"][1]) for lr in LRS]
    compare(simulation, [NaiveMIFA(x, one, 0.7, True) for x, one in zip(starts, learners, strict=True)], play)
