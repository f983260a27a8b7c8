"""Event files are read in the order of their names: a resumed run's must come after those that are there."""

from __future__ import annotations

import time
from pathlib import Path

from fedsim.run.tracking.observer import RunStarted
from fedsim.run.tracking.tensorboard import TensorBoard


def test_a_resumed_runs_event_file_is_named_later(tmp_path: Path) -> None:
    now = int(time.time())
    (tmp_path / "seed_0").mkdir()
    (tmp_path / "seed_0" / f"events.out.tfevents.{now}.host.1.9").touch()  # … 9 sorts after … 10, in the same second
    (tmp_path / "seed_0" / "events.out.tfevents").touch()
    observer = TensorBoard()
    observer.begin(RunStarted(tmp_path, (0,), rounds=5, completed=3))
    observer.close()
    names = sorted(path.name for path in tmp_path.glob("seed_0/events.out.tfevents.*"))
    assert len(names) == 2
    assert int(names[-1].split(".")[3]) > now
