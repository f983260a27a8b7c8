"""A run read back: its numbers as pandas and polars have them, its configuration, and θ^PS and θ^PO in its summary."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim import EvaluationOptions, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import BinaryGaussians, GaussianMean, Pricing
from fedsim.evaluation.performative import Risk
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking import RunConfig, Tracking
from fedsim.shift import Demand, Location
from fedsim.studies.results.runs import Run

QUIET = Tracking(progress="none", tensorboard=False)
CONFIG = "strategy:\n  _target_: fedsim.strategies.FedAvg\nlr: 0.1\nseeds: [4, 9]\n"


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Simulation(
        GaussianMean(3, means=[1.0, 2.0, 3.0]),
        Mean,
        clients=3,
        shift=Location(0.5),
        local=SGD(lr=0.5, steps=20),
        rounds=6,
        seeds=[4, 9],
        evaluation=EvaluationOptions(every=2),
    ).run(folder, tracking=QUIET, config=RunConfig(yaml=CONFIG))
    return folder


def test_metrics_as_arrays_are_those_of_the_file(folder: Path) -> None:
    arrays = fedsim.load(folder).arrays()
    lines = [line for line in (folder / "metrics.csv").read_text().splitlines() if not line.startswith("#")]
    assert list(arrays) == lines[0].split(",")
    naive = np.array([[float(number) for number in line.split(",")] for line in lines[1:]])
    np.testing.assert_array_equal(np.stack(list(arrays.values()), 1), naive)
    assert arrays["round"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert arrays["seed"].tolist() == [4, 9] * 4


def test_a_run_that_was_begun_in_python_says_that_it_knows_no_data_set(folder: Path) -> None:
    with pytest.raises(ConfigError, match="started from Python"):
        fedsim.load(folder).dataset()


def test_pandas_has_them_as_it_reads_the_file_itself(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = fedsim.load(folder).frame()
    read = pandas.read_csv(folder / "metrics.csv", comment="#")
    pandas.testing.assert_frame_equal(frame, read)
    assert frame.groupby("seed").train_loss.last().index.tolist() == [4, 9]


def test_polars_has_them_too(folder: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = fedsim.load(folder).frame("polars")
    assert frame.equals(polars.read_csv(folder / "metrics.csv", comment_prefix="#"))


def test_an_absent_library_is_an_extra_and_an_unknown_one_no_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match=r"polars is an extra; pip install 'fedsim-torch\[polars\]'"):
        fedsim.load(folder).frame("polars")
    with pytest.raises(ConfigError, match="library='dask'"):
        fedsim.load(folder).frame("dask")


def test_configuration_summary_and_clients(folder: Path) -> None:
    run = fedsim.load(str(folder))
    assert run.config == {"strategy": {"_target_": "fedsim.strategies.FedAvg"}, "lr": 0.1, "seeds": [4, 9]}
    assert run.settings["strategy._target_"] == "fedsim.strategies.FedAvg"
    assert run.seeds == [4, 9]
    assert run.summary == json.loads((folder / "summary.json").read_text())
    assert run.environment["versions"]["torch"] == importlib.metadata.version("torch")  # without the build, as "+cu130"
    assert run.clients is not None
    assert run.clients.number == 3


def test_the_summary_has_both_points_their_risks_and_how_near_the_run_came(folder: Path) -> None:
    """Mean estimation: θ^PS = m̄ / (1 − ε); the risk ½ E(z + εθ − θ)² is least at the same point."""
    run = fedsim.load(folder)
    said = run.summary["references"]
    for name, column in (("stable", "distance_to_ps"), ("optimal", "distance_to_po")):
        point = said[name]
        assert point["verdict"] == ["found", "found"]
        assert np.array(point["values"]).shape == (2, 1)
        assert point["norm"] == pytest.approx(np.abs(point["values"]).ravel().tolist())
        for r, row in enumerate(run.rows[-2:]):
            assert point["distance"][r] == {"first": run.rows[r][column], "last": row[column]}
            assert point["distance"][r]["last"] < 0.2 * point["distance"][r]["first"]
    assert said["stable"]["values"] == [[pytest.approx(4.0, abs=1e-6)]] * 2


def test_the_risks_are_those_of_the_points_and_the_optimal_one_is_lower(tmp_path: Path) -> None:
    simulation = Simulation(Pricing(3, 2), Mean, clients=3, shift=Demand(), rounds=1)
    simulation.run(tmp_path, tracking=QUIET)
    said = fedsim.load(tmp_path).summary["references"]
    risk = Risk(simulation.model, simulation.shift, simulation.data, 0)
    for point in said.values():
        value = risk.performative_risk(torch.tensor(point["values"][0], dtype=torch.float64))
        assert point["risk"] == [pytest.approx(value.item(), rel=1e-12)]
    assert said["optimal"]["risk"][0] < said["stable"]["risk"][0]


def test_a_point_that_does_not_exist_leaves_its_reason(tmp_path: Path) -> None:
    simulation = Simulation(Pricing(3, 2), Mean, clients=3, shift=Demand(-1.0, 0.0), rounds=1)
    simulation.run(tmp_path, tracking=QUIET)
    said = fedsim.load(tmp_path).summary["references"]["optimal"]
    assert "is unbounded below; set shift.box" in said["verdict"][0]
    assert said["risk"] == said["norm"] == said["values"] == [None]
    assert "distance" not in said


def test_a_point_that_was_not_sought_says_so_and_of_many_parameters_there_is_the_norm(tmp_path: Path) -> None:
    for references, found in (("auto", False), ("always", True)):
        simulation = Simulation(Pricing(3, 101), Mean, clients=3, shift=Demand(references=references), rounds=1)
        simulation.run(tmp_path / references, tracking=QUIET)
        said = fedsim.load(tmp_path / references).summary["references"]["stable"]
        if not found:
            assert "the model has 101 parameters" in said["verdict"][0]
        else:
            point = simulation.references["distance_to_ps"][0]
            assert "values" not in said
            assert said["norm"] == [pytest.approx(math.sqrt((point**2).sum().item()))]


def test_data_that_do_not_answer_have_no_such_entry(tmp_path: Path) -> None:
    Simulation(BinaryGaussians(3), functools.partial(Linear, bias=False), clients=3, rounds=1).run(
        tmp_path, tracking=QUIET
    )
    assert "references" not in fedsim.load(tmp_path).summary


def test_a_sweep_is_no_run_and_the_message_names_its_runs(tmp_path: Path) -> None:
    for name in ("strategy=fedau", "strategy=mifa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").touch()
    with pytest.raises(ConfigError, match=r"is a sweep of 2 runs; load one of them, such as \S+/strategy=fedau$"):
        fedsim.load(tmp_path)


@pytest.mark.parametrize("seeds", [[4], [4, 9], [4, 4, 9]])
@pytest.mark.parametrize("rounds", [[0], [0, 5]])
def test_replicates_are_counted_after_the_first_evaluation_already(seeds: list[int], rounds: list[int]) -> None:
    """A run of one seed that has just begun has a single row."""
    run = Run(Path(), [{"round": t, "seed": seed} for t in rounds for seed in seeds], {})
    assert (run.replicates, run.seeds) == (len(seeds), seeds)
