"""Adapters: what their aggregation must be, beside a loop by torch.optim over clients, and what it costs."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim import ConfigError, Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import MLP, LoRAMLP
from fedsim.models.lora import LoRALinear, add_adapters
from fedsim.models.selectors import ByName
from fedsim.strategies import FedAvg, FedExLoRA, FlexLoRA, FLoRA
from fedsim.uplink import TopK

SIZES = (2, 7, 4, 5)
WORDS = ("1101 0111 0000 1111", "1011 1110 0101 1001")
COUNTS = np.array([[list(map(int, word)) for word in one.split()] for one in WORDS]).swapaxes(0, 1)  # [T, R, m]
MODEL = partial(LoRAMLP, hidden=(5,), rank=2, alpha=3.0)
LAYERS = ("layers.1", "layers.3")
FACTORS = ("lora_A", "lora_B")


def samples() -> Dataset:
    draw = np.random.default_rng(0)
    owners = torch.as_tensor(np.repeat(np.arange(len(SIZES)), SIZES))
    x, y = torch.as_tensor(draw.standard_normal((len(owners), 4))), torch.as_tensor(draw.integers(0, 3, len(owners)))
    return Dataset("few", x, y, classes=3, owners=owners)


@pytest.fixture(name="simulation_of")
def simulation_of_fixture(Scripted):
    def of(strategy, executor="vmap", **options) -> Simulation:
        given = {
            "local": SGD(lr=0.4, steps=3, batch_size=None), "availability": Scripted(COUNTS), "rounds": len(COUNTS),
            "model": partial(MODEL, residual=not isinstance(strategy, (FedAvg, FlexLoRA))), "seeds": (3, 5),
        }  # fmt: skip
        options = given | options
        return Simulation(
            samples(), options.pop("model"), clients=len(SIZES), strategy=strategy,
            execution=Execution(executor, dtype="float64"), **options,
        )  # fmt: skip

    return of


def module_of(simulation: Simulation, row: torch.Tensor) -> nn.Module:
    module = copy.deepcopy(simulation.model.training_module)
    module.load_state_dict(module.state_dict() | simulation.model.unflatten(row))
    return module


def weight(module: nn.Module, name: str) -> torch.Tensor:
    """The effective weight of a layer."""
    layer = module.get_submodule(name)
    change = layer.lora_B @ layer.lora_A + (0.0 if layer.lora_residual is None else layer.lora_residual)
    return (layer.weight + 1.5 * change).detach()


def trained_by_hand(simulation: Simulation, row: torch.Tensor, client: int) -> nn.Module:
    """The client's model after its local steps from a row."""
    return trained(simulation, module_of(simulation, row), client)


