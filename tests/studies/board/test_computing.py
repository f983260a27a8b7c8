"""A small board computed: fair, resumable, made again, and nothing that does not belong beside the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from fedsim.app.build import build
from fedsim.app.cli import run
from fedsim.app.composition import hydra_context
from fedsim.core import ConfigError
from fedsim.studies.board import costs as times
from fedsim.studies.board import tasks
from fedsim.studies.board.board import BoardEntry, Leaderboard, load_leaderboard
from fedsim.studies.board.costs import AlgorithmRoundTimes
from fedsim.studies.board.digests import DIGEST_NAMES, check_matching_digests, digest_inputs
from fedsim.studies.board.recheck import max_difference_from_rerun
from fedsim.studies.board.rows import (
    DONE_STATUS,
    FAILED_STATUS,
    REFUSED_STATUS,
    Row,
    TunedRates,
    cell_path,
    read_cell_rows,
    write_cell_rows,
)
from fedsim.studies.board.tasks import FillCellTask, TrackTimingTask
from fedsim.studies.reproduce.recipe import RecipeSetting
from fedsim.studies.reproduce.runner import RecipeJob, compose_config, plan_jobs
from fedsim.studies.results.runs import load as load_run

Made = Callable[..., list[str]]


def composed(overrides: list[str]) -> tuple[Any, dict[str, str]]:
    with hydra_context():
        return compose_config((*overrides, "tracking.tensorboard=false", "tracking.progress=none"))


def test_a_row_has_the_numbers_of_the_run_alone(small: Leaderboard, results: Path, tmp_path: Path) -> None:
    cell = small.find_cell("digits/rare")
    row = read_cell_rows(results, cell, small).rows["MIFA"]
    config, choices = composed([*small.base, *cell.overrides, *row.overrides, f"out={tmp_path / 'alone'}"])
    run(config, tmp_path / "alone", choices)
    alone = load_run(tmp_path / "alone")
    accuracy = alone.curve("test_accuracy")[1]
    assert (row.status, row.message) == (DONE_STATUS, "")
    np.testing.assert_allclose(row.values_of("accuracy"), accuracy[-2:].mean(0), rtol=1e-6)
    np.testing.assert_allclose(row.values_of("received"), alone.curve("client_mean_test_accuracy")[1][-1], rtol=1e-6)
    there = [next((t for t, a in enumerate(of) if a >= 0.3), math.nan) for of in accuracy.T]
    np.testing.assert_array_equal(row.values_of("rounds"), there)
    np.testing.assert_allclose(row.curve[1], accuracy.mean(1), atol=1e-5)
    assert row.remembered == 650 * 4 + 1  # a model of 64 · 10 + 10 numbers, and whether it was seen
    assert not any((tmp_path / "runs").glob("*"))


def test_tuning_spends_the_budget_and_keeps_the_best(small: Leaderboard, results: Path) -> None:
    rates = TunedRates.read(results)
    for name, knobs in (("FedAvg", {0.5, 1}), ("MIFA", {None})):
        found = rates.record_of("digits", name)
        assert found is not None
        assert len(found["trials"]) == small.tuning.trials
        assert {knob for _, knob, _ in found["trials"]} == knobs
        best = max(found["trials"], key=lambda trial: trial[2])
        assert [found["lr"], found["knob"], found["score"]] == best
        assert not set(found["seeds"]) & set(small.seeds)


def test_times_are_medians_of_the_later_half_of_a_runs_rounds(
    small: Leaderboard, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = AlgorithmRoundTimes.read(results)
    assert known.by_track["digits"].keys() == small.entries.keys()
    assert all(
        0.1 < ms < 1000
        for ms in (known.milliseconds_per_round("digits", name) for name in small.entries)
        if ms is not None
    )
    assert known.milliseconds_per_round("digits", "FedAU") is None
    clock = iter([n * 60.0 if n < 4 else 1000.0 + 3 * (n - 4) for n in range(10)])  # rounds of 60 s, then of 3
    monkeypatch.setattr(times.time, "process_time", lambda: next(clock))
    job = plan_jobs([RecipeSetting((), (*small.base, "dataset=digits", "model=linear", "seeds=[0]"))], tmp_path, ())[0]
    assert times.milliseconds_per_round(job, {}) == 3000
    assert [path.name for path in tmp_path.iterdir()] == ["results"]  # and no run


def test_folders_that_are_gone_are_forgotten_too(small: Leaderboard, tmp_path: Path) -> None:
    """As where a job never made its folder, or another process has deleted it."""
    setting = RecipeSetting((), (*small.base, "dataset=digits", "model=linear", "seeds=[0]"))
    job = plan_jobs([setting], tmp_path, ())[0]
    job.folder.mkdir(parents=True)
    for _ in range(2):
        tasks._delete_run_folders([job])
        assert not job.folder.exists()


def test_what_cannot_run_is_not_timed_again(small: Leaderboard, tmp_path: Path) -> None:
    rates = {"FedAvg": {"lr": None}, "MIFA": {"lr": -1.0, "knob": None}}
    found = TrackTimingTask(small, ["FedAvg", "MIFA"], tmp_path, tmp_path, {}, "digits", rates)()
    known = AlgorithmRoundTimes({"digits": found})
    assert [known.milliseconds_per_round("digits", name) for name in found] == [None, None]
    assert known.record_of("digits", "FedAvg") is not None


@pytest.mark.slow
def test_a_trials_score_is_that_of_its_rate_alone(small: Leaderboard, results: Path, tmp_path: Path) -> None:
    found = TunedRates.read(results).record_of("digits", "MIFA")
    assert found is not None
    lr, _, score = found["trials"][1]
    cell = small.find_cell("digits/rare")
    own = ["strategy=mifa", f"lr={lr}", "rounds=3", "seeds=[10,11]", f"out={tmp_path / 'alone'}"]
    config, choices = composed([*(o for o in small.base if not o.startswith("rounds")), *cell.overrides, *own])
    run(config, tmp_path / "alone", choices)
    assert load_run(tmp_path / "alone").final_values("validation_accuracy").mean() == pytest.approx(score, abs=1e-5)


@pytest.mark.slow
def test_what_is_there_is_not_computed_again(small: Leaderboard, results: Path, made: Made) -> None:
    before = {path: path.read_text() for path in results.rglob("*.json")}
    assert made(small, results) == []
    small.entries["FedAU"] = BoardEntry(["strategy=fedau"])
    said = made(small, results)
    assert (said[0], said[3:]) == ("[1/1] tuned in digits: FedAU", ["timed in digits: FedAU"])
    for number, (line, at) in enumerate(zip(said[1:3], ("full", "rare"), strict=True), 1):
        means = {
            name: row.values_of("accuracy").mean()
            for name, row in read_cell_rows(results, small.find_cell(f"digits/{at}"), small).rows.items()
        }
        best = max(means, key=lambda name: means[name])
        assert line == f"[{number}/2] digits/{at}: 1 rows; best so far: accuracy {means[best]:.4g} ({best})"
    cell = small.find_cell("digits/rare")
    assert set(read_cell_rows(results, cell, small).rows) == {"FedAvg", "MIFA", "FedAU"}
    assert before[cell_path(results, cell)] != cell_path(results, cell).read_text()


@pytest.mark.slow
def test_rows_of_one_cell_share_their_digests_and_what_differs_is_told(small: Leaderboard) -> None:
    def of(*overrides: str) -> Any:
        own = ["dataset=digits", "model=mlp", "model.hidden=[4]", "availability=stationary", *overrides]
        return digest_inputs(build(composed([*small.base, *own])[0])[0])

    first = of("strategy=fedavg")
    assert {name.partition(":")[0] for name in first} == set(DIGEST_NAMES)
    check_matching_digests("FedAWE", of("strategy=fedawe", "lr=0.7"), first, list(DIGEST_NAMES))
    for other, names in (
        (["availability.base.p=0.9"], "traces"),
        (["partition.alpha=0.1"], "splits, batches"),
        (["batch_size=3"], "batches"),
        (["seeds=[7]"], "models, splits, traces, batches"),
    ):
        with pytest.raises(ConfigError, match=f"made with other {names} than"):
            check_matching_digests("FedAWE", of("strategy=fedawe", *other), first, list(DIGEST_NAMES))
    check_matching_digests(
        "FedAWE", of("strategy=fedawe", "batch_size=3"), first, ["data", "splits", "traces", "models"]
    )


def test_a_row_made_with_other_traces_is_refused(small: Leaderboard, results: Path) -> None:
    full, rare = (read_cell_rows(results, small.find_cell(f"digits/{at}"), small) for at in ("full", "rare"))
    with pytest.raises(ConfigError, match="theirs in digits/rare was made with other traces than the rows"):
        rare.add_row("theirs", full.rows["MIFA"], small.compared)
    rare.rows["theirs"] = full.rows["MIFA"]
    write_cell_rows(results, rare, small)
    with pytest.raises(ConfigError, match="theirs in digits/rare was made with other traces"):
        read_cell_rows(results, rare.cell, small)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda c: c["rows"]["MIFA"]["numbers"].update(accuracy=[0.5]), "MIFA does not have one value of each measure"),
        (lambda c: c["overrides"].append("rounds=6"), "made with other settings than board small has now"),
        (lambda c: c.update(target=0.5), "made with other settings than board small has now"),
        (lambda c: c["measures"]["accuracy"].__setitem__(1, 3), "made with other settings"),
        (lambda c: c.pop("rows"), "holds no rows of a board"),
        (lambda c: c["rows"]["MIFA"].update(made=9), "holds no rows of a board"),
    ],
)
def test_damaged_files_are_one_sentence(
    small: Leaderboard, results: Path, changed: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = cell_path(results, small.find_cell("digits/full"))
    content = json.loads(path.read_text())
    changed(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        read_cell_rows(results, small.find_cell("digits/full"), small)


def test_rates_of_other_trials_are_refused(small: Leaderboard, results: Path, made: Made) -> None:
    assert small.entries["FedAvg"].knob is not None
    small.entries["FedAvg"].knob.values = [0.5, 2]
    with pytest.raises(ConfigError, match="rates of FedAvg in digits were found by other trials"):
        made(small, results)
    small.entries["FedAvg"].knob.values = [0.5, 1]
    small.tuning.rounds = 4
    with pytest.raises(ConfigError, match="rates of FedAvg in digits were found by other trials"):
        made(small, results)


@pytest.mark.slow
def test_the_performative_board_compares_a_pooled_rule_by_its_models_alone(tmp_path: Path) -> None:
    """Of the non-smooth problem, whose class lies beside the board; PFL goes to θ^PS and PoFL to θ^PO."""
    board = load_leaderboard("performative")
    other = [o for o in board.base if not o.startswith(("rounds", "eval_every"))]
    board.base = [*other, "rounds=40", "eval_every=2"]
    cell = board.find_cell("kinked/full")
    rates = {name: {"lr": 0.01, "knob": None if name == "PFL" else 20} for name in ("PFL", "PoFL", "PG")}
    FillCellTask(board, list(rates), tmp_path / "runs", tmp_path / "results", {}, cell, rates)()
    found = read_cell_rows(tmp_path / "results", cell, board)
    assert {name: row.status for name, row in found.rows.items()} == dict.fromkeys(rates, DONE_STATUS)
    assert (found.rows["PG"].digests.keys(), "traces" in found.digests) == ({"models"}, True)
    assert found.rows["PFL"].values_of("to θ^PS").max() < 0.5 < 2 < found.rows["PFL"].values_of("to θ^PO").min()
    assert found.rows["PoFL"].values_of("to θ^PO").max() < 0.5 < 2 < found.rows["PoFL"].values_of("to θ^PS").min()
    each = found.rows["PoFL"].values_of("deployments") / found.rows["PoFL"].values_of("rounds")
    np.testing.assert_array_equal(each, 4)


@pytest.mark.slow
def test_a_cell_made_again_gives_its_numbers(small: Leaderboard, results: Path, tmp_path: Path) -> None:
    cell = small.find_cell("digits/full")
    assert max_difference_from_rerun(small, cell, list(small.entries), results, tmp_path / "one") < 1e-6
    found = read_cell_rows(results, cell, small)
    found.rows["MIFA"].numbers["accuracy"][0] *= 1.01
    write_cell_rows(results, found, small)
    assert max_difference_from_rerun(small, cell, ["MIFA"], results, tmp_path / "two") == pytest.approx(
        0.01 / 1.01, rel=1e-3
    )
    found.rows["MIFA"].numbers["rounds"][0] = math.nan if found.rows["MIFA"].numbers["rounds"][0] >= 0 else 1.0
    write_cell_rows(results, found, small)
    with pytest.raises(ConfigError, match="rounds is"):
        max_difference_from_rerun(small, cell, ["MIFA"], results, tmp_path / "three")


OWN = """
from fedsim.strategies import FedAvg

