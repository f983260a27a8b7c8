"""What goes wrong is said in one sentence that helps: where settings come from elsewhere, devices, pipes, newcomers.

The words are looked at where they are made; `test_bad_configurations.py` shows that they reach the command line.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fedsim import Execution, Simulation, Tracking
from fedsim.app import cli
from fedsim.app.explain import unresolvable_setting_reason
from fedsim.app.signature import check_types
from fedsim.availability import Trace, UniformK
from fedsim.core import ConfigError, DivergenceError, Federation
from fedsim.data.datasets import LEAF, ArrayFiles, GaussianMean, Quadratics, Text
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD, PFedMe
from fedsim.local.history import DeploymentHistory
from fedsim.models import Mean
from fedsim.run.checkpoint import NAME
from fedsim.run.divergence import divergence_remedy
from fedsim.run.wiring import resolve_device
from fedsim.shift import Demand, Location
from fedsim.strategies import FedAvg
from fedsim.trainer.choose import MAX_WORKERS, resolve_num_workers

QUIET = Tracking(progress="none", tensorboard=False)
ELSEWHERE = {  # a value of lr, and what is said of it
    "${ronds}": "lr=${ronds}: ronds is not a setting; did you mean 'rounds'?",
    "${lr}": "lr=${lr}: this leads back to itself; give a value",
    "${local.lr}": "lr=${local.lr}: this leads back to itself; give a value",
    "${oc.env:FEDSIM_NOPE}": "lr=${oc.env:FEDSIM_NOPE}: the environment variable FEDSIM_NOPE is not set; export it, or "
    "write ${oc.env:FEDSIM_NOPE,VALUE} with what to take then",
    "${oc.nope:x}": "lr=${oc.nope:x}: there is no oc.nope; use oc.env:NAME, oc.decode, or the name of a setting",
}
DEVICES = {
    "gpu": "device='gpu' is unknown; choose one of auto, cpu, cuda, mps, xpu, or cuda:1; did you mean 'cuda'?",
    "GPU:0": "did you mean 'cuda'?",
    3: "device=3 is unknown; choose one of auto, cpu, cuda, mps, xpu, or cuda:1; did you mean 'cuda:3'?",
    "cuda:x": "device='cuda:x' is unknown",
    "cpuu": "did you mean 'cpu'?",
    "meta": "device='meta' is unknown",
    "": "device='' is unknown",
    None: "device=None is unknown",
}
PIPES = {
    "trace": (
        lambda: Trace("pipe"),
        "availability.path=pipe cannot be read as CSV (it is a pipe or a device",
    ),
    "trace.npy": (lambda: Trace("pipe.npy"), "pipe.npy is not a numeric .npy array (it is a pipe or a device"),
    "arrays": (lambda: ArrayFiles("pipe.npz"), "path=pipe.npz cannot be read: it is a pipe or a device"),
    "text": (lambda: Text("pipe", clients=2), "path=pipe cannot be read (it is a pipe or a device"),
    "leaf": (lambda: LEAF("pipe.json"), "pipe.json cannot be read as JSON (it is a pipe or a device"),
}


@pytest.mark.parametrize("value", ELSEWHERE)
def test_settings_that_come_from_nowhere(value: str) -> None:
    cfg = OmegaConf.create({"lr": value, "rounds": 3, "local": {"lr": "${lr}"}})
    assert unresolvable_setting_reason(cfg) == ELSEWHERE[value]


def test_settings_that_come_from_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_LR", "0.1")
    lr = "${oc.decode:${oc.env:FEDSIM_LR}}"
    assert unresolvable_setting_reason(OmegaConf.create({"lr": lr, "rounds": 3, "local": {"lr": "${lr}"}})) is None


def test_a_number_that_is_text() -> None:
    with pytest.raises(ConfigError, match=r"^lr='0.1' must be a number, without quotes; of the env.*\${oc.decode:"):
        check_types(PFedMe, {"inner_lr": "0.1"}, {"inner_lr": "lr"})
    with pytest.raises(ConfigError, match=r"^lr='fast' must be a number$"):
        check_types(PFedMe, {"inner_lr": "fast"}, {"inner_lr": "lr"})


@pytest.mark.parametrize("device", DEVICES)
def test_devices_that_there_are_not(device: object) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_device(device)  # type: ignore[arg-type]
    assert DEVICES[device] in str(raised.value)


@pytest.mark.parametrize("reader", PIPES)
def test_a_pipe_is_not_waited_for(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "pipe.npy", "pipe.npz", "pipe.json"):
        os.mkfifo(name)
    make, message = PIPES[reader]
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)


def test_a_thousand_million_workers_are_as_many_as_processors_can_use(caplog: pytest.LogCaptureFixture) -> None:
    resolve_num_workers.cache_clear()
    most = MAX_WORKERS * (os.cpu_count() or 1)
    assert resolve_num_workers(10**9) == most
    assert f"processors; {most} workers are used" in caplog.text
    assert resolve_num_workers(2) == 2


def of_newcomers(**parts: object) -> Simulation:
    return Simulation(
        GaussianMean(4), Mean, clients=4, personal=Personal(newcomers=1, newcomer_epochs=1), rounds=1, **parts
    )


@pytest.mark.parametrize(
    "shift",
    [Location(epsilons=[0.1, 0.2, 0.3, 0.4], references="none"), Demand(gamma=[1.0, 2.0, 3.0, 4.0], references="none")],
)
def test_numbers_of_clients_are_those_of_newcomers_too(shift: Location | Demand) -> None:
    """Each of `clients` has its own; the members keep theirs."""
    run = of_newcomers(shift=shift)
    given = [0.1, 0.2, 0.3] if isinstance(shift, Location) else [1.0, 2.0, 3.0]
    found = run.shift.epsilons if isinstance(shift, Location) else run.shift.gammas
    spread = 0.0 if isinstance(shift, Location) else shift.spread
    assert torch.allclose(found, torch.tensor(given, dtype=torch.float64), atol=spread + 1e-12)
    assert run.newcomers is not None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"shift": Location(epsilons=[0.1, 0.2, 0.3])}, r"shift\.epsilons has 3 entries, but clients=4; give one per"),
        ({"shift": Demand(gamma=[1.0])}, r"shift\.gamma has 1 entries, but clients=4; give one number"),
        (
            {"availability": UniformK(4)},
            r"availability\.k=4 exceeds the 3 of clients=4 that are no newcomers \(personal\.newcomers=1\)",
        ),
    ],
)
def test_under_newcomers_the_number_is_the_one_that_was_set(parts: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_newcomers(**parts)


def test_a_trace_of_three_under_newcomers(tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", np.ones((3, 5)))
    with pytest.raises(ConfigError, match=r"has 5 clients, but the 3 of clients=4 .*; set clients=6, or avail"):
        of_newcomers(availability=Trace(str(tmp_path / "trace.npy")))


@pytest.mark.parametrize(
    ("rule", "strategy", "said"),
    [
        (SGD(), FedAvg(), "lower lr, or clip gradients with local.clip"),
        (SGD(clip=1.0), FedAvg(), "lower lr"),
        (PFedMe(), FedAvg(), "lower lr and local.inner_lr, or clip gradients with local.clip"),
        (APFL(lr=0.1, personal_lr=5.0), FedAvg(), "lower lr and local.personal_lr, or clip gradients with local.clip"),
        (SGD(clip=1.0), FedAvg(server_lr=9.0), "lower lr and strategy.server_lr"),
    ],
)
def test_a_remedy_is_a_key_that_the_run_has(rule: SGD, strategy: FedAvg, said: str) -> None:
    assert divergence_remedy(rule, strategy) == said


class Log(nn.Module):
    """The logarithm of what may be negative."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight - 1).log() + 0 * x


