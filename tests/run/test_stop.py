"""Rules that end a run, against the uninterrupted run's own numbers; the best model; and both when a run is resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resumable import QUIET, Coins, simulation_of
from safetensors import safe_open
from safetensors.torch import load_file

import fedsim
from fedsim import Stop
from fedsim.availability.clock import Devices
from fedsim.core import ConfigError
from fedsim.evaluation.personal import Personal
from fedsim.run import tracker
from fedsim.run.run_files import BEST_MODELS_FILE
from fedsim.run.tracking import Tracking

T = 12
SEEDS = (1, 4)


def numbers(result: Any, name: str) -> np.ndarray:
    """[E, R]."""
    return np.array([row[name] for row in result.history]).reshape(-1, len(SEEDS))


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that was measured, but how long it took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


@pytest.fixture(scope="module", name="whole")
def whole_fixture() -> Any:
    """The run that nobody stops, evaluated after every round."""
    return simulation_of(rounds=T).run(tracking=QUIET)


def test_it_ends_when_every_replicate_has_reached_the_target(whole: Any, tmp_path: Path) -> None:
    loss = numbers(whole, "train_loss")
    reached = {float(v): [next((t for t in range(T) if loss[t, r] <= v), T) for r in (0, 1)] for v in loss.ravel()}
    target, rounds = next((v, ts) for v, ts in reached.items() if min(ts) < max(ts) < T)
    result = simulation_of(rounds=T, stop=Stop(target={"train_loss": target})).run(tmp_path, tracking=QUIET)
    assert result.history[-1]["round"] == max(rounds)
    assert without_times(result.history) == without_times(whole.history[: len(result.history)])
    torch.testing.assert_close(result.state.model, simulation_of(rounds=max(rounds)).run().state.model, rtol=0, atol=0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["targets"] == {"train_loss": {"value": target, "rounds": rounds}}
    assert summary["stopped"] == result.stopped
    assert f"was reached in every replicate after round {max(rounds)}" in result.stopped


def test_the_mean_may_decide_instead(whole: Any) -> None:
    mean = numbers(whole, "train_loss").mean(1)
    target = float(mean[4])
    expected = next(t for t in range(1, T + 1) if mean[t] <= target)
    result = simulation_of(rounds=T, stop=Stop(target={"train_loss": target}, over="mean")).run()
    assert result.history[-1]["round"] == expected


def test_a_target_that_is_never_reached_and_one_that_is_at_the_end_stop_nothing(whole: Any, tmp_path: Path) -> None:
    for target in (-1.0, float(numbers(whole, "train_loss")[T].max())):
        stop = Stop(target={"train_loss": target})
        result = simulation_of(rounds=T, stop=stop).run(tmp_path / str(target), tracking=QUIET)
        assert result.history[-1]["round"] == T
        assert result.stopped is None
    assert json.loads((tmp_path / "-1.0" / "summary.json").read_text())["targets"]["train_loss"]["rounds"] == [None] * 2


def last_round(values: list[list[float]], patience: int, over: str) -> int | None:
    """Naively: count evaluations without a smaller value, each replicate by itself, until all have waited enough."""
    columns = list(zip(*values, strict=True)) if over == "all" else [[sum(row) / len(row) for row in values]]
    for t in range(1, len(values)):
        waited = []
        for column in columns:
            best, since = column[0], 0
            for value in column[1 : t + 1]:
                best, since = (value, 0) if value < best else (best, since + 1)
            waited.append(since)
        if min(waited) >= patience:
            return t
    return None


@given(
    values=st.lists(st.lists(st.integers(0, 5).map(float), min_size=2, max_size=2), min_size=2, max_size=12),
    patience=st.integers(1, 4),
    over=st.sampled_from(["all", "mean"]),
)
def test_patience_against_a_naive_count(values: list[list[float]], patience: int, over: str) -> None:
    rule = Stop(patience=patience, metric="loss", over=over)
    history, ended = [], None
    for t, row in enumerate(values):
        history += [{"round": t, "seed": r, "loss": value} for r, value in enumerate(row)]
        if rule.stop_reason(history, 0.0, "loss") is not None:
            ended = t
            break
    assert ended == last_round(values, patience, over)


def test_a_replicate_that_was_given_up_is_not_waited_for() -> None:
    rows = [(0, 2.0, 2.0), (1, 1.0, math.nan), (2, 0.5, math.nan)]
    history = [{"round": t, "seed": r, "loss": v} for t, *pair in rows for r, v in enumerate(pair)]
    for over in ("all", "mean"):
        rule = Stop(target={"loss": 0.7}, over=over)
        assert rule.stop_reason(history[:4], 0.0, None) is None
        assert rule.stop_reason(history, 0.0, None) is not None
    assert Stop(target={"loss": 0.7}).target_summary(history)["targets"]["loss"]["rounds"] == [2, None]


@pytest.mark.slow
def test_seconds_are_of_the_whole_run_and_its_last_model_is_evaluated(tmp_path: Path, monkeypatch: Any) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(tracker.time, "monotonic", lambda: next(clock))
    options: dict[str, Any] = {"evaluation": fedsim.EvaluationOptions(every=100), "rounds": 40}
    result = simulation_of(stop=Stop(seconds=15), **options).run(tmp_path, tracking=QUIET)
    ended = result.history[-1]["round"]
    assert 3 < ended < 40
    assert [row["round"] for row in result.history] == [0, 0, ended, ended]
    assert result.stopped.startswith("stop.seconds: 15 seconds were over")
    again = simulation_of(stop=Stop(seconds=15), **options).run(tmp_path, resume=True, tracking=QUIET)
    assert again.history[-1]["round"] == ended
    assert simulation_of(**options).run(tmp_path, resume=True, tracking=QUIET).history[-1]["round"] == 40


@pytest.mark.sampled(1)
@pytest.mark.parametrize("over", ["all", "mean"])
def test_virtual_seconds_end_it_by_its_clock_and_resumed_it_knows_them(tmp_path: Path, over: str) -> None:
    """The first round by whose end so many went by, evaluated though no evaluation was due."""
    clock: dict[str, Any] = {"clock": Devices(0.1, 0.8, 0.5), "rounds": T}
    times = numbers(simulation_of(**clock).run(tracking=QUIET), "virtual_seconds")
    decides = times.mean(1) if over == "mean" else times.min(1)
    limit = float((decides[5] + decides[6]) / 2)
    stop, rare = Stop(virtual_seconds=limit, over=over), {"evaluation": fedsim.EvaluationOptions(every=100)}
    assert decides[5] < limit < decides[6]
    simulation_of(**clock | rare | {"rounds": 3}, stop=stop).run(tmp_path, tracking=QUIET)
    result = simulation_of(**clock | rare, stop=stop).run(tmp_path, resume=True, tracking=QUIET)
    assert result.history[-1]["round"] == 6
    assert numbers(result, "virtual_seconds")[-1].tolist() == times[6].tolist()
    assert result.stopped is not None
    assert result.stopped.startswith(f"stop.virtual_seconds: {limit:g} virtual seconds were over in ")
    assert simulation_of(**clock | rare, stop=stop).run(tmp_path, resume=True).history[-1]["round"] == 6
    assert simulation_of(**clock | rare).run(tmp_path, resume=True, tracking=QUIET).history[-1]["round"] == T


def test_a_replicate_that_was_given_up_lets_no_virtual_time_go_by() -> None:
    rows = [(0, 1.0, 0.0, 0.0), (1, 1.0, 4.0, 1.0), (2, math.nan, 9.0, 1.0)]
    history = [
        {"round": t, "seed": r, "train_loss": 1.0 if r == 0 else loss, "virtual_seconds": (a, b)[r]}
        for t, loss, a, b in rows
        for r in (0, 1)
    ]
    for over in ("all", "mean"):
        rule = Stop(virtual_seconds=3.0, over=over)
        assert rule.stop_reason(history[:4], 0.0, None) is None
        assert "virtual seconds were over" in (rule.stop_reason(history, 0.0, None) or "")


def test_targets_say_the_virtual_seconds_too(tmp_path: Path) -> None:
    clock: dict[str, Any] = {"clock": Devices(0.1, 0.8), "rounds": T}
    whole = simulation_of(**clock).run(tracking=QUIET)
    loss, times = numbers(whole, "train_loss"), numbers(whole, "virtual_seconds")
    target = float(loss[4].max())
    simulation_of(**clock, stop=Stop(target={"train_loss": target})).run(tmp_path, tracking=QUIET)
    told = json.loads((tmp_path / "summary.json").read_text())["targets"]["train_loss"]
    assert told["virtual_seconds"] == [times[t, r] for r, t in enumerate(told["rounds"])]


def test_a_run_that_a_rule_ended_stays_ended_and_goes_on_under_another(whole: Any, tmp_path: Path) -> None:
    target = float(numbers(whole, "train_loss")[5].max())
    stop = Stop(target={"train_loss": target})
    first = simulation_of(rounds=T, stop=stop).run(tmp_path, tracking=QUIET)
    ended = first.history[-1]["round"]
    assert 0 < ended < T
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".csv", ".safetensors")}
    again = simulation_of(rounds=T, stop=stop).run(tmp_path, resume=True, tracking=QUIET)
    assert (again.stopped, again.history[-1]["round"]) == (first.stopped, ended)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == first.stopped
    on = simulation_of(rounds=T).run(tmp_path, resume=True, tracking=QUIET)
    assert on.stopped is None
    assert torch.equal(on.state.model, whole.state.model)
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == T


def test_the_best_model_of_every_replicate_is_kept(whole: Any, tmp_path: Path) -> None:
    accuracy = numbers(whole, "test_accuracy")
    simulation = simulation_of(rounds=T, stop=Stop(metric="test_accuracy"))
    result = simulation.run(tmp_path, tracking=QUIET)
    rounds = accuracy.argmax(0).tolist()
    assert result.extra["best"]["rounds"] == rounds
    assert result.extra["best"]["values"] == accuracy.max(0).tolist()
    run = fedsim.load(tmp_path)
    for r, t in enumerate(rounds):
        there = simulation_of(rounds=max(t, 1))
        row = there.initial_state().model if t == 0 else there.run().state.model
        state = run.model(SEEDS[r], "best")
        torch.testing.assert_close(torch.cat([v.reshape(-1) for v in state.values()]), row[r], rtol=0, atol=0)


def test_it_is_chosen_on_validation_samples_where_there_are_some(tmp_path: Path) -> None:
    from fedsim.data.partition import Dirichlet

    held = {"partition": Dirichlet(1.0, "per_class", validation=0.3), "personal": Personal(over="all")}
    simulation_of(rounds=4, **held).run(tmp_path / "held", tracking=QUIET)
    best = fedsim.load(tmp_path / "held").summary["best"]
    assert best["metric"] == "global_validation_accuracy"
    simulation_of(rounds=4).run(tmp_path / "none", tracking=QUIET)
    assert not (tmp_path / "none" / BEST_MODELS_FILE).exists()
    assert "best" not in fedsim.load(tmp_path / "none").summary


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [2, 5, 9])
def test_the_best_model_of_a_resumed_run_is_that_of_the_uninterrupted(at: int, tmp_path: Path) -> None:
    stop = Stop(metric="test_loss")
    whole = simulation_of(rounds=T, stop=stop).run(tmp_path / "whole", tracking=QUIET)
    simulation_of(rounds=at, stop=stop).run(tmp_path / "parts", tracking=QUIET)
    parts = simulation_of(rounds=T, stop=stop).run(tmp_path / "parts", resume=True, tracking=QUIET)
    assert parts.extra["best"] == whole.extra["best"]
    one, other = (load_file(tmp_path / name / BEST_MODELS_FILE)["model"] for name in ("whole", "parts"))
    assert torch.equal(one, other)


def test_a_crash_leaves_the_best_models_up_to_the_last_checkpoint(whole: Any, tmp_path: Path) -> None:
    def crash() -> None:
        raise RuntimeError("power cut")

    stop, every_third = Stop(metric="train_loss"), replace(QUIET, checkpoint_every=3)
    with pytest.raises(RuntimeError, match="power cut"):
        simulation_of(stop=stop, availability=Coins(4, crash)).run(tmp_path, tracking=every_third)
    with safe_open(tmp_path / BEST_MODELS_FILE, framework="pt") as file:
        record = json.loads(file.metadata()["best"])
    losses = numbers(whole, "train_loss")[:4]
    assert (record["rounds"], record["values"]) == (losses.argmin(0).tolist(), losses.min(0).tolist())


def test_a_best_file_that_is_ahead_of_its_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """As where a run is killed between the two."""
    stop = Stop(metric="train_loss")
    simulation_of(rounds=T, stop=stop).run(tmp_path / "whole", tracking=QUIET)
    simulation_of(rounds=5, stop=stop).run(tmp_path / "parts", tracking=QUIET)
    ahead = (tmp_path / "whole" / BEST_MODELS_FILE).read_bytes()
    (tmp_path / "parts" / BEST_MODELS_FILE).write_bytes(ahead)
    simulation_of(rounds=T, stop=stop).run(tmp_path / "parts", resume=True, tracking=QUIET)
    assert (tmp_path / "parts" / BEST_MODELS_FILE).read_bytes() == ahead


def test_a_best_file_with_a_changed_bit_is_told_and_sought_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop(metric="train_loss")
    simulation_of(rounds=2, stop=stop).run(tmp_path, tracking=QUIET)
    content = bytearray((tmp_path / BEST_MODELS_FILE).read_bytes())
    content[-1] ^= 4
    (tmp_path / BEST_MODELS_FILE).write_bytes(content)
    result = simulation_of(rounds=4, stop=stop).run(tmp_path, resume=True, tracking=QUIET)
    assert (
        f"{BEST_MODELS_FILE} cannot be read (it is damaged: the checksum of model differs); the best model is searched"
        in caplog.text
    )
    assert min(result.extra["best"]["rounds"]) > 2


def test_a_new_run_in_an_old_folder_has_no_old_best(tmp_path: Path) -> None:
    simulation_of(rounds=3, stop=Stop(metric="train_loss")).run(tmp_path, tracking=QUIET)
    simulation_of(rounds=2).run(tmp_path, tracking=QUIET)
    assert not (tmp_path / BEST_MODELS_FILE).exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": 0.9}, r"target=0\.9 must be metrics and values"),
        ({"target": {}}, r"target=\{\} must be metrics"),
        ({"target": {"test_accuracy": "high"}}, r"target\.test_accuracy='high' must be a finite number"),
        ({"patience": 0, "metric": "train_loss"}, r"patience=0"),
        ({"seconds": -1}, r"seconds=-1"),
        ({"virtual_seconds": 0}, r"virtual_seconds=0"),
        ({"virtual_seconds": 9}, r"stop\.virtual_seconds=9, but no virtual time goes by; add clock=devices"),
        ({"over": "any"}, r"over='any' is unknown"),
        ({"target": {"test_acuracy": 0.9}}, r"stop\.target='test_acuracy' is unknown.*test_accuracy"),
        ({"metric": "round"}, r"stop\.metric='round' is unknown"),
        ({"patience": 3}, r"stop\.patience=3 has no metric to compare.*partition\.validation"),
    ],
)
def test_rules_that_cannot_be_are_refused_before_anything_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        simulation_of(stop=Stop(**options)).run(tmp_path / "run", tracking=Tracking(progress="none"))
    assert not (tmp_path / "run").exists()
