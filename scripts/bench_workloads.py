"""What `bench.py` runs: the workloads, the usual simulator's loop, and the raw loop that is the limit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedsim.data.datasets import Dataset, GaussianMean, Synthetic
from fedsim.data.partition import IID, Natural, Partition
from fedsim.data.partition.partition import Samples
from fedsim.local import SGD
from fedsim.models import CIFAR10CNN, MLP, SVHNCNN, CharLSTM, Linear, Mean, from_torchvision
from fedsim.models.precision import tf32_products
from fedsim.shift import Location, Shift

sys.path.append(str(Path(__file__).parent / "bench_peers"))
import workload as peers

LR = 0.01


@dataclass
class Workload:
    """One row of the table; `active` of the clients take part in a round, None is all."""

    name: str
    what: str
    data: Dataset
    model: Callable[..., nn.Module]
    batch: int
    steps: int
    clients: int = 100
    active: int | None = None
    seeds: int = 1
    partition: Partition | None = None
    shift: Shift | None = None
    has_limit: bool = True

    def local(self) -> SGD:
        return SGD(lr=LR, steps=self.steps, batch_size=self.batch)

    def module(self) -> nn.Module:
        if isinstance(self.data, GaussianMean):
            return Mean(self.data.shape)
        return self.model(shape=self.data.shape, classes=self.data.classes)

    def shares(self) -> list[np.ndarray]:
        """The sample numbers of every client."""
        owners = None if self.data.owners is None else self.data.owners.numpy()
        samples = Samples(len(self.data.train_x), None, owners)
        table = (self.partition or IID()).table(samples, self.clients, seed=0)
        return np.split(table.order, table.offsets[1:-1])


def noise(shape: tuple[int, ...], samples: int) -> Dataset:
    """uint8 images without content, with labels: speed does not depend on what the pixels show."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, *shape), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (samples,), generator=draw)
    return Dataset("noise", x, y, x[:100], y[:100], classes=10)


def text(length: int, samples: int) -> Dataset:
    """Tokens without sense; every next one is a label."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 80, (samples, length + 1), generator=draw)
    x, y = tokens[:, :-1], tokens[:, 1:]
    return Dataset("noise", x, y, x[:100], y[:100], classes=80)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "a": lambda: Workload(
        "a", "logistic, synthetic(1,1), batch 100, 25 steps", Synthetic(clients=100), Linear, 100, 25,
        partition=Natural(),
    ),
    "b": lambda: Workload("b", "logistic, MNIST, batch 20, 20 steps", noise((1, 28, 28), 60_000), Linear, 20, 20),
    "c": lambda: Workload("c", "MLP 2×200, MNIST, batch 20, 10 steps", noise((1, 28, 28), 60_000), mlp, 20, 10),
    "d": lambda: Workload(
        "d", "SVHN CNN, 3×32×32, batch 128, 10 steps, 20 of 100 active", noise((3, 32, 32), 50_000), SVHNCNN, 128, 10,
        active=20,
    ),
    "e": lambda: Workload(
        "e", "Gaussian mean under a shift, 25 clients × 10 seeds, batch 4, 5 steps", GaussianMean(clients=25), Mean, 4,
        5, clients=25, seeds=10, partition=Natural(), shift=Location(variance=0.01), has_limit=False,
    ),
    "g": lambda: Workload(
        "g", "ResNet-18 with GroupNorm, 3×32×32, batch 8, 6 steps, 1 of 100 active", noise((3, 32, 32), 20_000),
        resnet18_gn, 8, 6, active=1,
    ),
    "h": lambda: Workload(
        "h", "character LSTM, 40 tokens, batch 10, 5 steps, 4 of 100 active", text(40, 4000), char_lstm, 10, 5,
        active=4,
    ),
}  # fmt: skip


def p_cnn() -> Workload:
    """As in `bench_peers`, with labelled noise of bytes."""

    def model(shape: tuple[int, ...], classes: int) -> nn.Module:
        found: nn.Module = peers.torch_model("p-cnn")
        return found

    data = noise(peers.SHAPES["p-cnn"], peers.CLIENTS * peers.SAMPLES)
    what = "two convolutions, 3×32×32, batch 10, 5 steps, 50 of 1000 active"
    return Workload("p-cnn", what, data, model, peers.BATCH, peers.STEPS, peers.CLIENTS, peers.ACTIVE)


def fedawe() -> Workload:
    """The local work of a round of FedAWE's CIFAR-10 experiment (§7), where 28 of 100 clients are available."""
    what = "FedAWE's CIFAR-10 CNN, 3×32×32, batch 128, 10 steps, 28 of 100 active"
    return Workload("fedawe", what, noise((3, 32, 32), 50_000), CIFAR10CNN, 128, 10, active=28)


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return MLP(shape, classes, hidden=(200, 200))


