"""A step that is replayed is the step: the same bits, whatever varies; and what may vary is not recorded."""

from __future__ import annotations

import pytest
import torch
from stackable_models import simulation_of
from torch import nn

from fedsim import Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError
from fedsim.data.contamination import Gaussian
from fedsim.data.datasets import Digits, GaussianMean
from fedsim.evaluation import EvaluationOptions
from fedsim.local import APFL, DFO, SGD, PerFedAvg, PFedMe, ProFL
from fedsim.local.schedules import Inverse
from fedsim.models import MLP, Linear, Mean
from fedsim.shift import Location
from fedsim.strategies import FedProx, Scaffold
from fedsim.trainer import Execution, replay
from fedsim.trainer.replay import OperationRecording, Replay, returns_equal_tensors

WORK = {"lr": 0.05, "steps": 3, "batch_size": 4}


def means(rule, shift=None, compile: str = "replay", **options) -> Simulation:
    shift = shift or Location(0.6, 0.1, references="none")
    return Simulation(
        GaussianMean(6), Mean, clients=6, rounds=6, local=rule, shift=shift, seeds=(2, 5),
        evaluation=EvaluationOptions(every=2), execution=Execution("vmap", compile=compile), **options,
    )  # fmt: skip


def labelled(rule, compile: str = "replay", **options) -> Simulation:
    model = options.pop("model", lambda shape, classes: MLP(shape, classes, hidden=[5], dropout=0.3))
    return simulation_of(model, rule, rounds=5, execution=Execution("vmap", compile=compile), **options)


