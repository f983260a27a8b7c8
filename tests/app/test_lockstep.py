"""hydra/launcher=lockstep: the folders and numbers of any other launcher."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from small_runs import QUICK

from fedsim.app.lockstep import KEPT, ComposedOnce

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

    loader, master = ComposedOnce(Loader()), OmegaConf.create()
    jobs = [[f"lr={number}"] for number in range(KEPT + 2)]
    first = [loader.load_sweep_config(master_config=master, sweep_overrides=job) for job in jobs]
    second = [loader.load_sweep_config(master, job) for job in jobs]
    assert [found.at for found in second] == jobs
    assert [a is b for a, b in zip(first, second, strict=True)] == [True] * KEPT + [False] * 2
    assert Loader.asked == [*jobs, *jobs[KEPT:]]
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
