"""A decomposition that refuses its numbers is a divergence: named, and dropped where that is asked for."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedsim import EvaluationOptions, Execution, Simulation, run_together
from fedsim.core import DivergenceError
from fedsim.core.numerical import is_numerical_error
from fedsim.data.datasets import GaussianMean, Quadratics
from fedsim.data.partition import Natural
from fedsim.local import PG, SGD, PoFL, ProFL
from fedsim.models import Mean
from fedsim.run.divergence import DivergenceGuard
from fedsim.run.tracking import Tracking
from fedsim.shift import Location
from fedsim.strategies import FedAvg

SEEDS, BAD, ROUND = (5, 8), 2, 2
QUIET = Tracking(progress="none", tensorboard=False)
ROUTINES = {
    "eigh": lambda a: torch.linalg.eigh(a)[1],
    "pinv": torch.linalg.pinv,
    "svd": lambda a: torch.linalg.svd(a)[0],
    "cholesky": torch.linalg.cholesky,
    "solve": lambda a: torch.linalg.solve(a, torch.eye(3, dtype=a.dtype)),
    "inv": torch.linalg.inv,
    "lstsq": lambda a: torch.linalg.lstsq(a, torch.eye(3, dtype=a.dtype))[0],
}
SINGULAR = ("cholesky", "solve", "inv")  # refuse finite matrices too
CASES = [(name, ill) for name in ROUTINES for ill in (math.nan, 0.0) if ill != 0.0 or name in SINGULAR]


class Decomposing(SGD):
    """SGD that decomposes a matrix which is not finite (or singular) for client 2 of seed 8 from round 2 on."""

    def __init__(self, routine: str, ill: float) -> None:
        super().__init__(lr=0.1, steps=2)
        self.routine, self.ill = routine, ill

    def memory(self, federation, dimension):
        bad = torch.zeros(federation.num_replicates, federation.clients, dtype=federation.dtype)
        bad[[seed == SEEDS[1] for seed in federation.seeds], 2] = 1
        return {"bad": bad.flatten(), "seen": torch.zeros(federation.num_memory_rows, dtype=federation.dtype)}

    def step(self, carry, batch, lr, objective):
        carry, loss = super().step(carry, batch, lr, objective)
        ill = (carry["bad"] > 0) & (carry["seen"] >= 2 * ROUND)
        found = ROUTINES[self.routine](torch.eye(3, dtype=loss.dtype) * torch.where(ill, self.ill, 1.0))
        return carry | {"params": carry["params"] + 0 * found.sum(), "seen": carry["seen"] + 1}, loss


def simulation_of(local, executor="vmap", **options) -> Simulation:
    points = torch.arange(12.0).reshape(4, 3).numpy()
    settings = {"strategy": FedAvg(), "rounds": 5, "seeds": SEEDS, "evaluation": EvaluationOptions(every=2)}
    execution = Execution(executor, dtype="float64", trial=False)
    data = Quadratics(clients=4, dimension=3, points=points)
    return Simulation(data, Mean, clients=4, local=local, execution=execution, **settings | options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(("routine", "ill"), CASES)
def test_it_is_named_and_dropped_and_the_others_do_not_notice(routine, ill, executor):
    if routine == "lstsq" and executor == "vmap":
        pytest.skip("PyTorch cannot vmap it")
    with pytest.raises(DivergenceError, match=r"non-finite values in round 2 of FedAvg, seed 8: clients 2; lower lr"):
        simulation_of(Decomposing(routine, ill), executor).run()
    whole = simulation_of(Decomposing(routine, 1.0), executor).run()
    given_up = simulation_of(Decomposing(routine, ill), executor, on_nonfinite="drop_replicate").run()
    assert torch.equal(given_up.state.model[0], whole.state.model[0])
    assert given_up.history[-1]["seed"] == SEEDS[1]
    assert math.isnan(given_up.history[-1]["train_loss"])
    dropped = simulation_of(Decomposing(routine, ill), executor, on_nonfinite="drop_client").run()
    assert torch.equal(dropped.state.model[0], whole.state.model[0])
    assert math.isfinite(dropped.history[-1]["train_loss"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", [PG, PoFL, ProFL])
def test_performative_rules_of_the_package_diverge_in_a_sentence(rule):
    """At a rate of 1e9 numbers overflow, and matrices that the rule inverts or sorts are not finite."""

    def run(on_nonfinite):
        settings = {"partition": Natural(), "shift": Location(), "rounds": 6, "seeds": SEEDS, "clients": 5}
        local = rule(lr=1e9)
        made = Simulation(GaussianMean(clients=5), Mean, local=local, on_nonfinite=on_nonfinite, **settings)
        return made.run(tracking=QUIET)

    with pytest.raises(DivergenceError, match=r"non-finite values in round \d+ of FedAvg.*lower lr"):
        run("stop")
    for kept in ("drop_client", "drop_replicate"):
        with contextlib.suppress(DivergenceError):  # all may be lost, which is a sentence too
            run(kept)


def test_runs_that_go_together_lose_the_one_alone():
    fine, ill = simulation_of(Decomposing("eigh", 1.0)), simulation_of(Decomposing("eigh", 1.0))
    ill.trainer.local_rule.ill = math.nan
    with pytest.raises(DivergenceError, match="round 2 of FedAvg, seed 8: clients 2"):
        run_together([fine, ill])


def test_an_aggregation_that_fails_is_named():
    class Inverting(FedAvg):
        """Inverts a matrix of its rows."""

        def aggregate(self, state, report, t):
            torch.linalg.inv(torch.diag(report.end.sum(0) if t != 4 else torch.zeros(3, dtype=torch.float64)) + 0)
            return super().aggregate(state, report, t)

    with pytest.raises(DivergenceError, match=r"round 4 of Inverting: linalg\.inv.*singular.*lower lr"):
        simulation_of(SGD(lr=0.1, steps=2), strategy=Inverting(), rounds=6).run(tracking=QUIET)


def test_a_model_that_cannot_be_evaluated_is_evaluated_as_another_replicates():
    def evaluator(models):
        if not torch.isfinite(models).all():
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return models

    federation = SimpleNamespace(num_memory_rows=12, num_replicates=3, device=torch.device("cpu"))
    models = torch.tensor([[math.nan, 1.0], [2.0, 3.0], [4.0, 5.0]])
    result = DivergenceGuard(federation, "FedAvg").evaluate(evaluator, models, 7)
    assert result.tolist() == [[2.0, 3.0], [2.0, 3.0], [4.0, 5.0]]
    with pytest.raises(DivergenceError, match=r"models of FedAvg cannot be evaluated after round 7: .*; lower lr"):
        DivergenceGuard(federation, "FedAvg").evaluate(evaluator, models[:1], 7)


def test_what_counts_as_numerical():
    def of(call):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            call()
        return is_numerical_error(raised.value)

    ill = torch.full((2, 2), math.nan)
    assert of(lambda: torch.linalg.eig(ill))
    assert of(lambda: torch.multinomial(ill, 1))
    assert of(lambda: vmap(torch.linalg.svd)(ill[None]))
    assert of(lambda: np.linalg.inv(np.zeros((2, 2))))
    assert not of(lambda: ill @ torch.ones(3))
    assert not of(lambda: [][1])
    assert not of(lambda: 1 / 0)
