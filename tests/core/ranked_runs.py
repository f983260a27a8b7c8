"""Runs that several ranks share, spawned as processes that talk through gloo."""

from __future__ import annotations

import functools
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from nonlinear import Krum, MedianMomentum
from processes import exit_codes
from ranked_strategies import STRATEGIES
from safetensors.torch import load_file

from fedsim import EvaluationOptions, Execution, Simulation, Stop
from fedsim.availability import Arrivals, Bernoulli, Multiset, Sine, Uniform, UniformK
from fedsim.core import ConfigError, DivergenceError, PeerError, ProcessRanks
from fedsim.core.federation import Cohort
from fedsim.data import drift as data_drift
from fedsim.data.contamination import Gaussian
from fedsim.data.datasets import Dataset, GaussianMean, Pricing
from fedsim.data.partition import Natural
from fedsim.evaluation.diagnostics import DIAGNOSTIC_NAMES
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD, FedProto, PerFedAvg, ProFL
from fedsim.local import FedPAC as FedPACSteps
from fedsim.models import MLP, Linear, LoRAMLP, Mean
from fedsim.run import Stopped
from fedsim.run.checkpoint import NAME
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.shift import Demand, Location
from fedsim.strategies import (
    FedAMP,
    FedAU,
    FedAvg,
    FedAvgKnown,
    FedAWE,
    FedExLoRA,
    FedFomo,
    FedPAC,
    FedPBC,
    FedVARP,
    HetLoRA,
    LocalOnly,
    PFedAvg,
    RoLoRA,
)
from fedsim.uplink import QSGD, TopK, Uplink

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # in double precision: only the order of sums differs


def assert_same_run(found: Path, expected: Path, **tolerance) -> None:
    """Metrics of every round, all that is remembered, and what newcomers made of it."""
    rows, others = read_metrics(found / "metrics.csv"), read_metrics(expected / "metrics.csv")
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - {"seconds"}:
            np.testing.assert_allclose(row[key], other[key], **tolerance, err_msg=key)
    tensors, wanted = load_file(found / NAME), load_file(expected / NAME)
    assert tensors.keys() == wanted.keys()
    for key, value in wanted.items():
        assert tensors[key].dtype == value.dtype
        np.testing.assert_allclose(tensors[key].numpy(), value.numpy(), **tolerance, err_msg=key)
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (found, expected))
    assert one["samples"] == other["samples"]
    assert one.get("dropped") == other.get("dropped")
    for epoch, wish in zip(one.get("newcomers", []), other.get("newcomers", []), strict=True):
        for key, values in wish.items():
            np.testing.assert_allclose(epoch[key], values, **tolerance)


class Dying(FedAWE):
    """The rank that is the victim is killed in the middle of round 6."""

    def aggregate(self, state, report, t):
        if t == 6 and os.environ.get("RANK") == os.environ["VICTIM"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(state, report, t)


SIZES = (3, 10, 25, 4, 15, 30, 5)  # 7 clients: 4 + 3 of two ranks, 3 + 2 + 2 of three


M, ROUNDS, HALF = len(SIZES), 4, 2


def labelled() -> Dataset:
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(M), SIZES)
    x, y = torch.as_tensor(draw.standard_normal((1200, 4))), torch.as_tensor(draw.integers(0, 3, 1200))
    n = len(owners)  # the test set takes two forward passes: ranks share them
    return Dataset("labelled", x[:n], y[:n], x[n:], y[n:], classes=3, owners=torch.as_tensor(owners))


class Coins(Bernoulli):
    """Nobody in round 1, only client 4 in round 2; else coins. `disturb` is called in the middle of a round."""

    def __init__(self, at: int = -1, disturb=None) -> None:
        super().__init__(Uniform(0.5), Sine())
        self.at, self.disturb = at, disturb

    def sample(self, t: int) -> Cohort:
        """Asked once a round of the run, not when the process is tried before it."""
        if t == self.at:
            self.disturb()
        return super().sample(t)

    def counts(self, t: int) -> np.ndarray:
        found = super().counts(t)
        only = np.broadcast_to(np.arange(found.shape[1]) == 4, found.shape)
        return only * 1 if t == 2 else found * (t != 1)


class Breaks(SGD):
    """The model of client 4 of the second replicate becomes NaN."""

    def step(self, carry, batch, lr, objective):
        carry, loss = super().step(carry, batch, lr, objective)
        return carry | {"params": torch.where(batch["row"] == M + 4, torch.nan, carry["params"])}, loss


def stream(data, model, local, shift, **options):
    return {"dataset": data, "model": model, "local": local, "shift": shift, "clients": M} | options


