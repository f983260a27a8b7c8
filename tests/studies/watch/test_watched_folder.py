"""What `fedsim watch` reads of a folder: runs at any depth, their states, and nothing is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from watched_runs import finish, hold, record, write_run

from fedsim.core.errors import ConfigError
from fedsim.core.lock import Lock, is_folder_locked
from fedsim.studies.results.run_state import run_state
from fedsim.studies.watch.curves import DEVIATION_BAND, INTERVAL_BAND, NO_BAND, final_value_text, make_curve
from fedsim.studies.watch.folder import MAX_NAME_LENGTH, MAX_RUNS, WatchedFolder

ACCURACY = {"test_accuracy": [0.1, 0.6, 0.7]}
NO_PROCESS = 2**22 + 1  # above Linux's largest number of a process


def states(folder: Path) -> dict[str, str]:
    return {one.folder.name: one.state for one in WatchedFolder(folder).snapshot().runs}


@pytest.mark.skipif(sys.platform == "win32", reason="there a process is not asked whether it lives")
def test_every_state(tmp_path: Path) -> None:
    for number, name in enumerate(("done", "going", "killed", "refused", "asked", "alone")):
        write_run(tmp_path / name, ACCURACY)
        if name != "alone":
            status = {"done": "done", "refused": "failed", "asked": "stopped"}.get(name, "running")
            record(tmp_path / name, number, status, "why")
    finish(tmp_path / "done")
    hold(tmp_path / "going")
    hold(tmp_path / "killed", NO_PROCESS)
    assert states(tmp_path) == {
        "done": "finished", "going": "running", "killed": "stopped", "refused": "failed", "asked": "stopped",
        "alone": "stopped",
    }  # fmt: skip
    assert run_state(tmp_path / "refused").message == "why"


def test_a_run_that_goes_on_after_it_failed_is_running(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ACCURACY)
    record(tmp_path / "a", 0, "failed", "no space")
    hold(tmp_path / "a")
    assert states(tmp_path) == {"a": "running"}


def test_the_lock_of_a_live_process_is_seen_and_left_alone(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "a")
    assert is_folder_locked(tmp_path / "a")
    with pytest.raises(ConfigError, match="in use"):
        Lock(tmp_path / "a")
    lock.release()
    assert not is_folder_locked(tmp_path / "a")


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"host": 3}', '{"pid": -1}', "x" * 5000, '{"pid": 1' + "0" * 30 + "}", "\udcff"]
)
def test_a_damaged_lock_file_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_bytes(content.encode(errors="surrogateescape"))
    assert is_folder_locked(tmp_path) in (True, False)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "null", "[" * 100_000,
        json.dumps({"folder": "..", "overrides": [], "status": "", "message": ""}),
        json.dumps({"folder": "a", "overrides": [1], "status": "failed", "message": ""}),
        json.dumps({"folder": "a", "overrides": 3, "status": "failed", "message": ""}), "9" * 70_000,
    ],
)  # fmt: skip
def test_a_damaged_record_is_passed_over(tmp_path: Path, content: str) -> None:
    write_run(tmp_path / "a", ACCURACY)
    (tmp_path / ".runs").mkdir()
    (tmp_path / ".runs" / "0.json").write_text(content)
    assert states(tmp_path) == {"a": "stopped"}


def test_a_run_that_was_refused_before_it_had_a_folder_is_named_by_its_overrides(tmp_path: Path) -> None:
    write_run(tmp_path / "lr=1", ACCURACY)
    record(tmp_path / "lr=-1", 1, "failed", "lr=-1 must be positive", ["lr=-1", "seeds=[0]"])
    refused = WatchedFolder(tmp_path).snapshot().runs[0]
    assert (refused.label, refused.state, refused.message) == ("lr=-1 seeds=[0]", "failed", "lr=-1 must be positive")


def test_new_runs_and_new_rows_appear_and_deleted_runs_go(tmp_path: Path) -> None:
    watched = WatchedFolder(tmp_path, seconds=0)
    assert watched.snapshot().runs == []
    write_run(tmp_path / "a", ACCURACY, {"lr": 0.1})
    assert [len(run.rows) for run in watched.snapshot().measured_runs] == [9]
    write_run(tmp_path / "a", {"test_accuracy": [0.1, 0.6, 0.7, 0.8]}, {"lr": 0.1})
    write_run(tmp_path / "deeper" / "b", ACCURACY, {"lr": 0.2})
    assert [one.label for one in watched.snapshot().runs] == ["lr=0.1", "lr=0.2"]
    assert [len(run.rows) for run in watched.snapshot().measured_runs] == [12, 9]
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    (tmp_path / "a").rmdir()
    assert [one.folder.name for one in watched.snapshot().runs] == ["b"]


def test_a_run_is_read_again_only_where_a_file_has_changed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ACCURACY)
    watched = WatchedFolder(tmp_path, seconds=0)
    (first,), (second,) = watched.snapshot().measured_runs, watched.snapshot().measured_runs
    assert first is second
    finish(tmp_path / "a")
    (third,) = watched.snapshot().measured_runs
    assert third is not first


def test_damaged_runs_are_shown_as_such_and_others_beside_them(tmp_path: Path) -> None:
    write_run(tmp_path / "good", ACCURACY)
    (write_run(tmp_path / "bad", ACCURACY) / "metrics.csv").write_text("round,seed,test_accuracy\n0,0,word\n")
    (write_run(tmp_path / "pipe", ACCURACY) / "metrics.csv").unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe" / "metrics.csv")
    else:
        (tmp_path / "pipe" / "metrics.csv").write_text("round\n1\n")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "environment.json").write_text("{}")
    assert states(tmp_path) == {"bad": "unreadable", "begun": "stopped", "good": "stopped", "pipe": "unreadable"}


def test_a_folder_is_read_and_nothing_in_it_is_touched(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        write_run(tmp_path / name, ACCURACY)
        record(tmp_path / name, number, "running")
    hold(tmp_path / "a")
    hold(tmp_path / "b", NO_PROCESS)

    def content() -> dict[str, tuple[int, bytes]]:
        paths = sorted(path for path in tmp_path.rglob("*"))
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in paths}

    before = content()
    watched = WatchedFolder(tmp_path, seconds=0)
    for _ in range(3):
        watched.snapshot()
    assert content() == before


def test_names_are_on_one_line_and_of_moderate_length(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ACCURACY, {"lr": 1, "note": "\x1b]0;title\x07 \u202e one\ntwo"})
    write_run(tmp_path / ("b" * 200), ACCURACY, {"lr": 1, "note": "x"})
    for watched in WatchedFolder(tmp_path).snapshot().runs:
        assert len(watched.label) <= MAX_NAME_LENGTH
        assert watched.label.isprintable()


def test_so_many_runs_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    for number in range(MAX_RUNS + 3):
        record(tmp_path / f"{number:04}", number, "running")
    snapshot = WatchedFolder(tmp_path).snapshot()
    assert (len(snapshot.runs), snapshot.num_runs) == (MAX_RUNS, MAX_RUNS + 3)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        WatchedFolder(tmp_path / "absent")


def test_curves_are_means_with_a_band_over_seeds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_accuracy": [0.1, 0.5], "test_loss": [2.0, 1.0]}, seeds=(0, 1, 2))
    (run,) = WatchedFolder(tmp_path).snapshot().measured_runs
    drawn = make_curve(run, "test_loss", DEVIATION_BAND)
    assert drawn is not None
    np.testing.assert_allclose(drawn.mean, [2.01, 1.01])
    np.testing.assert_allclose(drawn.upper_band - drawn.mean, 0.01)
    interval = make_curve(run, "test_loss", INTERVAL_BAND)
    assert interval is not None
    np.testing.assert_allclose(
        interval.upper_band - interval.mean, 4.302652729911275 * 0.01 / np.sqrt(3)
    )  # Student's, n = 3
    without = make_curve(run, "test_loss", NO_BAND)
    assert without is not None
    assert np.isnan(without.lower_band).all()
    percent = make_curve(run, "test_accuracy")
    assert percent is not None
    np.testing.assert_allclose(percent.mean, [11, 51])
    assert make_curve(run, "absent_metric") is None
    assert (final_value_text(run, "test_loss"), final_value_text(run, "test_accuracy")) == (
        "1.01 ± 0.01",
        "51.0 ± 1.0 %",
    )


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_interval_of_the_mean_is_that_of_students_t(tmp_path: Path, count: int) -> None:
    values = 2.0 + 0.01 * np.arange(count)
    write_run(tmp_path / "a", {"test_loss": [2.0]}, seeds=tuple(range(count)))
    (run,) = WatchedFolder(tmp_path).snapshot().measured_runs
    drawn = make_curve(run, "test_loss", INTERVAL_BAND)
    assert drawn is not None
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    np.testing.assert_allclose((drawn.lower_band[0], drawn.upper_band[0]), (low, high))


def test_one_seed_and_undefined_values_have_no_band(tmp_path: Path) -> None:
    write_run(tmp_path / "one", {"test_loss": [2.0, float("nan"), 1.0]}, {"lr": 1}, seeds=(0,))
    (run,) = WatchedFolder(tmp_path).snapshot().measured_runs
    drawn = make_curve(run, "test_loss")
    assert drawn is not None
    assert np.isnan(drawn.lower_band).all()
    np.testing.assert_array_equal(np.isnan(drawn.mean), [False, True, False])


def test_long_curves_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_loss": list(np.linspace(2, 1, 3001))}, seeds=(0, 1))
    (run,) = WatchedFolder(tmp_path).snapshot().measured_runs
    drawn = make_curve(run, "test_loss")
    assert drawn is not None
    assert len(drawn.rounds) <= 400
    assert drawn.rounds[-1] == 30_000
