"""A module seen as a function of one row is the module itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import SETTINGS, SMALL, inputs
from torch import Tensor, nn
from torch.func import vmap

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.models import CIFAR10CNN, CINIC10CNN, MLP, SVHNCNN, Linear, Mean, StatelessModel
from fedsim.models.calling import without_fused_encoder_layers
from fedsim.models.dropout import KeyedDropout
from fedsim.models.lora import add_adapters
from fedsim.models.text import Transformer

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Linear(SMALL, 3),
    "linear_without_bias": lambda: Linear(SMALL, 3, bias=False),
    "mlp": lambda: MLP(SMALL, 3, (7, 5)),
    "mlp_without_hidden": lambda: MLP(SMALL, 3, ()),
    "svhn": lambda: SVHNCNN(SMALL, 3),
    "cifar10": lambda: CIFAR10CNN(SMALL, 3),
    "cinic10": lambda: CINIC10CNN(SMALL, 3),
    "group_norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3)),
}


WITHOUT_DROPOUT = [name for name in MODELS if name != "cinic10"]


def randomised(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module whose every parameter is random, also those that start at zero."""
    module, draw = build(), torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.2
    return module


class Frozen(nn.Module):
    """Random features that are not trained, one as a parameter, one as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 4)
        self.features.requires_grad_(False)
        self.register_buffer("phase", torch.rand(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cos(self.features(x) + self.phase))


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("name", MODELS)
def test_unflatten_undoes_the_flattening_of_initial(name: str) -> None:
    """A ready module starts every replicate from its own parameters, and unflattening names them as the module does."""
    module = randomised(MODELS[name])
    model = StatelessModel(module)
    rows = model.initial([0, 1])
    named = dict(module.named_parameters())
    assert rows.shape == (2, model.dimension)
    assert model.dimension == sum(p.numel() for p in named.values())
    for row in rows:
        parameters = model.unflatten(row)
        assert list(parameters) == list(named)
        assert all(torch.equal(parameters[key], named[key]) for key in named)


@pytest.mark.parametrize("name", WITHOUT_DROPOUT)
def test_prediction_is_the_modules_forward(name: str) -> None:
    module = randomised(MODELS[name])
    model = StatelessModel(MODELS[name])
    row = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x = inputs()
    torch.testing.assert_close(model.predict(model.unflatten(row), {"x": x}), module(x))
    torch.testing.assert_close(model.evaluate(row, x), module.eval()(x))


def test_prediction_with_dropout_is_the_modules_forward_under_the_same_masks() -> None:
    """Evaluation has no masks at all; in training they are those of the three keyed layers, in order."""
    module, model = randomised(MODELS["cinic10"]), StatelessModel(MODELS["cinic10"])
    row = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x, key = inputs(), torch.tensor(77)
    torch.testing.assert_close(model.evaluate(row, x), module.eval()(x))
    layers = [key_layer for key_layer in module.layers if isinstance(key_layer, nn.Dropout)]
    assert len(layers) == 3
    by_hand, position = x, 0
    for layer in module.layers:
        if isinstance(layer, nn.Dropout):
            masks = KeyedDropout(layer.p, position).train()
            masks.key = key
            by_hand, position = masks(by_hand), position + 1
        else:
            by_hand = layer(by_hand)
    torch.testing.assert_close(model.predict(model.unflatten(row), {"x": x, "key": key}), by_hand)


@pytest.mark.parametrize("name", MODELS)
def test_vmapped_prediction_is_row_by_row(name: str) -> None:
    model = StatelessModel(MODELS[name])
    rows = torch.stack(
        [torch.cat([p.detach().reshape(-1) for p in randomised(MODELS[name], s).parameters()]) for s in range(3)]
    )
    batches = [{"x": inputs(4, seed=s), "key": torch.tensor(100 + s)} for s in range(3)]
    together = vmap(lambda row, batch: model.predict(model.unflatten(row), batch))(
        rows, {k: torch.stack([b[k] for b in batches]) for k in ("x", "key")}
    )
    apart = [model.predict(model.unflatten(row), batch) for row, batch in zip(rows, batches, strict=True)]
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "svhn", "cifar10", "cinic10"])
def test_initial_rows_follow_the_seed(name: str) -> None:
    """Equal seeds start equally, alone or in company; different seeds differently."""
    model = StatelessModel(MODELS[name])
    rows = model.initial([3, 4, 3])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(model.initial([4])[0], rows[1])
    assert torch.equal(StatelessModel(MODELS[name]).initial([4])[0], rows[1])


@pytest.mark.parametrize("name", MODELS)
def test_torchs_global_generator_is_neither_used_nor_moved(name: str) -> None:
    model = StatelessModel(MODELS[name])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = model.initial([0])
    StatelessModel(MODELS[name]).check({"x": inputs(2), "y": torch.tensor([0, 1])}, 3, "test")
    model.predict(model.unflatten(first[0]), {"x": inputs(), "key": torch.tensor(5)})
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(model.initial([0]), first)


def test_frozen_parameters_are_not_in_the_row_but_in_the_prediction() -> None:
    module = Frozen()
    model = StatelessModel(module)
    assert model.dimension == 4 * 3 + 3
    x = torch.randn(5, 6)
    torch.testing.assert_close(model.evaluate(model.initial([0])[0], x), module(x))


def test_adapters_of_an_encoder_layer_count_in_evaluation() -> None:
    module = add_adapters(Transformer((5,), 7, 8, 2, 1), 2, 4.0, "linear")
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    tokens = torch.arange(10).reshape(2, 5) % 7
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(tokens), module.train()(tokens))


def test_what_a_module_draws_beside_its_trained_parameters_is_no_stream_either() -> None:
    """Random frozen weights and buffers must not hang on how much was drawn before the run."""
    x, row, outputs = torch.ones(2, 6), torch.ones(15), []
    for state in (1, 2):
        torch.manual_seed(state)
        outputs.append(StatelessModel(Frozen).evaluate(row, x))
    assert torch.equal(*outputs)


def test_a_shared_parameter_is_one_parameter() -> None:
    module = Tied()
    model = StatelessModel(module)
    assert model.dimension == 16
    row, x = torch.randn(16), torch.randn(3, 4)
    weight = row.reshape(4, 4)
    torch.testing.assert_close(model.evaluate(row, x), torch.relu(x @ weight.T) @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_and_predictions_have_the_runs_type(dtype: torch.dtype) -> None:
    model = StatelessModel(MODELS["mlp"], dtype=dtype)
    row = model.initial([0])[0]
    assert row.dtype == dtype
    assert model.evaluate(row, inputs().to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("module", "layers"),
    [
        (SVHNCNN, [(2048, 128), (128, 10)]),
        (CIFAR10CNN, [(2048, 256), (256, 64), (64, 10)]),
        (CINIC10CNN, [(2048, 512), (512, 256), (256, 10)]),
    ],
)
def test_the_networks_of_table_6_have_their_number_of_parameters(
    module: type[nn.Module], layers: list[tuple[int, int]]
) -> None:
    """C(3, 32) has 32·(3·9 + 1), C(32, 32) has 32·(32·9 + 1); two poolings leave 32·8·8 = 2048 features."""
    convolutions = 32 * (3 * 9 + 1) + 32 * (32 * 9 + 1)
    assert StatelessModel(module).dimension == convolutions + sum(b * (a + 1) for a, b in layers)


@pytest.mark.parametrize(("module", "count"), [(SVHNCNN, 273_706), (CIFAR10CNN, 551_786), (CINIC10CNN, 1_193_130)])
def test_the_networks_of_table_6_in_numbers(module: type[nn.Module], count: int) -> None:
    assert StatelessModel(module).dimension == count


@pytest.mark.parametrize(
    ("module", "letters"),
    [(SVHNCNN, "CRMCRMLRL"), (CIFAR10CNN, "CRMCRMLRLRL"), (CINIC10CNN, "CRMCRMDLRDLRDL")],
)
def test_the_networks_of_table_6_have_their_layers(module: type[nn.Module], letters: str) -> None:
    letter = {nn.Conv2d: "C", nn.ReLU: "R", nn.MaxPool2d: "M", nn.Linear: "L", nn.Dropout: "D"}
    built = module()
    leaves = [m for m in built.modules() if not list(m.children()) and not isinstance(m, nn.Flatten)]
    assert "".join(letter[type(m)] for m in leaves) == letters
    for m in leaves:
        if isinstance(m, nn.Conv2d):
            assert (m.kernel_size, m.stride, m.padding, m.out_channels) == ((3, 3), (1, 1), (1, 1), 32)
        if isinstance(m, nn.MaxPool2d):
            assert (m.kernel_size, m.stride) == (2, 2)
        if isinstance(m, nn.Dropout):
            assert m.p == 0.2
    assert built(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_networks_start_with_kaimings_variance() -> None:
    """2 / fan-in before a ReLU, within 5 standard errors of a variance; biases are zero."""
    torch.manual_seed(0)
    layers = [m for m in CIFAR10CNN().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for layer in layers[:-1]:
        variance = 2 / layer.weight[0].numel()
        assert abs(layer.weight.var().item() / variance - 1) < 5 * math.sqrt(2 / layer.weight.numel())
        assert layer.bias is not None
        assert not layer.bias.any()


@pytest.mark.parametrize("build", [SVHNCNN, CIFAR10CNN, CINIC10CNN])
def test_only_the_last_bias_is_pytorchs_where_asked_for(build) -> None:
    """Uniform on ±1/√fan_in, and nothing else changes: not even the other layers' draws."""
    found = []
    for last_bias in ("zero", "default"):
        torch.manual_seed(0)
        found.append([m for m in build(last_bias=last_bias).modules() if isinstance(m, (nn.Conv2d, nn.Linear))])
    for zero, default in zip(*found, strict=True):
        assert torch.equal(zero.weight, default.weight)
        assert not zero.bias.any()
        assert default.bias.any() == (default is found[1][-1])
    last = found[1][-1]
    assert 0.3 < last.bias.abs().max() * last.in_features**0.5 <= 1
    with pytest.raises(ConfigError, match=r"last_bias='none'"):
        build(last_bias="none")


