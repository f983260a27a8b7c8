"""What stays with the client is neither sent nor averaged: FedBN, FedPer and LG-FedAvg against programs by hand."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import RATE, ROUNDS, SIZES, module_of, samples, simulation_of
from torch import nn

from fedsim import ConfigError, EvaluationOptions, Execution
from fedsim.availability import Bernoulli, Uniform
from fedsim.core.columns import AVERAGED_COLUMNS_ENTRY, ParameterPartition
from fedsim.local import SGD, FedRep
from fedsim.models.selectors import ByName, Everything, Head, Normalisation, Selector
from fedsim.run.tracking import Tracking
from fedsim.strategies import MIFA, FedAvg, FedAWE, FedOpt, FedPBC, FedProx, LocalOnly, Scaffold
from fedsim.strategies.strategy import KeepsClientModels


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


SELECTORS: dict[str, tuple[Selector, set[str]]] = {
    "everything": (Everything(), set()),
    "fedbn": (Normalisation(), {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}),
    "fedper": (Head(), {"3.weight", "3.bias"}),
    "lg-fedavg": (
        Head(travels=True),
        {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"},
    ),
    "by name": (ByName(stays=["bias"]), {"1.bias", "3.bias"}),
    "statistics": (ByName(stays=["running", "num"]), {"1.running_mean", "1.running_var", "1.num_batches_tracked"}),
}  # fmt: skip


def by_hand(simulation: Any, home: set[str], mu: float = 0.0) -> tuple[dict[str, torch.Tensor], list[nn.Module]]:
    """One replicate: clients keep what stays, and the rest is averaged; a proximal term holds what travels."""
    row = simulation.model.initial(simulation.federation.seeds)[0]
    clients = [module_of(simulation, build, row) for _ in SIZES]
    server = {name: v.clone() for name, v in clients[0].state_dict().items() if name not in home}
    for t in range(ROUNDS):
        plan = simulation.trainer.batches.plan(
            simulation.federation.make_cohort(np.ones((1, len(SIZES))), np.ones((1, len(SIZES)))), t
        )
        for i, client in enumerate(clients):
            client.load_state_dict(client.state_dict() | server)
            client.train()
            anchor = copy.deepcopy(client.state_dict())
            optimizer = torch.optim.SGD(client.parameters(), lr=RATE)
            chunk = plan.chunk(np.array([i]))
            for step in range(int(chunk.steps[0])):
                batch = chunk.batch(step, 0, 1, torch.float64)
                optimizer.zero_grad()
                term = sum((p - anchor[n]).square().sum() for n, p in client.named_parameters() if n not in home)
                (F.cross_entropy(client(batch["x"][0]), batch["y"][0]) + mu / 2 * term).backward()
                optimizer.step()
        states = [client.state_dict() for client in clients]
        for name, value in server.items():
            mean = torch.stack([state[name].double() for state in states]).mean(0)
            server[name] = mean if value.is_floating_point() else mean.round().long()
    return server, clients


@pytest.mark.sampled(5)
@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_what_stays_stays_and_what_travels_is_averaged(name: str, executor: str, mu: float) -> None:
    selector, home = SELECTORS[name]
    simulation = simulation_of(
        build,
        seeds=(0,),
        columns=selector,
        strategy=FedProx(mu),
        execution=Execution(dtype="float64", executor=executor),
    )
    result = simulation.run()
    server, clients = by_hand(simulation, home, mu)
    trained = [n for n, _ in build().named_parameters()]
    shared = torch.cat([server[n].reshape(-1) for n in trained if n not in home])
    torch.testing.assert_close(result.state.model[0], shared, rtol=0, atol=1e-10)
    # the evaluated model has the mean over the clients of what stayed
    model, data = build().double(), samples()
    mean = {n: torch.stack([c.state_dict()[n].double() for c in clients]).mean(0) for n in home}
    model.load_state_dict({n: server[n] if n in server else mean[n] for n in model.state_dict()})
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(data.test_x), data.test_y).item()
    assert result.history[-1]["test_loss"] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_statistics_that_travel_are_weighted_as_the_strategy_weights(weighting: str) -> None:
    """The server's running mean after a round is Σ w_i of the clients' own, whose sizes differ."""
    simulation = simulation_of(build, rounds=1, seeds=(0,), strategy=FedAvg(weighting=weighting))
    ends: list[torch.Tensor] = []
    genuine = simulation.trainer.run_local_steps

    def noted(work: Any) -> Any:
        done = genuine(work)
        ends.append(done.carry["params"].clone())
        return done

    simulation.trainer.run_local_steps = noted  # type: ignore[method-assign]
    memories: list[Any] = []
    initial = simulation.trainer.initial_memory
    simulation.trainer.initial_memory = lambda model: memories.append(initial(model)) or memories[-1]  # type: ignore[func-returns-value,method-assign]
    simulation.run()
    weights = torch.tensor(SIZES, dtype=torch.float64) if weighting == "data" else torch.ones(len(SIZES)).double()
    statistics = ends[-1][:, simulation.model.columns.averaged]
    expected = (weights[:, None] / weights.sum() * statistics).sum(0)
    (travelled,) = [m.server[AVERAGED_COLUMNS_ENTRY][0] for m in memories if AVERAGED_COLUMNS_ENTRY in m.server][:1]
    torch.testing.assert_close(travelled, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(statistics[0], statistics[1])


def in_turns(
    simulation: Any, home: set[str], head_steps: int | None, counts: np.ndarray
) -> tuple[dict[str, torch.Tensor], list[nn.Module]]:
    """The first replicate: a round's first steps on what stays, the rest on what travels; None: all of them on both."""
    row = simulation.model.initial(simulation.federation.seeds)[0]
    clients = [module_of(simulation, build, row) for _ in SIZES]
    server = {name: v.clone() for name, v in clients[0].state_dict().items() if name not in home}
    for t, there in enumerate(counts):
        plan = simulation.trainer.batches.plan(simulation.federation.make_cohort(there, there), t)
        states = []
        for position, i in enumerate(np.flatnonzero(there[0])):
            client = clients[i]
            client.load_state_dict(client.state_dict() | server)
            client.train()
            chunk = plan.chunk(np.array([position]))
            for step in range(int(chunk.steps[0])):
                batch = chunk.batch(step, 0, 1, torch.float64)
                turn = None if head_steps is None else step < head_steps
                trained = [p for n, p in client.named_parameters() if turn in (None, n in home)]
                gradients = torch.autograd.grad(F.cross_entropy(client(batch["x"][0]), batch["y"][0]), trained)
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        parameter -= RATE * gradient
            states.append(client.state_dict())
        for name, value in server.items():
            mean = torch.stack([state[name].double() for state in states]).mean(0) if states else value
            server[name] = mean if value.is_floating_point() else mean.round().long()
    return server, clients


