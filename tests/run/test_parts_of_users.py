"""Parts that somebody wrote without reading the contract: each is right, or refused in one sentence.

Right is what a loop in double precision gives: one client at a time, on its own batches, the model's gradient by hand.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim import ConfigError, Simulation, Tracking
from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.data.contamination import Contamination
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Partition, Table
from fedsim.evaluation import EvaluationOptions
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.shift import Shift
from fedsim.strategies import FedAvg, State, Strategy
from fedsim.trainer import Execution
from fedsim.uplink import Clip, Stage

QUIET = Tracking(progress="none", tensorboard=False)
SIZES = (9, 2, 5, 13)
LR, BATCH, STEPS, ROUNDS = 0.3, 6, 2, 3
CALLS: dict[str, Any] = {"n": 0, "sum": 0.0}


def data() -> Dataset:
    """Unequal clients, so that batches are padded where clients go together."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x = draw.standard_normal((len(owners), 3)) + owners[:, None] / 4
    y = x @ [1.0, -2.0, 0.5] + owners
    return Dataset("unequal", torch.as_tensor(x), torch.as_tensor(y), loss="squared", owners=torch.as_tensor(owners))


def simulation(executor: str = "auto", **parts: Any) -> Simulation:
    settings: dict[str, Any] = {
        "local": SGD(lr=LR, steps=STEPS, batch_size=BATCH), "rounds": ROUNDS, "clients": len(SIZES),
        "execution": Execution(executor, dtype="float64"),
        "evaluation": EvaluationOptions(every=ROUNDS, client_samples=99),
    }  # fmt: skip
    return Simulation(data(), Linear, **(settings | parts))


def by_hand(run: Simulation, move: Any = None, step: Any = None, rounds: int = ROUNDS) -> Tensor:
    """FedAvg [d]: `move(x, y, θ)` is the shift, `step(θ, gradient, x, lr)` the local rule."""
    step = step or (lambda theta, gradient, x, lr: theta - lr * gradient)
    model = run.initial_state().model[0].clone()
    for t in range(rounds):
        cohort = run.federation.make_cohort(np.ones((1, len(SIZES))), np.ones((1, len(SIZES))), t)
        plan, ends = run.trainer.batches.plan(cohort, t), []
        for client in range(len(SIZES)):
            chunk, theta = plan.chunk(np.array([client])), model.clone()
            for number in range(int(chunk.steps[0])):
                batch = chunk.batch(number, 0, 1, torch.float64)
                x, y = batch["x"][0], batch["y"][0]
                x, y = (x, y) if move is None else move(x, y, theta)
                bias = theta.clone().requires_grad_()
                residual = x @ bias[:3] + bias[3] - y.reshape(-1)
                (gradient,) = torch.autograd.grad(run.model.loss(
                    (residual + y.reshape(-1))[:, None], {"x": x, "y": y}).mean(), bias)  # fmt: skip
                theta = step(theta, gradient, x, LR)
            ends.append(theta)
        model = torch.stack(ends).mean(0)
    return model


def shift(call: Any, **attributes: Any) -> dict[str, Any]:
    made = type("Moving", (Shift,), {"__call__": call, **attributes})(references="none")
    return {"shift": made}


def local(step: Any, **attributes: Any) -> dict[str, Any]:
    made = type("Rule", (SGD,), {"step": step, **attributes})(lr=LR, steps=STEPS, batch_size=BATCH)
    return {"local": made}


