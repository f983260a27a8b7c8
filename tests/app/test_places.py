"""Where runs and sweeps write: two that begin at once apart, each where it was told, what is refused nowhere."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from small_runs import QUICK

from fedsim.app import folders
from fedsim.app.cli import main
from fedsim.app.folders import new_folder
from fedsim.core.lock import Lock
from fedsim.studies.results import load

SMALL = ["dataset=quadratics", "partition=natural", "model=mean", "trainer.executor=loop"]
LEAST = [*QUICK, *SMALL, "rounds=1", "tracking.progress=none"]


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still."""
    monkeypatch.setattr(folders.time, "strftime", lambda form: "outputs/2030-01-01/12-00-00")


@pytest.mark.usefixtures("one_second")
def test_all_that_begin_at_once_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.extend(new_folder() for _ in range(5))) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(set(made)) == 40
    assert {path.parent for path in made} == {Path("outputs/2030-01-01")}
    assert {path.name for path in made} == {"12-00-00", *(f"12-00-00-{n}" for n in range(2, 41))}


@pytest.mark.slow
@pytest.mark.usefixtures("one_second")
def test_runs_and_sweeps_of_one_second_all_stay(fedsim, tmp_path: Path) -> None:
    for lr in ("0.1", "0.2"):
        ended = fedsim(tmp_path, *LEAST, f"lr={lr}")
        assert ended.code == 0
        assert f"run: {tmp_path}/outputs/" in ended.log
    for _ in range(2):
        ended = fedsim(tmp_path, "-m", *LEAST, "lr=0.3")
        assert ended.code == 0, ended.err
    there = tmp_path / "outputs" / "2030-01-01"
    found = {path.parent.relative_to(there).as_posix(): load(path.parent) for path in there.rglob("metrics.csv")}
    assert {name: run.settings["lr"] for name, run in found.items()} == {
        "12-00-00": 0.1,
        "12-00-00-2": 0.2,
        "12-00-00-3/run": 0.3,
        "12-00-00-4/run": 0.3,
    }
    assert found["12-00-00-2"].settings["out"].endswith("12-00-00-2")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "arguments",
    [["lr=-1"], ["-m", "out="], ["out=true"], ["-m", "out=true"], ["out=[a]"], ["resume="], ["hydra.run.dir=x"]],
    ids=" ".join,
)
def test_what_is_refused_leaves_no_folder(fedsim, tmp_path: Path, arguments: list[str]) -> None:
    ended = fedsim(tmp_path, *LEAST, *arguments)
    assert ended.code == 1
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert "run: " not in ended.log
    assert len(list(tmp_path.rglob("*"))) <= 2  # outputs/DATE, where the next one goes
    assert not list(tmp_path.rglob("*/*/*"))


def test_a_folder_in_use_is_refused_before_anything_else(fedsim, tmp_path: Path) -> None:
    """Not with `resume=auto` for a remedy, by which the second would break the first."""
    assert fedsim(tmp_path, *LEAST, "out=o").code == 0
    mine = Lock(tmp_path / "o")
    try:
        ended = fedsim(tmp_path, *LEAST, "out=o")
        assert "o is in use by process" in ended.err
        assert "resume=" not in ended.err
    finally:
        mine.release()


@pytest.mark.slow
def test_two_sweeps_do_not_share_a_folder(fedsim, tmp_path: Path) -> None:
    mine = Lock(tmp_path / "o")
    ended = fedsim(tmp_path, "-m", *LEAST, "out=o")
    assert ended.code == 1
    assert "fedsim: out=o is in use by process" in ended.err
    mine.release()
    assert fedsim(tmp_path, "-m", *LEAST, "out=o").code == 0
    Lock(tmp_path / "o").release()  # it was given back


@pytest.mark.slow
def test_swept_values_that_lead_elsewhere_stay_below(fedsim, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    values = "..,../in/.."
    ended = fedsim(tmp_path / "in", "-m", *LEAST, "out=deep/o", "availability=trace", f"availability.path={values}")
    assert "2 failed" in ended.err
    kept = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {("in", "deep", "o")}


def test_a_number_may_name_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedsim", *LEAST, "out=5"])
    main()
    assert (tmp_path / "5" / "metrics.csv").exists()
