"""With `cache_frozen`, the first frozen layers are computed once: the run's numbers are those of the whole model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.contamination import FeatureNoise
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.augment import CropFlip
from fedsim.data.drift import Linear
from fedsim.local import SGD
from fedsim.local.fedproto import FedProto
from fedsim.models.frozen_prefix import FrozenPrefix, return_input
from fedsim.models.lora import add_adapters
from fedsim.models.text import Transformer
from fedsim.run import frozen_layers
from fedsim.shift import Shift
from fedsim.strategies import Scaffold

CLIENTS, LENGTH, VOCABULARY = 4, 6, 9


def images(samples: int = 48) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples + 16, 2, 6, 6), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 3, (samples + 16,), generator=generator)
    return Dataset(
        "images", x[:samples], y[:samples], x[samples:], y[samples:], 3, mean=(0.5, 0.4), std=(0.2, 0.3)
    )  # fmt: skip


def tokens() -> Dataset:
    text = torch.randint(0, VOCABULARY, (56, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    x, y = text[:, :-1], text[:, 1:]
    return Dataset("tokens", x[:40], y[:40], x[40:], y[40:], VOCABULARY)


def lora_transformer(shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    return add_adapters(Transformer(shape, classes, 16, 2, 3, dropout), 2, 4.0, r"blocks\.2\.linear", trained="head")


def backbone(norm: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    features = nn.Sequential(nn.Conv2d(2, 4, 3), norm(), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
    module = nn.Sequential(features.requires_grad_(False), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    return module


def run(data: Dataset, model: Any, cached: bool, executor: str = "vmap", **parts: Any) -> Simulation:
    options = {"local": SGD(lr=0.1, epochs=2, batch_size=4), "evaluation": EvaluationOptions(every=1, metrics=[])}
    return Simulation(
        data, model, clients=CLIENTS, seeds=[0, 1],
        execution=Execution(executor=executor, dtype="float64", device="cpu", cache_frozen=cached),
        **options | {"rounds": 3} | parts,
    )  # fmt: skip


def assert_same_numbers(data: Callable[[], Dataset], model: Any, last: str, **parts: Any) -> None:
    whole, cached = (run(data(), model, cache, **parts) for cache in (False, True))
    skipped = [name for name, layer in cached.model.training_module.named_modules() if layer.forward is return_input]
    assert (skipped or ["embed"])[-1] == last
    assert cached.dataset.shape != whole.dataset.shape == data().shape
    results = [simulation.run() for simulation in (whole, cached)]
    torch.testing.assert_close(results[1].state.model, results[0].state.model, rtol=0, atol=1e-12)
    for before, after in zip(results[0].history, results[1].history, strict=True):
        assert before.keys() == after.keys()
        for column in before.keys() - {"seconds"}:
            assert after[column] == pytest.approx(before[column], rel=1e-11, abs=1e-12, nan_ok=True), column


@pytest.mark.parametrize("executor", [pytest.param("vmap", marks=pytest.mark.slow), "loop"])
def test_adapters_of_a_transformer(executor: str) -> None:
    assert_same_numbers(tokens, lora_transformer, "blocks.1", executor=executor)


def test_a_head_on_a_frozen_backbone() -> None:
    assert_same_numbers(images, backbone, "0", strategy=Scaffold())


def test_a_rule_that_asks_for_features() -> None:
    assert_same_numbers(images, backbone, "0", local=FedProto(lr=0.1, steps=2, batch_size=4))


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(images(), backbone, True, "loop").run(out=tmp_path / "whole")
    run(images(), backbone, True, "loop", rounds=2).run(out=tmp_path / "part")
    resumed = run(images(), backbone, True, "loop").run(out=tmp_path / "part", resume=True)
    assert torch.equal(resumed.state.model, whole.state.model)


def test_the_users_data_set_and_the_names_of_rows_stay() -> None:
    data, module = images(), backbone()
    stored = data.train_x.clone()
    whole, cached = (run(data, module, cache) for cache in (False, True))
    assert torch.equal(data.train_x, stored)
    assert list(cached.model.shapes.items()) == list(whole.model.shapes.items())
    constants = whole.parameter_naming.constants
    assert all(torch.equal(value, constants[name]) for name, value in cached.parameter_naming.constants.items())
    assert module.get_submodule("0.0").forward(torch.zeros(1, 2, 6, 6)).shape == (1, 4, 4, 4)


class Residual(nn.Module):
    """The input is used beside the frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Conv2d(2, 2, 1).requires_grad_(False), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head((x + self.frozen(x)).flatten(1))
        return output


