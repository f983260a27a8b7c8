"""`fedsim why` is stopped: it says so, and its worker processes end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNS = ("dataset=synthetic", "clients=5", "rounds=100000", "partition=natural", "seeds=[0,1,2]", "device=cpu")


def ends(group: int, seconds: float) -> bool:
    """Whether no process of the group is left after at most this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups")
@pytest.mark.parametrize("to_all", [False, True], ids=["the command", "its group"])
def test_sigterm_leaves_no_worker_running(tmp_path: Path, to_all: bool) -> None:
    """A scheduler signals the whole group, so that workers receive the signal twice."""
    command = subprocess.Popen(
        [sys.executable, "-m", "fedsim", "why", *RUNS, "--causes", "availability,drift", "--jobs", "2"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("why/runs/*/metrics.csv"))) < 2:
            assert command.poll() is None, command.stderr.read() if command.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(1)
        (os.killpg if to_all else os.kill)(command.pid, signal.SIGTERM)
        _, stderr = command.communicate(timeout=60)
        assert command.returncode == 128 + signal.SIGTERM
        assert "fedsim why: stopped by SIGTERM; the same command continues the runs" in stderr
        assert ends(command.pid, 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
