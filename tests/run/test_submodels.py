"""Clients that hold a part of the model's channels, beside networks that are narrow in fact."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.availability import Availability
from fedsim.core.errors import RunError
from fedsim.core.federation import Cohort, Federation
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.data.samples import Batch
from fedsim.local import SGD
from fedsim.local.rule import Carry, Objective
from fedsim.models.capacity import Capacity, Widths
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvg, FedOpt, FedProx, Scaffold

SIZES, HIDDEN, ROUNDS, RATE, STEPS = (7, 1, 9, 4), 6, 4, 0.3, 2
QUIET = Tracking(progress="none", tensorboard=False)


def build(hidden: int = HIDDEN) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def data() -> Dataset:
    draw = np.random.default_rng(0)
    x = torch.as_tensor(draw.standard_normal((sum(SIZES), 4)))
    y = torch.as_tensor(draw.integers(0, 3, sum(SIZES)))
    owners = torch.as_tensor(np.repeat(np.arange(len(SIZES)), SIZES))
    return Dataset("toy", x, y, x[:6], y[:6], classes=3, owners=owners)


def federated(capacity: Capacity | None, **given: Any) -> Simulation:
    options: dict[str, Any] = {
        "clients": len(SIZES), "partition": Natural(), "local": SGD(lr=RATE, steps=STEPS, batch_size=None),
        "rounds": ROUNDS, "seeds": (0, 1), "execution": Execution(dtype="float64"),
        "evaluation": EvaluationOptions(every=ROUNDS), "capacity": capacity,
    }  # fmt: skip
    return Simulation(data(), build, **options | given)


def models(capacity: Capacity | None, **given: Any) -> Tensor:
    return federated(capacity, **given).run(tracking=QUIET).state.model


class Given(Capacity):
    """Client i holds these channels in round t."""

    def __init__(self, *held: list[list[int]]) -> None:
        self.held = held

    def held_channels(self, cohort: Cohort, widths: Any, t: int) -> tuple[list[Tensor], Tensor]:
        sets = torch.zeros(len(SIZES), HIDDEN, dtype=torch.bool)
        for client, channels in enumerate(self.held[t % len(self.held)]):
            sets[client, channels] = True
        return [sets], cohort.client_index


HELD = ([[0, 1, 2, 3, 4, 5], [0, 1, 2], [0], [3, 4]], [[5], [5, 2], [1, 2, 3], [0, 1, 2, 3, 4, 5]])


class Sometimes(Availability):
    """Clients by turns; nobody in round 2."""

    def probabilities(self, t: int) -> np.ndarray:
        turns = ([1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1])
        return np.tile(np.array(turns[t % 4], dtype=float), (2, 1))

    def counts(self, t: int) -> np.ndarray:
        return self.probabilities(t)


def places(held: list[int]) -> dict[str, Any]:
    """Parameter name → which of its entries a network with these hidden channels has."""
    return {"0.weight": held, "0.bias": held, "2.weight": (slice(None), held), "2.bias": slice(None)}


def narrow_by_hand(model: Tensor, held: list[int], samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A narrow network's update by torch.optim, in the places of the wide one, and which places it has."""
    wide, small = build().double(), build(len(held)).double()
    nn.utils.vector_to_parameters(model, wide.parameters())
    with torch.no_grad():
        for name, place in places(held).items():
            small.get_parameter(name).copy_(wide.get_parameter(name)[place])
    before = copy.deepcopy(small)
    optimizer = torch.optim.SGD(small.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(small(samples[0]), samples[1]).backward()
        optimizer.step()
    update, mask = build().double(), build().double()
    with torch.no_grad():
        for parameter in (*update.parameters(), *mask.parameters()):
            parameter.zero_()
        for name, place in places(held).items():
            update.get_parameter(name)[place] = small.get_parameter(name) - before.get_parameter(name)
            mask.get_parameter(name)[place] = 1.0
    return nn.utils.parameters_to_vector(update.parameters()), nn.utils.parameters_to_vector(mask.parameters())


@pytest.mark.parametrize("weighting", ["uniform", "data"])
@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
def test_heterogeneous_averaging_is_that_of_narrow_networks(weighting: str, executor: str) -> None:
    simulation = federated(
        Given(*HELD), strategy=FedAvg(weighting=weighting), execution=Execution(dtype="float64", executor=executor)
    )
    model = simulation.model.initial([0])[0].detach()
    x, y, offsets = data().train_x, data().train_y, np.concatenate([[0], np.cumsum(SIZES)])
    assert y is not None
    for t in range(ROUNDS):
        total, weight = torch.zeros_like(model), torch.zeros_like(model)
        for client, held in enumerate(HELD[t % 2]):
            at = slice(offsets[client], offsets[client + 1])
            update, mask = narrow_by_hand(model, held, (x[at], y[at]))
            share = SIZES[client] if weighting == "data" else 1.0
            total, weight = total + share * update, weight + share * mask
        model = (model + torch.where(weight > 0, total / weight.clamp(min=1), 0.0)).detach()
    torch.testing.assert_close(simulation.run(tracking=QUIET).state.model[0], model, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", [FedAvg(), FedAvg(weighting="data"), FedProx(mu=0.1), FedOpt()])
def test_where_all_hold_everything_it_is_the_plain_run_bit_for_bit(strategy: Any) -> None:
    for options in ({}, {"availability": Sometimes()}):
        whole = models(Widths([1.0]), strategy=strategy, **options)
        assert torch.equal(whole, models(None, strategy=strategy, **options))


def test_a_column_that_nobody_holds_keeps_its_value() -> None:
    simulation = federated(Given([[0, 1]] * 4), strategy=FedProx(mu=0.1))
    first = simulation.model.initial([0, 1])
    last = simulation.run(tracking=QUIET).state.model
    absent = [r * 4 + c for r in range(2, HIDDEN) for c in range(4)] + [24 + r for r in range(2, HIDDEN)]
    absent += [30 + 6 * out + r for out in range(3) for r in range(2, HIDDEN)]
    assert torch.equal(first[:, absent], last[:, absent])
    held = [column for column in range(first.shape[1]) if column not in absent]
    assert (first[:, held] != last[:, held]).all()


@pytest.mark.parametrize("options", [{}, {"channels": "random"}, {"channels": "rolling", "redraw": True}])
def test_replicates_and_resumed_runs_agree(options: dict[str, Any], tmp_path: Path) -> None:
    capacity = Widths([1.0, 0.5, 0.2], **options)
    together = models(capacity, seeds=(3, 8))
    for r, seed in enumerate((3, 8)):
        torch.testing.assert_close(models(capacity, seeds=(seed,))[0], together[r], rtol=1e-10, atol=1e-12)
    files = Tracking(progress="none", tensorboard=False, checkpoint_every=1)
    federated(capacity, seeds=(3, 8), rounds=2).run(tmp_path / "a", tracking=files)
    resumed = federated(capacity, seeds=(3, 8)).run(tmp_path / "a", resume=True, tracking=files)
    assert torch.equal(resumed.state.model, together)


def cohort_of(clients: int, seeds: tuple[int, ...] = (0,), t: int = 0, sizes: np.ndarray | None = None) -> Cohort:
    sizes = np.ones(len(seeds) * clients) if sizes is None else sizes
    ones = np.ones((len(seeds), clients))
    return Federation(seeds, clients, sizes).make_cohort(ones, ones, t)


def held(capacity: Widths, cohort: Cohort, width: int, t: int = 0) -> Tensor:
    capacity.setup(cohort.federation)
    sets, index = capacity.held_channels(cohort, [width], t)
    return sets[0][index]


def test_so_many_channels_are_held_by_so_many_clients() -> None:
    for channels in ("first", "rolling", "random"):
        rows = held(Widths([0.1, 1.0, 0.25], shares=[1, 1, 2], channels=channels), cohort_of(40), 10, t=7)
        counts = rows.sum(1)
        assert sorted(counts.tolist()) == [1] * 10 + [3] * 20 + [10] * 10  # ⌈0.1 · 10⌉, ⌈0.25 · 10⌉
    first = held(Widths([0.3]), cohort_of(2), 10)
    assert first.tolist() == [[True] * 3 + [False] * 7] * 2


def test_a_rolling_window_visits_each_channel_equally_often() -> None:
    windows = torch.stack([held(Widths([0.3], channels="rolling"), cohort_of(1), 10, t=t) for t in range(10)])
    assert windows.sum(0).tolist() == [[3] * 10]


def test_drawn_channels_are_those_of_the_client_and_the_round_and_are_even() -> None:
    capacity = Widths([0.3], channels="random")
    rows = torch.stack([held(capacity, cohort_of(500, t=t), 10, t) for t in range(4)])
    assert len({tuple(row) for row in rows.flatten(0, 1).long().tolist()}) > 100  # of 120
    frequencies = rows.double().mean((0, 1))
    assert ((frequencies - 0.3).abs() < 4 * (0.21 / 2000) ** 0.5).all()


def test_clients_with_more_samples_are_wider() -> None:
    sizes = np.array([5, 9, 1, 7, 3, 2])
    rows = held(Widths([0.2, 0.6, 1.0], assign="size"), cohort_of(6, sizes=sizes), 5)
    assert rows.sum(1).tolist() == [3, 5, 1, 5, 3, 1]


def test_redrawn_widths_stay_below_their_clients() -> None:
    capacity, fixed = Widths([0.2, 0.6, 1.0], redraw=True), Widths([0.2, 0.6, 1.0])
    limit = held(fixed, cohort_of(300), 5).sum(1)
    counts = torch.stack([held(capacity, cohort_of(300, t=t), 5, t).sum(1) for t in range(20)])
    assert (counts <= limit).all()
    widest = counts[:, limit == 5].double()
    shares = [(widest == k).double().mean().item() for k in (1, 3, 5)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)


def test_bytes_are_those_of_the_columns_that_are_held() -> None:
    simulation = federated(Given([[0], [0, 1], [2, 3, 4], [0, 1, 2, 3, 4, 5]]), rounds=1, seeds=(0,))
    row = simulation.run(tracking=QUIET).history[-1]
    columns = sum(k * (4 + 1 + 3) + 3 for k in (1, 2, 3, 6))
    assert row["bytes_up"] == row["bytes_down"] == row["total_bytes_up"] == 8 * columns


class Shaken(SGD):
    """Moves every parameter, wanted or not."""

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        carry, loss = super().step(carry, batch, lr, objective)
        return carry | {"params": carry["params"] + 0.01}, loss


def test_a_rule_that_moves_what_a_client_lacks_ends_the_run() -> None:
    with pytest.raises(RunError, match="round 0 local=Shaken moved columns that its client does not hold"):
        models(Widths([0.5]), local=Shaken(lr=RATE, steps=STEPS, batch_size=None))


def test_what_needs_whole_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="strategy=Scaffold uses more of the clients' updates than their mean"):
        federated(Widths([0.5]), strategy=Scaffold())
    with pytest.raises(ConfigError, match="evaluate=client_mean"):
        federated(Widths([0.5]), evaluation=EvaluationOptions(every=ROUNDS, of="client_mean"))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"widths": []}, "widths"),
        ({"widths": [0.5, 0]}, "widths"),
        ({"widths": [0.5, 1.2]}, "widths"),
        ({"shares": [1]}, "shares"),
        ({"assign": "luck"}, "assign"),
        ({"channels": "last"}, "channels"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Widths(**options)
