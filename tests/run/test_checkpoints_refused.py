"""Checkpoints that are damaged, foreign or another run's are refused; a diverging run spares its last one."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from resumable import QUIET, simulation_of
from safetensors.torch import save_file

from fedsim import Execution, Simulation
from fedsim.availability import Full
from fedsim.core import CheckpointError, DivergenceError
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.run.checkpoint import NAME
from fedsim.run.tracking import RunConfig, Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.strategies import FedAvg, FedAWE, FedPBC


def truncate(share):
    def damage(path):
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return damage


DAMAGE = {
    "nothing left": truncate(0.0),
    "first bytes only": truncate(0.01),
    "half": truncate(0.5),
    "last bytes lost": truncate(0.999),
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(2000)),
    "a pickle": lambda path: torch.save({"model": torch.zeros(2)}, path),
    "another program's": lambda path: save_file({"model": torch.zeros(2)}, path),
    "another program's, with a header": lambda path: save_file({"model": torch.zeros(2)}, path, {"format": "pt"}),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused(case, tmp_path):
    simulation_of(rounds=3).run(tmp_path, tracking=QUIET)
    DAMAGE[case](tmp_path / NAME)
    damaged = (tmp_path / NAME).read_bytes()
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / NAME))):
        simulation_of().run(tmp_path, resume=True, tracking=QUIET)
    assert (tmp_path / NAME).read_bytes() == damaged
    assert len(read_metrics(tmp_path / "metrics.csv")) == 2 * 4


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"seeds": (1, 5)}, "seeds"),
        ({"strategy": FedAvg()}, "strategy"),
        ({"identity": {"lr": 0.2, "model": "mlp"}}, "lr was 0.1, now 0.2"),
        ({"identity": {"lr": 0.1}}, "model was 'mlp', now None"),
        ({"identity": {"lr": 0.1, "model": "mlp", "clip": 1}}, "clip was None, now 1"),
    ],
)
def test_another_runs_checkpoint_is_refused_by_the_key_that_differs(changed, key, tmp_path):
    identity = {"lr": 0.1, "model": "mlp"}
    simulation_of(rounds=2).run(tmp_path, tracking=QUIET, config=RunConfig(identity))
    identity = changed.pop("identity", identity)
    with pytest.raises(CheckpointError, match=rf"(?s){re.escape(str(tmp_path / NAME))}.*{re.escape(key)}"):
        simulation_of(**changed).run(tmp_path, resume=True, tracking=QUIET, config=RunConfig(identity))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    Simulation(Quadratics(clients=3, dimension=4), Mean, clients=3, rounds=1).run(tmp_path, tracking=QUIET)
    larger = Simulation(Quadratics(clients=3, dimension=7), Mean, clients=3, rounds=2)
    with pytest.raises(CheckpointError, match=r"model is \[1, 4\] of float32, expected \[1, 7\] of float32"):
        larger.run(tmp_path, resume=True, tracking=QUIET)


@pytest.mark.filterwarnings("ignore:invalid value")  # the rotten sample in the loss of the initial model
@pytest.mark.parametrize("strategy", [FedAvg(), FedPBC(compute="active"), FedAWE()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_a_model_that_leaves_the_numbers_ends_the_run_and_spares_the_checkpoint(
    strategy, executor, tmp_path, Scripted, monkeypatch
):
    """Client 2 holds a rotten sample and comes in round 3, in the replicate of seed 8 only."""
    monkeypatch.setattr(
        "fedsim.run.simulation.content_fingerprints", lambda run: {}
    )  # which knows a healed sample for another

    def run(rotten: float, resume: bool = False):
        dataset = Quadratics(clients=4, points=[0.0, 1.0, rotten, 3.0])
        counts = np.tile([1, 1, 0, 1], (6, 2, 1))
        counts[3, 1] = [0, 1, 1, 0]
        simulation = Simulation(
            dataset,
            Mean,
            clients=4,
            availability=Scripted(counts),
            strategy=strategy,
            local=SGD(lr=0.1, steps=2),
            rounds=6,
            seeds=(5, 8),
            execution=Execution(executor=executor),
        )
        tracking = Tracking(progress="none", tensorboard=False, checkpoint_every=1)
        return simulation.run(tmp_path, resume=resume, tracking=tracking)

    with pytest.raises(DivergenceError, match=r"round 3 .*seed 8: clients 2;") as raised:
        run(float("inf"))
    assert type(strategy).__name__ in str(raised.value)
    assert "5" not in str(raised.value)
    resumed = run(2.0, resume=True)
    assert torch.isfinite(resumed.state.model).all()
    assert [row["round"] for row in resumed.history] == [0, 0, 6, 6]


def test_a_model_that_grows_without_bound_is_noticed():
    simulation = Simulation(
        Quadratics(clients=3, dimension=2), Mean, clients=3, availability=Full(), local=SGD(lr=1e10, steps=5), rounds=50
    )
    with pytest.raises(DivergenceError, match="lower lr"):
        simulation.run()
