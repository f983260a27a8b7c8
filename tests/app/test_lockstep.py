"""hydra/launcher=lockstep: the folders and numbers of any other launcher."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from small_runs import QUICK, configuration

from fedsim.app.folding import combined_config, foldable_job_groups, per_seed_setting_keys
from fedsim.app.lockstep import MAX_CACHED_CONFIGURATIONS, CachingConfigLoader

SMALL = [*QUICK, "dataset=quadratics", "partition=natural", "model=mean", "trainer.trial=false", "seeds=[0,1]"]
SWEEP = ["strategy=fedavg,fedpbc", "lr=0.05"]


def found(folder: Path) -> dict[str, list[float]]:
    """The metrics of every run by its folder's name, row by row, but for the time it took."""
    runs = {}
    for path in sorted(folder.glob("*/metrics.csv")):
        with path.open(newline="") as lines:
            rows = csv.DictReader(line for line in lines if not line.startswith("#"))
            runs[path.parent.name] = [float(value) for row in rows for name, value in row.items() if name != "seconds"]
    return runs


def test_a_job_is_composed_for_the_check_and_the_launcher_at_once() -> None:
    class Loader:
        asked: list[list[str]] = []  # noqa: RUF012

        def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
            self.asked.append(sweep_overrides)
            return OmegaConf.create({"at": sweep_overrides})

        def list_groups(self) -> str:
            return "all others are Hydra's"

    loader, master = CachingConfigLoader(Loader()), OmegaConf.create()
    jobs = [[f"lr={number}"] for number in range(MAX_CACHED_CONFIGURATIONS + 2)]
    first = [loader.load_sweep_config(master_config=master, sweep_overrides=job) for job in jobs]
    second = [loader.load_sweep_config(master, job) for job in jobs]
    assert [found.at for found in second] == jobs
    assert [a is b for a, b in zip(first, second, strict=True)] == [True] * MAX_CACHED_CONFIGURATIONS + [False] * 2
    assert Loader.asked == [*jobs, *jobs[MAX_CACHED_CONFIGURATIONS:]]
    assert loader.list_groups() == "all others are Hydra's"
    assert loader.load_sweep_config(master, jobs[0]) is not first[0]  # a launcher has changed that one


@pytest.mark.slow
def test_folders_numbers_and_resuming_are_those_of_one_job_after_another(fedsim, tmp_path: Path) -> None:
    together = fedsim(tmp_path, "-m", "hydra/launcher=lockstep", *SMALL, *SWEEP, "out=a")
    assert together.code == 0, together.err
    assert "2 jobs in lockstep" in together.log
    assert "sweep of 2 runs in a: 2 done" in together.err
    assert fedsim(tmp_path, "-m", *SMALL, *SWEEP, "out=b").code == 0
    assert len(found(tmp_path / "a")) == 2
    for name, numbers in found(tmp_path / "a").items():
        assert found(tmp_path / "b")[name] == pytest.approx(numbers, rel=1e-5), name
    again = fedsim(tmp_path, "-m", "hydra/launcher=lockstep", *SMALL, *SWEEP, "out=b")
    assert "sweep of 2 runs in b: 2 finished before" in again.err


@pytest.mark.slow
def test_jobs_of_several_kinds_two_at_a_time_and_one_that_cannot_be(fedsim, tmp_path: Path) -> None:
    two = ["hydra.launcher.at_once=2", "local_steps=1,2,0", "objective=train_loss"]
    ended = fedsim(tmp_path, "-m", "hydra/launcher=lockstep", *SMALL, *two, "out=c")
    assert ended.code == 1
    assert "sweep of 3 runs in c: 2 done, 1 failed" in ended.err
    assert "failed: local_steps=0: local_steps=0" in ended.err


@functools.cache
def composed(strategy: str, local: str = "sgd") -> DictConfig:
    return configuration(f"strategy={strategy}", f"local={local}")


def grouped(*jobs: tuple[DictConfig, dict[str, Any]]) -> list[list[int]]:
    """Positions of jobs that are folded, each given by a configuration and what it changes."""
    configs = [changed(config, changes) for config, changes in jobs]
    return foldable_job_groups(configs, [Path(f"nowhere/{number}") for number in range(len(configs))])


