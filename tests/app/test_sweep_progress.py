"""What a sweep says as its runs end: how many of how many, the best so far; trials of a tuning sweep are counted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Ended

from fedsim.app.sweep_progress import TOTAL_RUNS_FILE, best_run_text, progress_text


def ended(records: Path, number: int, status: str, **final: float | None) -> tuple[Path, list[str]]:
    """A run's record, and its summary where it has one; its folder and overrides."""
    records.mkdir(exist_ok=True)
    folder, overrides = records.parent / f"lr={number}", ["clients=5", f"lr={number}"]
    record = {"number": number, "overrides": overrides, "folder": str(folder), "status": status, "message": ""}
    (records / f"{number}.json").write_text(json.dumps(record))
    if final:
        folder.mkdir()
        content = {"final": {name: {"mean": mean, "std": None} for name, mean in final.items()}}
        (folder / "summary.json").write_text(json.dumps(content))
    return folder, overrides


@pytest.mark.parametrize(
    ("objective", "direction", "expected"),
    [
        (None, None, "highest so far: test_accuracy 0.9 (lr=1)"),
        ("test_loss", None, "lowest so far: test_loss 0.2 (lr=2)"),
        ("test_loss", "Direction.maximize", "highest so far: test_loss 0.9 (lr=1)"),
        ("test_accuracy", "minimize", "lowest so far: test_accuracy 0.5 (lr=3)"),
    ],
)
def test_the_best_run_is_that_of_the_objective(
    tmp_path: Path, objective: str | None, direction: str | None, expected: str
) -> None:
    records = tmp_path / ".runs"
    ended(records, 1, "done", test_accuracy=0.9, test_loss=0.9)
    ended(records, 2, "kept", test_accuracy=0.6, test_loss=0.2)
    ended(records, 4, "failed", test_accuracy=1.0, test_loss=0.0)
    ended(records, 5, "done", test_accuracy=None, test_loss=None)
    ended(records, 6, "running")
    now = ended(records, 3, "running", test_accuracy=0.5, test_loss=0.5)
    assert best_run_text(records, *now, objective, direction) == f"; {expected}"


def test_of_one_run_nothing_is_said(tmp_path: Path) -> None:
    now = ended(tmp_path / ".runs", 0, "running", test_accuracy=0.5)
    assert best_run_text(tmp_path / ".runs", *now, None) == ""
    assert best_run_text(tmp_path / ".runs", *now, "no_such_metric") == ""


def test_the_time_left_is_in_proportion(tmp_path: Path) -> None:
    records = tmp_path / ".runs"
    ended(records, 0, "done")
    assert progress_text(records, 1) == "[2]"
    (records / TOTAL_RUNS_FILE).write_text(json.dumps([4, time.time() - 120]))
    assert progress_text(records, 1) == "[2/4], about 2.0 min left:"
    ended(records, 2, "running")
    assert progress_text(records, 1) == "[2/4]"


SMALL = ["clients=6", "rounds=1", "local_steps=1", "tracking.tensorboard=false", "tracking.progress=none"]


def test_a_sweep_says_its_best_run(fedsim: Callable[..., Ended], tmp_path: Path) -> None:
    lines = fedsim(tmp_path, "-m", "lr=0.0001,0.3", *SMALL, "out=sweep").out.splitlines()
    positions = [line for line in lines if line.startswith("[")]
    assert positions[0].startswith("[1/2], about ")
    assert "so far" not in positions[0]
    assert re.search(r"^\[2/2\] .*; highest so far: test_accuracy 0\.\d+ \(lr=0\.3\)$", positions[1])


def test_trials_are_counted_and_the_best_is_shown(fedsim: Callable[..., Ended], tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    lines = fedsim(
        tmp_path, "-m", "sweep=learning_rate", "hydra.sweeper.n_trials=2", *SMALL, "out=tuned"
    ).out.splitlines()
    positions = [line for line in lines if line.startswith("[")]
    assert positions[0].startswith("[1/2], about ")
    assert re.search(r"^\[2/2\] .*; highest so far: test_accuracy 0\.\d+ \(.*lr=", positions[1])