BOTH_MODELS = {"evaluation": EvaluationOptions(every=2, of=["global", "client_mean"])}
VALIDATED = {"partition": Natural(validation=0.2)}


def widest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric of whole sets."""
    return output.max() - output.min()


double = functools.partial(Execution, dtype="float64")


CASES = {
    **STRATEGIES,
    "fedavg by data": lambda: BOTH_MODELS | {"strategy": FedAvg(0.8, "data")},
    "fedavg known": lambda: {
        "strategy": FedAvgKnown(),
        "execution": double(chunk=2),
        "contamination": Gaussian(fraction=0.3),
    },
    "fedpbc": lambda: {"strategy": FedPBC(), "evaluation": EvaluationOptions(every=2, of="client_mean")},
    "fedawe": lambda: {"strategy": FedAWE(0.7, clip=0.2), "model": functools.partial(MLP, hidden=(5,))},
    "fedau": lambda: {"strategy": FedAU(cutoff=2), "execution": double("loop", workers=2)},
    "uplink": lambda: {"uplink": Uplink(TopK(k=5), QSGD(3))},
    "diagnostics": lambda: (
        VALIDATED
        | {
            "evaluation": EvaluationOptions(
                every=2, diagnostics=[name for name in DIAGNOSTIC_NAMES if name != "presence"]
            )
        }
    ),
    "drift": lambda: {
        "drift": data_drift.Linear(0.2, moves="labels", spread=0.5),
        "availability": Arrivals(Uniform(0.8), rate=2.0, lifetime=4.0),
        "evaluation": EvaluationOptions(every=2, diagnostics=["presence"]),
        "ridge": 0.1,
    },
    "random walk": lambda: stream(
        GaussianMean(clients=M),
        Mean,
        SGD(lr=0.1),
        Location(0.5),
        drift=data_drift.RandomWalk(0.3),
        availability=Coins(),
    ),
    "metrics": lambda: {
        "evaluation": EvaluationOptions(every=2, metrics=["auroc", {"name": "f1_score", "average": "macro"}, widest]),
        "personal": Personal(over="all"),
        **VALIDATED,
    },
    "p-fedavg I": lambda: {"strategy": PFedAvg("I"), "availability": Multiset(5)},
    "p-fedavg II": lambda: {"strategy": PFedAvg("II"), "availability": UniformK(3)},
    "krum": lambda: {"strategy": Krum()},
    "median": lambda: {"strategy": MedianMomentum(), "local": APFL(lr=0.2, epochs=1, batch_size=4)},
    "fedamp": lambda: {"strategy": FedAMP(0.6, 2.0, 0.3)},
    "fedpac": lambda: {
        "strategy": FedPAC("data"),
        "local": FedPACSteps(0.5, lr=0.2, steps=3, batch_size=4),
        "model": functools.partial(MLP, hidden=(5,)),
    },
    "fedfomo": lambda: {"strategy": FedFomo(2), **VALIDATED},
    "rolora": lambda: {"strategy": RoLoRA(), "model": functools.partial(LoRAMLP, hidden=(5,), rank=2)},
    "hetlora": lambda: {"strategy": HetLoRA((1, 2)), "model": functools.partial(LoRAMLP, hidden=(5,), rank=2)},
    "fedex_lora": lambda: {
        "strategy": FedExLoRA(),
        "model": functools.partial(LoRAMLP, hidden=(5,), rank=2, residual=True),
    },
    "fedproto": lambda: {
        "local": FedProto(lr=0.2, epochs=1, batch_size=4, drop_last=False),
        "model": functools.partial(MLP, hidden=(5,)),
    },
    "local only": lambda: {"strategy": LocalOnly(), "personal": Personal(over="all"), **VALIDATED},
    "apfl": lambda: {
        "local": APFL(0.3, adaptive=True, lr=0.2, steps=3, batch_size=4),
        "personal": Personal(over="online"),
        "execution": double(memory="host"),
        **VALIDATED,
    },
    "newcomers": lambda: {
        "local": PerFedAvg(lr=0.2, steps=2, batch_size=2),
        "personal": Personal(over="all", newcomers=2, newcomer_epochs=2),
        **VALIDATED,
    },
    "dropped client": lambda: {"local": Breaks(lr=0.2), "strategy": FedVARP(), "on_nonfinite": "drop_client"},
    "dropped replicate": lambda: {"local": Breaks(lr=0.2), "strategy": FedAWE(), "on_nonfinite": "drop_replicate"},
    "location": lambda: stream(
        GaussianMean(clients=M), Mean, SGD(lr=0.1), Location(inertia=0.5), availability=Coins(), strategy=FedAWE()
    ),
    "demand": lambda: stream(
        Pricing(clients=M, dimension=2, low=4.0, high=6.0),
        Mean,
        ProFL(lr=0.02, steps=3, batch_size=50, box=[0, 5], server_derivative=True, history=2),
        Demand(2.0, 0.1, deploy="round", inertia=0.3),
    ),
}


def simulation(name: str, ranks: ProcessRanks, **more) -> Simulation:
    options = {
        "dataset": labelled(),
        "model": Linear,
        "clients": M,
        "availability": Coins(),
        "local": SGD(lr=0.2, epochs=1, batch_size=4),
        "seeds": (3, 5),
        "rounds": ROUNDS,
        "evaluation": EvaluationOptions(every=2),
        "execution": double(),
    }
    return Simulation(**options | CASES[name]() | more, ranks=ranks)


def play(name: str, folder: Path, ranks: ProcessRanks, every: int = 1000, **more) -> torch.Tensor:
    """A run, or the rest of it; its last model."""
    quiet = Tracking(progress="none", tensorboard=False, checkpoint_every=every)
    return simulation(name, ranks, **more).run(folder / name, resume=True, tracking=quiet).state.model


RESUMED = ("fedawe", "mifa", "fedau", "apfl", "demand", "median", "diagnostics", "late")


def all_cases(folder: Path, ranks: ProcessRanks) -> None:
    """Every case; the models of each rank, to see that they are the same bits."""
    torch.save({name: play(name, folder, ranks) for name in CASES}, folder / f"models-{ranks.rank}")


def first_halves(folder: Path, ranks: ProcessRanks) -> None:
    for name in RESUMED:
        play(name, folder, ranks, rounds=HALF)


def second_halves(folder: Path, ranks: ProcessRanks) -> None:
    for name in RESUMED:
        play(name, folder, ranks)


def note(folder: Path, ranks: ProcessRanks, error: BaseException | None) -> None:
    (folder / f"error-{ranks.rank}").write_text(f"{type(error).__name__}: {error}")


def one_is_told_to_stop(folder: Path, ranks: ProcessRanks) -> None:
    """The last rank gets SIGTERM in round 1."""
    when = Coins(1, lambda: ranks.rank == ranks.num_ranks - 1 and os.kill(os.getpid(), signal.SIGTERM))
    try:
        play("fedawe", folder, ranks, availability=when)
    except Stopped as stop:
        note(folder, ranks, stop)


def one_diverges(folder: Path, ranks: ProcessRanks) -> None:
    try:
        play("fedvarp", folder, ranks, local=Breaks(lr=0.2))
    except DivergenceError as error:
        note(folder, ranks, error)


def one_dies(folder: Path, ranks: ProcessRanks) -> None:
    """The last rank is gone in the middle of round 3."""
    when = Coins(3, lambda: ranks.rank < ranks.num_ranks - 1 or os._exit(9))
    try:
        play("fedawe", folder, ranks, every=2, availability=when)
    except PeerError as error:
        note(folder, ranks, error)


def one_cannot_write(folder: Path, ranks: ProcessRanks) -> None:
    """A file lies where the run folder should be; only the first rank minds."""
    (folder / "fedawe").write_text("in the way")
    try:
        play("fedawe", folder, ranks)
    except (ConfigError, PeerError) as error:
        note(folder, ranks, error)
        ranks.leave_group()


def ended(folder: Path, ranks: ProcessRanks) -> None:
    """A rule ends one run, an observer another, of which only the first rank has one that speaks."""
    say = [lambda seen: "enough" if seen.round >= HALF else None]
    watched = Tracking(progress="none", tensorboard=False, observers=say)
    for name, stop, tracking in (("rule", Stop(target={"train_loss": 1e9}), None), ("watched", None, watched)):
        quiet = tracking or Tracking(progress="none", tensorboard=False)
        run = simulation("fedawe", ranks, stop=stop, evaluation=EvaluationOptions(every=1))
        result = run.run(folder / name, tracking=quiet)
        (folder / f"{name}-{ranks.rank}").write_text(f"{result.stopped}")


def rank_of(rank: int, count: int, folder: Path, jobs: list) -> None:
    """One spawned process."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    store = f"file://{folder}/store-{count}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    ranks = ProcessRanks.join_group()
    for job, name in jobs:
        (folder / name).mkdir(exist_ok=True)
        job(folder / name, ranks)
    os._exit(0)  # a group that has lost a rank cannot be taken down in order


def spawn(count: int, folder: Path, *jobs) -> list[int]:
    """Exit codes of N ranks that do these jobs, each in a folder of this name."""
    return exit_codes(count, rank_of, folder, list(jobs))
