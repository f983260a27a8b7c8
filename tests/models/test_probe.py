"""What a module must not do: each is refused in one sentence that names it; what it may do is found out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core import ConfigError
from fedsim.models import StatelessModel
from fedsim.models import probe as probe_module
from fedsim.models.probe import ForwardTraits, probe_forward_traits

X = torch.tensor([[0.3, -1.0, 2.0], [1.5, 0.2, -0.7]])


class Own(nn.Module):
    """A linear layer and something else, in a forward of the test's own."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls, self.mean = 0, torch.zeros(3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self, x)


def numpy_noise(module: Own, x: Tensor) -> Tensor:
    return module.layer(x) + float(np.random.normal())  # noqa: NPY002


def python_noise(module: Own, x: Tensor) -> Tensor:
    return module.layer(x) * random.random()


def dropped_in_evaluation(module: Own, x: Tensor) -> Tensor:
    return F.dropout(module.layer(x), 0.5)


def into_the_input(module: Own, x: Tensor) -> Tensor:
    return module.layer(x.mul_(2))


def counted_outside(module: Own, x: Tensor) -> Tensor:
    module.calls += 1
    return module.layer(x) / module.calls


def averaged_outside(module: Own, x: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * x.mean(0)
    return module.layer(x - module.mean)


def counted_for_nobody(module: Own, x: Tensor) -> Tensor:
    module.calls += 1  # never read
    return module.layer(x)


def moved_in_evaluation(module: Own, x: Tensor) -> Tensor:
    module.seen = module.seen + x.detach().mean(0)
    return module.layer(x)


def multinomial(module: Own, x: Tensor) -> Tensor:
    return module.layer(x) * torch.multinomial(torch.ones(3), 1)


@pytest.mark.parametrize(
    ("forward", "sentence"),
    [
        (numpy_noise, "Own draws random numbers that cannot be keyed by client and step"),
        (python_noise, "Own draws random numbers that cannot be keyed by client and step"),
        (dropped_in_evaluation, "Own draws random numbers in evaluation, .* pass training=self.training"),
        (into_the_input, "the forward pass of Own writes into its input"),
        (counted_outside, "Own keeps 'calls' from one forward pass to the next in a plain attribute"),
        (averaged_outside, r"Own keeps 'mean' .* keep it in a buffer \(self.register_buffer\)"),
        (moved_in_evaluation, "Own changes its buffer 'seen' in evaluation; ask for self.training first"),
        (multinomial, "multinomial in a forward pass draws from a global stream"),
    ],
)
def test_what_would_pass_between_clients_is_refused(forward: Any, sentence: str) -> None:
    module, x = Own(forward), X.clone()
    kept = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    with pytest.raises(ConfigError, match=f"model: {sentence}"):
        probe_forward_traits(module, x)
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert np.array_equal(np.random.get_state()[1], kept[1])  # noqa: NPY002
    assert random.getstate() == kept[2]


def test_the_innermost_layer_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Own(numpy_noise)))
    with pytest.raises(ConfigError, match=r"layer '1\.1' \(Own\) draws random numbers"):
        probe_forward_traits(module, X)


def test_dropout_inside_a_recurrence_cannot_be_keyed() -> None:
    with pytest.raises(ConfigError, match=r"layer '0' \(LSTM\) applies dropout=0\.2 inside"):
        StatelessModel(nn.Sequential(nn.LSTM(3, 3, num_layers=2, dropout=0.2)))


def running(module: Own, x: Tensor) -> Tensor:
    if module.training:
        module.seen = 0.9 * module.seen + 0.1 * x.detach().mean(0)
        module.count += 1
    return module.layer(x - module.seen)


def with_the_largest_input(module: Own, x: Tensor) -> Tensor:
    if module.training:
        module.seen.copy_(torch.where(x.max() > 4, x.detach().amax(0), module.seen))  # X reaches 2
    return module.layer(x)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (nn.Linear(3, 3), {}),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), {}),
        (
            Own(counted_for_nobody),
            {
                "isolation_reason": "Own changes its attribute 'calls' in each forward pass",
                "evaluation_isolated": "Own changes its attribute 'calls' in each forward pass",
            },
        ),
        (Own(with_the_largest_input), {"statistics": ["seen"]}),
        (Own(running), {"statistics": ["seen", "count"], "mixes_samples": True}),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
            {
                "statistics": ["1.running_mean", "1.running_var", "1.num_batches_tracked"],
                "mixes_samples": True,
                "min_batch": 2,
            },
        ),
        (
            nn.BatchNorm1d(3, track_running_stats=False),
            {"mixes_samples": True, "evaluation_mixes_samples": True, "min_batch": 2},
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.AlphaDropout(0.2)), {"random": True}),
        (nn.LayerNorm(3), {}),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            {"statistics": ["parametrizations.weight.0._u", "parametrizations.weight.0._v"]},
        ),
    ],
)
def test_what_a_forward_pass_does_is_found_out(module: nn.Module, found: dict[str, Any]) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert probe_forward_traits(module, X) == ForwardTraits(**found)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_what_vmap_cannot_do_is_known_beforehand() -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    model = StatelessModel(Branch(3, 3))
    model.check({"x": X, "y": torch.tensor([0, 1])}, 3, "test")
    assert "data-dependent control flow" in str(model.no_vmap_reason)
    assert "data-dependent control flow" in str(model.traits.evaluation_unvmapped)
    plain = StatelessModel(nn.Linear(3, 3))
    plain.check({"x": X, "y": torch.tensor([0, 1])}, 3, "test")
    assert plain.traits == ForwardTraits()


@pytest.mark.parametrize("strange", [False, True])
def test_rounding_alone_is_no_other_number(strange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where single precision cannot tell, double does: a deep network's gradients differ by 10⁻⁴ of the largest."""

    class Grouped(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(self[0].weight)
            return super().forward(x.unflatten(0, (-1, 1, 1))) * (2.0 if strange and wrapped else 1.0)

    torch.manual_seed(0)
    model = StatelessModel(Grouped(nn.Conv2d(1, 8, (1, 3), padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)))
    model.check({"x": X, "y": torch.tensor([0, 1])}, 3, "test")
    monkeypatch.setattr(probe_module, "PROBE_TOLERANCE", 1e-9)
    looks: list[torch.dtype] = []
    asked = StatelessModel.initial
    monkeypatch.setattr(StatelessModel, "initial", lambda self, seeds: looks.append(self.dtype) or asked(self, seeds))
    assert model.no_vmap_reason == ("it gives other numbers" if strange else None)
    assert looks == [torch.float32, torch.float64]