class Breaks(FedAvg):
    def aggregate(self, state, report, t):
        if t == 4 and len(report.cohort) > 6:  # more than in the trial before a run
            raise IndexError("nothing there")
        return super().aggregate(state, report, t)
"""


@pytest.mark.slow
def test_what_cannot_run_diverges_or_breaks_is_a_row_that_says_so(
    small: Leaderboard, results: Path, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_here.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    small.entries |= {
        "two of all": BoardEntry(["strategy=p_fedavg", "strategy.scheme=II"]),
        "far": BoardEntry(["strategy=fedavg", "local.weight_decay=1e30"]),
        "breaks": BoardEntry(["strategy=custom", "strategy._target_=breaks_here.Breaks"]),
    }
    made(small, results)
    rows = read_cell_rows(results, small.find_cell("digits/full"), small).rows
    assert (rows["two of all"].status, rows["far"].status, rows["breaks"].status) == (
        REFUSED_STATUS,
        REFUSED_STATUS,
        REFUSED_STATUS,
    )
    assert "uniform_k" in rows["two of all"].message
    assert rows["far"].message == "no trial of its tuning ended well"
    assert "IndexError: nothing there" in rows["breaks"].message
    assert rows["MIFA"].status == DONE_STATUS


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("no such key"), REFUSED_STATUS, "no such key"),
        (IndexError("not\nhere"), FAILED_STATUS, "IndexError: not"),
    ],
)
def test_a_run_that_is_refused_or_breaks_ends_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, status: str, message: str
) -> None:
    def fail(job: RecipeJob, **options: Any) -> None:
        raise error

    monkeypatch.setattr(tasks, "job_local_tasks", fail)
    config = {"dataset": "x", "model": "x", "shift": "x", "contamination": "x", "deterministic": False, "rounds": 2}
    job = RecipeJob((), (), tmp_path / "run", OmegaConf.create(config | {"local": {}}), {})  # type: ignore[arg-type]
    ((folder, outcome),) = tasks._run_jobs([job])
    assert (folder, outcome.status, outcome.message) == (job.folder, status, message)


def test_an_empty_row_has_no_numbers() -> None:
    assert Row(REFUSED_STATUS).values_of("accuracy").size == 0


def test_runs_are_deleted_once_their_numbers_are_stored(computed_once: Path, results: Path, small: Leaderboard) -> None:
    """Those of the tuning too, of which a board has many."""
    assert TunedRates.read(results).record_of("digits", "FedAvg") is not None
    assert not list((computed_once / "runs").rglob("*.*"))
