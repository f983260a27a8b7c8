"""Ranks under torchrun, from the command line; and what cannot be divided among ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranked_runs import CLOSE, assert_same_run

from fedsim.core import ConfigError, Federation, Memory, ProcessRanks
from fedsim.run.layout import RankLayout
from fedsim.strategies import (
    FedAvg,
    LocalOnly,
    State,
    Strategy,
)
from fedsim.strategies.strategy import ClientModels


class EverybodyEverywhere(Strategy[ClientModels]):
    """Counts clients as if there were one process."""

    def initial(self, model, federation):
        return ClientModels(model, model.repeat_interleave(federation.clients, dim=0))

    def aggregate(self, state, report, t):
        return state


def command(count: int, folder: Path, *arguments: str, victim: int = -1) -> subprocess.CompletedProcess[str]:
    """`fedsim` in this folder, as one process or under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    setting = ["trainer.dtype=float64", "device=cpu", "tracking.progress=none", "clients=5", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "VICTIM": str(victim)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    whole = [sys.executable, *launcher, "-m", "fedsim", *setting]
    return subprocess.run(
        whole, cwd=folder, capture_output=True, text=True, timeout=240, env=os.environ | environment, check=False
    )


def test_more_ranks_than_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="clients=3 cannot be divided among 5 ranks"):
        Federation((0,), 3, np.ones(3), ranks=ProcessRanks(0, 5))


def test_a_strategy_that_counts_all_clients_on_every_rank_is_told() -> None:
    federation, model = Federation((0, 1), 5, np.ones(10), ranks=ProcessRanks(0, 2)), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"strategy=EverybodyEverywhere keeps models of every client on every rank"):
        RankLayout.from_components(EverybodyEverywhere(), Memory(), model, federation)
    assert RankLayout.from_components(LocalOnly(), Memory(), model, federation).fields_divided_by_rank == {"models"}
    assert isinstance(FedAvg().initial(model, federation), State)
    assert RankLayout.from_components(FedAvg(), Memory(), model, federation).fields_divided_by_rank == frozenset()


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path) -> None:
    """One report, one run folder, and the numbers of one process."""
    for count, out in ((2, "two"), (1, "one")):
        done = command(count, tmp_path, "rounds=3", "strategy=fedawe", f"out={out}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("saved in") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert_same_run(tmp_path / "two", tmp_path / "one", **CLOSE)
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(2, 0), (3, 1)])
def test_killed_under_torchrun_the_others_say_so_and_one_process_goes_on(count, victim, tmp_path) -> None:
    """The first rank, which writes, or another one."""
    setting = [
        "rounds=9",
        "availability=sine",
        "strategy=fedawe",
        "strategy._target_=ranked_runs.Dying",
        "eval_every=1",
    ]
    setting += ["tracking.checkpoint_every=2", "tracking.tensorboard=false"]
    ended = command(count, tmp_path, *setting, "out=run", victim=victim)
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("fedsim: ")]
    assert {line.split(" lost another rank (")[0] for line in said} == {
        f"fedsim: rank {rank} of {count}" for rank in range(count) if rank != victim
    }, ended.stderr
    assert all(line.endswith(f"resume=auto out={tmp_path / 'run'}") for line in said)
    for out, resume in (("run", "auto"), ("alone", "never")):
        done = command(1, tmp_path, *setting, f"out={out}", f"resume={resume}")
        assert done.returncode == 0, done.stderr
        assert ("after round 6" in done.stderr) == (out == "run")
    assert_same_run(tmp_path / "run", tmp_path / "alone", **CLOSE)


class Gathers(ProcessRanks):
    """The first of two ranks; the other one's clients have been filled in already."""

    def all_reduce_host(self, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(value + np.where(value == 0, 7.0, 0.0) for value in values)


def test_numbers_of_clients_are_gathered_from_all_ranks() -> None:
    federation = Federation((0, 1), 5, np.ones(10), ranks=Gathers(0, 2))
    here = np.arange(1.0, 7.0)  # clients 0, 2, 4 of both replicates
    gathered = federation.all_gather_clients(here)
    assert gathered.tolist() == [1, 7, 2, 7, 3, 4, 7, 5, 7, 6]
    alone = Federation((0, 1), 5, np.ones(10))
    assert alone.all_gather_clients(np.arange(10.0)).tolist() == list(range(10))


def test_rows_of_a_rank_know_which_clients_they_are() -> None:
    """Of 2 · 5 clients, rank 1 of 2 has 1 and 3 of each replicate; alone, a row's number is the client's."""
    counts, ones = np.ones((2, 5)), np.ones((2, 5))
    cohort = Federation((0, 1), 5, np.ones(10), ranks=ProcessRanks(1, 2)).make_cohort(counts, ones)
    assert cohort.host_index.virtual_clients.tolist() == [1, 3, 6, 8]
    assert Federation((0, 1), 5, np.ones(10)).make_cohort(counts, ones).host_index.virtual_clients.tolist() == list(
        range(10)
    )


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}])
def test_a_lone_process_joins_nobody(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that torchrun started alone, or a job of a scheduler that only says how large the world is."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ProcessRanks.join_group() == ProcessRanks(rank=0, num_ranks=1)
    assert not torch.distributed.is_initialized()
