"""Signals and pipes: a run whose reader leaves, whose terminal is closed, or that is halted for a while is whole."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from small_runs import QUICK

from fedsim.app.cli import main
from fedsim.core.speaking import BrokenPipeTolerantStream, tolerate_broken_pipes
from fedsim.run.tracker import Tracker
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.studies.plots.plot_cli import main as plot

SMALL = ["dataset=quadratics", "partition=natural", "model=mean", "trainer.executor=loop"]
LEAST = [*QUICK, *SMALL]


def closed() -> Any:
    """A pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.fixture
def nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, closed())


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fedsim", *LEAST, *arguments])
    main()


@pytest.mark.usefixtures("nobody_reads")
def test_a_run_that_nobody_reads_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, tmp_path, "out=o")
    assert (tmp_path / "o" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_reads")
def test_a_sweep_that_nobody_reads_does_all_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.app.sweep.SweepCallback.records", None)
    command(monkeypatch, tmp_path, "-m", "lr=0.1,0.2", "out=o")
    assert len(list(tmp_path.rglob("summary.json"))) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_reads")
def test_pictures_are_drawn_though_nobody_reads_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, tmp_path, "out=o")
    monkeypatch.setattr("fedsim.studies.plots.plot_cli.comparison_pictures", lambda *_, **__: iter(()))
    plot([str(tmp_path / "o"), "--html", str(tmp_path / "r.html")])
    assert (tmp_path / "r.html").stat().st_size > 1000


@pytest.mark.slow
def test_a_process_whose_reader_left_ends_well_and_in_silence(tmp_path: Path) -> None:
    """As with `| true`: nothing of Python's own end on standard error, and no exit status of 120."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "fedsim", *LEAST, "out=o", "tracking.progress=none"]
    done = subprocess.run(words, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert "Exception" not in done.stderr
    assert (tmp_path / "o" / "summary.json").exists()


def test_a_full_pipe_that_must_not_be_waited_for_loses_words_and_no_more() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    stream = BrokenPipeTolerantStream(os.fdopen(writer, "w", buffering=1))
    for _ in range(3000):
        stream.write("x" * 100 + "\n")
    while len(os.read(reader, 65536)) == 65536:
        pass
    os.close(reader)
    stream.write("nobody\n")
    stream.flush()


def test_a_full_pipe_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any program does: nothing is lost when the reader comes back."""
    reader, writer = os.pipe()
    heard: list[bytes] = []

    def read() -> None:
        while part := os.read(reader, 4096):
            heard.append(part)

    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with tolerate_broken_pipes():
        late = threading.Timer(0.05, read)
        late.start()
        print("x" * 200_000)
    sys.stdout.close()
    late.join()
    assert b"".join(heard) == b"x" * 200_000 + b"\n"


def test_streams_are_what_they_were_behind_the_block() -> None:
    before = sys.stdout, sys.stderr
    with tolerate_broken_pipes():
        assert isinstance(sys.stdout, BrokenPipeTolerantStream)
        assert sys.stdout.encoding == before[0].encoding
        with tolerate_broken_pipes():
            assert not isinstance(sys.stdout._stream, BrokenPipeTolerantStream)
    assert (sys.stdout, sys.stderr) == before


def signalled(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """In round 1 of the run."""
    finish = Tracker.record_round

    def during(tracker: Tracker, t: int, *arguments: Any) -> None:
        if t == 1:
            act()
        finish(tracker, t, *arguments)

    monkeypatch.setattr(Tracker, "record_round", during)


def test_a_closed_terminal_ends_a_run_like_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with monkeypatch.context() as patched:
            signalled(patched, lambda: os.kill(os.getpid(), signal.SIGHUP))
            with pytest.raises(SystemExit, match="stopped by SIGHUP after round 2 of 4; go on with"):
                command(patched, tmp_path, "rounds=4", "out=o")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    command(monkeypatch, tmp_path, "rounds=4", "out=o", "resume=auto")
    assert [row["round"] for row in read_metrics(tmp_path / "o" / "metrics.csv")] == [0, 1, 2, 3, 4]


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signalled(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGHUP))
        command(monkeypatch, tmp_path, "rounds=3", "out=o")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "o" / "summary.json").exists()


def test_a_run_that_is_halted_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, and SIGCONT a moment later, from a child that watches."""

    def halt() -> None:
        me = os.getpid()
        child = os.fork()
        if child == 0:
            while "T" not in Path(f"/proc/{me}/stat").read_text().rpartition(")")[2].split()[0]:
                os.sched_yield()
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        os.kill(me, signal.SIGSTOP)
        os.waitpid(child, 0)

    command(monkeypatch, tmp_path, "rounds=4", "out=straight")
    with monkeypatch.context() as patched:
        signalled(patched, halt)
        command(patched, tmp_path, "rounds=4", "out=halted")
    rows = [read_metrics(tmp_path / name / "metrics.csv") for name in ("straight", "halted")]
    for row in (*rows[0], *rows[1]):
        del row["seconds"]
    assert rows[0] == rows[1]


def test_lines_are_written_one_after_the_other() -> None:
    written = io.StringIO()
    BrokenPipeTolerantStream(written).writelines(["a\n", "b\n"])
    assert written.getvalue() == "a\nb\n"
