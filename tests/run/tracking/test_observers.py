"""Observers hear of every evaluation, may end a run and write files; one that fails ends nothing but itself."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsim
from fedsim import EvaluationOptions, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean
from fedsim.run.tracking import EvaluationEvent, Observer, RunConfig, RunEnded, RunStarted, Tracking


def simulation_of(rounds: int = 6, **options: Any) -> Simulation:
    options = {"seeds": (2, 5), "evaluation": EvaluationOptions(every=2)} | options
    return Simulation(Quadratics(clients=3, dimension=2), Mean, clients=3, rounds=rounds, **options)


def quiet(*observers: Any) -> Tracking:
    return Tracking(progress="none", tensorboard=False, observers=list(observers))


class Notebook(Observer):
    """Writes down everything it hears."""

    def __init__(self, end_at: int | None = None) -> None:
        self.heard: list[Any] = []
        self.end_at = end_at

    def begin(self, run: RunStarted) -> None:
        self.heard.append(run)
        self.folder = run.folder

    def evaluated(self, event: EvaluationEvent) -> str | None:
        self.heard.append(event)
        if self.folder is not None:
            (self.folder / "notes.txt").write_text(f"{event.round}: {event.mean()['train_loss']}")
        return "that will do" if self.end_at is not None and event.round >= self.end_at else None

    def finish(self, event: RunEnded) -> None:
        self.heard += [event, [heading for heading, _ in event.pictures()]]

    def close(self) -> None:
        self.heard.append("closed")


class RoundCounter(Observer):
    """Writes down in which order rounds and evaluations are completed."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def round_completed(self, completed_rounds: int) -> None:
        self.heard.append(f"round {completed_rounds}")

    def evaluated(self, event: EvaluationEvent) -> None:
        self.heard.append(f"evaluation {event.round}")


def test_it_hears_of_each_round_before_its_evaluation(tmp_path: Path) -> None:
    """Also on the way on after round 3."""
    counter = RoundCounter()
    simulation_of(rounds=3).run(tmp_path, tracking=quiet(counter))
    assert counter.heard == ["evaluation 0", "round 1", "round 2", "evaluation 2", "round 3", "evaluation 3"]
    counter.heard.clear()
    simulation_of(rounds=5).run(tmp_path, resume=True, tracking=quiet(counter))
    assert counter.heard == ["round 4", "evaluation 4", "round 5", "evaluation 5"]


def test_it_hears_of_the_run_its_evaluations_and_its_end(tmp_path: Path) -> None:
    notebook = Notebook()
    result = simulation_of().run(
        tmp_path, tracking=quiet(notebook), config=RunConfig(settings={"lr": 0.1}, yaml="lr: 0.1\n")
    )
    begun, *evaluated, ended, pictures, closed = notebook.heard
    assert (begun.folder, begun.seeds, begun.rounds, begun.completed_rounds) == (tmp_path, (2, 5), 6, 0)
    assert (begun.settings, begun.config, begun.names) == ({"lr": 0.1}, "lr: 0.1\n", ["seed_2", "seed_5"])
    assert [seen.round for seen in evaluated] == [0, 2, 4, 6]
    assert [row for seen in evaluated for row in seen.rows] == result.history
    for seen in evaluated:
        assert seen.mean()["train_loss"] == pytest.approx(np.mean([row["train_loss"] for row in seen.rows]))
    for r in (0, 1):
        state = evaluated[-1].model(r)
        torch.testing.assert_close(torch.cat([v.ravel() for v in state.values()]), result.state.model[r])
    assert ended.summary["final"]["train_loss"]["mean"] == result.final["train_loss"][0]
    assert "Over the rounds" in pictures
    assert closed == "closed"
    assert (tmp_path / "notes.txt").read_text().startswith("6: ")


def test_a_run_without_a_folder_is_watched_too() -> None:
    notebook, rounds = Notebook(), []
    simulation_of().run(tracking=quiet(notebook, lambda seen: rounds.append(seen.round)))
    assert notebook.heard[0].folder is None
    assert notebook.heard[-2] == []
    assert rounds == [0, 2, 4, 6]


