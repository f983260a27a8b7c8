"""Modules with state, writes, shared layers or a view of the whole batch: as FedAvg written by hand, or refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from by_hand import RATE, by_hand, samples, simulation_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedsim import ConfigError, Execution, Simulation
from fedsim.core.errors import RunError
from fedsim.local import SGD
from fedsim.run.tracking import Tracking

QUIET = Tracking(progress="none", tensorboard=False)
WORK = SGD(lr=RATE, epochs=2, batch_size=5, drop_last=False)  # clients of 7, 5 and 9 samples: batches of 5, 4 and 2


class Instance(nn.Module):
    """Statistics over the samples of a batch, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.InstanceNorm1d(2, track_running_stats=True, affine=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.unflatten(1, (2, 2))).flatten(1))


class CountsSamples(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += len(x)
        return super().forward(x) / (1 + 0.01 * self.count)


class ByFrequency(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 4, **options), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x > 0).long() + (x > 1).long()).flatten(1))


class CentresLargeBatches(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if len(x) >= 4 else x)


class Teacher(nn.Module):
    """A frozen copy that follows the trained layer, as in BYOL and MoCo."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    if self.assigns:
                        one.data = 0.9 * one.data + 0.1 * other.data
                    else:
                        one.mul_(0.9).add_(other, alpha=0.1)
        return self.student(x) + 0.5 * self.teacher(x)


class CountsForNobody(nn.Linear):
    """A diagnostic that nothing reads."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self._passes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self._passes.append(len(x))
        return super().forward(x)