def test_linear_starts_at_zero() -> None:
    assert not StatelessModel(MODELS["linear"]).initial([0]).any()


@SETTINGS
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), start=st.floats(-5, 5, width=32), n=st.integers(1, 4))
def test_mean_predicts_its_parameters(shape: list[int], start: float, n: int) -> None:
    model = StatelessModel(lambda: Mean(tuple(shape), start), loss="half_squared_distance")
    row = model.initial([0])[0]
    assert row.tolist() == [start] * math.prod(shape)
    theta = torch.arange(float(len(row)))
    assert torch.equal(model.evaluate(theta, torch.randn(n, *shape)), theta.reshape(shape).expand(n, *shape))


def test_group_norm_lets_every_sample_stand_alone() -> None:
    """Neither padding nor the evaluation's chunks can change a sample's output."""
    model = StatelessModel(randomised(MODELS["group_norm"]))
    row, x = model.initial([0])[0], inputs(6)
    torch.testing.assert_close(model.evaluate(row, x)[:2], model.evaluate(row, x[:2]))


def test_what_is_no_module_or_has_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: expected a torch\.nn\.Module, got int"):
        StatelessModel(lambda: 3)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        StatelessModel(nn.ReLU)


def test_a_module_that_takes_classes_needs_data_that_have_them() -> None:
    class Net(nn.Linear):
        def __init__(self, classes: int) -> None:
            super().__init__(4, classes)

    data = Dataset("mine", torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"model Net takes `classes`, but .* give Dataset\(…, classes=C\)"):
        Simulation(data, Net, clients=2, rounds=1)


def test_pytorchs_encoder_kernels_are_not_used_on_a_gpu_in_evaluation() -> None:
    enabled, module = torch.backends.mha.get_fastpath_enabled, nn.Linear(2, 2)
    assert enabled()
    for training, device, expected in ((False, "cpu", True), (True, "cuda", True), (False, "cuda", False)):
        with without_fused_encoder_layers(module.train(training), torch.device(device)):
            assert enabled() == expected
        assert enabled()
