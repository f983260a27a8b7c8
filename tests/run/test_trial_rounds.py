"""Parts whose rounds depend on what must make no difference: refused by the stage of the round that shows it, or the
run ends in the round in which it first shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_parts_of_users import QUIET, Mine, simulation
from torch import Tensor, nn

from fedsim import ConfigError, Simulation
from fedsim.availability import Availability
from fedsim.availability.clock import Delay, Devices, Work
from fedsim.availability.clock.clock import Times
from fedsim.core.errors import RunError
from fedsim.data.datasets import Digits
from fedsim.local import SGD, PerFedAvg
from fedsim.local.schedules import Schedule
from fedsim.run.rehearsal import _check_schedule
from fedsim.run.sample_contract import ClientComponentsTrial, _has_single_sample_steps
from fedsim.run.trial_rounds import TrialReplica, trial_replicates
from fedsim.shift import Shift
from fedsim.strategies import State
from fedsim.uplink import Stage

SEEDS = (0, 1)


@pytest.mark.parametrize(
    ("sizes", "batch_size", "single"),
    [([5, 8], 4, True), ([6, 8], 4, False), ([1, 8], 4, True), ([5, 8], 1, True), ([5, 8], None, False)],
)
def test_parts_are_tried_on_one_sample_where_a_batch_of_the_run_has_one(
    sizes: list[int], batch_size: int | None, single: bool
) -> None:
    """The last batch of five samples in batches of four holds one."""
    batches = SimpleNamespace(local_work=SimpleNamespace(batch_size=batch_size))
    run: Any = SimpleNamespace(
        federation=SimpleNamespace(num_samples=np.array([sizes])), trainer=SimpleNamespace(batches=batches)
    )
    assert _has_single_sample_steps(run) == single


def part(base: Any, *arguments: Any, **methods: Any) -> Any:
    """An object of a class derived from a base, with these methods."""
    return type("Part", (base,), methods)(*arguments)


def rule(**methods: Any) -> Any:
    return type("Part", (SGD,), methods)(lr=0.1, steps=2, batch_size=6)


def counting(self: Any) -> int:
    self.calls = getattr(self, "calls", 0) + 1
    return int(self.calls)


def moved(self: Any, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
    return batch | {"x": batch["x"] + 0.1 * theta[:3]}


def remembered(self: Any, federation: Any, dimension: int) -> dict[str, Tensor]:
    return {"last": federation.zeros(dimension)}


def stepped(self: Any, carry: Any, batch: Any, lr: Tensor, objective: Any) -> Any:
    gradient, loss = objective.gradient(carry["params"], batch)
    return carry | {"params": carry["params"] - lr * (gradient + 0.1 * carry["last"]), "last": gradient}, loss


def averaged_with_last(self: Any, server: Any, model: Tensor, t: int = 0) -> Tensor:
    last, self.last = getattr(self, "last", model), model.clone()
    return 0.5 * (model + last)


AGAIN, ALONE = "differs when the same rounds are simulated a second time", "when no other seed is simulated with it"
ROUNDS_OF_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "a delay that counts": (
        {"delay": part(Delay, rounds=lambda self, t, virtual: np.full(len(virtual), counting(self) % 3))},
        rf"delay=Part: what clients send in round \d {AGAIN} \(calls has changed\)",
    ),
    "a delay by position": (
        {"delay": part(Delay, rounds=lambda self, t, virtual: np.arange(len(virtual)) % 3)}, rf"delay=Part.*{ALONE}",
    ),
    "work that counts": (
        {"work": part(Work, steps=lambda self, t, virtual, load: np.full(len(virtual), 1 + counting(self) % 2))},
        rf"work=Part: who computes in round 0 {AGAIN}",
    ),
    "work by position": (
        {"work": part(Work, steps=lambda self, t, virtual, load: 1 + np.arange(len(virtual)) // 5)},
        rf"work=Part.*{ALONE}",
    ),
    "a clock by virtual number": (
        {"clock": type("Part", (Devices,), {
            "times": lambda self, t, virtual, down, up: Times(np.zeros(len(virtual)), 0.1 * (1 + virtual % 3)),
        })(deadline=1.5)},
        rf"clock=Part: who computes in round 0 differs for seed 1 {ALONE}",
    ),
    "a schedule by call": (
        {"local": SGD(schedule=part(Schedule, factor=lambda self, t, k, steps, per_pass=1: 1 / counting(self)))},
        r"schedule=Part: factor\(.*\) is not the same when called twice",
    ),
    "a schedule that is not steady": (
        {"local": SGD(schedule=part(
            Schedule, steady=True, factor=lambda self, t, k, steps, per_pass=1: 1 / (1 + t + k)))},
        "says by steady=True that its factor is constant in a round, and it is not",
    ),
    "a deployed model of all seeds": (
        {"shift": type("Part", (Shift,), {
            "__call__": moved, "deployed": lambda self, server, model, t=0: model.mean(0)[None].expand_as(model),
        })(deploy="round", references="none")},
        rf"shift=Part: what clients send .*{ALONE}",
    ),
    "a deployed model written in place": (
        {"shift": type("Part", (Shift,), {
            "__call__": moved, "deployed": lambda self, server, model, t=0: model.add_(0.01),
        })(deploy="round", references="none")},
        "shift=Part writes into the server's model that it is given",
    ),
    "a shift by row": (
        {"shift": type("Part", (Shift,), {
            "__call__": lambda self, batch, theta: batch | {"x": batch["x"] * (1 + batch["row"])},
        })(references="none")},
        rf"shift=Part: what clients send in round 0 differs for seed 1 {ALONE}",
    ),
    "sums over all seeds after a round": (
        {"local": rule(memory=remembered, step=stepped,
                       after_round=lambda self, memory, cohort: memory["last"].copy_(memory["last"].mean(0)))},
        rf"local=Part: .*{ALONE}",
    ),
    "a start row of all seeds": (
        {"strategy": part(Mine, start=lambda self, state, cohort: (
            cohort.broadcast(state.model) * 0 + state.model.mean(0)))},
        "mixes the clients of different seeds",
    ),
    "a stage by the number of rows": (
        {"uplink": [part(Stage, __call__=lambda self, rows, link: rows / (1 + (len(rows) > 6)))]},
        rf"uplink=\w+: what the server receives .*{ALONE}",
    ),
    "draws in round 5": (
        {"uplink": [part(Stage, __call__=lambda self, rows, link: (
            rows + torch.randn_like(rows) if link.cohort.round == 5 else rows))]},
        "draws from a global random stream in round 5",
    ),
    "an error in round 5": (
        {"uplink": [part(Stage, __call__=lambda self, rows, link: rows * [1, 1, 1, 1, 1][link.cohort.round])]},
        r"uplink.* raised IndexError: .*\(test_trial_rounds.py, line \d+\), in round 5",
    ),
    "a setup that draws": (
        {"shift": type("Part", (Shift,), {
            "__call__": moved, "setup": lambda self, federation, data, model: setattr(self, "scale", torch.rand(())),
        })(references="none")},
        "shift=Part draws from a global random stream while it is set up",
    ),
    "a stage by the number of threads": (
        {"uplink": [part(Stage, __call__=lambda self, rows, link: rows / torch.get_num_threads())]},
        r"uplink=\w+: what the server receives in round 0 differs when PyTorch has \d threads?; a result",
    ),
    "two threads of counts": (
        {"delay": part(Delay, rounds=lambda self, t, virtual: np.full(len(virtual), -1))},
        "must return whole numbers of at least 0, and returns -1",
    ),
    "half a step": (
        {"work": part(Work, steps=lambda self, t, virtual, load: load.steps * 0.5)},
        r"work=Part: steps\(0, …\) must return an array of \d+ whole numbers.* and returns float64",
    ),
}  # fmt: skip


def test_a_schedule_is_tried_in_the_last_round() -> None:
    """Otherwise a table of factors that is one too short would end the run before its last round."""
    short = SGD(steps=2, schedule=part(Schedule, factor=lambda self, t, k, steps, per_pass=1: ([1.0] * 29)[t]))
    batches = SimpleNamespace(longest=[2])
    run: Any = SimpleNamespace(trainer=SimpleNamespace(local_rule=short, batches=batches), rounds=29)
    _check_schedule(run)
    run.rounds = 30
    with pytest.raises(ConfigError, match="schedule=Part raised IndexError: list index out of range"):
        _check_schedule(run)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ROUNDS_OF_PARTS)
def test_a_part_is_named_by_the_stage_that_shows_it(name: str) -> None:
    own, message = ROUNDS_OF_PARTS[name]
    with pytest.raises(ConfigError, match=message) as raised:
        simulation(seeds=SEEDS, rounds=8, **own).run(tracking=QUIET)
    assert "\n" not in str(raised.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("keeps", ["the last model", "the turn of two", "the turn of three"])
def test_what_is_kept_between_rounds_is_found_for_any_number_of_rounds(keeps: str, rounds: int) -> None:
    """A part that takes turns is back where it was after two or three rounds, and after round 0 the last model is the
    initial one."""
    turns = 3 if keeps.endswith("three") else 2

    def steps(self: Any, t: int, virtual: np.ndarray, load: Any) -> np.ndarray:
        return np.full(len(virtual), 1 + (counting(self) % turns == 0))

    own: dict[str, Any] = {"work": part(Work, steps=steps)}
    if keeps == "the last model":
        methods = {"__call__": moved, "deployed": averaged_with_last}
        own = {"shift": type("Part", (Shift,), methods)(deploy="round", references="none")}
    with pytest.raises(ConfigError, match=rf"=Part: .*{AGAIN}"):
        simulation(seeds=SEEDS, rounds=rounds, **own).run(tracking=QUIET)


OF_ALL_SEEDS = {  # parts that are right for one seed alone
    "draws of all seeds at once": {"availability": part(
        Availability,
        probabilities=lambda self, t: np.full(self.population.shape, 0.5),
        counts=lambda self, t: np.random.default_rng(t).integers(0, 2, self.population.shape),
    )},
    "one generator for both replicates of a seed": {"availability": part(
        Availability,
        setup=lambda self, population: (
            Availability.setup(self, population),
            setattr(self, "streams", {seed: np.random.default_rng(seed) for seed in population.seeds}),
            setattr(self, "paths", [self.streams[s].random((9, population.clients)) for s in population.seeds]),
        )[0],
        probabilities=lambda self, t: np.full(self.population.shape, 0.5),
        counts=lambda self, t: (np.stack([path[t] for path in self.paths]) < 0.5).astype(int),
    )},
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OF_ALL_SEEDS)
def test_replicates_with_rates_of_their_own_are_tried_alone_too(name: str) -> None:
    """They are two jobs of a sweep that are folded into one federation, among others."""
    rates = SGD(lr=[0.05, 0.02, 0.1, 0.05], steps=2, batch_size=6)
    with pytest.raises(ConfigError, match=ALONE):
        simulation(seeds=(0, 1, 0, 1), rounds=4, local=rates, **OF_ALL_SEEDS[name]).run(tracking=QUIET)


def test_both_another_seed_and_another_replicate_of_the_first_are_tried() -> None:
    tried = {(0,): [0], (3, 3): [0, 1], (0, 1, 2, 3): [0, 1], (0, 1, 0, 1): [0, 1, 2], (4, 4, 4, 2, 4): [0, 1, 3]}
    assert {seeds: trial_replicates(seeds) for seeds in tried} == tried


@pytest.mark.slow
def test_a_harmless_part_runs_with_rates_of_its_own() -> None:
    settings = {"local": SGD(lr=[0.05, 0.02, 0.1], steps=2, batch_size=6), "seeds": (0, 1, 0), "rounds": 4}
    own = simulation(strategy=part(Mine), **settings).run(tracking=QUIET)
    alone = simulation(strategy=part(Mine), **settings | {"local": rule_of(0.1), "seeds": (0,)}).run(tracking=QUIET)
    assert torch.allclose(own.state.model[2], alone.state.model[0], rtol=1e-10, atol=0)


def rule_of(lr: float) -> SGD:
    return SGD(lr=lr, steps=2, batch_size=6)


class Everybody(Availability):
    """All clients, but for what happens in one round that no trial sees."""

    def probabilities(self, t: int) -> np.ndarray:
        return np.ones(self.population.shape)

    def counts(self, t: int) -> np.ndarray:
        if t == 4:
            self.late()
        return np.ones(self.population.shape)

    def late(self) -> None:
        raise KeyError("round 4")


def test_an_error_in_a_round_that_was_not_tried_ends_the_run_in_one_sentence() -> None:
    with pytest.raises(RunError, match=r"ended in round 4: availability=Everybody raised KeyError: .*round 4.*line"):
        simulation(availability=Everybody(), rounds=6).run(tracking=QUIET)


def test_a_draw_in_a_round_that_was_not_tried_ends_the_run() -> None:
    process = type("Drawing", (Everybody,), {"late": lambda self: torch.rand(())})()
    with pytest.raises(RunError, match="ended in round 4: availability=Drawing drew from a global random stream"):
        simulation(availability=process, rounds=6).run(tracking=QUIET)


def test_an_init_that_forgets_its_base_is_named() -> None:
    made = type("Part", (Shift,), {"__call__": moved, "__init__": lambda self: None})()
    with pytest.raises(ConfigError, match=r"shift=Part has no attribute '\w+', which its base class sets; call super"):
        simulation(shift=made).run(tracking=QUIET)


@dataclass
class TwoFields(State):
    last: Tensor


def noted(self: Any, state: Any, report: Any, t: int) -> Any:
    after = Mine.aggregate(self, state, report, t)
    after.calls = t
    return after


def aliased(self: Any, state: Any, report: Any, t: int) -> Any:
    after = Mine.aggregate(self, state, report, t)
    return replace(after, last=after.model)


def emptied(self: Any, state: Any, report: Any, t: int) -> Any:
    after = Mine.aggregate(self, state, report, t)
    report.samples[:] = 0
    return after


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "an attribute that is no field": ({"aggregate": noted}, "'calls' is an attribute of State and none of its fields"),
    "two fields in one memory": (
        {"aggregate": aliased, "initial": lambda self, model, federation: TwoFields(model, model.clone())},
        "last and model of the next state share memory",
    ),
    "an emptied report": ({"aggregate": emptied}, r"aggregate writes into report\.samples"),
    "an unsorted cohort": (
        {"cohort": lambda self, state, active: active.subset(np.arange(len(active))[::-1].copy())},
        "clients that are not in ascending order, each once",
    ),
    "another precision": (
        {"start": lambda self, state, cohort: cohort.broadcast(state.model).float()},
        r"start must return rows .* float64, one per client, and returns .* float32",
    ),
    "an unknown weighting": ({"weighting": "loss"}, "weighting='loss' is unknown; choose one of uniform, data"),
    "no arrivals": ({"arrivals": 0}, "arrivals=0 must be a whole number of at least 1"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STATES)
def test_what_a_strategy_may_not_return_is_refused(name: str) -> None:
    methods, message = STATES[name]
    with pytest.raises(ConfigError, match=message):
        simulation(strategy=part(Mine, **methods), seeds=SEEDS).run(tracking=QUIET)


def test_a_trial_moves_trained_parameters_and_leaves_running_statistics() -> None:
    """Statistics that are moved may become negative variances, which no model has."""

    def normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

    run = Simulation(Digits(), normalised, clients=3, rounds=1)
    state = run.initial_state()
    trial = ClientComponentsTrial(run, state, run.initial_memory(state))
    rows, models = trial.carry["params"], run.model.initial(run.federation.seeds)
    trained = run.model.trained
    assert torch.equal(rows[:, trained:], models[:, trained:].expand(3, -1))
    assert rows.shape[1] > trained
    assert not torch.isclose(rows[:, :trained], models[:, :trained]).all(1).any()


def test_what_steps_weigh_is_compared_where_they_weigh_gradients() -> None:
    options: dict[str, Any] = {"steps": 1, "batch_size": 6}
    for rule, weighs in ((SGD(**options), True), (PerFedAvg(**options, keep_inner=True), False)):
        stages = TrialReplica(simulation("loop", local=rule), (0,)).run_rounds([0], math.inf)
        sent = next(stage for stage in stages if stage.name == "what clients send").values[0]
        assert ("gradient weight" in sent) == weighs