def centred(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x - x.mean(0) + 0.1 * theta[:3], y


def ranked(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x.sort(0).values + 0.1 * theta[:3], y


def counted(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0.1 * theta[:3] / len(x), y


def only_large(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return (x - x.mean(0) if len(x) >= 4 else x) + 0.1 * theta[:3], y


def branching(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return (x + 0.1 if theta.norm() > 0.5 else x - 0.1), y


def last_row(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0.05 * x[-1] + 0.1 * theta[:3], y


def plain(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0.1 * theta[:3], y


def moving(move: Any) -> Any:
    def call(self: Any, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        x, y = move(batch["x"], batch["y"], theta)
        return batch | {"x": x, "y": y}

    return call


MOVES = {move.__name__: move for move in (centred, ranked, counted, only_large, branching, last_row, plain)}


@pytest.mark.parametrize("name", MOVES)
def test_a_shift_moves_each_clients_batch_as_it_is(name: str) -> None:
    run = simulation(**shift(moving(MOVES[name])))
    result = run.run(tracking=QUIET)
    torch.testing.assert_close(result.state.model[0], by_hand(run, MOVES[name]), rtol=0, atol=1e-10)
    assert run.shift.runs_unpadded == (name != "plain")
    owners, theta, losses = run.dataset.owners, result.state.model[0], []
    for client in range(len(SIZES)):
        own = owners == client
        x, y = MOVES[name](run.dataset.train_x[own].double(), run.dataset.train_y[own].double(), theta)
        output = (x @ theta[:3] + theta[3])[:, None]
        losses.append(run.model.loss(output, {"x": x, "y": y}).mean())
    assert result.final["performative_loss"][0] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-10)


def test_references_of_a_shift_that_looks_at_the_batch_are_those_without_padding() -> None:
    """θ^PS of x − x.mean(0), which does not answer θ: least squares on every client's centred inputs."""
    made = type("Centring", (Shift,), {"__call__": moving(lambda x, y, theta: (x - x.mean(0), y))})
    run = simulation(shift=made(references="always"), rounds=1)
    run.run(tracking=QUIET)
    gram, right = torch.zeros(4, 4).double(), torch.zeros(4).double()
    for client in range(len(SIZES)):
        own = run.dataset.owners == client
        x = run.dataset.train_x[own].double()
        x = torch.cat([x - x.mean(0), torch.ones(len(x), 1)], 1).double()
        gram += x.T @ x / len(x)
        right += x.T @ run.dataset.train_y[own].double() / len(x)
    torch.testing.assert_close(run.references["distance_to_ps"][0], torch.linalg.solve(gram, right), rtol=0, atol=1e-6)


STEPS_OF_USERS: dict[str, Any] = {
    "mean of the batch": lambda theta, g, x, lr: theta - lr * (g + 0.1 * x.mean()),
    "size of the batch": lambda theta, g, x, lr: theta - lr * g / len(x),
    "clip by a branch": lambda theta, g, x, lr: theta - lr * (g / g.norm() if g.norm() > 1 else g),
    "item": lambda theta, g, x, lr: theta - lr * g * min(1.0, 1 / (1e-9 + g.norm().item())),
    "last sample": lambda theta, g, x, lr: theta - lr * g * (1 + 0.1 * x[-1].tanh().sum()),
    "a while loop": lambda theta, g, x, lr: _shrunk(theta, lr * g),
    "plain": lambda theta, g, x, lr: theta - lr * g,
}


def _shrunk(theta: Tensor, step: Tensor) -> Tensor:
    while step.abs().max() > 0.5:
        step = step / 2
    return theta - step


@pytest.mark.parametrize("name", STEPS_OF_USERS)
def test_a_local_rule_meets_each_clients_batch_as_it_is(name: str) -> None:
    how = STEPS_OF_USERS[name]

    def step(self: Any, carry: Any, batch: Any, lr: Tensor, objective: Any) -> Any:
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | {"params": how(carry["params"], gradient, batch["x"], lr)}, loss

    run = simulation(**local(step))
    torch.testing.assert_close(run.run(tracking=QUIET).state.model[0], by_hand(run, step=how), rtol=0, atol=1e-10)
    assert ("loop" in run.trainer.executor_choice.executor) == (name != "plain")


def test_the_reason_is_logged_and_another_executor_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fedsim"):
        simulation(**shift(moving(centred))).run(tracking=QUIET)
    assert "shift=Moving gives other samples where a batch is padded" in caplog.text
    with pytest.raises(ConfigError, match=r"trainer\.executor=vmap cannot be used here: shift=Moving gives other"):
        simulation("vmap", **shift(moving(centred))).run(tracking=QUIET)


class Holder:
    """An object that a part may hold."""

    def __init__(self) -> None:
        self.total: Any = 0.0


def remembering(make: Any, use: Any) -> Any:
    """A shift and a local rule with a memory: `make(self)` what is kept, `use(self, value)` a number of the past."""

    def call(self: Any, batch: Any, theta: Tensor) -> Any:
        return batch | {"x": batch["x"] + use(self, batch["x"])}

    def step(self: Any, carry: Any, batch: Any, lr: Tensor, objective: Any) -> Any:
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | {"params": carry["params"] - lr * (gradient + use(self, batch["x"]))}, loss

    def setup(self: Any, *whatever: Any) -> None:
        make(self)

    return shift(call, setup=setup) | local(step, setup=setup)


def _attribute(self: Any, x: Tensor) -> float:
    self._past = 0.5 * self._past + 0.01
    return float(self._past)


def _array(self: Any, x: Tensor) -> float:
    self.past += 0.01
    return float(self.past[0])


def _nested(self: Any, x: Tensor) -> float:
    self.holder.total += 0.01
    return float(self.holder.total)


def _queue(self: Any, x: Tensor) -> float:
    self.queue.append(float(self.queue[-1] + 0.01))
    return float(sum(self.queue))


def _global(self: Any, x: Tensor) -> float:
    CALLS["sum"] += 0.01
    return float(CALLS["sum"])


class Classed:
    total: ClassVar[list[float]] = [0.0]


def _of_class(self: Any, x: Tensor) -> float:
    Classed.total[0] += 0.01
    return Classed.total[0]


def _default(self: Any, x: Tensor, past: list[float] = [0.0]) -> float:  # noqa: B006 (what is refused)
    past[0] += 0.01
    return past[0]


def _late(self: Any, x: Tensor) -> float:
    self.calls += 1
    return 0.01 * self.calls if self.calls > 4 else 0.0


def _much_later(self: Any, x: Tensor) -> float:
    self.calls += 1
    return 0.5 if self.calls > 500 else 0.0


def _generator(self: Any, x: Tensor) -> float:
    return float(self.draw.random())


def _iterator(self: Any, x: Tensor) -> float:
    return 0.01 * next(self.counter)


FIRST: dict[str, float] = {}


class OfFirst:
    mean: ClassVar[float | None] = None


def _first_of_all(self: Any, x: Tensor) -> float:
    return FIRST.setdefault("mean", float(x.mean()))


def _first_in_a_class(self: Any, x: Tensor) -> float:
    if OfFirst.mean is None:
        OfFirst.mean = float(x.mean())
    return OfFirst.mean


def _first_in_an_attribute(self: Any, x: Tensor) -> float:
    if self.mean is None:
        self.mean = float(x.mean())
    return float(self.mean)


MEMORIES: dict[str, tuple[Any, Any, str]] = {
    "a private attribute": (lambda self: setattr(self, "_past", 0.0), _attribute, "_past"),
    "an array": (lambda self: setattr(self, "past", np.zeros(2)), _array, "past"),
    "a nested object": (lambda self: setattr(self, "holder", Holder()), _nested, r"holder\.total"),
    "a queue": (lambda self: setattr(self, "queue", deque([0.0], 3)), _queue, r"queue\["),
    "a global": (lambda self: None, _global, "global 'CALLS'"),
    "a class": (lambda self: None, _of_class, r"Classed\.total"),
    "a default argument": (lambda self: None, _default, "default argument 'past'"),
    "late": (lambda self: setattr(self, "calls", 0), _late, "calls"),
    "after five hundred calls": (lambda self: setattr(self, "calls", 0), _much_later, "calls"),
    "a generator of its own": (lambda self: setattr(self, "draw", np.random.default_rng(0)), _generator, "draw"),
    "a counter": (lambda self: setattr(self, "counter", itertools.count()), _iterator, "counter"),
    "of the first batch, in a global": (lambda self: None, _first_of_all, "global 'FIRST'"),
    "of the first batch, in a class": (lambda self: None, _first_in_a_class, r"OfFirst\.mean"),
    "of the first batch": (lambda self: setattr(self, "mean", None), _first_in_an_attribute, "mean"),
}


@pytest.mark.parametrize("part", ["shift", "local"])
@pytest.mark.parametrize("name", MEMORIES)
def test_memory_in_attributes_is_refused_by_its_name(name: str, part: str) -> None:
    make, use, place = MEMORIES[name]
    own = remembering(make, use)[part]
    with pytest.raises(ConfigError, match=rf"{part}=\w+ (remembers|counts) in .*{place}.*`memory`"):
        simulation(**{part: own}).run(tracking=QUIET)


CONSTANTS: dict[int, Tensor] = {}


def test_constants_computed_when_first_needed_are_welcome() -> None:
    def cached(x: Tensor) -> Tensor:
        return CONSTANTS.setdefault(x.shape[-1], torch.full((x.shape[-1],), 0.25, dtype=x.dtype))

    def step(self: Any, carry: Any, batch: Any, lr: Tensor, objective: Any) -> Any:
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | {"params": carry["params"] - lr * cached(batch["x"])[0] * gradient}, loss

    simulation(**local(step)).run(tracking=QUIET)


def test_what_a_trial_wrote_is_put_back_so_that_the_next_simulation_is_refused_too() -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="global 'FIRST'"):
            simulation(local=remembering(lambda self: None, _first_of_all)["local"]).run(tracking=QUIET)
    assert not FIRST


def test_notes_that_matter_to_nothing_are_welcome() -> None:
    def noting(self: Any, batch: Any, theta: Tensor) -> Any:
        self.notes = [*getattr(self, "notes", ()), len(batch["x"])]
        self.calls = getattr(self, "calls", 0) + 1
        return batch | {"x": batch["x"] + 0.1 * theta[:3]}

    run = simulation("loop", **shift(noting))
    torch.testing.assert_close(run.run(tracking=QUIET).state.model[0], by_hand(run, plain), rtol=0, atol=1e-10)
    assert run.shift.calls > 0


class Rot(Contamination):
    """The mean of the batch in the place of its first sample."""

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        x = torch.cat([batch["x"].mean(1, keepdim=True), batch["x"][:, 1:]], 1)
        first = torch.zeros(x.shape[:2], dtype=torch.bool)
        first[:, 0] = True
        return batch | {"x": x, "contaminated": first}


def test_a_contamination_that_looks_at_the_batch() -> None:
    def rotten(x: Tensor, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x.mean(0, keepdim=True), x[1:]]), y

    run = simulation(contamination=Rot())
    torch.testing.assert_close(run.run(tracking=QUIET).state.model[0], by_hand(run, rotten), rtol=0, atol=1e-10)


@dataclass
class Counted(State):
    rounds: Tensor


class Mine(Strategy[Any]):
    """FedAvg, whose step cases change."""

    def aggregate(self, state: Any, report: Any, t: int) -> Any:
        mean = report.cohort.mean(report.innovation)
        return replace(state, model=report.cohort.where_nonempty(state.model - mean, state.model))


def strategy(aggregate: Any, **attributes: Any) -> Any:
    return type("Mine", (Mine,), {"aggregate": aggregate, **attributes})()


def by_count(self: Any, state: Any, report: Any, t: int) -> Any:
    return replace(state, model=state.model - report.cohort.sum(report.innovation) / max(len(report.end), 1))


def later_mixing(self: Any, state: Any, report: Any, t: int) -> Any:
    mean = report.cohort.mean(report.innovation)
    return replace(state, model=state.model - (mean.mean(0) if t else mean))


def second_round_mixing(self: Any, state: Any, report: Any, t: int) -> Any:
    mean = report.cohort.mean(report.innovation)
    return replace(state, model=state.model - (mean.flip(0) if t == 2 else mean))


def later_drawing(self: Any, state: Any, report: Any, t: int) -> Any:
    noise = torch.randn_like(state.model) if t else 0
    return replace(state, model=state.model - report.cohort.mean(report.innovation) + noise)


def later_raising(self: Any, state: Any, report: Any, t: int) -> Any:
    return replace(state, model=state.model - [0.1, 0.2][t] * report.cohort.mean(report.innovation))


def by_largest(self: Any, state: Any, report: Any, t: int) -> Any:
    mean = report.cohort.mean(report.innovation)
    return replace(state, model=state.model - mean / (1 + mean.abs().max()))


def sorted_rows(self: Any, state: Any, report: Any, t: int) -> Any:
    first = report.innovation[torch.searchsorted(report.cohort.replicate_index, torch.arange(len(state.model)))]
    return replace(state, model=state.model - first)


def counting_calls(self: Any, state: Any, report: Any, t: int) -> Any:
    self._calls = getattr(self, "_calls", 0) + 1
    return replace(state, model=state.model - report.cohort.mean(report.innovation) / self._calls)


def in_a_global(self: Any, state: Any, report: Any, t: int) -> Any:
    CALLS["n"] += 1
    return replace(state, model=state.model - report.cohort.mean(report.innovation) * (1 + CALLS["n"] % 7))


BY_ROUND: dict[int, Tensor] = {}


def by_round_in_a_global(self: Any, state: Any, report: Any, t: int) -> Any:
    BY_ROUND[t] = report.cohort.mean(report.innovation)
    return replace(state, model=state.model - BY_ROUND[t] - 0.5 * BY_ROUND.get(t - 1, 0 * BY_ROUND[t]))


def counting_to_a_thousand(self: Any, state: Any, report: Any, t: int) -> Any:
    self.calls = getattr(self, "calls", 0) + 1
    return replace(state, model=state.model - report.cohort.mean(report.innovation) * (1 if self.calls < 1000 else 2))


def empty_nan(self: Any, state: Any, report: Any, t: int) -> Any:
    count = report.cohort.sum(torch.ones_like(report.loss))
    return replace(state, model=state.model - report.cohort.sum(report.innovation) / count[:, None])


def other_shape_later(self: Any, state: Any, report: Any, t: int) -> Any:
    return replace(state, model=state.model if t < 2 else state.model[:1])


class HalfOfTheTime(Availability):
    """Unequal numbers of clients, sometimes nobody."""

    def probabilities(self, t: int) -> np.ndarray:
        return np.full(self.population.shape, 0.5)

    def counts(self, t: int) -> np.ndarray:
        seeds = self.population.seeds
        return np.stack([np.random.default_rng([seed, t]).integers(0, 2, self.population.clients) for seed in seeds])


def from_round_three(self: Any, state: Any, report: Any, t: int) -> Any:
    return by_count(self, state, report, t) if t >= 3 else Mine.aggregate(self, state, report, t)


def in_the_last_round(self: Any, state: Any, report: Any, t: int) -> Any:
    return by_count(self, state, report, t) if t == 4 else Mine.aggregate(self, state, report, t)


def first_norm_in_a_global(self: Any, state: Any, report: Any, t: int) -> Any:
    scale = FIRST.setdefault("norm", float(report.innovation.norm()))
    return replace(state, model=state.model - report.cohort.mean(report.innovation) * scale)


STRATEGIES: dict[str, tuple[Any, str | None]] = {
    "mixing from round 3 on": (from_round_three, "mixes the clients of different seeds.*in round 3"),
    "mixing in the last round": (in_the_last_round, "mixes the clients of different seeds.*in round 4"),
    "the first norm in a global": (first_norm_in_a_global, "make it a field of its State"),
    "by the number of all rows": (by_count, "mixes the clients of different seeds"),
    "mixing from round 1 on": (later_mixing, "mixes the clients of different seeds.*in round 1"),
    "mixing in round 2": (second_round_mixing, "mixes the clients of different seeds.*in round 2"),
    "drawing from round 1 on": (later_drawing, "in round 1 draws from a global random stream"),
    "raising in round 2": (later_raising, r"in round 2 raised IndexError: .*\(test_parts_of_users.py, line \d+\)"),
    "by the largest of all seeds": (by_largest, "mixes the clients of different seeds"),
    "the first client's": (sorted_rows, r"Mine raised IndexError: index is out of bounds .*test_parts_of_users"),
    "a counter of calls": (counting_calls, r"\(_calls\).*make it a field of its State"),
    "a counter in a global": (in_a_global, "make it a field of its State"),
    "the round before in a global": (by_round_in_a_global, "make it a field of its State"),
    "a counter that matters late": (counting_to_a_thousand, r"\(calls\).*make it a field of its State"),
    "no number where nobody came": (empty_nan, "the model is not finite after a round in which no clients took part"),
    "another shape in round 2": (other_shape_later, r"model must stay .* in the next state"),
    "plain": (Mine.aggregate, None),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_keeps_replicates_apart_in_all_rounds(name: str) -> None:
    aggregate, message = STRATEGIES[name]
    own = {"availability": HalfOfTheTime(), "seeds": (0, 1)}
    run = simulation(strategy=strategy(aggregate), rounds=5 if "round" in name else ROUNDS, **own)
    if message is None:
        together = run.run(tracking=QUIET).state.model
        for place, seed in enumerate((0, 1)):
            alone = simulation(strategy=FedAvg(), availability=HalfOfTheTime(), seeds=(seed,)).run(tracking=QUIET)
            torch.testing.assert_close(together[place], alone.state.model[0], rtol=0, atol=1e-12)
        return
    with pytest.raises(ConfigError, match=message) as told:
        run.run(tracking=QUIET)
    assert "\n" not in str(told.value)


def test_rates_may_depend_on_round_and_seed() -> None:
    """A strategy made for two seeds cannot be tried with one; it is tried with other clients of the first instead."""
    rates = torch.tensor([[0.5], [1.0]], dtype=torch.float64)

    def falling(self: Any, state: Any, report: Any, t: int) -> Any:
        return replace(state, model=state.model - report.cohort.mean(report.innovation) / (t + 1))

    def of_each_seed(self: Any, state: Any, report: Any, t: int) -> Any:
        return replace(state, model=state.model - rates * report.cohort.mean(report.innovation))

    def of_both_seeds(self: Any, state: Any, report: Any, t: int) -> Any:
        return replace(state, model=state.model - rates * report.cohort.mean(report.innovation).mean(0))

    for aggregate in (falling, of_each_seed):
        run = simulation(strategy=strategy(aggregate), seeds=(0, 1))
        assert torch.isfinite(run.run(tracking=QUIET).state.model).all()
    with pytest.raises(ConfigError, match="mixes the clients of different seeds"):
        simulation(strategy=strategy(of_both_seeds), seeds=(0, 1)).run(tracking=QUIET)


def test_a_strategy_for_a_fixed_number_of_clients_runs_where_there_are_so_many() -> None:
    def reshaped(self: Any, state: Any, report: Any, t: int) -> Any:
        rows = report.innovation.reshape(len(state.model), len(SIZES), -1)
        return replace(state, model=state.model - rows.median(1).values)

    run = simulation(strategy=strategy(reshaped), seeds=(0, 1))
    assert torch.isfinite(run.run(tracking=QUIET).state.model).all()
    with pytest.raises(ConfigError, match="raised RuntimeError"):
        simulation(strategy=strategy(reshaped), seeds=(0, 1), availability=HalfOfTheTime()).run(tracking=QUIET)


def _advancing(self: Any, t: int) -> np.ndarray:
    self.draw = getattr(self, "draw", None) or np.random.default_rng(0)
    return self.draw.integers(0, 2, self.population.shape)


def _from_one_to_the_next(self: Any, t: int) -> np.ndarray:
    self.state = 1 - getattr(self, "state", np.zeros(self.population.shape, dtype=int))
    return self.state


def _of_a_class(self: Any, t: int) -> np.ndarray:
    Classed.total[0] += 1
    return np.full(self.population.shape, int(Classed.total[0]) % 2)


def _counting_to_a_hundred(self: Any, t: int) -> np.ndarray:
    self.asked = getattr(self, "asked", 0) + 1
    return np.full(self.population.shape, int(self.asked < 100))


def _shared_seeds(self: Any, t: int) -> np.ndarray:
    return np.random.default_rng(t + Known.seeds[0]).integers(0, 2, self.population.shape)


class Known:
    """What is kept of the last population that was set up."""

    seeds: ClassVar[tuple[int, ...]] = (0,)


def _keep_seeds(self: Any, population: Any) -> None:
    Availability.setup(self, population)
    Known.seeds = population.seeds


AVAILABILITY: dict[str, tuple[dict[str, Any], str]] = {
    "a generator that goes on": ({"counts": _advancing}, "not the same when called twice .*draw"),
    "from one round to the next": ({"counts": _from_one_to_the_next}, "not the same when called twice .*state"),
    "in a class": ({"counts": _of_a_class}, "not the same when called twice .*Classed"),
    "of the last simulation": ({"counts": _shared_seeds, "setup": _keep_seeds}, r"not the same when called twice"),
    "counted to a hundred": ({"counts": _counting_to_a_hundred}, "its results depend on asked, which changes when"),
    "halves": (
        {"counts": lambda self, t: np.full(self.population.shape, 0.5)},
        r"counts\(0\) of client 0 is 0.5, and a client participates a whole number of times",
    ),
    "a tensor": ({"counts": lambda self, t: torch.ones(self.population.shape)}, "must be an array .* and is Tensor"),
    "wrong in round 2": (
        {"counts": lambda self, t: np.full(self.population.shape, 1 - t)},
        r"counts\(2\) of client 0 is -1",
    ),
}


@pytest.mark.parametrize("name", AVAILABILITY)
def test_an_availability_process_is_a_function_of_seed_and_round(name: str) -> None:
    methods, message = AVAILABILITY[name]
    process = type("Own", (HalfOfTheTime,), methods)()
    with pytest.raises(ConfigError, match=message):
        simulation(availability=process, seeds=(0, 1)).run(tracking=QUIET)


def split(how: Any, **attributes: Any) -> Partition:
    return type("Deal", (Partition,), {"split": how, **attributes})()


def _in_turn(samples: Any, clients: int) -> list[np.ndarray]:
    return [np.arange(client, samples.count, clients) for client in range(clients)]


def _global_draw(self: Any, samples: Any, clients: int, draw: Any) -> Any:
    return np.array_split(np.random.permutation(samples.count), clients)  # noqa: NPY002 (what is refused)


def _own_draw(self: Any, samples: Any, clients: int, draw: Any) -> Any:
    self.draw = getattr(self, "draw", None) or np.random.default_rng(0)
    return np.array_split(self.draw.permutation(samples.count), clients)


def _by_entropy(self: Any, samples: Any, clients: int, draw: Any) -> Any:
    return np.array_split(np.random.default_rng().permutation(samples.count), clients)


def _sorting(self: Any, samples: Any, clients: int, draw: Any) -> Any:
    samples.owners.sort()
    return _in_turn(samples, clients)


def changed_split(change: Any) -> Any:
    return lambda self, samples, clients, draw: change(_in_turn(samples, clients), samples)


PARTITIONS: dict[str, tuple[Any, str]] = {
    "NumPy's global stream": (_global_draw, "draws from a global random stream"),
    "a generator that goes on": (_own_draw, r"in another way when it is called twice.*draw"),
    "entropy": (_by_entropy, r"called twice for seed 0; draw by the generator that split is given"),
    "sorting in place": (_sorting, "raised ValueError: .*read-only"),
    "out of range": (changed_split(lambda p, s: [p[0] + s.count, *p[1:]]), r"gives client 0 sample 29, but .* 0 to 28"),
    "negative": (changed_split(lambda p, s: [*p[:2], -1 - p[2], p[3]]), r"gives client 2 sample -\d+"),
    "a sample twice": (changed_split(lambda p, s: [p[0], p[0], *p[2:]]), "assigns a sample to two clients"),
    "nothing for one": (changed_split(lambda p, s: [p[0][:0], *p[1:]]), "leaves 1 of clients=4 without samples"),
    "too few clients": (changed_split(lambda p, s: p[:3]), "makes 3 clients, but clients=4"),
    "too many": (changed_split(lambda p, s: [*p, p[0]]), "makes 5 clients, but clients=4"),
    "masks": (changed_split(lambda p, s: [np.isin(np.arange(s.count), q) for q in p]), r"bool.*np\.flatnonzero"),
    "fractions": (changed_split(lambda p, s: [q / 2 for q in p]), "whole sample numbers, and holds float64"),
    "None": (lambda *_: None, "must return a list .*, and returns None"),
    "a number": (lambda *_: 3, "returns int"),
    "two dimensions": (
        changed_split(lambda p, s: [q[:, None] for q in p]),
        r"one-dimensional .* holds int64 \[\d, 1\]",
    ),
    "a table of its own": (
        lambda self, s, m, draw: Table(np.arange(s.count), np.array([0, 3, 2, 9, s.count])),
        "offsets of a Table must rise",
    ),
    "its own error": (lambda self, s, m, draw: s.nothing, r"raised AttributeError: .*\(test_parts_of_users.py"),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_deals_out_what_there_is_the_same_every_time(name: str) -> None:
    how, message = PARTITIONS[name]
    with pytest.raises(ConfigError, match=message) as told:
        simulation(partition=split(how))
    assert "\n" not in str(told.value)
    assert "Deal" in str(told.value)


def test_a_partition_by_its_own_generator_or_by_what_it_is_given_is_welcome() -> None:
    by_given = split(lambda self, s, m, draw: np.array_split(draw.permutation(s.count), m))
    by_seed = split(lambda self, s, m, draw: np.array_split(np.random.default_rng(3).permutation(s.count), m))
    for own in (by_given, by_seed, split(lambda self, s, m, draw: [list(p) for p in _in_turn(s, m)])):
        one, other = (simulation(partition=own).partition_tables[0].order for _ in range(2))
        assert np.array_equal(one, other)


def stage(call: Any, **attributes: Any) -> list[Stage]:
    return [Clip(1.0), type("Sending", (Stage,), {"__call__": call, **attributes})()]


def _written(self: Any, rows: Tensor, link: Any) -> Tensor:
    return rows.mul_(0.5)


def _error_feedback(self: Any, rows: Tensor, link: Any) -> Tensor:
    self.left = getattr(self, "left", 0.0) + float(rows.abs().sum())
    return rows * (1 + self.left)


def _keyed(self: Any, rows: Tensor, link: Any) -> Tensor:
    return rows + 0.1 * rng.normal(link.keys[:, None], torch.arange(rows.shape[1]), rows.dtype)


def _sorted(self: Any, rows: Tensor, link: Any) -> Tensor:
    return rows.flip(0)


STAGES: dict[str, tuple[Any, str | None]] = {
    "in place": (_written, "writes into the rows that it is given"),
    "half of them": (lambda self, rows, link: rows[: len(rows) // 2], r"must return rows \[\d, 4\] float64"),
    "another precision": (
        lambda self, rows, link: rows.float(),
        r"rows .* float64, and returns .* float32",
    ),
    "nothing": (lambda self, rows, link: None, "returns None"),
    "a global stream": (lambda self, rows, link: rows + torch.randn_like(rows), "draws from a global random stream"),
    "memory in attributes": (_error_feedback, "remembers in left .*`memory`"),
    "by the mean of all rows": (lambda self, rows, link: rows - rows.mean(0), "mixes the clients of different seeds"),
    "by the largest of all rows": (
        lambda self, rows, link: rows / (1 + rows.abs().max()),
        r"in round 2 raised .*max\(\)",
    ),
    "by the sum of all rows": (
        lambda self, rows, link: rows / (1 + rows.abs().sum()),
        "mixes the clients of different seeds",
    ),
    "in another order": (_sorted, "mixes the clients of different seeds"),
    "raising where nobody is": (lambda self, rows, link: rows / rows[0].norm(), "raised IndexError"),
    "keyed": (_keyed, None),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_of_the_uplink_is_a_function_of_rows_and_keys(name: str) -> None:
    call, message = STAGES[name]
    run = simulation(uplink=stage(call), seeds=(0, 1))
    if message is None:
        assert torch.isfinite(run.run(tracking=QUIET).state.model).all()
        return
    with pytest.raises(ConfigError, match=message) as told:
        run.run(tracking=QUIET)
    assert "\n" not in str(told.value)


def test_nothing_is_written_where_a_part_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError):
        simulation(strategy=strategy(later_raising), seeds=(0, 1)).run(tmp_path / "run", tracking=QUIET)
    assert not (tmp_path / "run").exists()


class Rotten(Contamination):
    """Fails at whatever it is given."""

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        raise IndexError("nothing there")


def test_a_contamination_that_fails_is_named() -> None:
    with pytest.raises(ConfigError, match="contamination=Rotten raised IndexError: nothing there"):
        simulation(contamination=Rotten()).run(tracking=QUIET)
