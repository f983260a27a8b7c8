"""FedAvg as anybody would write it: deepcopy, torch.optim, average of the state dictionaries."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.local import SGD
from fedsim.models.copying import get_named_tensor
from fedsim.models.randomness import KeyedRandomness
from fedsim.strategies import FedAvg

SIZES = (7, 5, 9)
ROUNDS = 2
RATE = 0.1


def samples() -> Dataset:
    draw = np.random.default_rng(0)
    x = torch.as_tensor(draw.standard_normal((sum(SIZES), 4)))
    y = torch.as_tensor(draw.integers(0, 3, sum(SIZES)))
    owners = torch.as_tensor(np.repeat(np.arange(len(SIZES)), SIZES))
    return Dataset("toy", x, y, x[:6], y[:6], classes=3, owners=owners)


def simulation_of(build: Callable[[], nn.Module], rounds: int = ROUNDS, **given: Any) -> Simulation:
    options: dict[str, Any] = {
        "clients": len(SIZES),
        "partition": Natural(),
        "strategy": FedAvg(),
        "local": SGD(lr=RATE, epochs=2, batch_size=3),
        "seeds": (0, 1),
        "evaluation": EvaluationOptions(every=ROUNDS),
        "execution": Execution(dtype="float64"),
    }
    return Simulation(samples(), build, rounds=rounds, **options | given)


def module_of(simulation: Simulation, build: Callable[[], nn.Module], row: Tensor) -> nn.Module:
    """A module of the user's own with what the row [d] holds."""
    module = build()
    with torch.no_grad():
        module(samples().train_x[:2].float())  # lazy layers get their shapes
    module = module.double()
    named = dict(module.named_parameters())
    columns = {name: named[name].data for name in simulation.model.shapes}
    columns |= {name: get_named_tensor(module, name).data for name in simulation.model.statistics}
    start = 0
    for value in columns.values():
        value.copy_(row[start : start + value.numel()].view(value.shape))
        start += value.numel()
    for name, value in simulation.model.training_module.named_parameters():  # frozen ones are the template's
        if name not in simulation.model.shapes and name not in simulation.model.statistics:
            named[name].data.copy_(value)
    return module


def cross_entropy(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"])


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def by_hand(
    simulation: Simulation,
    build: Callable[[], nn.Module],
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = plain_sgd,
    keep: bool = False,
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = cross_entropy,
) -> list[nn.Module]:
    """FedAvg of every replicate on the batches of the simulation: train copies, average state dictionaries. `keep`:
    a client's optimizer goes on from round to round; `loss` of an output and a batch is a number."""
    federation, clients = simulation.federation, len(SIZES)
    trained: dict[tuple[int, int], tuple[nn.Module, torch.optim.Optimizer]] = {}
    servers = [module_of(simulation, build, row) for row in simulation.model.initial(federation.seeds)]
    everyone = np.ones((len(servers), clients))
    for t in range(ROUNDS):
        plan = simulation.trainer.batches.plan(federation.make_cohort(everyone, everyone), t)
        for r, server in enumerate(servers):
            states = []
            for i in range(clients):
                if not keep or (r, i) not in trained:
                    copied = copy.deepcopy(server).train()
                    trained[r, i] = copied, optimizer_of([p for p in copied.parameters() if p.requires_grad])
                client, optimizer = trained[r, i]
                client.load_state_dict(server.state_dict())
                chunk = plan.chunk(np.array([r * clients + i]))
                for step in range(int(chunk.steps[0])):
                    batch = chunk.batch(step, 0, 1, torch.float64)
                    optimizer.zero_grad()
                    with KeyedRandomness(batch["key"][0]) if "key" in batch else contextlib.nullcontext():
                        output = client(batch["x"][0])
                    loss(output, {name: value[0] for name, value in batch.items()}).backward()
                    optimizer.step()
                states.append(copy.deepcopy(client.state_dict()))
            mean = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
            whole = {n: v if server.state_dict()[n].is_floating_point() else v.round().long() for n, v in mean.items()}
            server.load_state_dict(whole)
    return servers