EVERYBODY = np.ones((ROUNDS, 1, len(SIZES)))
SOME = np.array([[[1, 1, 0], [0, 0, 1]], [[0, 1, 1], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]], [[1, 0, 1], [0, 0, 0]],
                 [[0, 1, 0], [1, 0, 1]]])  # fmt: skip
PARTLY = [("fedper", None), ("lg-fedavg", None), ("fedbn", None), ("fedper", 2), ("fedper", 0)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("executor", ["auto", "loop"])
@pytest.mark.parametrize(("name", "head_steps"), PARTLY)
def test_who_is_away_keeps_what_stays_and_an_empty_round_moves_nothing(
    name: str, head_steps: int | None, executor: str, Scripted: Any
) -> None:
    """Five rounds; two steps of heads first are FedRep, none FedBABU, whose heads are the initial ones to the bit."""
    selector, home = SELECTORS[name]
    work: dict[str, Any] = {"lr": RATE, "steps": 4, "batch_size": 3}
    simulation = simulation_of(
        build, rounds=len(SOME), columns=selector, availability=Scripted(SOME),
        local=SGD(**work) if head_steps is None else FedRep(head_steps, **work),
        execution=Execution(dtype="float64", executor=executor), evaluation=EvaluationOptions(every=len(SOME)),
    )  # fmt: skip
    memory, initial = simulation.trainer.initial_memory, {}

    def seen(model: torch.Tensor) -> Any:
        initial["memory"] = memory(model)
        return initial["memory"]

    simulation.trainer.initial_memory = seen  # type: ignore[method-assign]
    result = simulation.run()
    server, clients = in_turns(simulation, home, head_steps, SOME)
    order = [*simulation.model.shapes, *simulation.model.statistics]
    columns, trained = simulation.model.columns, dict(build().named_parameters())
    shared = torch.cat([server[n].reshape(-1) for n in order if n in trained and n not in home])
    torch.testing.assert_close(result.state.model[0], shared, rtol=0, atol=1e-10)
    kept = initial["memory"].clients["own columns"]
    assert kept.shape == (2 * len(SIZES), len(columns.private))
    for i, client in enumerate(clients):
        own = torch.cat([client.state_dict()[n].double().reshape(-1) for n in order if n in home])
        torch.testing.assert_close(kept[i], own, rtol=0, atol=1e-10)
        start = simulation.model.initial(simulation.federation.seeds)[0, columns.private]
        assert torch.equal(kept[i], start) == (head_steps == 0)


@pytest.mark.parametrize("head_steps", [0, 2])
@pytest.mark.parametrize("executor", ["auto", "loop"])
def test_fedrep_trains_the_head_first_and_fedbabu_never(head_steps: int, executor: str) -> None:
    local = FedRep(head_steps, lr=RATE, steps=5, batch_size=3)
    execution = Execution(dtype="float64", executor=executor)
    simulation = simulation_of(build, seeds=(0,), columns=Head(), local=local, execution=execution)
    server, _ = in_turns(simulation, {"3.weight", "3.bias"}, head_steps, EVERYBODY)
    expected = torch.cat([server[n].reshape(-1) for n, _ in build().named_parameters() if n in server])
    torch.testing.assert_close(simulation.run().state.model[0], expected, rtol=0, atol=1e-10)


def test_fedrep_without_a_head_or_without_a_body_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"everything travels; choose columns=fedper"):
        simulation_of(build, local=FedRep(lr=RATE, steps=5))
    with pytest.raises(ConfigError, match=r"head_steps=5 leaves none of local_steps=5"):
        FedRep(5, steps=5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [FedAWE(), FedPBC(), MIFA(), Scaffold(), FedOpt()], ids=lambda s: type(s).__name__)