def trained(simulation: Simulation, module: nn.Module, client: int, factors=FACTORS) -> nn.Module:
    """A client's model after its local steps on these factors alone."""
    data = simulation.data.dataset
    adapters = [p for name, p in module.named_parameters() if name.endswith(factors) and p.requires_grad]
    optimiser = torch.optim.SGD(adapters, lr=0.4)
    mine = data.owners == client
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(module(data.train_x[mine]), data.train_y[mine]).backward()
        optimiser.step()
    return module


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weighting", ["uniform", "data"])
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", [FedExLoRA, FLoRA])
def test_every_round_follows_the_formula_and_has_no_aggregation_error(
    strategy, executor, weighting, simulation_of, play
):
    """Effective weights are the means of the clients', from whom no one comes in round 2 of a replicate."""
    simulation = simulation_of(strategy(weighting), executor)
    for played in play(simulation):
        for replicate in (0, 1):
            before, after = played.before.model[replicate], played.after.model[replicate]
            active = np.flatnonzero(COUNTS[played.t][replicate])
            if not len(active):
                assert torch.equal(after, before)
                continue
            clients = [trained_by_hand(simulation, before, int(client)) for client in active]
            shares = np.array([SIZES[i] if weighting == "data" else 1.0 for i in active])
            shares = shares / shares.sum()
            found = module_of(simulation, after)
            for name in LAYERS:
                wanted = sum(w * weight(module, name) for w, module in zip(shares, clients, strict=True))
                torch.testing.assert_close(weight(found, name), wanted, rtol=0, atol=1e-10)
                layers = [module.get_submodule(name) for module in clients]
                own = found.get_submodule(name)
                if strategy is FedExLoRA:
                    mean = sum(w * layer.lora_A for w, layer in zip(shares, layers, strict=True))
                    torch.testing.assert_close(own.lora_A, mean, rtol=0, atol=1e-10)
                else:
                    assert not bool(own.lora_B.any())
                    assert float(own.lora_A.abs().max().detach()) <= own.lora_A.shape[1] ** -0.5
                    assert not torch.equal(own.lora_A, module_of(simulation, before).get_submodule(name).lora_A)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_every_round_of_flexlora_follows_the_formula(executor, simulation_of, play):
    """The best approximation of rank r: its error is that of the dropped singular values."""
    simulation, largest_error = simulation_of(FlexLoRA("data"), executor), 0.0
    for played in play(simulation):
        for replicate in (0, 1):
            before, after = played.before.model[replicate], played.after.model[replicate]
            active = np.flatnonzero(COUNTS[played.t][replicate])
            if not len(active):
                assert torch.equal(after, before)
                continue
            shares = np.array([float(SIZES[i]) for i in active])
            clients = [trained_by_hand(simulation, before, int(client)) for client in active]
            found = module_of(simulation, after)
            for name in LAYERS:
                layers = [module.get_submodule(name) for module in clients]
                products = [w * (layer.lora_B @ layer.lora_A).detach() for w, layer in zip(shares, layers, strict=True)]
                mean = (sum(products) / shares.sum()).numpy()
                u, s, v = np.linalg.svd(mean)
                own = found.get_submodule(name)
                product = (own.lora_B @ own.lora_A).detach().numpy()
                np.testing.assert_allclose(product, (u[:, :2] * s[:2]) @ v[:2], rtol=0, atol=1e-10)
                assert np.sum((mean - product) ** 2) == pytest.approx(np.sum(s[2:] ** 2), abs=1e-12)
                largest_error = max(largest_error, s[2])
    assert largest_error > 1e-3


@pytest.mark.slow
def test_fedavg_on_adapters_has_an_aggregation_error(simulation_of, play):
    """FedIT's: the covariance of B and A over the clients."""
    simulation = simulation_of(FedAvg())
    for played in play(simulation, 2):
        before, after = played.before.model[0], played.after.model[0]
        clients = [trained_by_hand(simulation, before, int(i)) for i in np.flatnonzero(COUNTS[played.t][0])]
        for name in LAYERS:
            layers = [module.get_submodule(name) for module in clients]
            b, a = (torch.stack([getattr(layer, part) for layer in layers]).detach() for part in ("lora_B", "lora_A"))
            covariance = ((b - b.mean(0)) @ (a - a.mean(0))).mean(0)
            exact = torch.stack([weight(module, name) for module in clients]).mean(0)
            error = exact - weight(module_of(simulation, after), name)
            torch.testing.assert_close(error, 1.5 * covariance, rtol=0, atol=1e-10)
            assert float(error.norm()) > 1e-5


@pytest.mark.slow
def test_the_first_round_of_both_has_the_same_effective_weights(simulation_of, play):
    ends = []
    for strategy in (FedExLoRA(), FLoRA()):
        simulation = simulation_of(strategy)
        row = next(play(simulation)).after.model[0]
        ends.append([weight(module_of(simulation, row), name) for name in LAYERS])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
def test_clients_neither_train_nor_send_residuals(executor, simulation_of, play):
    simulation = simulation_of(FedExLoRA(), executor)
    columns = simulation.federation.columns
    assert [name for name in columns if columns[name].role == "received"] == [f"{n}.lora_residual" for n in LAYERS]
    for played in play(simulation, 2):
        for name in LAYERS:
            residual = columns[f"{name}.lora_residual"]
            assert torch.equal(residual.select(played.report.end), residual.select(played.report.start))
    sent = sum(p.numel() for n, p in simulation.model.training_module.named_parameters() if n[-1] in "AB")
    received = sum(p.numel() for n, p in simulation.model.training_module.named_parameters() if "residual" in n)
    assert (simulation.traffic.bytes_up, simulation.traffic.bytes_down) == (8 * sent, 8 * (sent + received))


