"""Tuning beside runs of each trial alone."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsim.app import commands
from fedsim.app.build import build
from fedsim.core.errors import ConfigError
from fedsim.studies.tuning import proposals
from fedsim.studies.tuning.choice import SelectionRule
from fedsim.studies.tuning.schedule import SuccessiveHalving
from fedsim.studies.tuning.space import format_override
from fedsim.studies.tuning.tune import compose_single_config, tune

pytestmark = pytest.mark.slow
SMALL = [
    "clients=6", "rounds=8", "local_steps=2", "batch_size=8", "partition.validation=0.2", "device=cpu",
    "trainer.executor=loop", "trainer.trial=false", "availability=stationary",
]  # fmt: skip
RATES = "lr=0.03,0.3,0.1,1.0"
HALVING = SuccessiveHalving(eta=2, rungs=3, finalists=1)  # rungs 2, 4, 8


def alone(trial, *more: str):
    """Rows of metrics.csv of one trial, run by itself."""
    config = compose_single_config(
        (*SMALL, *more, *(format_override(key, value) for key, value in trial), "seeds=[0,1]")
    )
    return build(config)[0].run().history


def at(history, completed: int, metric: str = "validation_accuracy") -> np.ndarray:
    return np.array([row[metric] for row in history if row["round"] == completed])


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The full grid, and the same with trials dropped."""
    words = [*SMALL, RATES, "eval_every=2", "strategy.server_lr=0.5,1"]
    everything = tune(words, 2, halving=SuccessiveHalving(eta=1), extensions=0, out=None)
    folder = tmp_path_factory.mktemp("halved")
    return everything, tune(words, 2, halving=HALVING, extensions=0, out=folder), folder, words


def test_without_dropping_it_is_the_grid_run_one_by_one(full):
    everything, *_ = full
    assert len(everything.tuning.finalists) == 8
    assert everything.tuning.relative_cost == 1
    for trial, values in everything.tuning.finalists.items():
        assert np.array_equal(values, at(alone(trial, "eval_every=2"), 8))
    best = max(everything.tuning.finalists, key=lambda trial: everything.tuning.finalists[trial].mean())
    assert everything.choice.best_trial == best


def test_what_is_measured_until_a_trial_is_dropped_is_that_of_the_full_run(full):
    _, halved, *_ = full
    assert halved.tuning.rung_rounds == [2, 4, 8]
    reached = sorted(len(values) for values in halved.tuning.values_by_trial.values())
    assert reached == [1, 1, 1, 1, 2, 2, 3, 3]
    for trial, values in halved.tuning.values_by_trial.items():
        history = alone(trial, "eval_every=2")
        for completed, numbers in zip((2, 4, 8), values, strict=False):
            assert np.array_equal(numbers, at(history, completed))
    scores = {trial: values[0].mean() for trial, values in halved.tuning.values_by_trial.items()}
    dropped = [trial for trial, values in halved.tuning.values_by_trial.items() if len(values) == 1]
    assert max(scores[trial] for trial in dropped) <= min(scores[t] for t in scores if t not in dropped)
    assert halved.tuning.relative_cost == (4 * 2 + 2 * 4 + 2 * 8) / 64


