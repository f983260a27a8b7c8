"""Which columns belong to which hidden channels: the narrow network inside the wide one, beside one built by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedsim import ConfigError
from fedsim.models import StatelessModel
from fedsim.models.channels import HiddenLayerChannels, check_channel_chain

WIDTHS = {"perceptron": (5, 4), "convolutions": (4, 3, 5)}


def perceptron(first: int = 5, second: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, first), nn.ReLU(), nn.Linear(first, second, bias=False),
                         nn.Tanh(), nn.Linear(second, 3))  # fmt: skip


def convolutions(first: int = 4, second: int = 3, third: int = 5) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(second * 9, third), nn.SiLU(),
        nn.Linear(third, 3),
    )  # fmt: skip


BUILDERS: dict[str, Callable[..., nn.Module]] = {"perceptron": perceptron, "convolutions": convolutions}


def samples(count: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 6, 6, generator=draw, dtype=torch.float64)
    return {"x": x, "y": torch.arange(count) % 3}


def model_of(build: Callable[[], nn.Module]) -> StatelessModel:
    model = StatelessModel(build, "cross_entropy", dtype=torch.float64)
    model.check(samples(), 3, "toy")
    return model


@pytest.mark.parametrize("name", BUILDERS)
def test_a_masked_row_is_the_narrow_network(name: str) -> None:
    build = BUILDERS[name]
    model = model_of(build)
    chain = HiddenLayerChannels.from_model(model, samples())
    assert chain.widths == WIDTHS[name]
    held = [torch.zeros(1, width, dtype=torch.bool) for width in chain.widths]
    for channels in held:
        channels[0, 1:-1] = True  # neither the first nor the last
    check_channel_chain(model, chain, held, samples())
    draw = torch.Generator().manual_seed(2)
    row = torch.randn(model.dimension, generator=draw, dtype=torch.float64)
    mask = chain.held_column_masks(held)[0]
    narrow = build(*(width - 2 for width in chain.widths)).double()
    kept = row[mask]
    assert len(kept) == sum(parameter.numel() for parameter in narrow.parameters())
    with torch.no_grad():
        start = 0
        for parameter in narrow.parameters():
            parameter.copy_(kept[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()
        output = model.evaluate(row * mask, model.call.inputs(samples()))
        torch.testing.assert_close(output, narrow(samples()["x"]), rtol=1e-12, atol=1e-12)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(36, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        return self.last(hidden + torch.relu(self.second(hidden)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(36, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))))


def mixture(between: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 6), between, nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), "has no hidden layer"),
        (Residual, "change the output"),
        (Twice, "'second' of Twice is executed 2 times"),
        (mixture(nn.LayerNorm(6, elementwise_affine=False)), "change the output"),
        (mixture(nn.Softmax(1)), "change the output"),
        (mixture(nn.LayerNorm(6)), "is LayerNorm"),
        (mixture(nn.Sigmoid()), "must be 0 at 0"),
        (mixture(nn.PReLU()), "is PReLU"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)),
         "is Conv2d"),
    ],
)  # fmt: skip
def test_models_without_separate_channels_are_refused(build: Callable[[], nn.Module], said: str) -> None:
    def follow() -> None:
        chain = HiddenLayerChannels.from_model(model, samples())
        held = [(torch.arange(width) + layer)[None] % 3 > 0 for layer, width in enumerate(chain.widths)]
        check_channel_chain(model, chain, held, samples())

    model = model_of(build)
    with pytest.raises(ConfigError, match=said):
        follow()
