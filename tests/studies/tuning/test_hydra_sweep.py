"""hydra/sweeper=tune: the trials and the choice of `fedsim tune`, with the options of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_loader import ConfigLoader
from omegaconf import OmegaConf

from fedsim.app import commands
from fedsim.core.errors import ConfigError
from fedsim.studies.tuning.hydra_sweep import run_tuning_sweep, sweep_overrides

SWEEP = ["-m", "hydra/sweeper=tune"]
SMALL = [
    "dataset=quadratics", "dataset.points=[0.0,1.0,5.0]", "partition=natural", "model=mean", "clients=3", "rounds=8",
    "local_steps=1", "batch_size=1", "availability=uniform_k", "availability.k=2", "device=cpu", "trainer.trial=false",
    "trainer.executor=vmap", "tracking.tensorboard=false",
]  # fmt: skip
OPTIONS = {"seeds": 2, "metric": "distance_to_optimum", "eta": 2, "rungs": 3, "finalists": 1, "extend": 1}
RATES = "lr=log(0.001,0.3,4)"


def with_options(prefix: str) -> list[str]:
    return [f"{prefix}{name}={value}" for name, value in OPTIONS.items()]


@pytest.mark.slow
def test_a_sweep_makes_the_trials_and_the_choice_of_the_command(fedsim, tmp_path: Path, monkeypatch, capsys) -> None:
    knobs = [RATES, "strategy=fedavg,mifa"]
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        commands.run_subcommand("tune", [*SMALL, *knobs, *with_options("--"), "--out", "by_command"])
        printed = capsys.readouterr().out
    done = fedsim(tmp_path, *SWEEP, *SMALL, *knobs, *with_options("hydra.sweeper."), "out=by_sweep")
    assert (done.code, done.out) == (0, printed)
    by_command, by_sweep = tmp_path / "by_command", tmp_path / "by_sweep"
    for name in ("tune.json", "trials.csv"):
        assert (by_sweep / name).read_text() == (by_command / name).read_text()
    assert (by_sweep / "tune.png").stat().st_size > 5000
    outcome = json.loads((by_sweep / "tune.json").read_text())
    assert len(outcome["trials"]) >= 8
    assert {trial["status"] for trial in outcome["trials"]} >= {"chosen", "dropped"}
    results = yaml.safe_load((by_sweep / "optimization_results.yaml").read_text())
    assert results == {"name": "tune", "best_params": outcome["chosen"], "best_value": outcome["mean"]}


@pytest.mark.slow
def test_a_file_can_define_the_sweep_and_the_command_changes_it(fedsim, tmp_path: Path) -> None:
    """Also a file in the user's folder, from which trials are composed, too; a repeated command computes nothing."""
    folder = tmp_path / "con'figs" / "sweep"
    folder.mkdir(parents=True)
    folder.joinpath("rates.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /hydra/sweeper: tune}]\n"
        "objective: distance_to_optimum\n"
        "local_steps: 3\n"
        "hydra: {mode: MULTIRUN, sweeper: {seeds: [3, 4], extend: 0, params: {lr: 'log(0.01,0.1,2)', batch_size: 2}}}\n"
    )
    small = [text for text in SMALL if not text.startswith(("local_steps", "batch_size"))]
    arguments = ["--config-dir", str(folder.parent), "sweep=rates", *small, "out=swept"]
    assert fedsim(tmp_path, *arguments).err.endswith("swept/optimization_results.yaml\n")
    outcome = json.loads((tmp_path / "swept" / "tune.json").read_text())
    assert (outcome["seeds"], outcome["metric"]) == ([3, 4], "distance_to_optimum")
    assert [trial["settings"] for trial in outcome["trials"]] == [{"lr": 0.01}, {"lr": 0.1}]
    config = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())
    assert (config["local_steps"], config["batch_size"]) == (3, 2)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")}
    assert fedsim(tmp_path, *arguments).code == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")} == written
    assert fedsim(tmp_path, *arguments, "lr=0.2,0.4,0.3").code == 0
    outcome = json.loads((tmp_path / "swept" / "tune.json").read_text())
    assert {trial["settings"]["lr"] for trial in outcome["trials"]} == {0.2, 0.3, 0.4}


