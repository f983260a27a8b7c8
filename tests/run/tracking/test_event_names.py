"""Event files are read in the order of their names: a resumed run's must come after those that are there."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsim.run.tracking import tensorboard
from fedsim.run.tracking.observer import RunStarted
from fedsim.run.tracking.tensorboard import TensorBoard


def test_a_resumed_runs_event_file_is_named_later(tmp_path: Path) -> None:
    now = int(time.time())
    (tmp_path / "seed_0").mkdir()
    (tmp_path / "seed_0" / f"events.out.tfevents.{now}.host.1.9").touch()  # … 9 sorts after … 10, in the same second
    (tmp_path / "seed_0" / "events.out.tfevents").touch()
    observer = TensorBoard()
    observer.begin(RunStarted(tmp_path, (0,), rounds=5, completed_rounds=3))
    observer.close()
    names = sorted(path.name for path in tmp_path.glob("seed_0/events.out.tfevents.*"))
    assert len(names) == 2
    assert int(names[-1].split(".")[3]) > now


def test_a_resumed_run_waits_until_the_second_of_the_newest_event_file_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.5]
    clock = SimpleNamespace(time=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(tensorboard, "time", clock)
    names = {"seed_0/events.out.tfevents.0000000040.host.1.0", "seed_0/events.out.tfevents.0000000100.host.1.1"}
    (tmp_path / "seed_0").mkdir()
    for name in names:
        (tmp_path / name).touch()
    tensorboard._ensure_next_file_sorts_last(tmp_path)
    assert 101 <= now[0] < 101.1
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")} == names
