"""Tokens in, labels of positions, several labels, named outputs, losses of one's own: against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.data.contamination import Contamination, FeatureNoise, Gaussian, LabelFlip, Point
from fedsim.data.datasets import Dataset
from fedsim.data.partition import IID
from fedsim.local import SGD
from fedsim.models.losses import IGNORED_LABEL
from fedsim.shift import Location

WORDS, LENGTH = 7, 5
DRAW = np.random.default_rng(0)
TOKENS = torch.as_tensor(DRAW.integers(0, WORDS, (24, LENGTH)))
NEXT = torch.as_tensor(DRAW.integers(0, WORDS, (24, LENGTH)))
NEXT[::3, 2:] = IGNORED_LABEL
IMAGES = torch.as_tensor(DRAW.standard_normal((24, 2, 4, 4)))
PIXELS = torch.as_tensor(DRAW.integers(0, 3, (24, 4, 4)))
LABELS = torch.as_tensor(DRAW.integers(0, 3, 24))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).cumsum(1))


def simulation_of(x: Tensor, y: Tensor, model: Callable[[], nn.Module], **given: Any) -> Simulation:
    dataset = Dataset("toy", x[:16], y[:16], x[16:], y[16:], **given.pop("of_data", {}))
    options: dict[str, Any] = {"partition": IID(), "local": SGD(lr=0.3, steps=4, batch_size=4), "rounds": 3}
    options |= {"evaluation": EvaluationOptions(every=3), "execution": Execution(dtype="float64")}
    return Simulation(dataset, model, clients=4, **options | given)


def module_of(simulation: Simulation, model: Callable[[], nn.Module], row: Tensor) -> nn.Module:
    module = model().double().eval()
    nn.utils.vector_to_parameters(row, module.parameters())
    return module


@pytest.mark.parametrize("executor", ["vmap", "loop", "fused"])
def test_a_language_model_learns_the_next_token(executor: str) -> None:
    simulation = simulation_of(
        TOKENS.int(), NEXT, Language, of_data={"classes": WORDS},
        execution=Execution(dtype="float64", executor=executor),
    )  # fmt: skip
    result = simulation.run()
    module = module_of(simulation, Language, result.state.model[0])
    with torch.no_grad():
        output = module(TOKENS[16:])
    losses = F.cross_entropy(output.movedim(-1, 1), NEXT[16:], reduction="none", ignore_index=IGNORED_LABEL)
    there = NEXT[16:] != IGNORED_LABEL
    expected = (losses.sum(1) / there.sum(1)).mean().item()
    hits = ((output.argmax(-1) == NEXT[16:]).sum(1).double() / there.sum(1)).mean().item()
    assert result.history[-1]["test_loss"] == pytest.approx(expected, abs=1e-12)
    assert result.history[-1]["test_accuracy"] == pytest.approx(hits, abs=1e-12)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"] - 0.05


def test_classes_may_stand_second_as_convolutions_have_them() -> None:
    def model() -> nn.Module:
        return nn.Conv2d(2, 3, 3, padding=1)

    simulation = simulation_of(IMAGES, PIXELS, model, of_data={"classes": 3})
    result = simulation.run()
    with torch.no_grad():
        output = module_of(simulation, model, result.state.model[0])(IMAGES[16:])
    assert result.history[-1]["test_loss"] == pytest.approx(F.cross_entropy(output, PIXELS[16:]).item(), abs=1e-12)
    right = (output.argmax(1) == PIXELS[16:]).double().mean().item()
    assert result.history[-1]["test_accuracy"] == pytest.approx(right, abs=1e-12)


def test_several_labels_at_once() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 3))

    targets = torch.as_tensor(DRAW.integers(0, 2, (24, 3)), dtype=torch.float64)
    simulation = simulation_of(IMAGES, targets, model, of_data={"classes": 3, "loss": "multi_label"})
    result = simulation.run()
    with torch.no_grad():
        output = module_of(simulation, model, result.state.model[0])(IMAGES[16:])
    expected = F.binary_cross_entropy_with_logits(output, targets[16:]).item()
    assert result.history[-1]["test_loss"] == pytest.approx(expected, abs=1e-12)
    hits = ((output > 0).double() == targets[16:]).double().mean().item()
    assert result.history[-1]["test_accuracy"] == pytest.approx(hits, abs=1e-12)


@pytest.mark.parametrize("shape", [(24,), (24, 1), (24, 2)])
def test_regression_takes_targets_of_any_width(shape: tuple[int, ...]) -> None:
    width = shape[1] if len(shape) > 1 else 1

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(32, width))

    targets = torch.as_tensor(DRAW.standard_normal(shape))
    simulation = simulation_of(IMAGES, targets, model, loss="squared", local=SGD(lr=0.01, steps=4))
    result = simulation.run()
    with torch.no_grad():
        output = module_of(simulation, model, result.state.model[0])(IMAGES[16:])
    expected = 0.5 * (output - targets[16:].reshape(-1, width)).square().sum(1).mean().item()
    assert result.history[-1]["test_loss"] == pytest.approx(expected, abs=1e-12)


class Masked(nn.Module):
    """Reads a mask beside the tokens, and a number of every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 6), nn.Linear(7, 3)

    def forward(self, tokens: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        found = (self.table(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.head(torch.cat([found, age[:, None]], 1))


MASK = torch.as_tensor(DRAW.integers(0, 2, (24, LENGTH)), dtype=torch.bool)
AGE = torch.as_tensor(DRAW.standard_normal(24))


@pytest.mark.parametrize("executor", ["vmap", "loop", "fused"])
def test_further_inputs_come_as_keywords(executor: str) -> None:
    more = {"more": {"mask": MASK[:16], "age": AGE[:16]}, "test_more": {"mask": MASK[16:], "age": AGE[16:]}}
    simulation = simulation_of(
        TOKENS, LABELS, Masked, of_data={"classes": 3, **more}, execution=Execution(dtype="float64", executor=executor)
    )
    result = simulation.run()
    with torch.no_grad():
        output = module_of(simulation, Masked, result.state.model[0])(TOKENS[16:], MASK[16:], AGE[16:])
    expected = F.cross_entropy(output, LABELS[16:]).item()
    assert result.history[-1]["test_loss"] == pytest.approx(expected, abs=1e-12)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


@pytest.mark.parametrize(
    ("more", "test_more", "sentence"),
    [
        ({"mask": MASK[:16]}, {}, r"training samples have the further inputs \['mask'\], test samples \[\]"),
        ({"key": MASK[:16]}, {"key": MASK[16:]}, "a further input is called 'key', which is taken"),
        ({"mask": MASK}, {"mask": MASK[16:]}, "mask has 24 entries for 16 samples"),
        ({"mask": MASK[:16]}, {"mask": MASK[16:]}, "model does not fit dataset=toy"),
    ],
)
def test_further_inputs_that_do_not_fit_are_refused(more: Any, test_more: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulation_of(TOKENS, LABELS, Masked, of_data={"classes": 3, "more": more, "test_more": test_more})


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Object:
    logits: Tensor


class Returning(nn.Linear):
    """A linear layer whose output is wrapped."""

    wrap: Callable[[Tensor], Any]

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__(32, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x.flatten(1)))


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "mapping": (lambda out: {"loss": None, "logits": out}, "logits"),
    "object": (Object, "logits"),
    "namespace": (lambda out: SimpleNamespace(logits=out), "logits"),
    "named tuple": (lambda out: Pair(out, out * 2), "logits"),
    "tuple": (lambda out: (out * 2, out), 1),
    "list, from the end": (lambda out: [out * 2, out], -1),
}


@pytest.mark.parametrize("name", WRAPS)
def test_the_output_is_found_by_its_name(name: str) -> None:
    wrap, output = WRAPS[name]
    plain = simulation_of(IMAGES, LABELS, lambda: Returning(lambda out: out), of_data={"classes": 3}).run()
    named = simulation_of(IMAGES, LABELS, lambda: Returning(wrap), output=output, of_data={"classes": 3}).run()
    torch.testing.assert_close(named.state.model, plain.state.model, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "output", "names"),
    [
        ("mapping", None, "one of 'logits'"),
        ("mapping", "scores", "one of 'logits'"),
        ("object", None, "one of 'logits'"),
        ("tuple", None, "one of 0, 1"),
        ("tuple", 2, "one of 0, 1"),
        ("named tuple", None, "one of"),
    ],
)
def test_an_output_without_a_name_is_refused_and_names_are_told(name: str, output: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=rf"model: the module returns a .* name its output by model\.output, {names}"):
        simulation_of(IMAGES, LABELS, lambda: Returning(WRAPS[name][0]), output=output, of_data={"classes": 3})


def test_tokens_do_not_move() -> None:
    with pytest.raises(ConfigError, match="shift=Location moves numbers, but dataset=toy has tokens"):
        simulation_of(TOKENS, NEXT, Language, of_data={"classes": WORDS}, shift=Location(0.5))


@pytest.mark.parametrize(
    ("contamination", "sentence"),
    [
        (Gaussian(), "contamination=Gaussian changes numbers, but dataset=toy has tokens"),
        (Point(), "contamination=Point changes numbers, but dataset=toy has tokens"),
        (FeatureNoise(), "contamination=FeatureNoise changes numbers, but dataset=toy has tokens"),
        (LabelFlip(), "contamination=label_flip needs one class per sample, and dataset=toy has several"),
    ],
)
def test_neither_tokens_nor_labels_of_positions_are_contaminated(contamination: Contamination, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulation_of(TOKENS, NEXT, Language, of_data={"classes": WORDS}, contamination=contamination)


def test_tokens_for_a_model_that_takes_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="model does not fit dataset=toy"):
        simulation_of(TOKENS, LABELS, lambda: nn.Linear(LENGTH, 3), of_data={"classes": 3})
