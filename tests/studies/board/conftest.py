"""A board of two strategies and two cells of five rounds, computed once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import fedsim, quickly

from fedsim.studies.board.board import Leaderboard, load_leaderboard
from fedsim.studies.board.runner import compute_missing_rows

__all__ = ["fedsim", "quickly"]

SMALL = """
title: small
about: who is first of two
base: [clients=6, local_steps=1, rounds=5, eval_every=1, on_nonfinite=drop_replicate, trainer.trial=false,
       partition.validation=0.2, "evaluate=[global,client_mean]"]
seeds: [0, 1]
axes:
  availability: {full: availability=full, rare: [availability=stationary, availability.base.p=0.3]}
tracks:
  digits: {about: digits, overrides: [dataset=digits, model=linear], rates: [0.01, 1], target: 0.3,
           tuned_at: [{availability: rare}]}
entries:
  FedAvg: {overrides: strategy=fedavg, knob: {key: strategy.server_lr, values: [0.5, 1]}}
  MIFA: {overrides: strategy=mifa, remembers: true}
tuning: {trials: 4, seeds: [10, 11], rounds: 3, metric: validation_accuracy}
measures:
  accuracy: {metric: test_accuracy, last: 2}
  received: {metric: client_mean_test_accuracy}
  rounds: {metric: test_accuracy, until: rounds}
against: FedAvg
compared: [data, splits, traces, models, batches]
"""


@pytest.fixture(scope="session")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of boards."""
    folder = tmp_path_factory.mktemp("boards")
    (folder / "small.yaml").write_text(SMALL)
    return folder


@pytest.fixture
def small(boards: Path) -> Leaderboard:
    """The board, as it is read."""
    return load_leaderboard("small", boards)


@pytest.fixture(scope="session")
def computed_once(boards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("computed")
    board = load_leaderboard("small", boards)
    compute_missing_rows(
        board, board.cells(), list(board.entries), root / "results", root / "runs", 1, {}, lambda said: None
    )
    return root


@pytest.fixture
def results(computed_once: Path, tmp_path: Path) -> Path:
    """A copy of the small board's results."""
    return Path(shutil.copytree(computed_once / "results", tmp_path / "results"))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., list[str]]:
    """`made(board, folder)`: compute what is missing of it; returns what was said."""

    def call(board: Leaderboard, folder: Path, entries: list[str] | None = None, **how: Any) -> list[str]:
        said: list[str] = []
        names = list(board.entries) if entries is None else entries
        compute_missing_rows(
            board, board.cells(), names, folder, tmp_path / "runs", how.get("jobs", 1), {}, said.append
        )
        return said

    return call