class Centred(nn.Module):
    """A frozen layer that looks at the other samples of the batch in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x - x.mean(0, keepdim=True))


class Detached(nn.Module):
    """The first layer's gradient is cut off, but its numbers change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(1)), nn.Linear(72, 3)
        self.inner = _Scale(self)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.inner(x).flatten(1))
        return output


class _Scale(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._owner = (owner,)

    def forward(self, x: Tensor) -> Tensor:
        return x * self._owner[0].weight.detach() + self.offset  # type: ignore[operator]


def centred() -> nn.Module:
    return nn.Sequential(Centred(), nn.Flatten(), nn.Linear(72, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 3))


@pytest.mark.parametrize(
    ("model", "parts", "reason"),
    [
        (mlp, {}, "no frozen layer"),
        (Residual, {}, "no frozen layer"),
        (centred, {}, "no frozen layer"),
        (Detached, {}, "no frozen layer"),
        (functools.partial(backbone, functools.partial(nn.BatchNorm2d, 4)), {}, None),
        (backbone, {"contamination": FeatureNoise(fraction=0.5)}, "contamination=FeatureNoise"),
        (backbone, {"loss": lambda output, batch: output.sum(1)}, "the loss"),
    ],
)
def test_what_depends_on_more_than_the_sample_is_computed_in_every_step(
    model: Any, parts: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    simulation = run(images(), model, True, **parts)
    if reason is None:  # the convolution before the batch normalisation is left out, and it is not
        assert simulation.dataset.shape == (4, 4, 4)
        return
    assert simulation.dataset.shape == (2, 6, 6)
    assert f"trainer.cache_frozen: frozen layers are computed in every step, since {reason}" in caplog.text


def test_augmented_images_stay() -> None:
    data = images()
    data.augment = CropFlip()
    assert run(data, backbone, True).dataset.shape == (2, 6, 6)


def numbers() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=draw), torch.randint(0, 2, (40,), generator=draw)
    return Dataset("numbers", x, y, classes=2)


def frozen_scale() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 2))


class Moved(Shift):
    """The inputs grow with the first parameter."""

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return batch | {"x": batch["x"] + theta[0]}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({}, None),
        ({"shift": Moved()}, "shift=Moved"),
        ({"drift": Linear(moves="features")}, "drift=Linear"),
    ],
)
def test_inputs_that_change_stay(parts: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    simulation = run(numbers(), frozen_scale, True, local=SGD(lr=0.1, steps=1, batch_size=4), **parts)
    stays = torch.equal(simulation.dataset.train_x.float(), numbers().train_x)
    assert stays == (reason is not None)
    assert reason is None or f"since {reason} may change or read inputs" in caplog.text


def test_outputs_that_do_not_fit_into_memory_are_not_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frozen_layers, "free_memory_bytes", lambda device: 1000.0)
    caplog.set_level(logging.INFO)
    assert run(images(), backbone, True).dataset.shape == (2, 6, 6)
    assert "of free memory" in caplog.text


@pytest.mark.slow
def test_dropout_ends_the_prefix() -> None:
    with_dropout = functools.partial(lora_transformer, dropout=0.1)
    assert_same_numbers(tokens, with_dropout, "embed", executor="loop")


def test_a_layer_whose_forward_was_replaced_keeps_it_from_batch_to_batch() -> None:
    module = backbone()
    original = module[0].forward
    module[0].forward = lambda x: 2 * original(x)
    batches = [torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for x, output in zip(batches, FrozenPrefix(("0",)).outputs(module, batches), strict=True):
        torch.testing.assert_close(output, 2 * original(x))