def test_frozen_weights_are_in_no_row(simulation_of):
    """FFA-LoRA: neither is A, which all clients share; FedSA-LoRA: B is in the client's rows alone."""
    fedit, ffa = simulation_of(FedAvg()), simulation_of(FedAvg(), model=partial(MODEL, train_a=False))
    assert fedit.model.dimension == 2 * (4 + 5) + 2 * (5 + 3)
    assert ffa.model.dimension == 2 * 5 + 2 * 3
    fedsa = simulation_of(FedAvg(), columns=ByName(stays=["lora_B"]))
    assert fedsa.initial_state().model.shape == (2, 2 * 4 + 2 * 5)


@pytest.mark.slow
def test_ffa_lora_has_no_aggregation_error(simulation_of, play):
    """With A the same everywhere, the mean of products is the product with the mean."""
    simulation = simulation_of(FedAvg(), model=partial(MODEL, train_a=False))
    for played in play(simulation, 2):
        clients = [
            trained_by_hand(simulation, played.before.model[0], int(i)) for i in np.flatnonzero(COUNTS[played.t][0])
        ]
        for name in LAYERS:
            exact = torch.stack([weight(module, name) for module in clients]).mean(0)
            found = weight(module_of(simulation, played.after.model[0]), name)
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_an_adapter_begins_as_the_layer_it_is_at():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    assert torch.equal(LoRALinear(layer, 2, 4.0, residual=True)(x), layer(x))


def test_adapters_are_put_where_a_name_matches():
    module = add_adapters(MLP((4,), 3, hidden=(5, 5)), rank=2, layers=r"layers\.[13]$", trained=r"layers\.5")
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert trained == [
        "layers.1.lora_A", "layers.1.lora_B", "layers.3.lora_A", "layers.3.lora_B", "layers.5.weight", "layers.5.bias",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FedExLoRA, FLoRA, FlexLoRA])
def test_a_resumed_run_is_the_uninterrupted_one(strategy, simulation_of, tmp_path):
    whole = simulation_of(strategy()).run().state.model
    simulation_of(strategy(), rounds=2).run(out=tmp_path)
    assert torch.equal(simulation_of(strategy()).run(out=tmp_path, resume=True).state.model, whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FedExLoRA, FLoRA, FlexLoRA])
def test_replicates_are_the_same_alone_and_together(strategy, simulation_of, Scripted):
    together = simulation_of(strategy()).run().state.model
    for replicate, seed in enumerate((3, 5)):
        alone = simulation_of(
            strategy(), seeds=(seed,), availability=Scripted(COUNTS[:, replicate : replicate + 1])
        ).run()
        torch.testing.assert_close(alone.state.model[0], together[replicate], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": MODEL}, r"strategy=fedex_lora aggregates products of adapters.*model\.residual=true"),
        ({"model": MLP}, r"strategy=fedex_lora aggregates products of adapters"),
        ({"columns": ByName(stays=["lora_B"])}, r"strategy=fedex_lora aggregates products of adapters.*columns=all"),
        ({"local": SGD(weight_decay=0.1)}, r"strategy=fedex_lora sends columns.*use local\.weight_decay=0"),
        ({"ridge": 0.1}, r"model\.ridge=0\.1 would shrink layers\.1\.lora_residual"),
        (
            {"uplink": TopK(fraction=0.1)},
            r"an uplink that compresses rows would count columns that clients do not send",
        ),
        ({"model": partial(LoRAMLP, rank=9, residual=True)}, r"rank=9 exceeds 4, the smaller dimension"),
    ],
)
def test_what_does_not_fit_is_refused(options, message, simulation_of):
    with pytest.raises(ConfigError, match=message):
        simulation_of(FedExLoRA(), **options).run()
