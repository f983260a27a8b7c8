"""Columns of rows by the names of the model's tensors: places, views, roles, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedsim import ConfigError, Execution, Simulation
from fedsim.core import Cohort, Report
from fedsim.core.column_names import ColumnsByName
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import MLP
from fedsim.models.selectors import ByName
from fedsim.strategies import FedAvg, State

SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.gain": (), "b.weight": (4, 2)}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def samples() -> Dataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(24, 4, generator=draw, dtype=torch.float64)
    owners = torch.arange(24) % 3
    return Dataset("few", x, torch.arange(24) // 8, classes=3, owners=owners)


def simulation_of(model=build, **options) -> Simulation:
    local = SGD(lr=0.3, steps=3, batch_size=None)
    options = {"local": local, "clients": 3, "seeds": (1, 5), "rounds": 2} | options
    return Simulation(samples(), model, execution=Execution(dtype="float64"), **options)


def test_a_view_is_the_tensor_that_was_flattened():
    tensors = {name: torch.randn(5, *shape) for name, shape in SHAPES.items()}
    rows = torch.cat([value.reshape(5, -1) for value in tensors.values()], dim=1)
    names = ColumnsByName.from_shapes(SHAPES, {}, set())
    for name, value in tensors.items():
        assert torch.equal(names[name].select(rows), value)
        assert names[name].select(rows).untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    before = rows.clone()
    changed = names["b.weight"].replace(rows, 2 * tensors["b.weight"])
    assert torch.equal(rows, before)
    assert torch.equal(names["b.weight"].select(changed), 2 * tensors["b.weight"])
    assert torch.equal(changed[:, :9], rows[:, :9])


def test_rows_of_a_run_hold_what_the_names_say(play):
    """Private parameters and statistics shift the columns of what follows them."""
    simulation = simulation_of(columns=ByName(stays=["^0.weight"]))
    names = simulation.federation.columns
    assert {name: names[name].role for name in names} == {
        "0.weight": "private", "0.bias": "trained", "1.weight": "trained", "1.bias": "trained", "3.weight": "trained",
        "3.bias": "trained", "1.running_mean": "statistic", "1.running_var": "statistic",
        "1.num_batches_tracked": "statistic",
    }  # fmt: skip
    played = next(play(simulation))
    model = simulation.model
    full = model.initial(simulation.federation.seeds)
    assert played.report.columns is names
    for name in ("0.bias", "3.weight", "3.bias"):
        wanted = torch.stack([model.unflatten(row)[name] for row in full])
        assert torch.equal(names[name].select(played.before.model), wanted)


def test_a_mask_marks_the_layers_in_whose_name_the_pattern_is_found():
    names = ColumnsByName.from_shapes(SHAPES, {"c.mean": (2,)}, {"a.bias"})
    mask = names.column_mask("weight", torch.zeros(2, 15, dtype=torch.float64))
    assert mask.tolist() == [1.0] * 6 + [0.0] + [1.0] * 8
    assert mask.dtype == torch.float64


class OneLayer(FedAvg):
    """Clients train one layer, and the server steps along half of its change."""

    def start(self, state: State, cohort: Cohort) -> dict[str, Tensor]:
        rows = cohort.broadcast(state.model)
        return {"params": rows, "scale": cohort.federation.columns.column_mask("layers.3", rows).expand_as(rows)}

    def aggregate(self, state: State, report: Report, t: int) -> State:
        step = 0.5 * report.cohort.mean(report.innovation)
        return replace(state, model=state.model - report.columns.column_mask("layers.3", step) * step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_a_strategy_may_train_and_step_one_layer(executor):
    """Against a loop by torch.optim, with the other layer frozen."""
    model = lambda shape, classes: MLP(shape, classes, hidden=(5,))  # noqa: E731
    data = samples()
    simulation = Simulation(
        data, model, clients=3, seeds=(1,), rounds=2, strategy=OneLayer(),
        local=SGD(lr=0.3, steps=3, batch_size=None), execution=Execution(executor, dtype="float64"),
    )  # fmt: skip
    start = simulation.model.initial((1,))[0]
    end = simulation.run().state.model[0]
    module = MLP((4,), 3, hidden=(5,)).double()
    nn.utils.vector_to_parameters(start, module.parameters())
    server = module.state_dict()
    for _ in range(2):
        server = {name: value.clone() for name, value in server.items()}
        moves = {name: torch.zeros_like(value) for name, value in server.items()}
        for client in range(3):
            module.load_state_dict(server)
            optimiser = torch.optim.SGD(module.layers[3].parameters(), lr=0.3)
            mine = data.owners == client
            for _ in range(3):
                optimiser.zero_grad()
                nn.functional.cross_entropy(module(data.train_x[mine]), data.train_y[mine]).backward()
                optimiser.step()
            moves = {name: moves[name] + (value - server[name]) / 3 for name, value in module.state_dict().items()}
        server = {name: value + 0.5 * moves[name] for name, value in server.items()}
    wanted = torch.cat([server[name].reshape(-1) for name, _ in module.named_parameters()])
    torch.testing.assert_close(end, wanted, rtol=0, atol=1e-10)
    assert torch.equal(end[:25], start[:25])
    assert not torch.equal(end, start)


def test_a_wrong_name_is_refused_with_the_closest_one():
    names = ColumnsByName.from_shapes(SHAPES, {"c.mean": (2,)}, {"a.bias"})
    with pytest.raises(ConfigError, match=r"columns of 'b.wieght'.*did you mean 'b.weight'"):
        names["b.wieght"]
    with pytest.raises(ConfigError, match=r"columns of a.bias, which stays with the client"):
        names["a.bias"].select(torch.zeros(2, 15))
    with pytest.raises(ConfigError, match=r"columns of c.mean, which is averaged by the simulator"):
        names["c.mean"].select(torch.zeros(2, 15))
    with pytest.raises(ConfigError, match=r"match 'lora', but rows have those of a.weight, b.gain, b.weight"):
        names.column_mask("lora", torch.zeros(15))