SOMETIMES = Bernoulli(Uniform(0.6))
COMPOSITIONS = {
    "means": lambda c: means(SGD(**WORK, schedule=Inverse(offset=10)), compile=c),
    "means with inertia": lambda c: means(SGD(**WORK), Location(0.5, inertia=0.3, references="none"), c),
    "deployed by round": lambda c: means(SGD(**WORK), Location(0.5, deploy="round", references="none"), c),
    "some come": lambda c: means(SGD(**WORK), compile=c, availability=SOMETIMES),
    "contaminated": lambda c: means(SGD(**WORK), compile=c, contamination=Gaussian(fraction=0.4)),
    "ProFL": lambda c: means(ProFL(**WORK), compile=c),
    "derivative-free": lambda c: means(DFO(points=1, **WORK | {"lr": 1e-4}), compile=c),
    "dropout": lambda c: labelled(SGD(**WORK, clip=0.5), c, availability=SOMETIMES),
    "unequal epochs": lambda c: labelled(SGD(lr=0.05, epochs=2, batch_size=3, drop_last=False, clip=1.0), c),
    "perFedAvg": lambda c: labelled(PerFedAvg(**WORK), c),
    "pFedMe": lambda c: labelled(PFedMe(**WORK), c),
    "APFL": lambda c: labelled(APFL(**WORK, alpha_every="step"), c),
    "FedProx": lambda c: labelled(SGD(**WORK, clip=2.0), c, strategy=FedProx(0.5)),
    "SCAFFOLD": lambda c: labelled(SGD(**WORK, clip=2.0), c, strategy=Scaffold()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_replayed_steps_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third time that the same shapes are met on; here everything varies that may: rates, keys, who comes."""
    monkeypatch.setattr(replay, "RECORDING_COST_IN_CALLS", 2)
    recorded = []
    made = replay.OperationRecording.__init__
    monkeypatch.setattr(
        replay.OperationRecording, "__init__", lambda self, *a: (recorded.append(self), made(self, *a))[1]
    )
    replayed = COMPOSITIONS[name]("replay").run()
    assert recorded
    recorded.clear()
    plain = COMPOSITIONS[name]("never").run()
    assert not recorded
    assert torch.equal(replayed.state.model, plain.state.model)
    for left, right in zip(replayed.history, plain.history, strict=True):
        assert left == pytest.approx(right | {"seconds": left["seconds"]}, rel=0, abs=0, nan_ok=True)


def test_few_recordings_serve_whoever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are filled up to a few numbers; what was filled in is no result, and changes none."""
    monkeypatch.setattr(replay, "RECORDING_COST_IN_CALLS", 0)
    options = {"clients": 40, "rounds": 30, "availability": Bernoulli(Uniform(0.5)), "seeds": (1,)}

    def drawn(compile: str) -> Simulation:
        return Simulation(
            GaussianMean(40), Mean, local=SGD(**WORK), shift=Location(0.6, references="none"),
            execution=Execution("vmap", compile=compile), **options,
        )  # fmt: skip

    simulation, plain = drawn("replay"), drawn("never").run()
    result = simulation.run()
    assert torch.equal(result.state.model, plain.state.model)
    assert [row["samples"] for row in result.history] == [row["samples"] for row in plain.history]
    met = {simulation.trainer.executor.padded_size(round(row["active_clients"])) for row in result.history}
    assert len(simulation.trainer.executor._shift_and_step_function._recordings) <= 12
    assert met <= {0, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40}


@pytest.mark.parametrize(("rows", "room"), [(1, 1), (7, 7), (9, 10), (33, 40), (40, 40), (75, 80), (2**15 + 1, 40960)])
def test_rows_are_filled_up_by_a_quarter_at_most(rows: int, room: int) -> None:
    assert means(SGD(**WORK)).trainer.executor.padded_size(rows) == room
    assert means(SGD(**WORK), compile="never").trainer.executor.padded_size(rows) == rows
    large = Simulation(Digits(), Linear, clients=4, local=SGD(**WORK, clip=1.0), execution=Execution("vmap"))
    assert large.trainer.executor.padded_size(101) == 101  # their arithmetic is what takes time


def test_shapes_are_recorded_apart() -> None:
    calls = []

    def doubled(x: torch.Tensor, more: dict[str, torch.Tensor], nothing: None) -> tuple[dict[str, torch.Tensor], None]:
        calls.append(len(x))
        return {"y": x * 2 + torch.ones_like(x), **more}, nothing

    replayed = Replay(doubled, recording_cost=1)
    for n in (2, 2, 2, 3, 3, 3, 2, 3):
        x = torch.rand(n)
        out, nothing = replayed(x, {"z": x + 1}, None)
        assert nothing is None
        assert list(out) == ["y", "z"]
        assert torch.equal(out["y"], x * 2 + 1)
        assert torch.equal(out["z"], x + 1)
    assert calls == [2, 2, 3, 3]  # once as it is, and once to be recorded
    column = torch.rand(3, 2)[:, 0]  # strides count too
    assert torch.equal(replayed(column, {"z": column}, None)[0]["y"], column * 2 + 1)
    assert calls[4:] == [3]


def test_what_is_written_in_place_or_handed_out_is_made_anew() -> None:
    def summed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros_like(x)
        total += x
        return total, torch.ones_like(x)

    def handed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.ones_like(x)

    for function in (summed, handed):
        replayed = Replay(function, recording_cost=0)
        for value in (1.0, 2.0, 3.0):
            first, ones = replayed(torch.full((2,), value))
            assert torch.equal(first, torch.full((2,), value + (function is handed)))
            assert torch.equal(ones, torch.ones(2))
            first += 1
            ones += 1


def test_what_cannot_be_traced_is_done_as_ever() -> None:
    """The host looks at a number."""

    def signed(x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x

    replayed = Replay(signed, recording_cost=1)
    for value in (1.0, -1.0, -2.0, 3.0):
        assert torch.equal(replayed(torch.tensor([value])), torch.tensor([abs(value)]))


class Counting(SGD):
    """A rule that knows by itself how often it has stepped."""

    steps_taken = 0

    def step(self, carry, batch, lr, objective):
        self.steps_taken += 1
        return super().step(carry, batch, lr / self.steps_taken, objective)


class Promised(Counting):
    replayable = True


class Layer(nn.Linear):
    """A layer of a user's own."""


def hooked(shape, classes) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    module[1].register_forward_hook(lambda layer, given, out: out * 2)
    return module


def test_classes_of_others_are_replayed_if_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RECORDING_COST_IN_CALLS", 0)

    def replays(simulation: Simulation) -> bool:
        return isinstance(simulation.trainer.executor._shift_and_step_function, Replay)

    assert replays(means(SGD(**WORK)))
    assert not replays(means(SGD(**WORK), compile="never"))
    assert not replays(means(Counting(**WORK)))
    assert replays(means(Promised(**WORK)))
    assert replays(labelled(SGD(**WORK, clip=1.0)))
    assert not replays(labelled(SGD(**WORK, clip=1.0), model=lambda: nn.Sequential(nn.Flatten(), Layer(32, 3))))
    assert not replays(labelled(SGD(**WORK, clip=1.0), model=hooked))
    assert not replays(labelled(SGD(**WORK, clip=1.0), loss=lambda output, batch: output.square().sum(1)))
    with pytest.raises(ConfigError, match="Counting remembers in steps_taken"):
        means(Counting(**WORK)).run()


def test_shifts_inside_others_are_looked_at() -> None:
    outer = Location(0.5)
    outer.inner = Location(0.4)
    assert replay._is_replayable_object(outer)
    outer.inner = type("Own", (Location,), {"__module__": "own"})(0.4)
    assert not replay._is_replayable_object(outer)


def test_recordings_call_functions_of_torch_and_give_the_same_bits() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return ((x + 1.5).sum(1).view(-1) * 0.3).pow(2)

    recording = OperationRecording(lambda x: step(x), (tuple, (torch.Tensor,)), [torch.randn(4, 3)])
    targets = {node.target for node in recording.operations.__self__.graph.nodes if node.op == "call_function"}
    assert {torch.add, torch.sum, torch.mul, torch.pow} <= targets
    for x in torch.randn(5, 4, 3):
        assert torch.equal(recording([x]), step(x))


def test_only_a_function_that_gives_the_same_bits_takes_the_place_of_an_operator() -> None:
    a, b = torch.randn(2, 4, 3)
    assert returns_equal_tensors(torch.add, ((a, b), {}), a + b)
    assert not returns_equal_tensors(torch.sub, ((a, b), {}), a + b)
    assert not returns_equal_tensors(torch.add, ((a, b), {}), (a + b).double())
    assert not returns_equal_tensors(torch.add, ((a, b), {}), (a + b).T.contiguous().T)
    assert not returns_equal_tensors(torch.add, ((a,), {}), a)
    assert not returns_equal_tensors(torch.split, ((a, 2), {}), a)
