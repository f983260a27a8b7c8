"""What a run leaves behind: metrics.csv, summary.json, environment.json, TensorBoard's event files."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset, Quadratics
from fedsim.evaluation import COLUMN_DESCRIPTIONS
from fedsim.local import SGD
from fedsim.models import MLP, Mean
from fedsim.run.tracking import RunConfig, Tracking
from fedsim.run.tracking.clients import read
from fedsim.run.tracking.environment import environment_facts
from fedsim.run.tracking.metrics_csv import MetricsCSV, read_metrics

SEEDS, ROUNDS, EVALUATED = (2, 7), 5, (0, 2, 4, 5)
COUNTS = np.array(
    [
        [[1, 1, 0, 1], [0, 0, 1, 0]],
        [[1, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 1, 1], [1, 1, 0, 0]],
        [[0, 0, 0, 1], [1, 1, 1, 1]],
        [[1, 1, 0, 0], [0, 1, 0, 0]],
    ]
)
SETTINGS = {"lr": 0.1, "strategy": "fedavg", "deep": True, "clip": None, "layers": [5]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, Scripted):
    """One run with everything switched on: (folder, result)."""
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((60, 4))), torch.as_tensor(draw.integers(0, 3, 60))
    simulation = Simulation(
        Dataset("blobs", x[:40], y[:40], x[40:], y[40:], classes=3),
        functools.partial(MLP, hidden=(5,)),
        clients=4,
        availability=Scripted(COUNTS, 0.5),
        local=SGD(steps=3, batch_size=2),
        rounds=ROUNDS,
        seeds=SEEDS,
        evaluation=EvaluationOptions(every=2),
        execution=Execution(chunk=3),
    )
    folder = tmp_path_factory.mktemp("run") / "deep" / "folder"
    return folder, simulation.run(folder, tracking=Tracking(progress="none"), config=RunConfig(settings=SETTINGS))


def test_metrics_csv_says_what_each_column_is_and_reads_back_exactly(finished):
    folder, result = finished
    lines = (folder / "metrics.csv").read_text().splitlines()
    names = list(result.history[0])
    assert lines[: len(names)] == [f"# {name}: {COLUMN_DESCRIPTIONS[name]}" for name in names]
    assert lines[len(names)].split(",") == names
    assert read_metrics(folder / "metrics.csv") == result.history
    assert [(row["round"], row["seed"]) for row in result.history] == [(t, s) for t in EVALUATED for s in SEEDS]


def test_participation_and_samples_are_counted(finished):
    _, result = finished
    active = COUNTS.sum(2)
    for row in result.history:
        t, r = row["round"], SEEDS.index(row["seed"])
        if t == 0:
            assert row["active_clients"] == row["mean_active_clients"] == row["samples"] == 0
            continue
        since = max(e for e in EVALUATED if e < t)
        assert row["active_clients"] == active[t - 1, r]
        assert row["mean_active_clients"] == pytest.approx(active[since:t, r].mean())
    assert result.samples == active.sum() * 3 * 2
    assert sum(row["samples"] for row in result.history if row["round"] == ROUNDS) == result.samples
    seconds = [row["seconds"] for row in result.history]
    assert seconds == sorted(seconds)


def test_summary_json_is_the_last_evaluation(finished):
    folder, result = finished
    summary = json.loads((folder / "summary.json").read_text())
    last = [row for row in result.history if row["round"] == ROUNDS]
    assert summary["rounds"] == ROUNDS
    assert summary["seeds"] == list(SEEDS)
    assert [row["seed"] for row in summary["per_replicate"]] == list(SEEDS)
    for name in ("test_accuracy", "test_loss", "train_loss", "train_accuracy", "client_accuracy_worst10"):
        values = [row[name] for row in last]
        assert [row[name] for row in summary["per_replicate"]] == values
        assert summary["final"][name]["mean"] == pytest.approx(np.mean(values))
        assert summary["final"][name]["std"] == pytest.approx(np.std(values, ddof=1))
        assert result.final[name] == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert summary["samples"] == result.samples
    assert summary["parameters"] == 4 * 5 + 5 + 5 * 3 + 3
    assert (summary["executor"], summary["chunk"]) == ("fused", 3)
    assert summary["seconds"] > 0


def test_environment_json_says_where_the_run_was_made(finished):
    found = json.loads((finished[0] / "environment.json").read_text())
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"command", "started", "device", "gpu", "cpus", "threads", "platform", "python", "commit"} <= set(found)
    assert found["device"].split(":")[0] in ("cpu", "cuda")
    assert found["ranks"] == 1
    assert environment_facts(torch.device("cpu"))["ranks"] == 1  # of a report that no run belongs to


def test_clients_npz_says_how_good_the_model_is_for_whom_and_who_was_there(finished):
    folder, result = finished
    known = read(folder / "clients.npz")
    assert known.number == 4
    np.testing.assert_array_equal(known.present, COUNTS[:, 0].T > 0)
    assert known.samples.sum() == 40
    np.testing.assert_allclose(known.class_fractions.sum(1), 1)
    last = [row["train_accuracy"] for row in result.history[-len(SEEDS) :]]
    np.testing.assert_allclose(known.accuracy.mean(1), last, rtol=1e-6)


def test_a_finished_run_that_is_resumed_knows_its_clients_as_before(tmp_path):
    """Nothing is left to evaluate then; and what has neither labels nor samples says so."""
    simulation = Simulation(Quadratics(clients=2, dimension=3), Mean, clients=2, rounds=1)
    for resume in (False, True):
        simulation.run(tmp_path, resume=resume, tracking=Tracking(progress="none", tensorboard=False))
        known = read(tmp_path / "clients.npz")
        assert known.accuracy is None
        assert known.class_fractions is None
        np.testing.assert_array_equal(known.present, np.ones((2, 1)))


def test_no_half_written_file_is_left(finished):
    assert not list(finished[0].rglob("*.partial"))


def events(folder) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0}).Reload()


def test_tensorboard_has_every_scalar_of_every_replicate_and_their_mean(finished):
    folder, result = finished
    groups = {
        "accuracy": ("test_accuracy", "train_accuracy", "client_accuracy_worst10"),
        "loss": ("test_loss", "train_loss"),
        "participation": ("active_clients", "mean_active_clients"),
        "bytes": ("bytes_down", "bytes_up", "total_bytes_down", "total_bytes_up"),
    }
    tags = {f"{group}/{name}": name for group, names in groups.items() for name in names}
    mean = events(folder / "mean")
    for r, seed in enumerate(SEEDS):
        each = events(folder / f"seed_{seed}")
        assert set(tags) == set(each.Tags()["scalars"])
        for tag, name in tags.items():
            values = [row[name] for row in result.history[r :: len(SEEDS)]]
            assert [event.step for event in each.Scalars(tag)] == list(EVALUATED)
            np.testing.assert_allclose([event.value for event in each.Scalars(tag)], values, rtol=1e-6)
    for tag, name in tags.items():
        values = np.array([row[name] for row in result.history]).reshape(-1, len(SEEDS)).mean(1)
        assert [event.step for event in mean.Scalars(tag)] == list(EVALUATED)
        np.testing.assert_allclose([event.value for event in mean.Scalars(tag)], values, rtol=1e-6)


def test_tensorboard_has_what_differs_from_client_to_client_and_the_pictures(finished):
    folder, _ = finished
    found = events(folder / "mean")
    histograms = found.Histograms("clients/accuracy")
    assert [event.step for event in histograms] == list(EVALUATED)
    assert all(event.histogram_value.num == len(SEEDS) * 4 for event in histograms)
    lengths = found.Histograms("clients/length of update")
    assert [(event.step, event.histogram_value.num) for event in lengths] == [
        (t, COUNTS[t - 1].sum()) for t in EVALUATED if t
    ]
    assert set(found.Tags()["images"]) == {
        f"figures/{heading}"
        for heading in ("Over the rounds", "From client to client", "Who was there", "Who holds what")
    }
    (picture,) = found.Images("figures/Who was there")
    assert picture.step == ROUNDS
    assert min(picture.width, picture.height) > 400


def test_tensorboard_has_the_settings_and_what_they_led_to(finished):
    folder, result = finished
    found = events(folder / "mean")
    content = found.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    told = HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["lr"].number_value == pytest.approx(0.1)
    assert told["strategy"].string_value == "fedavg"
    assert set(told) == set(SETTINGS)
    for tag, name in (("accuracy/test_accuracy", "test_accuracy"), ("loss/train_loss", "train_loss")):
        assert found.Scalars(tag)[-1].value == pytest.approx(result.final[name][0], rel=1e-6)


def test_a_single_replicate_needs_no_mean(tmp_path):
    Simulation(
        Quadratics(clients=2, dimension=3), Mean, clients=2, rounds=2, evaluation=EvaluationOptions(every=1)
    ).run(tmp_path, tracking=Tracking(progress="none"))
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["seed_0"]
    found = events(tmp_path / "seed_0")
    assert [event.step for event in found.Scalars("distance/distance_to_optimum")] == [0, 1, 2]
    assert "accuracy/test_accuracy" not in found.Tags()["scalars"]
    assert "test_loss" not in read_metrics(tmp_path / "metrics.csv")[0]


def test_replicates_of_equal_seed_do_not_share_a_folder(tmp_path):
    """They may differ in their learning rate, and each has its own curve."""
    simulation = Simulation(
        Quadratics(clients=2, dimension=3),
        Mean,
        clients=2,
        local=SGD(lr=[0.1, 0.3], steps=1),
        rounds=2,
        seeds=(3, 3),
        evaluation=EvaluationOptions(every=1),
    )
    result = simulation.run(tmp_path, tracking=Tracking(progress="none"))
    curves = [
        [event.value for event in events(folder).Scalars("loss/train_loss")]
        for folder in sorted(tmp_path.glob("seed_3_replicate_*"))
    ]
    expected = [[row["train_loss"] for row in result.history[r::2]] for r in (0, 1)]
    np.testing.assert_allclose(sorted(curves), sorted(expected), rtol=1e-6)


def test_tensorboard_can_be_switched_off_and_a_run_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulation = Simulation(Quadratics(clients=2, dimension=3), Mean, clients=2, rounds=1)
    assert simulation.run().folder is None
    assert not list(tmp_path.iterdir())
    simulation.run(tmp_path / "run", tracking=Tracking(progress="none", tensorboard=False))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "metrics.csv",
        "summary.json",
        "environment.json",
        "clients.npz",
        "checkpoint.safetensors",
    }


def test_a_new_run_in_an_old_folder_replaces_its_files(tmp_path):
    """Without `resume` the old numbers are gone, in TensorBoard as in metrics.csv."""
    for rounds in (4, 2):
        simulation = Simulation(
            Quadratics(clients=2, dimension=3), Mean, clients=2, rounds=rounds, evaluation=EvaluationOptions(every=1)
        )
        simulation.run(tmp_path, tracking=Tracking(progress="none"))
    assert [row["round"] for row in read_metrics(tmp_path / "metrics.csv")] == [0, 1, 2]
    scalars = events(tmp_path / "seed_0").Scalars("loss/train_loss")
    assert [event.step for event in scalars] == [0, 1, 2]


def write_rows(path, keep=-1, rows=()):
    columns = {"round": "when", "seed": "who", "test_loss": "how"}
    file = MetricsCSV.open(path, columns, keep)
    file.append([dict(zip(columns, row, strict=True)) for row in rows])
    file.close()


@pytest.mark.parametrize("lost", [1, 2, 3, 8])
def test_a_line_cut_short_is_passed_over(tmp_path, lost):
    path = tmp_path / "metrics.csv"
    rows = [(0, 3, 1 / 3), (1, 3, math.inf), (2, 3, 1e-300)]
    write_rows(path, rows=rows)
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    assert [tuple(row.values()) for row in read_metrics(path)] == rows[:2]


def test_reopened_metrics_keep_the_rows_up_to_a_round(tmp_path):
    path = tmp_path / "metrics.csv"
    rows = [(t, s, 0.1 * t + s) for t in range(4) for s in (1, 2)]
    write_rows(path, rows=rows)
    write_rows(path, keep=1, rows=[(2, 1, 0.5)])
    assert [tuple(row.values()) for row in read_metrics(path)] == [*rows[:4], (2, 1, 0.5)]
    write_rows(path)
    assert read_metrics(path) == []