def test_it_may_end_the_run_which_is_resumed_as_any_other(tmp_path: Path) -> None:
    result = simulation_of().run(tmp_path, tracking=quiet(Notebook(end_at=4)))
    assert result.history[-1]["round"] == 4
    assert result.stopped == "observer Notebook: that will do after round 4"
    assert fedsim.load(tmp_path).summary["stopped"] == result.stopped
    notebook = Notebook()
    on = simulation_of().run(tmp_path, resume=True, tracking=quiet(notebook))
    assert notebook.heard[0].completed_rounds == 4
    assert [seen.round for seen in notebook.heard[1:-3]] == [6]
    assert torch.equal(on.state.model, simulation_of().run().state.model)
    again = Notebook()
    simulation_of().run(tmp_path, resume=True, tracking=quiet(again))
    assert again.heard == []  # nothing is left to be watched


def test_a_replicate_that_it_drops_after_an_evaluation_is_given_up_from_there_on() -> None:
    class Dropping(Notebook):
        def drop_reason_by_replicate(self) -> dict[int, str]:
            return {0: "hopeless"} if self.heard[-1].round == 2 else {}

    losses = np.array([row["train_loss"] for row in simulation_of().run(tracking=quiet(Dropping())).history])
    assert np.isnan(losses.reshape(4, 2)).tolist() == [[False, False], [False, False], [True, False], [True, False]]


def test_observers_change_no_number(tmp_path: Path) -> None:
    plain = simulation_of().run(tmp_path / "plain", tracking=quiet())
    seen = simulation_of().run(tmp_path / "seen", tracking=quiet(Notebook()))
    assert torch.equal(plain.state.model, seen.state.model)
    without_seconds = [[{**row, "seconds": 0} for row in result.history] for result in (plain, seen)]
    assert without_seconds[0] == without_seconds[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["begin", "evaluated", "finish", "close"])
def test_one_that_fails_is_left_out_and_the_run_goes_on(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(Notebook):
        pass

    def fail(self: Any, *_: Any) -> None:
        self.heard.append("failed")
        raise OSError("no room\nfor details")

    setattr(Clumsy, where, fail)
    clumsy, other = Clumsy(), Notebook()
    with caplog.at_level(logging.WARNING):
        result = simulation_of().run(tmp_path, tracking=quiet(clumsy, other))
    assert result.history[-1]["round"] == 6
    assert [seen.round for seen in other.heard if isinstance(seen, EvaluationEvent)] == [0, 2, 4, 6]
    (said,) = [record.getMessage() for record in caplog.records if "observer" in record.getMessage()]
    assert "observer Clumsy failed" in said
    assert "(OSError: no room); it is disabled, and the run continues" in said
    assert "\n" not in said
    assert clumsy.heard.count("failed") == (2 if where == "close" else 1)
    assert (tmp_path / "summary.json").exists()


def test_an_interrupted_run_closes_its_observers_and_does_not_finish_them(tmp_path: Path) -> None:
    notebook = Notebook()

    def interrupt(seen: EvaluationEvent) -> None:
        if seen.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulation_of().run(tmp_path, tracking=quiet(notebook, interrupt))
    assert notebook.heard[-1] == "closed"
    assert not any(isinstance(heard, RunEnded) for heard in notebook.heard)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("wandb", r"observers='wandb' must be a list, such as \[wandb\]"),
        (["wand"], r"observers='wand' is unknown; choose one of wandb, mlflow, trackio"),
        ([3], r"tracking\.observers: 3 is not an observer"),
        ([Notebook], r"is not an observer"),
        (None, r"observers=None must be a list"),
    ],
)
def test_what_is_no_observer_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Tracking(observers=given)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_an_absent_service_is_an_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=rf"tracking\.observers={name} is an extra; pip install 'fedsim-torch\[{name}\]'"
    ):
        Tracking(observers=[name])