def resnet18_gn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return from_torchvision("resnet18", classes, shape, "group", small_images=True)


def char_lstm(classes: int, **_: Any) -> nn.Module:
    return CharLSTM(classes, hidden=64, every=True)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Of samples, or of every position."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def loss_in(precision: str, model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The same of a model, under PyTorch's autocast where the precision is 'bf16'."""
    with torch.autocast(x.device.type, torch.bfloat16, precision == "bf16"):
        return loss_of(model(x), target)


def in_precision(run: Callable[[], None], precision: str) -> Callable[[], None]:
    """A round whose float32 products are rounded to TF32 if that is the precision, and not if it is another."""

    def rounded() -> None:
        with tf32_products(precision == "tf32"):
            run()

    return rounded


def limit_round(work: Workload, device: torch.device, precision: str = "full") -> Callable[[], None]:
    """One model, plain PyTorch, as many steps and samples as the round has, batches ready in memory."""
    model = work.module().to(device)
    parameters = list(model.parameters())
    shares = [len(share) for share in work.shares()][: work.active]
    sizes = sorted({min(work.batch, held) for held in shares})
    data, tokens = work.data, work.data.train_x.dtype == torch.int64
    assert data.train_y is not None
    x = {b: torch.rand(work.steps, b, *data.shape, device=device) for b in sizes}
    x = {b: (value * (data.classes or 1)).long() if tokens else value for b, value in x.items()}
    y = {b: torch.randint(0, data.classes or 1, (work.steps, b, *data.train_y.shape[1:]), device=device) for b in sizes}

    def run() -> None:
        for held in shares:
            b = min(work.batch, held)
            for k in range(work.steps):
                gradients = torch.autograd.grad(loss_in(precision, model, x[b][k], y[b][k]), parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.sub_(gradient, alpha=LR)

    return in_precision(run, precision)


def common_round(work: Workload, device: torch.device, precision: str = "full") -> Callable[[], None]:
    """A round of the usual simulator: clients one after another, each with its own objects."""
    if isinstance(work.data, GaussianMean):
        return common_stream_round(work, work.data, device)
    server = work.module().to(device)
    images = work.data.train_x.dtype == torch.uint8
    data = []
    for share in work.shares():
        assert work.data.train_y is not None
        x = work.data.train_x[share]
        x = (x.float() / 255 - 0.5) / 0.25 if images else x
        data.append(TensorDataset(x, work.data.train_y[share]))
    draw = np.random.default_rng(0)

    def run() -> None:
        active = range(work.clients) if work.active is None else draw.choice(work.clients, work.active, replace=False)
        collected: list[dict[str, Tensor]] = []
        for client in active:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            held = len(data[client])
            loader = DataLoader(data[client], batch_size=work.batch, shuffle=True, drop_last=held > work.batch)
            step = 0
            while step < work.steps:
                for x, y in loader:
                    optimizer.zero_grad()
                    loss_in(precision, model, x.to(device), y.to(device)).backward()
                    optimizer.step()
                    step += 1
                    if step == work.steps:
                        break
            collected.append({name: value.clone() for name, value in model.state_dict().items()})
        average(server, collected)

    return in_precision(run, precision)


def common_stream_round(work: Workload, data: GaussianMean, device: torch.device) -> Callable[[], None]:
    """The same where samples are drawn afresh and answer the client's model: seed by seed, client by client."""
    servers = [work.module().to(device) for _ in range(work.seeds)]
    epsilon, centre = 0.9, 10.0

    def run() -> None:
        for server in servers:
            collected: list[dict[str, Tensor]] = []
            for _ in range(work.clients):
                model = copy.deepcopy(server)
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                for _ in range(work.steps):
                    with torch.no_grad():
                        theta = next(model.parameters())
                        z = centre + torch.randn(work.batch, *data.shape, device=device) + epsilon * theta
                    optimizer.zero_grad()
                    loss = 0.5 * (model(z) - z).square().sum(1).mean()
                    loss.backward()
                    optimizer.step()
                collected.append({name: value.clone() for name, value in model.state_dict().items()})
            average(server, collected)

    return run


def average(server: nn.Module, collected: list[dict[str, Tensor]]) -> None:
    """The server's new parameters: the clients' mean."""
    mean: dict[str, Any] = {name: torch.stack([c[name] for c in collected]).mean(0) for name in collected[0]}
    server.load_state_dict(mean)