def changed(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    config = config.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return config


def test_jobs_are_folded_that_differ_in_numbers_of_rows_and_seeds() -> None:
    plain, awe = composed("fedavg"), composed("fedawe")
    rates = [(plain, {"lr": 0.1}), (plain, {"lr": 0.2}), (awe, {"lr": 0.1}), (awe, {"lr": 0.2}), (plain, {"lr": [0.3]})]
    assert grouped(*rates) == [[0, 1, 4], [2, 3]]
    others = [{"batch_size": 8}, {"rounds": 9}, {"clients": 7}, {"availability.base.p": 0.1}]
    assert grouped(*((plain, changes) for changes in ({"seeds": [0]}, {"seeds": [1, 2]}, *others))) == [[0, 1]]
    assert grouped(*((awe, {"strategy.clip": clip}) for clip in (2.0, None, 3.0))) == [[0, 2]]
    assert grouped((plain, {"local.lr": 0.1}), (plain, {"local.lr": 0.2})) == [[0, 1]]
    assert grouped((plain, {"lr": 0.1})) == grouped((plain, {}), (plain, {"trusted": ["somebody"]})) == []


def test_a_rate_that_is_also_a_number_for_all_seeds_is_not_folded() -> None:
    config = composed("fedavg", "apfl")
    keys = per_seed_setting_keys(config)
    assert keys == {"local.lr": "lr", "local.alpha": "local.alpha", "strategy.server_lr": "strategy.server_lr"}
    assert grouped((config, {"lr": 0.1}), (config, {"lr": 0.2})) == [[0, 1]]
    tied = changed(config, {"local.personal_lr": "${lr}"})
    assert grouped((tied, {"lr": 0.1}), (tied, {"lr": 0.2})) == []


def test_the_federation_of_several_jobs() -> None:
    plain = composed("fedavg")
    last = {"seeds": [7, 8], "lr": [0.3, 0.4], "strategy.server_lr": 0.5}
    jobs = [{"seeds": [0, 1], "lr": 0.1}, {"seeds": [5], "lr": [0.2]}, last]
    joint = combined_config([changed(plain, changes) for changes in jobs])
    assert joint.seeds == [0, 1, 5, 7, 8]
    assert joint.lr == joint.local.lr == [0.1, 0.1, 0.2, 0.3, 0.4]
    assert joint.strategy.server_lr == [1.0, 1.0, 1.0, 0.5, 0.5]
    alike = combined_config([changed(plain, {"seeds": [seed]}) for seed in (3, 4)])
    assert (alike.seeds, alike.lr) == ([3, 4], 0.1)


@pytest.mark.slow
def test_a_sweep_of_folded_jobs_has_the_folders_and_numbers_of_one_job_after_another(fedsim, tmp_path: Path) -> None:
    rates = ["strategy=fedavg,fedpbc", "lr=0.05,0.1,1e30", "objective=train_loss"]
    loop = [setting for setting in SMALL if not setting.startswith("trainer.trial")] + ["trainer.executor=loop"]
    together = fedsim(tmp_path, "-m", "hydra/launcher=lockstep", *loop, *rates, "out=a")
    assert together.log.count("3 jobs differ only in settings with one value per seed: they run as one federation") == 2
    assert "sweep of 6 runs in a: 4 done, 2 failed" in together.err
    apart = fedsim(tmp_path, "-m", *loop, *rates, "out=b")
    assert "sweep of 6 runs in b: 4 done, 2 failed" in apart.err
    assert len(found(tmp_path / "a")) == 6
    for name, numbers in found(tmp_path / "a").items():
        assert found(tmp_path / "b")[name] == pytest.approx(numbers, rel=1e-6, nan_ok=True), name
    again = fedsim(tmp_path, "-m", "hydra/launcher=lockstep", *loop, *rates, "out=a")
    assert "sweep of 6 runs in a: 4 finished before, 2 failed" in again.err
