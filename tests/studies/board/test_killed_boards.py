"""A board computed by several processes: the same rows, and what is killed goes on and leaves nothing running."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsim.studies.board.board import Leaderboard, load_leaderboard
from fedsim.studies.board.rows import read_cell_rows

Made = Callable[..., list[str]]

KILLED = """
import sys
from pathlib import Path
from fedsim.studies.board.board import load_leaderboard
from fedsim.studies.board.runner import compute_missing_rows

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    board = load_leaderboard("long", folder)
    compute_missing_rows(board, board.cells(), list(board.entries), folder / "results", folder / "runs", 2, {})
"""


BUSY = """
import signal
import sys
import time
from pathlib import Path
from fedsim.studies.board.runner import _yield_task_results


class Task:
    def __init__(self, number):
        self.number = number

    def __call__(self):
        signal.signal(signal.SIGTERM, lambda *_: None)  # as a run, which goes on to the end of its round
        Path(sys.argv[1], str(self.number)).touch()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            time.sleep(0.05)


if __name__ == "__main__":
    list(_yield_task_results([Task(number) for number in range(8)], 2))
"""


@pytest.mark.slow
def test_workers_of_a_killed_command_begin_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "begun").mkdir()
    command = subprocess.Popen([sys.executable, str(tmp_path / "busy.py"), str(tmp_path / "begun")])
    end = time.monotonic() + 120
    while len(list((tmp_path / "begun").iterdir())) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    command.kill()
    command.wait()
    time.sleep(5)
    assert len(list((tmp_path / "begun").iterdir())) == 2


@pytest.mark.slow
def test_a_killed_command_goes_on_and_ends_with_the_same_numbers(
    boards: Path, made: Made, tmp_path: Path, small: Leaderboard
) -> None:
    text = (boards / "small.yaml").read_text().replace("rounds=5", "rounds=60")
    (tmp_path / "long.yaml").write_text(text.replace("eval_every=1", "eval_every=20, tracking.checkpoint_every=1"))
    (tmp_path / "killed.py").write_text(KILLED)
    command = subprocess.Popen([sys.executable, str(tmp_path / "killed.py"), str(tmp_path)], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not (tmp_path / "results" / "rates.json").exists() or not any(tmp_path.glob("runs/*/checkpoint.safetensors")):
        assert command.poll() is None, "it ended before it was killed"
        assert time.monotonic() < end
        time.sleep(0.05)
    command.kill()
    command.wait()
    board = load_leaderboard("long", tmp_path)
    killed = made(board, tmp_path / "results")
    assert not any("tuned" in said for said in killed)
    made(board, tmp_path / "whole")
    for cell in board.cells():
        one, other = (read_cell_rows(tmp_path / name, cell, board).rows for name in ("results", "whole"))
        for name in board.entries:
            np.testing.assert_allclose(one[name].values_of("accuracy"), other[name].values_of("accuracy"), rtol=1e-6)


@pytest.mark.slow
def test_several_processes_give_the_same_rows(small: Leaderboard, results: Path, made: Made, tmp_path: Path) -> None:
    made(small, tmp_path / "two", jobs=2)
    for cell in small.cells():
        one, other = (read_cell_rows(folder, cell, small).rows for folder in (results, tmp_path / "two"))
        for name in small.entries:
            for measure in small.measures:
                np.testing.assert_allclose(one[name].values_of(measure), other[name].values_of(measure), rtol=1e-6)
