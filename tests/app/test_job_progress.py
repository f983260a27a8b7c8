"""Several jobs tell how far they are: done of how many, the time left, the leading metric, every ten seconds."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedsim.app import job_progress
from fedsim.app.job_progress import (
    FinishedRounds,
    JobProgress,
    LockstepProgress,
    best_metric_text,
    duration_text,
    leading_metric,
    yield_finished_futures,
)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rows(folder: Path, accuracy: float, metric: str = "test_accuracy") -> Path:
    folder.mkdir()
    lines = [
        f"round,seed,{metric},train_loss",
        f"0,0,{1 - accuracy},5",
        f"5,0,{accuracy - 0.1},1",
        f"5,1,{accuracy + 0.1},1",
    ]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_word_every_ten_seconds_with_the_time_that_is_left(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    progress = JobProgress(4, clock=clock, log_line=said.append)
    watch = LockstepProgress(progress, [rows(tmp_path / "a", 0.5), rows(tmp_path / "b", 0.8), tmp_path / "c"], [50] * 4)
    for t in range(40):
        clock.now += 1
        watch(t, 4)
    assert len(said) == 4
    best = "highest at present: test_accuracy 0.8 (b)"
    assert said[0] == f"0/4 jobs done after 10 s, about 40 s left; round 10/50, 4 together; {best}"
    progress.record_finished_jobs()
    clock.now += 9
    watch(45, 3)
    assert len(said) == 4  # whoever said that the job has ended has said a word
    clock.now += 1
    watch(46, 3)
    assert said[-1].startswith("1/4 jobs done after 50 s, about ")


@pytest.mark.parametrize(("metric", "whose"), [("test_accuracy", "b"), ("test_loss", "a")])
def test_the_best_is_that_of_the_metrics_direction(metric: str, whose: str, tmp_path: Path) -> None:
    folders = [rows(tmp_path / "a", 0.3, metric), rows(tmp_path / "b", 0.7, metric)]
    assert best_metric_text(folders).endswith(f"({whose})")
    assert best_metric_text([tmp_path / "nothing"]) == ""
    (tmp_path / "b" / "metrics.csv").write_text("no metrics\n1,2\n")
    assert best_metric_text(folders).endswith("(a)")


def test_futures_are_given_as_they_end_and_the_others_waited_for_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_progress, "SECONDS_BETWEEN_LOG_LINES", 0.02)
    said, hold = list[str](), threading.Event()
    progress = JobProgress(2, "runs", log_line=lambda text: (said.append(text), hold.set())[0])
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(lambda: 1), pool.submit(lambda: 2 if hold.wait(30) else 0)]
        outcomes = yield_finished_futures(futures, progress, lambda: "more", lambda: 0.5)
        assert [future.result() for future in outcomes] == [1, 2]
    assert said[0].startswith("0/2 runs done after 0 s, about 0 s left")
    assert said[0].endswith("; more")


def test_the_share_of_rounds_counts_from_the_start_of_the_command(tmp_path: Path) -> None:
    """A run that is resumed at round 5 of 20, and one of 20 that has no metrics yet."""
    resumed = rows(tmp_path / "a", 0.5)
    finished_rounds = FinishedRounds([resumed, tmp_path / "b"], [20, 20])
    assert finished_rounds.share() == 0.0
    rows(tmp_path / "b", 0.5)
    assert finished_rounds.share() == pytest.approx(5 / 35)
    with (resumed / "metrics.csv").open("a") as file:
        file.write("20,0,0.5,1\n20,1,0.5,1\n")
    assert finished_rounds.share() == pytest.approx(20 / 35)
    assert best_metric_text([resumed], ["lr = 0.1"]).endswith("(lr = 0.1)")


def test_words_for_times_and_metrics() -> None:
    assert [duration_text(s) for s in (0.4, 80, 100, 6000)] == ["0 s", "80 s", "1.7 min", "1.7 h"]
    assert leading_metric({"train_loss": 1.0, "test_loss": 2.0}) == ("test_loss", 2.0)
    assert leading_metric({"seconds": 1.0}) is None
    validated = {"test_accuracy": 0.9, "global_validation_loss": 1.0, "global_validation_accuracy": 0.8}
    assert leading_metric(validated) == ("global_validation_accuracy", 0.8)


@pytest.mark.parametrize("launcher", ["basic", "lockstep"])
def test_a_sweep_says_one_line_of_each_run(launcher: str, tmp_path: Path, fedsim) -> None:
    ended = fedsim(
        tmp_path, "-m", "strategy=fedavg,fedawe", "lr=0.1,0.2", "rounds=2", "clients=4", "partition=iid", "out=sweep",
        "availability=full", f"hydra/launcher={launcher}", "tracking.progress=none", "tracking.tensorboard=false",
    )  # fmt: skip
    lines = [line for line in ended.out.splitlines() if line]
    assert len(lines) == 4
    for number, line in enumerate(lines, 1):
        assert re.match(
            rf"\[{number}/4\](, about .* left:)? test_accuracy 0\.\d+, test_loss .* after 2 rounds in", line
        )
        assert "sweep" in line
    assert not re.search("left", lines[-1])