class KeepsItsActivation(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class ReEntrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


class Memo(nn.Linear):
    """Keeps a tensor that depends on the shape of its input alone."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None or len(self.scale) != x.shape[1]:
            self.scale = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return super().forward(x * self.scale)


class OwnGenerator(nn.Linear):
    """Noise from a generator that is begun at each pass, or that goes on."""

    def __init__(self, goes_on: bool) -> None:
        super().__init__(4, 3)
        self.generator = torch.Generator().manual_seed(1) if goes_on else None

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator or torch.Generator().manual_seed(1)
        return super().forward(x + torch.randn(4, generator=generator, dtype=torch.float64).to(x.dtype))


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    module[2].weight = module[0].weight
    return module


def pruned() -> nn.Module:
    layer = nn.Linear(4, 3)
    nn.utils.prune.l1_unstructured(layer, "weight", amount=0.3)
    return nn.Sequential(layer)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "instance norm": Instance,
    "counts samples": CountsSamples,
    "by frequency": lambda: ByFrequency(scale_grad_by_freq=True),
    "sparse gradients": lambda: ByFrequency(sparse=True),
    "centres large batches": CentresLargeBatches,
    "teacher": lambda: Teacher(False),
    "teacher by assignment": lambda: Teacher(True),
    "counts for nobody": CountsForNobody,
    "keeps its activation": KeepsItsActivation,
    "re-entrant checkpoint": ReEntrant,
    "shared layer": shared,
    "tied weights": tied,
    "old weight norm": old_weight_norm,
    "a memo": Memo,
    "a new generator": lambda: OwnGenerator(False),
}


def rows_of(servers: list[nn.Module]) -> Tensor:
    return torch.stack(
        [torch.cat([p.detach().reshape(-1) for p in server.parameters() if p.requires_grad]) for server in servers]
    )


@pytest.mark.parametrize("name", RIGHT)
def test_fedavg_of_such_a_module_is_that_written_by_hand(name: str) -> None:
    build = RIGHT[name]
    expected: list[nn.Module] | None = None
    for execution in (Execution(dtype="float64"), Execution("loop", workers=2, dtype="float64")):
        if name == "re-entrant checkpoint" and execution.executor == "loop":
            with pytest.raises(
                ConfigError, match=r"cannot be trained as trainer\.executor=loop.*; use trainer\.executor=auto$"
            ):
                simulation_of(build, local=WORK, execution=execution)
            continue
        simulation = simulation_of(build, local=WORK, execution=execution)
        result = simulation.run()
        expected = by_hand(simulation, build) if expected is None else expected
        torch.testing.assert_close(result.state.model, rows_of(expected), rtol=0, atol=1e-11, msg=name)
        for r, server in enumerate(expected):
            with torch.no_grad():
                data = samples()
                loss = nn.functional.cross_entropy(server.eval()(data.test_x), data.test_y).item()
            assert result.history[-2 + r]["test_loss"] == pytest.approx(loss, abs=1e-10), name


@pytest.mark.parametrize("assigned", [False, True])
def test_frozen_parameters_that_move_are_resumed(assigned: bool, tmp_path: Path) -> None:
    def simulation(rounds: int) -> Simulation:
        return simulation_of(lambda: Teacher(assigned), local=WORK, rounds=rounds)

    whole = simulation(4).run()
    simulation(2).run(out=tmp_path / "run", tracking=QUIET)
    resumed = simulation(4).run(out=tmp_path / "run", tracking=QUIET, resume=True)
    assert torch.equal(resumed.state.model, whole.state.model)


def test_pruned_weights_stay_pruned() -> None:
    """Deepcopy, which a FedAvg by hand needs, refuses such a module, so the mask is what is looked at."""
    simulation = simulation_of(pruned, local=WORK)
    before, mask = simulation.initial_state().model, simulation.model.training_module[0].weight_mask.reshape(-1)
    after = simulation.run().state.model
    weights = slice(3, 15)  # the bias comes first
    assert torch.equal(after[:, weights][:, mask == 0], before[:, weights][:, mask == 0])
    assert bool((after[:, weights][:, mask == 1] != before[:, weights][:, mask == 1]).all())


def test_what_a_module_needs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fedsim")
    simulation_of(CountsForNobody, local=WORK).run()
    assert (
        "a fresh copy of the module for each client, since CountsForNobody changes its attribute '_passes"
        in caplog.text
    )
    simulation_of(lambda: ByFrequency(scale_grad_by_freq=True), local=WORK, execution=Execution("vmap"))
    assert "batches of ByFrequency are not padded" in caplog.text


class Remembering(nn.Linear):
    """A linear layer whose output is scaled by state of some kind."""

    calls_of_class = 0

    def __init__(self, kind: str) -> None:
        super().__init__(4, 3)
        self.kind, self._calls, self._array, self._box = kind, 0, np.zeros(1), [{"calls": 0}]

    def forward(self, x: Tensor) -> Tensor:
        count = 0.0
        if self.kind == "private":
            self._calls += 1
            count = self._calls
        elif self.kind == "array":
            self._array[0] += 1
            count = float(self._array[0])
        elif self.kind == "nested":
            self._box[0]["calls"] += 1
            count = self._box[0]["calls"]
        elif self.kind == "of the class":
            Remembering.calls_of_class += 1
            count = Remembering.calls_of_class
        elif self.kind == "late":
            self._calls += 1
            count = self._calls if self._calls > 4 else 0
        elif self.kind == "global":
            CALLS.append(1)
            count = len(CALLS)
        return super().forward(x) * (1 + 0.1 * count)


CALLS: list[int] = []


class Writing(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                if self.how == "clamp":
                    self.weight.clamp_(-0.2, 0.2)
                elif self.how == "data":
                    self.weight.data = self.weight.data.clamp(-0.2, 0.2)
                elif self.how == "storage":
                    self.weight.data.clamp_(-9, 9)  # changes nothing yet
        return super().forward(x)


def hooked(post: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(4, 3)
        if post:
            layer.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        else:
            layer.weight.register_hook(lambda grad: 2 * grad)
        return layer

    return build


class Raising(nn.Linear):
    def __init__(self, error: type[Exception], training: bool, size: int | None = None) -> None:
        super().__init__(4, 3)
        self.error, self.when, self.size = error, training, size

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.when and self.size in (None, len(x)):
            raise self.error("not like this")
        return super().forward(x)


class Growing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(4, 3).to(x)
        return super().forward(x) + self.extra(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a private count": (lambda: Remembering("private"), "Remembering keeps '_calls' from one forward pass"),
    "an array": (lambda: Remembering("array"), "Remembering keeps '_array"),
    "a nested count": (lambda: Remembering("nested"), "Remembering keeps .*_box"),
    "a late count": (lambda: Remembering("late"), "Remembering keeps '_calls' from one forward pass"),
    "a count of the class": (lambda: Remembering("of the class"), "calls_of_class.*outside of the module"),
    "a global": (lambda: Remembering("global"), "'CALLS'.*outside of the module"),
    "a generator of its own": (lambda: OwnGenerator(True), "OwnGenerator keeps 'generator"),
    "clamps": (lambda: Writing("clamp"), "writes into its parameter 'weight'"),
    "assigns data": (lambda: Writing("data"), "writes into its parameter 'weight'"),
    "writes what stays": (lambda: Writing("storage"), "writes into its parameter 'weight'"),
    "max_norm": (lambda: ByFrequency(max_norm=0.5), "writes into its parameter 'table.weight'.*max_norm"),
    "a hook": (hooked(False), "parameter 'weight' of Linear has a hook"),
    "a hook behind": (hooked(True), "parameter 'weight' of Linear has a hook"),
    "an assertion": (lambda: Raising(AssertionError, True), "Raising raised AssertionError: not like this"),
    "a missing key": (lambda: Raising(KeyError, False), "KeyError"),
    "a missing attribute": (lambda: Raising(AttributeError, False), "AttributeError: not like this"),
    "batches of two": (lambda: Raising(ValueError, True, 2), "ValueError: not like this"),
    "batches of four": (lambda: Raising(ValueError, True, 4), "cannot be trained on a batch of 4 samples"),
    "torchscript": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 3))), "of TorchScript"),
    "a new parameter": (Growing, "adds or removes the parameter 'extra"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_such_a_module_is_refused_in_a_sentence(name: str) -> None:
    build, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence) as refused:
        simulation_of(build, local=WORK)
    assert "\n" not in str(refused.value)


class Occasionally(nn.Linear):
    """Does something on some inputs alone: on batches of a size, or of some values."""

    def __init__(self, act: Callable[[Tensor], Any] | None, when: Callable[[Tensor, bool], bool]) -> None:
        super().__init__(4, 3)
        self.act, self.when = act, when

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.act or self.count)(x) if self.when(x, self.training) else None
        return super().forward(x) * (1 if scale is None or isinstance(scale, Tensor) else scale)

    def count(self, x: Tensor) -> float:
        CALLS.append(1)
        return 1 + 0.1 * len(CALLS)


def halves(x: Tensor) -> None:
    x.mul_(0.5)


ON_SOME: dict[str, tuple[Callable[[Tensor], Any] | None, Callable[[Tensor, bool], bool], str]] = {
    "writes into batches of five": (halves, lambda x, _: len(x) == 5, "writes into its input"),
    "writes into test data": (halves, lambda x, training: not training and len(x) == 6, "writes into its input"),
    "writes what is there": (lambda x: x.clamp_(-9, 9), lambda x, _: True, "writes into its input"),
    "rectifies its input": (nn.ReLU(inplace=True), lambda x, _: True, "writes into its input"),
    "draws for test data": (
        lambda x: random.random(), lambda x, training: not training and len(x) == 6, "random numbers in evaluation",
    ),
    "draws for large values": (
        lambda x: random.random(), lambda x, _: float(x[0, 0]) > 1, "cannot be keyed by client and step",
    ),
    "counts large values": (None, lambda x, _: float(x[0, 0]) > 1, "changes .*'CALLS'.*outside of the module"),
    "counts batches of test data": (
        None, lambda x, training: not training and len(x) == 6, "changes .*'CALLS'.*outside of the module",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_SOME)
def test_what_a_module_does_on_some_inputs_alone_is_refused(name: str) -> None:
    act, when, sentence = ON_SOME[name]
    CALLS.clear()
    with pytest.raises(ConfigError, match=sentence):
        simulation_of(lambda: Occasionally(act, when), local=WORK).run()


class MovesLate(nn.Linear):
    """A buffer that moves after more passes than anybody tries."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            if float(self.count) > 30:
                self.offset = self.offset + 0.1 * x.detach().mean(0)
        return super().forward(x - self.offset)


@pytest.mark.parametrize("executor", ["auto", "loop"])
def test_a_buffer_that_moves_only_later_ends_the_run(executor: str) -> None:
    with pytest.raises(RunError, match="MovesLate writes to 'offset', which it left alone"):
        simulation_of(MovesLate, rounds=20, local=WORK, execution=Execution(executor)).run()


class RaisingLater(nn.Linear):
    """An error that depends on what was learned: nobody can know before."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if float(self.weight.abs().max()) > 0.3:
            raise KeyError("the weights have grown")
        return super().forward(x)


def test_an_error_in_the_middle_of_a_run_is_a_sentence_that_names_the_round() -> None:
    with pytest.raises(RunError, match=r"local training ended in round \d+: RaisingLater raised KeyError"):
        simulation_of(RaisingLater, rounds=40, local=SGD(lr=0.5, epochs=2, batch_size=5, drop_last=False)).run()