class BegunIll(Mean):
    """A parameter that is no number."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        nn.init.constant_(next(self.parameters()), float("nan"))


def test_what_is_no_number_before_any_training_is_no_matter_of_rates() -> None:
    run = Simulation(Quadratics(clients=2, dimension=3), Log, clients=2, rounds=2, execution=Execution("loop"))
    with pytest.raises(DivergenceError, match=r"in round 0 .*; the loss was not finite before training"):
        run.run()


def test_a_model_that_begins_as_no_number_is_refused() -> None:
    run = Simulation(Quadratics(clients=2, dimension=3), BegunIll, clients=2, rounds=1)
    with pytest.raises(ConfigError, match=r"BegunIll is initialised with non-finite values \(in \w+\)"):
        run.initial_state()


def test_a_checkpoint_is_promised_only_where_there_is_one(tmp_path: Path) -> None:
    assert cli._resume_hint(tmp_path) == "run the same command again"
    (tmp_path / NAME).touch()
    assert cli._resume_hint(tmp_path) == f"go on with the same command and resume=auto out={tmp_path}"


def test_no_last_good_checkpoint_where_none_exists(fedsim, tmp_path: Path) -> None:
    small = ["dataset=quadratics", "partition=natural", "model=mean", "clients=3", "tracking.tensorboard=false"]
    ended = fedsim(tmp_path, *small, "rounds=2", "lr=1e300", "tracking.progress=none", "out=o")
    assert ended.code == 1
    assert "non-finite values in round 0 of FedAvg" in ended.err
    assert "checkpoint" not in ended.err


def test_a_history_beyond_all_memory_is_named_before_it_is_made() -> None:
    federation = Federation((0,), 3, np.ones(3))
    with pytest.raises(ConfigError, match=r"local\.history=1000000000 needs \d+ GiB for 3 clients' models, more than"):
        DeploymentHistory(10**9).memory(federation, 9, 9)
