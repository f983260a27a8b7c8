"""What follows when rows become non-finite: the run stops by name, or goes on without the client or the replicate."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError, DivergenceError
from fedsim.data.datasets import Quadratics
from fedsim.local import APFL, SGD, PFedMe
from fedsim.models import Mean
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.strategies import F3AST, MIFA, FedAU, FedAvg, FedAWE, FedPBC, FedVARP, LocalOnly, Scaffold

ROUNDS, SEEDS, BAD = 7, (5, 8), 2
QUIET = Tracking(progress="none", tensorboard=False, checkpoint_every=1)
# Client 2 of seed 8 is there in rounds 1 and 4 alone.
COUNTS = np.random.default_rng(1).integers(0, 2, (ROUNDS, len(SEEDS), 4))
COUNTS[:, :, 0] = 1
COUNTS[:, :, BAD] = 0
WITHOUT = COUNTS.copy()
COUNTS[[1, 4], 1, BAD] = 1
STRATEGIES = {
    "fedavg": FedAvg,
    "fedpbc": lambda: FedPBC(compute="active"),
    "fedawe": FedAWE,
    "fedau": FedAU,
    "f3ast": F3AST,
    "mifa": MIFA,
    "fedvarp": FedVARP,
    "scaffold": Scaffold,
    "local_only": LocalOnly,
}


class Poisoned(SGD):
    """SGD whose client 2 of seed 8 comes home with NaN."""

    def __init__(self, where: str = "params", **options) -> None:
        super().__init__(lr=0.1, steps=2, **options)
        self.where = where

    def memory(self, federation, dimension):
        bad = torch.zeros(federation.num_memory_rows, dtype=federation.dtype)
        bad[-2] = 1
        return {"bad": bad, "own": torch.zeros(federation.num_memory_rows, dimension, dtype=federation.dtype)}

    def step(self, carry, batch, lr, objective):
        carry, loss = super().step(carry, batch, lr, objective)
        carry = carry | {"own": carry["own"] + carry["params"]}
        ill = torch.where(carry["bad"] > 0, math.nan, 0.0)
        return carry | {self.where: carry[self.where] + ill}, loss


def simulation_of(Scripted, counts=COUNTS, strategy=None, local=None, executor="loop", **options) -> Simulation:
    points = torch.arange(12.0).reshape(4, 3).numpy()
    return Simulation(
        Quadratics(clients=4, dimension=3, points=points),
        Mean,
        clients=4,
        availability=Scripted(counts),
        strategy=strategy or FedAvg(),
        local=local or Poisoned(),
        rounds=ROUNDS,
        evaluation=EvaluationOptions(every=2),
        execution=Execution(executor, dtype="float64"),
        **{"seeds": SEEDS} | options,
    )


def without_times(rows):
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples")} for row in rows]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["params", "own"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dropped_client_is_as_absent(Scripted, name, where, tmp_path):
    """Server, strategy's memory and rule's memory are those of a run in which it never came; bit for bit."""
    dropped = simulation_of(Scripted, strategy=STRATEGIES[name](), local=Poisoned(where), on_nonfinite="drop_client")
    result = dropped.run(tmp_path / "dropped", tracking=QUIET)
    absent = simulation_of(Scripted, WITHOUT, STRATEGIES[name](), Poisoned(where)).run(
        tmp_path / "absent", tracking=QUIET
    )
    for field in dataclasses.fields(absent.state):
        assert torch.equal(getattr(result.state, field.name), getattr(absent.state, field.name)), field.name
    assert without_times(result.history) == without_times(absent.history)
    files = [(tmp_path / run / "checkpoint.safetensors").read_bytes() for run in ("dropped", "absent")]
    tensors = [content[8 + int.from_bytes(content[:8], "little") :] for content in files]  # what follows the header
    assert tensors[0] == tensors[1]
    summary = json.loads((tmp_path / "dropped" / "summary.json").read_text())
    assert summary["dropped"] == [{"replicate": 1, "seed": 8, "client": BAD, "round": 1, "times": 2}]


def test_a_client_that_computes_unheard_is_dropped_too(Scripted):
    """Under FedPBC everybody computes in every round; the ill client's own model stays what it was at the start."""
    result = simulation_of(Scripted, strategy=FedPBC(), on_nonfinite="drop_client").run()
    assert torch.isfinite(result.state.models).all()
    assert torch.equal(result.state.models[4 + BAD], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("where", ["params", "own"])
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_by_default_the_run_stops_and_names_everything(Scripted, executor, where, tmp_path):
    simulation = simulation_of(Scripted, local=Poisoned(where), executor=executor)
    with pytest.raises(DivergenceError, match=r"round 1 of FedAvg, seed 8: clients 2; lower lr"):
        simulation.run(tmp_path, tracking=QUIET)
    resumed = simulation_of(Scripted, local=Poisoned(where), executor=executor, on_nonfinite="drop_client")
    assert resumed.run(tmp_path, resume=True, tracking=QUIET).history[-1]["round"] == ROUNDS  # from the last good round


@pytest.mark.parametrize("rule", [APFL(lr=0.1, personal_lr=1e200, steps=5), PFedMe(inner_lr=1e200, penalty=1e-9)])
def test_a_personal_model_that_diverges_is_noticed(Scripted, rule):
    """The federation's model stays finite under APFL, so nothing else would tell."""
    with pytest.raises(DivergenceError, match=r"seed 5: clients 0"):
        simulation_of(Scripted, local=rule).run()


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_lost_replicate_leaves_the_others_alone(Scripted, stop, tmp_path, caplog):
    """They are what they are without it, and it says NaN; resumed or not."""
    alone = simulation_of(Scripted, COUNTS[:, :1], seeds=SEEDS[:1], local=SGD(lr=0.1, steps=2)).run()
    result = simulation_of(Scripted, on_nonfinite="drop_replicate").run(tmp_path / "straight", tracking=QUIET)
    assert caplog.text.count("seed 8: clients 2; this replicate is dropped") == 1
    assert torch.equal(result.state.model[:1], alone.state.model)
    assert without_times(result.history[::2]) == without_times(alone.history)
    assert [math.isnan(row["train_loss"]) for row in result.history[1::2]] == [False, True, True, True, True]
    assert [row["active_clients"] > 0 for row in result.history[1::2]] == [False, True, False, False, False]
    assert result.final["train_loss"] == alone.final["train_loss"]
    assert np.isnan(result.final["train_loss"][1])  # of the one replicate that is left
    summary = json.loads((tmp_path / "straight" / "summary.json").read_text())
    assert summary["dropped"] == [{"replicate": 1, "seed": 8, "round": 1, "clients": [BAD]}]
    assert summary["per_replicate"][1] == {"seed": 8} | dict.fromkeys(result.metric_names)

    class Ending(Scripted):
        def sample(self, t):
            if t == stop:
                raise InterruptedError
            return super().sample(t)

    with pytest.raises(InterruptedError):
        simulation_of(Ending, on_nonfinite="drop_replicate").run(tmp_path / "parts", tracking=QUIET)
    simulation_of(Scripted, on_nonfinite="drop_replicate").run(tmp_path / "parts", resume=True, tracking=QUIET)
    rows = [without_times(read_metrics(tmp_path / run / "metrics.csv")) for run in ("straight", "parts")]
    np.testing.assert_equal(rows[1], rows[0])


class NoNumber(FedAvg):
    """FedAvg whose model of one replicate is no number after a round."""

    def __init__(self, t: int, replicate: int) -> None:
        super().__init__()
        self.t, self.replicate = t, replicate

    def aggregate(self, state, report, t):
        after = super().aggregate(state, report, t)
        if t == self.t:
            after.model = after.model.clone()
            after.model[self.replicate] = math.nan
        return after


@pytest.mark.parametrize("t", [4, 5])  # not among the rounds that are tried before a run
def test_a_model_that_is_no_number_is_named_with_the_round_that_made_it(Scripted, t):
    local = SGD(lr=0.1, steps=2)
    with pytest.raises(DivergenceError, match=rf"round {t} of NoNumber, seed 8: the aggregated model; lower lr"):
        simulation_of(Scripted, strategy=NoNumber(t, 1), local=local).run()


@pytest.mark.parametrize("t", [4, 5])  # not among the rounds that are tried before a run
def test_a_lost_replicate_computes_until_the_evaluation_after_its_round(Scripted, t):
    """Evaluated every two rounds: lost in round 3 it computes nothing from round 4 on, lost in 4 or 5 from round 6."""
    there = np.ones((ROUNDS, 2, 4), dtype=int)
    local, computed = SGD(lr=0.1, steps=2), []
    simulation = simulation_of(Scripted, there, strategy=NoNumber(t, 1), local=local, on_nonfinite="drop_replicate")
    genuine = simulation.strategy.aggregate

    def noted(state, report, t):
        computed.append(len(report.cohort))
        return genuine(state, report, t)

    simulation.strategy.aggregate = noted
    result = simulation.run()
    until = (t // 2 + 1) * 2
    assert computed[-ROUNDS:] == [8] * until + [4] * (ROUNDS - until)
    lost = [row["round"] for row in result.history[1::2] if math.isnan(row["train_loss"])]
    assert lost == [r for r in (0, 2, 4, 6, 7) if r > t]


def test_when_every_replicate_is_lost_the_run_ends(Scripted):
    rule = SGD(lr=1e200, steps=5)
    with pytest.raises(DivergenceError, match=r"seed 5: clients 0.*; seed 8: clients 0"):
        simulation_of(Scripted, local=rule, on_nonfinite="drop_replicate").run()


def test_an_aggregate_that_overflows_is_no_clients_fault(Scripted):
    """The rows are finite, the server's step is not: nobody can be dropped for it."""
    rule, strategy = SGD(lr=1e100, steps=1), FedAvg(server_lr=1e300)
    with pytest.raises(DivergenceError, match="seed 5: the aggregated model"):
        simulation_of(Scripted, strategy=strategy, local=rule, on_nonfinite="drop_client").run()


def test_replicates_of_one_seed_are_told_apart(Scripted):
    with pytest.raises(DivergenceError, match=r"seed 3 \(replicate 1\): clients 2;"):
        simulation_of(Scripted, seeds=(3, 3)).run()


def test_another_answer_is_refused(Scripted):
    with pytest.raises(ConfigError, match=r"on_nonfinite='ignore'.*drop_client"):
        simulation_of(Scripted, on_nonfinite="ignore")
