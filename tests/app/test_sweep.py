"""A sweep under every launcher: a failed run is listed, the rest complete, and what is finished is not run again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from joblib.externals.loky import get_reusable_executor
from small_runs import QUICK, configuration

from fedsim.app.cli import one_line_result, run
from fedsim.app.sweep import _failure, finished_result
from fedsim.app.sweep import _objective_value as objective_value
from fedsim.core import ConfigError, DivergenceError
from fedsim.core.errors import OutputError
from fedsim.run.stopping import Stopped
from fedsim.run.tracking.result import Result
from fedsim.strategies import State
from fedsim.trainer import Trainer

PLUGINS = {
    "basic": "hydra",
    "lockstep": "hydra_plugins.fedsim_lockstep",
    "local": "hydra_plugins.hydra_joblib_launcher",
    "slurm_local": "hydra_plugins.hydra_submitit_launcher",
    "ray_cluster": "hydra_plugins.hydra_ray_launcher",
}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def written(folder: Path) -> dict[Path, int]:
    """When each run's results were written, by file."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}


def launched(launcher: str) -> list[str]:
    """The arguments that choose it here; skips where it is not installed."""
    if not installed(PLUGINS[launcher]):
        pytest.skip(f"{PLUGINS[launcher]} is not installed")
    own = ["hydra.launcher.ray.init.address=null"] if launcher == "ray_cluster" else []
    own += ["hydra.launcher.n_jobs=2"] if launcher == "local" else []
    small = ["dataset=quadratics", "partition=natural", "model=mean"]  # imports least, in every process
    return ["-m", f"hydra/launcher={launcher}", *own, *QUICK, *small, "availability=uniform_k", "out=o"]


@pytest.fixture
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads of several small processes wait for one another; and joblib's processes go with the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    get_reusable_executor().shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=[] if name == "basic" else pytest.mark.slow) for name in PLUGINS],
)
@pytest.mark.usefixtures("one_thread_each")
def test_a_failed_run_ends_no_other_and_what_is_finished_is_left_alone(fedsim, tmp_path: Path, launcher: str) -> None:
    sweep = [*launched(launcher), "availability.k=30,3", "strategy=fedavg,fedpbc"]
    first = fedsim(tmp_path, *sweep)
    assert first.code == 1, first.err
    assert "sweep of 4 runs in o: 2 done, 2 failed" in first.err
    assert "failed: availability.k=30 strategy=fedpbc: availability.k=30 exceeds clients=12" in first.err
    before = written(tmp_path)
    assert len(before) == 2
    lost = next(path for path in before if "fedpbc" in str(path))
    lost.unlink()
    again = fedsim(tmp_path, *sweep)
    assert again.code == 1
    assert "sweep of 4 runs in o: 1 done, 1 finished before, 2 failed" in again.err
    after = written(tmp_path)
    assert {path for path in before if after[path] == before[path]} == before.keys() - {lost}


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(n, marks=pytest.mark.slow) for n in PLUGINS if n != "basic"],
)
@pytest.mark.usefixtures("one_thread_each")
def test_a_launcher_with_processes_of_its_own_tells_of_all_its_runs(fedsim, tmp_path: Path, launcher: str) -> None:
    ended = fedsim(tmp_path, *launched(launcher), "availability.k=30,3")
    assert ended.code == 1, ended.err
    assert "sweep of 2 runs in o: 1 done, 1 failed" in ended.err
    assert "failed: availability.k=30: availability.k=30 exceeds clients=12" in ended.err
    assert len(written(tmp_path)) == 1


@pytest.mark.slow
def test_changed_settings_are_no_finished_run(fedsim, tmp_path: Path) -> None:
    sweep = ["-m", *QUICK, "strategy=fedavg", "out=o"]
    assert fedsim(tmp_path, *sweep).code == 0
    (config,) = tmp_path.rglob("config.yaml")
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(content | {"rounds": 1}))
    done = fedsim(tmp_path, *sweep)
    assert done.code == 0
    assert "after round 2" in done.log  # resumed from the checkpoint
    assert "1 done" in done.err


@pytest.mark.slow
def test_a_longer_run_that_breaks_off_is_not_taken_for_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(rounds: int):
        return configuration(*QUICK, f"rounds={rounds}", "tracking.progress=none", "resume=auto")

    run(configured(2), tmp_path, {})
    assert finished_result(configured(2), tmp_path)
    monkeypatch.setattr(Trainer, "run_local_steps", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(configured(4), tmp_path, {})
    assert finished_result(configured(4), tmp_path) is None
    assert finished_result(configured(2), tmp_path) is None  # its checkpoint may be the longer run's by now


@pytest.mark.slow
def test_a_study_finds_its_best_trial_and_is_repeated_for_nothing(fedsim, tmp_path: Path) -> None:
    if not installed("hydra_plugins.hydra_optuna_sweeper"):
        pytest.skip("hydra-optuna-sweeper is not installed")
    study = ["-m", "sweep=learning_rate", *QUICK, "hydra.sweeper.n_trials=3", "out=tuned"]
    first = fedsim(tmp_path, *study)
    assert first.code == 0, first.err
    summaries = [json.loads(path.read_text()) for path in written(tmp_path)]
    best = yaml.safe_load((tmp_path / "tuned" / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(s["final"]["test_accuracy"]["mean"] for s in summaries)
    assert f"with lr={best['best_params']['lr']}" in first.err
    again = fedsim(tmp_path, *study)
    assert "sweep of 3 runs in tuned: 3 finished before" in again.err


def test_a_sweeper_is_told_the_mean_over_the_seeds() -> None:
    final = {"test_accuracy": (0.75, 0.25)}
    assert objective_value("test_accuracy", final) == 0.75
    assert objective_value(None, final) is None
    with pytest.raises(ConfigError, match="objective=loss is not measured in this run; choose one of test_accuracy"):
        objective_value("loss", final)
    with pytest.raises(DivergenceError, match="ended as nan"):
        objective_value("test_accuracy", {"test_accuracy": (float("nan"), 0.0)})


@pytest.mark.parametrize(
    ("error", "status", "message", "traceback"),
    [
        (Stopped("after round 3"), "stopped", "after round 3", False),
        (ConfigError("lr=0 trains nothing"), "failed", "lr=0 trains nothing", False),
        (DivergenceError("round 7"), "failed", "round 7", False),
        (OutputError("disk is full"), "failed", "disk is full", False),
        (IndexError("nothing\nthere"), "failed", "IndexError: nothing", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_of_fedsim_are_sentences_and_others_have_a_type_and_a_traceback(
    caplog: pytest.LogCaptureFixture, error: BaseException, status: str, message: str, traceback: bool
) -> None:
    assert _failure(error, Path("run")) == (status, message)
    assert [record.exc_info is not None for record in caplog.records] == [True] * traceback


def test_the_line_of_a_run_has_its_first_three_metrics() -> None:
    rows = [
        {"round": 4, "seed": seed, "train_loss": 3.0, "test_loss": 2.0, "fairness": 7.0, "distance_to_optimum": 1.0,
         "test_accuracy": accuracy}
        for seed, accuracy in ((0, 0.25), (1, 0.75))
    ]  # fmt: skip
    line = one_line_result(Result(rows, State(torch.zeros(2, 1)), 1.5, 10, "out/3"))
    assert line == (
        "test_accuracy 0.5 ± 0.35, test_loss 2 ± 0, distance_to_optimum 1 ± 0 after 4 rounds in 1.5 s: out/3"
    )
