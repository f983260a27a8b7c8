"""Models that come with the package: their sizes as published, their outputs, and training by one vmapped model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import ConfigError, EvaluationOptions, Simulation
from fedsim.data.datasets import Dataset
from fedsim.data.partition import IID
from fedsim.local import SGD
from fedsim.models import CharLSTM, LeafCNN, Transformer, ViT, from_torchvision
from fedsim.models.selectors import Normalisation


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_sizes_are_those_published() -> None:
    assert parameters(LeafCNN()) == 6_603_710  # Caldas et al., 2018
    small = functools.partial(from_torchvision, "resnet18", 10, (3, 32, 32), small_images=True)
    assert parameters(small()) == 11_173_962  # CIFAR's usual ResNet-18
    assert parameters(small(norm="group")) == 11_173_962  # a scale and a shift for each channel, as before
    assert not [m for m in small(norm="group").modules() if isinstance(m, nn.BatchNorm2d)]
    lstm = 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 81 * 80 - 81 * 80 + 257 * 80
    assert parameters(CharLSTM(80)) == lstm


def test_a_transformer_adds_the_embeddings_of_a_token_and_of_its_position() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer((4,), 3, width=4, heads=2, layers=1).double(), torch.tensor([[0, 2, 1]])
    expected = model(tokens)
    with torch.no_grad():
        model.token.weight += torch.arange(4.0)  # a constant would vanish in the normalisation
        model.position.weight -= torch.arange(4.0)
    torch.testing.assert_close(model(tokens), expected)
    with torch.no_grad():
        model.position.weight += torch.arange(4.0)
    assert not torch.allclose(model(tokens), expected)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("build", [CharLSTM, functools.partial(Transformer, (6,))])
def test_a_language_model_sees_no_later_token(build: Any, every: bool) -> None:
    model = build(classes=9, every=every).eval()
    tokens = torch.arange(12).reshape(2, 6) % 9
    changed = tokens.clone()
    changed[:, 4:] = 8
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    assert one.shape == ((2, 6, 9) if every else (2, 9))
    if every:
        torch.testing.assert_close(one[:, :4], other[:, :4])
        assert (one[:, 4:] - other[:, 4:]).abs().max() > 1e-3


def test_a_vision_transformer_knows_where_a_patch_is() -> None:
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, patch=4, width=8, heads=2, layers=1).eval()
    x = torch.zeros(1, 1, 8, 8)
    x[..., :4, :4] = 1
    with torch.no_grad():
        assert (model(x) - model(x.flip(-1))).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: ViT((1, 8, 8), 3, patch=3), r"patch=3 must divide the images' sides, 8 and 8"),
        (lambda: ViT((1, 8, 8), 3, width=10), r"width=10 must be a multiple of heads=4"),
        (lambda: Transformer((5,), 3, width=10), r"width=10 must be a multiple of heads=4"),
        (lambda: from_torchvision("resnet19", 10), r"name='resnet19' is unknown.*did you mean 'resnet1"),
        (lambda: from_torchvision("alexnet", 10, weights="abc"), r"weights='abc' is unknown"),
        (lambda: from_torchvision("alexnet", 10, small_images=True), "is for residual networks, not alexnet"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build()


def data(shape: tuple[int, ...], tokens: bool = False) -> Dataset:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 9, (24, *shape)) if tokens else draw.standard_normal((24, *shape))
    y = draw.integers(0, 9, (24, *shape) if tokens else 24)
    return Dataset("toy", *(torch.as_tensor(v) for v in (x[:16], y[:16], x[16:], y[16:])), classes=9)


SMALL: dict[str, tuple[Any, Dataset]] = {
    "vit": (functools.partial(ViT, patch=4, width=8, heads=2, layers=1, dropout=0.1), data((1, 8, 8))),
    "leaf": (functools.partial(LeafCNN, hidden=16), data((1, 8, 8))),
    "lstm": (functools.partial(CharLSTM, hidden=6, every=True), data((5,), tokens=True)),
    "transformer": (functools.partial(Transformer, width=8, heads=2, dropout=0.1), data((5,), tokens=True)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SMALL)
def test_training_does_not_depend_on_company(name: str) -> None:
    build, dataset = SMALL[name]

    def run(seeds: tuple[int, ...]) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"partition": IID(), "local": SGD(lr=0.2, steps=3, batch_size=4), "rounds": 2}
        return (
            Simulation(dataset, build, clients=4, seeds=seeds, evaluation=EvaluationOptions(every=2), **options)
            .run()
            .history
        )

    alone, company = run((1,)), run((0, 1))
    assert company[-1]["test_loss"] == pytest.approx(alone[-1]["test_loss"], rel=1e-5)
    assert alone[-1]["train_loss"] != alone[0]["train_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [None, Normalisation()])
def test_a_residual_network_with_batch_normalisation_trains(columns: Any) -> None:
    build = functools.partial(from_torchvision, "resnet18", small_images=True)
    history = Simulation(
        data((3, 8, 8)), build, clients=2, partition=IID(), local=SGD(lr=0.05, steps=8, batch_size=8), rounds=2,
        columns=columns, evaluation=EvaluationOptions(every=2),
    ).run().history  # fmt: skip
    assert history[-1]["train_loss"] < history[0]["train_loss"]