def test_strategies_meet_the_columns_that_travel_alone(strategy: Any, tmp_path: Any) -> None:
    """Whatever they make of parameters, variances stay positive: nobody extrapolates statistics. And runs resume."""
    given: dict[str, Any] = {
        "strategy": strategy,
        "columns": ByName(stays=["^3", "running", "num"]) if isinstance(strategy, KeepsClientModels) else Head(),
        "availability": Bernoulli(Uniform(0.5)),
        "evaluation": EvaluationOptions(every=1),
    }
    whole = simulation_of(build, rounds=8, **given).run()
    assert whole.state.model.shape == (2, 4 * 6 + 6 + 6)
    assert all(np.isfinite(row["test_loss"]) for row in whole.history)
    quiet = Tracking(progress="none", tensorboard=False)
    simulation_of(build, rounds=5, **given).run(tmp_path, tracking=quiet)
    resumed = simulation_of(build, rounds=8, **given).run(tmp_path, resume=True, tracking=quiet)
    assert torch.equal(resumed.state.model, whole.state.model)
    assert [row["test_loss"] for row in resumed.history] == [row["test_loss"] for row in whole.history]


@pytest.mark.parametrize("strategy", [FedAWE(), FedPBC(), LocalOnly()], ids=lambda s: type(s).__name__)
def test_where_clients_keep_models_statistics_stay_with_them_too(strategy: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"lets clients keep models of their own, and statistics \(1\.running_mean, …\)"
    ):
        simulation_of(build, strategy=strategy)
    simulation_of(build, strategy=strategy, columns=Normalisation())


def test_rows_are_put_together_as_they_were_taken_apart() -> None:
    columns = ParameterPartition(torch.tensor([0, 3, 4]), torch.tensor([1]), torch.tensor([2, 5]))
    rows = torch.arange(12.0).reshape(2, 6)
    assert torch.equal(
        columns.merge_parts(columns.select_shared(rows), rows[:, columns.private], rows[:, columns.averaged]), rows
    )


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        (lambda: ByName(), "give one of the two"),
        (lambda: ByName(["a"], ["b"]), "give one of the two"),
        (lambda: ByName(stays=["("]), r"'\(' is not a regular expression"),
        (lambda: ByName(stays=["convolution"]), r"'convolution' matches none of the model's 0\.weight, 1\.weight"),
        (lambda: ByName(stays=["."]), "nothing of the model travels"),
        (lambda: Head(3), r"columns\.layers=3, but Sequential has 3 layers with parameters"),
    ],
)
def test_a_selector_that_selects_nothing_is_refused(selector: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulation_of(build, columns=selector())


def test_fedbn_needs_batch_normalisation() -> None:
    with pytest.raises(ConfigError, match=r"columns=fedbn keeps layers of batch normalisation.*Linear has none"):
        simulation_of(lambda: nn.Linear(4, 3), columns=Normalisation())


def test_fedavg_is_the_default() -> None:
    given = {"strategy": FedAvg(), "local": SGD(lr=RATE, steps=2, batch_size=3)}
    one, other = (simulation_of(build, **given, **more).run().state.model for more in ({}, {"columns": Everything()}))
    assert torch.equal(one, other)
