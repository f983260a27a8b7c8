"""A resumed run is the uninterrupted one, however it was stopped."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch
from resumable import QUIET, Coins, simulation_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedsim import EvaluationOptions, Execution
from fedsim.core import ConfigError
from fedsim.run import Stopped, rehearsal
from fedsim.run.checkpoint import NAME, read
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.run.tracking.observer import Observer
from fedsim.strategies import FedAvg, FedAvgAll, FedAvgKnown, FedAWE, FedPBC

STRATEGIES = {
    "fedavg": FedAvg(server_lr=0.8, weighting="data"),
    "fedavg_all": FedAvgAll(),
    "fedavg_known": FedAvgKnown(),
    "fedpbc": FedPBC(),
    "fedpbc active": FedPBC(compute="active"),
    "fedawe": FedAWE(server_lr=0.7),
}


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def assert_same_run(resumed, straight, folder, straight_folder) -> None:
    for field in dataclasses.fields(straight.state):
        assert torch.equal(getattr(resumed.state, field.name), getattr(straight.state, field.name)), field.name
    assert resumed.samples == straight.samples
    assert timeless(resumed.history) == timeless(straight.history)
    files = [read_metrics(f / "metrics.csv") for f in (folder, straight_folder)]
    assert timeless(files[0]) == timeless(files[1]) == timeless(straight.history)


def crash():
    raise RuntimeError("power cut")


@pytest.fixture(autouse=True)
def _without_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this file send signals and crash in a round; a trial of rounds would meet them before the run."""
    monkeypatch.setattr(rehearsal, "rehearse_rounds", lambda run: None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_three_rounds_and_three_more_are_six(name, tmp_path):
    options = {"strategy": STRATEGIES[name]}
    straight = simulation_of(**options).run(tmp_path / "straight", tracking=QUIET)
    simulation_of(rounds=3, **options).run(tmp_path / "parts", tracking=QUIET)
    resumed = simulation_of(**options).run(tmp_path / "parts", resume=True, tracking=QUIET)
    assert_same_run(resumed, straight, tmp_path / "parts", tmp_path / "straight")
    assert sorted((row["round"], row["seed"]) for row in resumed.history) == [
        (t, seed) for t in range(7) for seed in (1, 4)
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_signal_ends_the_run_after_its_round_and_resuming_completes_it(number, every, tmp_path):
    evaluation = EvaluationOptions(every)
    straight = simulation_of(evaluation=evaluation).run(tmp_path / "straight", tracking=QUIET)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    interrupt = Coins(1, lambda: os.kill(os.getpid(), number))
    interrupted = simulation_of(availability=interrupt, evaluation=evaluation)
    with pytest.raises(Stopped, match=f"{number.name} after round 2 of 6"):
        interrupted.run(tmp_path / "parts", tracking=QUIET)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert isinstance(Stopped(), KeyboardInterrupt)
    _, progress = read(tmp_path / "parts" / NAME, interrupted.initial_state(), {"seeds": [1, 4], "strategy": "FedAWE"})
    assert progress.rounds == 2
    resumed = simulation_of(evaluation=evaluation).run(tmp_path / "parts", resume=True, tracking=QUIET)
    assert_same_run(resumed, straight, tmp_path / "parts", tmp_path / "straight")


def test_a_signal_in_the_last_round_lets_the_run_finish_and_stops_what_would_follow_it(tmp_path):
    straight = simulation_of().run()
    interrupt = Coins(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="SIGTERM after the run ended in round 6 of 6") as stopped:
        simulation_of(availability=interrupt).run(tmp_path, tracking=QUIET)
    assert timeless(stopped.value.result.history) == timeless(straight.history)
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("view", ["evaluated", "finish", "close"])
def test_a_signal_in_an_observer_of_the_last_evaluation_is_not_lost(view, tmp_path):
    class Signalling(Observer):
        """Asks the run to stop in one of its methods."""

    def ask(self, *seen):
        if view != "evaluated" or seen[0].round == 2:
            signal.raise_signal(signal.SIGINT)

    setattr(Signalling, view, ask)
    with pytest.raises(Stopped) as stopped:
        simulation_of(rounds=2).run(tmp_path, tracking=dataclasses.replace(QUIET, observers=[Signalling()]))
    assert stopped.value.result.history[-1]["round"] == 2
    assert (tmp_path / "summary.json").exists()


def test_a_run_that_fails_after_a_signal_is_stopped_and_says_why_it_failed(tmp_path):
    def ask_and_fail():
        signal.raise_signal(signal.SIGTERM)
        crash()

    with pytest.raises(Stopped, match="the run failed") as stopped:
        simulation_of(availability=Coins(1, ask_and_fail)).run(tmp_path, tracking=QUIET)
    assert "power cut" in str(stopped.value.__cause__)


def test_asked_twice_the_run_stops_at_once(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        simulation_of(availability=Coins(1, twice)).run(tmp_path, tracking=QUIET)
    assert not isinstance(stopped.value, Stopped)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tensorboard", [False, True])
def test_after_a_crash_nothing_is_lost_or_doubled(tensorboard, tmp_path):
    """Rounds after the last checkpoint were written already: they are replaced, in metrics.csv and in TensorBoard."""
    tracking = Tracking(progress="none", tensorboard=tensorboard, checkpoint_every=3)
    straight = simulation_of().run(tmp_path / "straight", tracking=tracking)
    with pytest.raises(RuntimeError, match="power cut"):
        simulation_of(availability=Coins(5, crash)).run(tmp_path / "parts", tracking=tracking)
    assert max(row["round"] for row in read_metrics(tmp_path / "parts" / "metrics.csv")) == 5
    resumed = simulation_of().run(tmp_path / "parts", resume=True, tracking=tracking)
    assert_same_run(resumed, straight, tmp_path / "parts", tmp_path / "straight")
    if tensorboard:
        for folder in ("mean", "seed_1", "seed_4"):
            points = []
            for run in ("parts", "straight"):
                events = EventAccumulator(str(tmp_path / run / folder)).Reload().Scalars("accuracy/test_accuracy")
                points.append([(event.step, event.value) for event in events])
            assert points[0] == points[1]
            assert [step for step, _ in points[0]] == list(range(7))


def test_a_new_run_in_an_old_folder_is_not_resumed_from_the_old_checkpoint(tmp_path):
    """It crashed before its first own checkpoint: resuming starts it afresh, and no row is lost."""
    straight = simulation_of().run(tmp_path / "straight", tracking=QUIET)
    folder = tmp_path / "parts"
    simulation_of(rounds=3).run(folder, tracking=QUIET)
    late = Tracking(progress="none", tensorboard=False, checkpoint_every=3)
    with pytest.raises(RuntimeError, match="power cut"):
        simulation_of(availability=Coins(1, crash)).run(folder, tracking=late)
    resumed = simulation_of().run(folder, resume=True, tracking=QUIET)
    assert_same_run(resumed, straight, folder, tmp_path / "straight")


def test_a_line_cut_short_and_a_half_written_checkpoint_do_not_matter(tmp_path):
    straight = simulation_of().run(tmp_path / "straight", tracking=QUIET)
    folder = tmp_path / "parts"
    simulation_of(rounds=3).run(folder, tracking=QUIET)
    with open(folder / "metrics.csv", "a") as file:
        file.write("4,1,0.73")
    (folder / NAME).with_suffix(".partial").write_bytes(b"half")
    resumed = simulation_of().run(folder, resume=True, tracking=QUIET)
    assert_same_run(resumed, straight, folder, tmp_path / "straight")


def test_a_finished_run_is_resumed_to_the_same_result(tmp_path):
    first = simulation_of().run(tmp_path, tracking=QUIET)
    again = simulation_of().run(tmp_path, resume=True, tracking=QUIET)
    assert again.history == first.history
    assert torch.equal(again.state.model, first.state.model)
    with pytest.raises(ConfigError, match="rounds=4"):
        simulation_of(rounds=4).run(tmp_path, resume=True, tracking=QUIET)


def test_executor_and_chunk_may_change_on_resuming(tmp_path):
    straight = simulation_of().run()
    simulation_of(rounds=3, execution=Execution("vmap")).run(tmp_path, tracking=QUIET)
    resumed = simulation_of(execution=Execution("loop", chunk=2)).run(tmp_path, resume=True, tracking=QUIET)
    torch.testing.assert_close(resumed.state.models, straight.state.models, rtol=0, atol=1e-5)


def test_without_a_checkpoint_a_resumed_run_starts_afresh(tmp_path):
    straight = simulation_of().run()
    resumed = simulation_of().run(tmp_path / "new", resume=True, tracking=QUIET)
    assert timeless(resumed.history) == timeless(straight.history)