def test_a_repeated_call_computes_nothing_and_a_killed_one_goes_on(full, tmp_path: Path, monkeypatch):
    _, halved, folder, words = full
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.csv")}
    again = tune(words, 2, halving=HALVING, extensions=0, out=folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.csv")} == before

    program = f"""if True:
        import os
        from fedsim.run.tracker import Tracker
        from fedsim.studies.tuning.schedule import SuccessiveHalving
        from fedsim.studies.tuning.tune import tune
        rounds, count = Tracker.record_round, [0]
        def until_killed(self, t, state, report):
            rounds(self, t, state, report)
            count[0] += 1
            if count[0] == 5:
                os._exit(9)
        Tracker.record_round = until_killed
        words = {words!r} + ["tracking.checkpoint_every=1"]
        tune(words, 2, halving=SuccessiveHalving(2, 3, 1), extensions=0, out={str(tmp_path)!r})
    """
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 9
    assert not list(tmp_path.rglob("tune.json"))
    resumed = tune([*words, "tracking.checkpoint_every=1"], 2, halving=HALVING, extensions=0, out=tmp_path)
    for outcome in (again, resumed):
        assert outcome.choice.trial == halved.choice.trial
        assert outcome.tuning.values_by_trial.keys() == halved.tuning.values_by_trial.keys()
        for trial, values in halved.tuning.values_by_trial.items():
            assert np.array_equal(values, outcome.tuning.values_by_trial[trial])


def test_what_rows_cannot_hold_and_updates_on_the_way_give_the_same_as_runs_alone():
    """Two federations, whose trials are compared with one another; with a delay dropped trials stay in the matrix."""
    words = [*SMALL, "lr=0.1,0.3", "batch_size=4,8", "eval_every=2", "delay=constant", "delay.rounds=3"]
    words = [text for text in words if text not in ("batch_size=8",)]
    outcome = tune(words, 2, "train_loss", HALVING, extensions=0, out=None)
    assert len(outcome.tuning.federations) == 2
    assert sorted(map(len, outcome.tuning.values_by_trial.values())) == [1, 1, 2, 3]
    for trial, values in outcome.tuning.values_by_trial.items():
        history = alone(trial, "eval_every=2", "delay=constant", "delay.rounds=3")
        for completed, numbers in zip(outcome.tuning.rung_rounds, values, strict=False):
            assert np.array_equal(numbers, at(history, completed, "train_loss"))


def test_a_grid_that_ends_too_early_is_extended_until_the_choice_is_inside():
    words = [
        "dataset=quadratics", "dataset.points=[0.0,1.0,5.0]", "partition=natural", "model=mean", "clients=3",
        "rounds=4", "local_steps=1", "batch_size=null", "availability=full", "device=cpu", "trainer.trial=false",
    ]  # fmt: skip
    outcome = tune(
        [*words, "lr=0.01,0.1"], 2, "distance_to_optimum", rule=SelectionRule("best"), extensions=5, out=None
    )
    # x ← x − lr · (x − mean): lr=1 is exact, 10 diverges
    assert outcome.tuning.extension_texts == ["lr=1.0", "lr=10.0"]
    assert (outcome.choice.trial, outcome.edge_knobs) == ((("lr", 1.0),), [])
    stopped = tune(
        [*words, "lr=0.001,0.01"], 2, "distance_to_optimum", rule=SelectionRule("best"), extensions=1, out=None
    )
    assert (stopped.tuning.extension_texts, stopped.edge_knobs) == (["lr=0.1"], ["lr=0.1"])


def test_trials_of_several_environments_are_compared_cell_by_cell():
    cells = (["availability=cyclic"], ["availability=full", "partition.alpha=1"])
    outcome = tune([*SMALL, "lr=0.1,0.3,0.03", "eval_every=2"], 2, halving=HALVING, extensions=0, out=None, cells=cells)
    for trial, values in outcome.tuning.values_by_trial.items():
        histories = [alone(trial, "eval_every=2", *cell) for cell in cells]
        for completed, numbers in zip(outcome.tuning.rung_rounds, values, strict=False):
            assert np.array_equal(numbers, np.concatenate([at(history, completed) for history in histories]))


@pytest.mark.parametrize("installed", [True, False], ids=["optuna", "random"])
def test_intervals_are_searched_with_optuna_or_at_random(monkeypatch, installed):
    if installed:
        pytest.importorskip("optuna")
    else:
        monkeypatch.setattr(proposals.importlib.util, "find_spec", lambda name: None)
    words = [*SMALL, "lr=log(0.01,1)", "strategy.server_lr=1,0.5", "eval_every=2"]
    first, second = (tune(words, 2, trials=6, halving=HALVING, out=None) for _ in range(2))
    assert list(first.tuning.values_by_trial) == list(second.tuning.values_by_trial)  # the same proposals
    assert len(first.tuning.values_by_trial) == 6
    assert all(0.01 <= dict(trial)["lr"] <= 1 for trial in first.tuning.values_by_trial)


def test_mistakes_are_refused_before_a_run(tmp_path: Path):
    for words, options, message in (
        ([*SMALL, RATES], {"metric": "weather"}, "metric='weather' is not among those of the run"),
        ([*SMALL, RATES], {"seeds": 1}, "at least two different ones"),
        ([*SMALL, RATES], {"trials": 5}, "trials=5 needs an interval"),
        ([*SMALL, "lr=log(0.1,1)"], {}, "an interval needs the number of trials"),
        ([*SMALL, RATES, "out=here"], {}, "out cannot be set here; use seeds or out"),
    ):
        with pytest.raises(ConfigError, match=message):
            tune(words, **({"out": tmp_path / "tune"} | options))
    assert not list(tmp_path.iterdir())


def test_the_command_writes_table_picture_and_outcome(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands.run_subcommand("tune", [*SMALL, RATES, "--seeds", "2", "--extend", "0"])
    printed = capsys.readouterr().out
    stored = json.loads((tmp_path / "tune" / "tune.json").read_text())
    assert printed.splitlines()[-1] == stored["sentence"]
    assert stored["metric"] == "validation_accuracy"
    rows = list(csv.DictReader((tmp_path / "tune" / "trials.csv").read_text().splitlines()))
    assert [row["status"] for row in rows].count("chosen") == 1
    assert {float(row["lr"]) for row in rows} == {0.03, 0.1, 0.3, 1.0}
    assert (tmp_path / "tune" / "tune.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="nothing is tuned"):
        commands.run_subcommand("tune", SMALL)
