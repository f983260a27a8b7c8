"""Segmentation, whose targets are classes of positions, and preferences between two texts (DPO): FedAvg with such data
and losses of one's own equals one written by hand (deepcopy, torch.optim, average) in double precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.local import SGD
from fedsim.strategies import FedAvg

SIZES = (7, 2, 5)
RATE, ROUNDS, CLASSES, WORDS, LENGTH, BETA = 0.2, 3, 4, 6, 5, 0.5
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def owners() -> Tensor:
    return torch.as_tensor(np.repeat(np.arange(len(SIZES)), SIZES))


def masks(side: int = 5) -> Dataset:
    """Images [3, side, side] and a class for each pixel."""
    draw = np.random.default_rng(0)
    x = torch.as_tensor(draw.standard_normal((sum(SIZES) + 4, 3, side, side)))
    y = torch.as_tensor(draw.integers(0, CLASSES, (sum(SIZES) + 4, side, side)))
    return Dataset("masks", x[:-4], y[:-4], x[-4:], y[-4:], classes=CLASSES, owners=owners())


def preferences() -> Dataset:
    """Pairs [2, length] of a chosen and a rejected text, and no targets but their preference."""
    draw = np.random.default_rng(1)
    x = torch.as_tensor(draw.integers(0, WORDS, (sum(SIZES) + 4, 2, LENGTH)))
    y = torch.zeros(len(x))
    return Dataset("preferences", x[:-4], y[:-4], x[-4:], y[-4:], owners=owners())


class Segments(nn.Module):
    """Scores [B, classes, height, width], as convolutions give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


class LanguageModel(nn.Module):
    """Log-probabilities [B, 2] of both texts of a pair, each word given the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.table(x[..., :-1]).tanh()).log_softmax(-1)
        return scores.gather(-1, x[..., 1:, None])[..., 0].sum(-1)


def dice(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """1 − Dice over the batch and all classes, and cross-entropy."""
    true = F.one_hot(batch["y"], CLASSES).movedim(-1, 1).to(output)
    probability = output.softmax(1)
    overlap = 2 * (probability * true).sum((0, 2, 3)) / (probability + true).sum((0, 2, 3))
    return 1 - overlap.mean() + F.cross_entropy(output, batch["y"])


def jaccard_of_samples(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """[B] 1 − soft Jaccard of each image."""
    true = F.one_hot(batch["y"], CLASSES).movedim(-1, 1).to(output)
    probability = output.softmax(1)
    both = (probability * true).sum((1, 2, 3))
    return 1 - both / (probability + true).sum((1, 2, 3)).sub(both)


class DPO:
    """Direct preference optimisation (Rafailov et al., 2023), relative to a frozen reference model; a scalar."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.reference = LanguageModel().double().requires_grad_(False)

    def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        margin = output - self.reference(batch["x"]).to(output)
        return -F.logsigmoid(BETA * (margin[:, 0] - margin[:, 1])).mean()


CASES: dict[str, tuple[Callable[[], Dataset], Callable[[], nn.Module], Any, Loss]] = {
    "F.cross_entropy of pixels": (masks, Segments, F.cross_entropy, lambda o, b: F.cross_entropy(o, b["y"])),
    "nn.CrossEntropyLoss of pixels": (
        masks,
        Segments,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda o, b: F.cross_entropy(o, b["y"], label_smoothing=0.1),
    ),
    "as many classes as pixels in a row": (
        lambda: masks(CLASSES),
        Segments,
        F.cross_entropy,
        lambda o, b: F.cross_entropy(o, b["y"]),
    ),
    "dice over the batch": (masks, Segments, dice, dice),
    "jaccard of each sample": (masks, Segments, jaccard_of_samples, lambda o, b: jaccard_of_samples(o, b).mean()),
    "DPO": (preferences, LanguageModel, DPO(), DPO()),
}


def fedavg_by_hand(simulation: Simulation, build: Callable[[], nn.Module], loss: Loss) -> nn.Module:
    """Copies of the server train on the run's batches, one client at a time; their parameters are averaged."""
    server = build().double()
    nn.utils.vector_to_parameters(simulation.model.initial((0,))[0], server.parameters())
    everyone = np.ones((1, len(SIZES)))
    for t in range(ROUNDS):
        plan, ends = simulation.trainer.batches.plan(simulation.federation.make_cohort(everyone, everyone), t), []
        for i in range(len(SIZES)):
            client, chunk = copy.deepcopy(server), plan.chunk(np.array([i]))
            optimizer = torch.optim.SGD(client.parameters(), RATE)
            for step in range(int(chunk.steps[0])):
                batch = {name: value[0] for name, value in chunk.batch(step, 0, 1, torch.float64).items()}
                optimizer.zero_grad()
                loss(client(batch["x"]), batch).backward()
                optimizer.step()
            ends.append(nn.utils.parameters_to_vector(client.parameters()).detach())
        nn.utils.vector_to_parameters(torch.stack(ends).mean(0), server.parameters())
    return server


@pytest.mark.parametrize("name", CASES)
def test_fedavg_with_such_a_loss_is_that_written_by_hand(name: str) -> None:
    data, build, given, loss = CASES[name]
    simulation = Simulation(
        data(), build, clients=len(SIZES), rounds=ROUNDS, partition=Natural(), strategy=FedAvg(), loss=given,
        local=SGD(lr=RATE, epochs=2, batch_size=3, drop_last=False), seeds=(0,),
        evaluation=EvaluationOptions(every=ROUNDS), execution=Execution(dtype="float64"),
    )  # fmt: skip
    result = simulation.run()
    server = fedavg_by_hand(simulation, build, loss)
    expected = nn.utils.parameters_to_vector(server.parameters()).detach()
    assert float((expected - simulation.model.initial((0,))[0]).abs().max()) > 0.01  # it did train
    torch.testing.assert_close(result.state.model[0], expected, rtol=0, atol=1e-11)
    samples = data()
    with torch.no_grad():
        output = server(samples.test_x)
        on_test = loss(output, {"x": samples.test_x, "y": samples.test_y})
    assert result.history[-1]["test_loss"] == pytest.approx(float(on_test), abs=1e-10)
    if samples.classes is not None:
        accuracy = (output.argmax(1) == samples.test_y).double().mean()
        assert result.history[-1]["test_accuracy"] == pytest.approx(float(accuracy), abs=1e-6)


class ClassesLast(Segments):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).movedim(1, -1)


def test_scores_whose_classes_come_last_are_told_by_the_loss() -> None:
    """[B, 4, 4, 4] for four classes: accuracy follows the dimension of which the loss is a cross-entropy."""

    def of_the_last(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.movedim(-1, 1), target)

    accuracies = [
        Simulation(
            masks(CLASSES), build, clients=3, rounds=2, partition=Natural(), loss=loss,
            local=SGD(lr=RATE, steps=2, batch_size=3), seeds=(0,), evaluation=EvaluationOptions(every=2),
        ).run().history[-1]["test_accuracy"]
        for build, loss in ((Segments, F.cross_entropy), (ClassesLast, of_the_last))
    ]  # fmt: skip
    assert accuracies[0] == accuracies[1]


def test_a_known_loss_needs_to_be_told_which_dimension_holds_the_classes() -> None:
    with pytest.raises(ConfigError, match="is not clear which dimension holds the classes"):
        Simulation(masks(CLASSES), Segments, clients=3, partition=Natural())
