"""Any module: FedAvg of it equals one written by hand (deepcopy, torch.optim, average), however it is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import RATE, by_hand, samples, simulation_of
from torch import Tensor, nn

from fedsim import ConfigError, Evaluation, Execution
from fedsim.local import SGD
from fedsim.models import ViT
from fedsim.tracking import Tracking


class Running(nn.Module):
    """Statistics of its own: a mean that moves, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean + (x.detach().mean(0) - self.mean) / (self.count + 2)
        return self.layer(x - self.mean)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrence, self.head = kind(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrence(x.reshape(len(x), 2, 2))[0][:, -1])


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else x * 2)


class Twice(nn.Module):
    """One layer in two places, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh() * self.scale))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.stack([x, -x], 1)).mean(1))


class Randomly(nn.Module):
    """Random numbers of several kinds in one forward pass, in training only."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.draw = nn.Linear(4, 6), nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.head(self.draw(x) if self.training else x)


class Residual(nn.Module):
    """A residual block with batch normalisation, and squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 1, 1), nn.Sigmoid())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 2, 2))
        x = x + self.block(x)
        return self.head((x * self.scale(x)).flatten(1))


def stochastic_depth(x: Tensor) -> Tensor:
    """As torchvision.ops.stochastic_depth, mode 'row'."""
    kept = torch.empty([len(x), 1], dtype=x.dtype).bernoulli_(0.7)
    return x * kept.div_(0.7)


def image(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, nn.Flatten(), nn.LazyLinear(3)))


def block(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)))


ZOO: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Linear(4, 3),
    "mlp": block(nn.ReLU()),
    "batch norm": block(nn.BatchNorm1d(6), nn.ReLU()),
    "batch norm, cumulative": block(nn.BatchNorm1d(6, momentum=None), nn.ReLU()),
    "batch norm by batches": block(nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU()),
    "batch norm of images": image(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU()),
    "batch norm of volumes": image(nn.Unflatten(2, (1, 2)), nn.BatchNorm3d(1), nn.ReLU()),
    "instance norm": image(nn.Conv2d(1, 3, 1), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    "group norm": image(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()),
    "layer norm": block(nn.LayerNorm(6), nn.GELU()),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "spectral norm by hooks": lambda: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "own statistics": Running,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "a branch by data": lambda: Branching(4, 3),
    "a layer twice": Twice,
    "attention": Attending,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3)),
    "prelu": block(nn.PReLU()),
    "embedding": lambda: Signs(),
    "vision transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), ViT((1, 2, 2), 3, patch=1, width=4, heads=2, layers=1)
    ),
    "residual": Residual,
    "functional dropout": lambda: Randomly(lambda x: F.dropout(x, 0.4)),
    "stochastic depth": lambda: Randomly(stochastic_depth),
    "gaussian noise": lambda: Randomly(lambda x: x + 0.1 * torch.randn_like(x) * torch.rand(6, dtype=x.dtype)),
    "noisy choice": lambda: Randomly(lambda x: x + F.gumbel_softmax(x, hard=True)),
    "alpha dropout": block(nn.SELU(), nn.AlphaDropout(0.2)),
    "random slopes": block(nn.RReLU()),
    "partly frozen": lambda: frozen(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))),
    "bilinear": lambda: Bilinear(),
}


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 5), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x > 0).long()).flatten(1))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


def frozen(module: nn.Sequential) -> nn.Module:
    module[0].requires_grad_(False)
    return module


UNVMAPPED = {"batch norm, cumulative", "spectral norm", "spectral norm by hooks", "a branch by data"}
STATISTICS = {
    "batch norm", "batch norm, cumulative", "batch norm of images", "batch norm of volumes", "instance norm",
    "spectral norm", "spectral norm by hooks", "own statistics", "residual",
}  # fmt: skip


WAYS = {
    "auto": Execution(dtype="float64"),
    "fused, row by row": Execution(dtype="float64", executor="fused", chunk=1, workers=1),
    "fused, two workers": Execution(dtype="float64", executor="fused", workers=2),
    "vmap": Execution(dtype="float64", executor="vmap"),
    "vmap, one row": Execution(dtype="float64", executor="vmap", chunk=1),
    "loop, two workers": Execution(dtype="float64", executor="loop", workers=2),
}


QUICK = ("auto", "vmap", "loop, two workers")
REST = tuple(way for way in WAYS if way not in QUICK)


@pytest.mark.parametrize("ways", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["ways", "other ways"])
@pytest.mark.parametrize("name", ZOO)
def test_fedavg_of_any_module_is_that_written_by_hand(name: str, ways: tuple[str, ...]) -> None:
    build = ZOO[name]
    expected: list[nn.Module] | None = None
    for way in ways:
        execution = WAYS[way]
        if way.startswith("vmap") and name in UNVMAPPED:
            with pytest.raises(ConfigError, match=r"trainer\.executor=vmap cannot run"):
                simulation_of(build, execution=execution)
            continue
        simulation = simulation_of(build, execution=execution)
        result = simulation.run()
        assert bool(simulation.model.statistics) == (name in STATISTICS)
        expected = by_hand(simulation, build) if expected is None else expected
        data = samples()
        for r, server in enumerate(expected):
            row = torch.cat([p.detach().reshape(-1) for p in server.parameters() if p.requires_grad])
            torch.testing.assert_close(result.state.model[r], row, rtol=0, atol=1e-10, msg=f"{way}")
            with torch.no_grad():
                loss = F.cross_entropy(server.eval()(data.test_x), data.test_y).item()  # statistics enter here
            assert result.history[-2 + r]["test_loss"] == pytest.approx(loss, abs=1e-10), way


@pytest.mark.parametrize("name", sorted(STATISTICS | {"lstm", "batch norm by batches"}))
def test_resumed_alone_or_in_company_it_is_the_same(name: str, tmp_path: Any) -> None:
    quiet = Tracking(progress="none", tensorboard=False)
    whole = simulation_of(ZOO[name]).run()
    simulation_of(ZOO[name], rounds=1).run(tmp_path, tracking=quiet)
    resumed = simulation_of(ZOO[name]).run(tmp_path, resume=True, tracking=quiet)
    assert torch.equal(resumed.state.model, whole.state.model)
    assert resumed.history[-1]["test_loss"] == whole.history[-1]["test_loss"]
    alone = simulation_of(ZOO[name], seeds=(1,)).run()
    torch.testing.assert_close(alone.state.model[0], whole.state.model[1], rtol=0, atol=1e-12)
    assert alone.history[-1]["test_loss"] == pytest.approx(whole.history[-1]["test_loss"], abs=1e-12)


def test_a_refused_model_leaves_nothing_behind(tmp_path: Any) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    with pytest.raises(ConfigError, match="Counting keeps 'calls' from one forward pass to the next"):
        simulation_of(lambda: Counting(4, 3)).run(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_batch_of_one_is_refused_where_it_cannot_be_normalised() -> None:
    local = SGD(lr=RATE, epochs=1, batch_size=3, drop_last=False)  # client 0 has seven samples
    with pytest.raises(
        ConfigError, match=r"cannot train on a batch of one sample.*client 0 has one; give local\.drop_last"
    ):
        simulation_of(ZOO["batch norm"], local=local)
    simulation_of(ZOO["batch norm"], local=SGD(lr=RATE, epochs=1, batch_size=5, drop_last=False))


def test_who_takes_part_moves_the_statistics_and_nobody_else(Scripted: Any) -> None:
    """Batch normalisation's mean after a round of one client is that client's; an empty round changes nothing."""
    counts = np.array([[[0, 1, 0]], [[0, 0, 0]]])
    given = {"seeds": (0,), "evaluation": Evaluation(every=1), "availability": Scripted(counts)}
    simulation = simulation_of(ZOO["batch norm"], **given)
    history = simulation.run().history
    assert history[1]["test_loss"] == history[2]["test_loss"]
    alone = simulation_of(ZOO["batch norm"], **given | {"availability": Scripted(counts[:1])}, rounds=1).run()
    assert alone.history[1]["test_loss"] == history[1]["test_loss"]