def refusal(folder: Path, arguments: list[str], options: dict[str, Any], launcher: str = "basic", **params: str) -> str:
    """What the sweeper says to options and overrides, called as Hydra does."""
    choices = {"hydra/launcher": launcher}
    config = {"hydra": {"sweep": {"dir": str(folder)}, "searchpath": [], "runtime": {"choices": choices}}}
    loader = SimpleNamespace(get_search_path=ConfigSearchPathImpl)
    with pytest.raises(SystemExit) as end:
        run_tuning_sweep(cast(ConfigLoader, loader), OmegaConf.create(config), arguments, params, options)
    assert not list(folder.iterdir())
    return str(end.value.code)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "nothing is tuned; give several values to a key"),
        ([RATES, "seeds=[0,1]"], {}, "seeds=[0,1]: with hydra/sweeper=tune give hydra.sweeper.seeds in its place"),
        ([RATES, "resume=overwrite"], {}, "resume cannot be set with hydra/sweeper=tune"),
        ([RATES], {"eta": 0}, "hydra.sweeper.eta=0 must be a whole number of at least 1"),
        ([RATES], {"together": 0}, "hydra.sweeper.together=0 must be a whole number"),
        ([RATES], {"extend": -1}, "hydra.sweeper.extend=-1 must be a whole number"),
        ([RATES], {"trials": "few"}, "hydra.sweeper.trials='few' must be a whole number"),
        ([RATES], {"prefer": "none"}, "hydra.sweeper.prefer='none' is unknown; choose one of smallest"),
        ([RATES], {"seeds": 1}, "hydra.sweeper.seeds=[0] must be at least two different ones"),
        ([RATES], {"seeds": "many"}, "hydra.sweeper.seeds='many' must be a number of seeds or a list of them"),
        ([RATES], {"seeds": [0, 0.5]}, "hydra.sweeper.seeds=[0, 0.5] must be a number of seeds or a list of them"),
        ([RATES], {"trails": 3}, "hydra.sweeper='trails' is unknown; choose one of seeds, metric, trials"),
        ([RATES, "rounds=2,3"], {}, "rounds cannot be tuned; seeds are set by hydra.sweeper.seeds"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_refused_in_one_sentence(
    tmp_path: Path, arguments: list[str], options: dict[str, Any], message: str
) -> None:
    said = refusal(tmp_path, arguments, options)
    assert said.startswith(f"fedsim: {message}")
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_mistakes_that_only_a_run_shows_are_refused_too(tmp_path: Path) -> None:
    interval = [*SMALL, "lr=log(0.1,1)"]
    for arguments, options, message in (
        ([*SMALL, RATES], {"metric": "weather"}, "hydra.sweeper.metric='weather' is not among those of the run: "),
        (interval, {}, "an interval needs the number of trials, such as hydra.sweeper.trials=32"),
        ([*SMALL, RATES], {"trials": 5}, "hydra.sweeper.trials=5 needs an interval"),
        ([*SMALL, RATES, "strategy=fedawg"], {}, "strategy=fedawg is unknown"),
    ):
        said = refusal(tmp_path, arguments, options)
        assert message in said
        assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_the_command_line_refuses_in_one_sentence_and_leaves_no_folder(fedsim, tmp_path: Path) -> None:
    for arguments, message in (
        (["hydra/launcher=lockstep", RATES], "hydra/launcher=lockstep has no jobs to launch with hydra/sweeper=tune"),
        (["objective=weather", RATES], "hydra.sweeper.metric='weather' is not among those of the run"),
        (["hydra.sweeper.direction=maximize", RATES], "hydra.sweeper.direction is not a setting"),
    ):
        ended = fedsim(tmp_path, *SWEEP, *SMALL, *arguments, "out=swept")
        assert (ended.code, ended.err.count("\n")) == (1, 0)
        assert ended.err.startswith(f"fedsim: {message}")
        assert not list(tmp_path.iterdir())


def test_the_command_replaces_what_a_file_lists_with_the_same_key() -> None:
    params = {"lr": "0.1,0.2", "strategy": "fedavg,mifa", "+new": 1}
    given = sweep_overrides(["rounds=3", "lr=0.5,1", "out=here", "resume=auto", "objective=test_loss"], params)
    assert given == ["lr=0.5,1", "strategy=fedavg,mifa", "+new=1", "rounds=3"]
    for key in ("trusted", "+trusted", "out", "resume", "hydra/launcher", "hydra.callbacks.mine._target_"):
        with pytest.raises(ConfigError, match=r"cannot be set there; give .* on the command line"):
            sweep_overrides([], {key: "1"})


def test_a_launcher_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, [RATES], {}, launcher="joblib")
    assert said.startswith("fedsim: hydra/launcher=joblib has no jobs to launch with hydra/sweeper=tune")


@pytest.mark.slow
def test_log_gives_values_with_a_constant_ratio_in_any_sweep(fedsim, tmp_path: Path) -> None:
    assert fedsim(tmp_path, "-m", *SMALL, "rounds=1", "lr=log(0.01,1,3)", "out=swept").code == 0
    assert {path.parent.name for path in tmp_path.rglob("summary.json")} == {"lr=0.01", "lr=0.1", "lr=1.0"}
