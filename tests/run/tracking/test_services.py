"""What Weights & Biases, MLflow and trackio have of a run, read back by themselves, without a network."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedsim import EvaluationOptions, Simulation
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean
from fedsim.run.tracking import MLflow, RunConfig, Tracking, Trackio, WandB
from fedsim.run.tracking.observer import EvaluationEvent, RunStarted
from fedsim.run.tracking.services import mean_and_replicate_metrics

SETTINGS = {"lr": 0.1, "strategy": "fedavg", "clip": None} | {f"key{n}": "x" * 600 for n in range(120)}


def carried_out(folder: Path, observer: Any, rounds: int = 4, resume: bool = False) -> Any:
    simulation = Simulation(
        Quadratics(clients=3, dimension=2),
        Mean,
        clients=3,
        rounds=rounds,
        seeds=(2, 5),
        evaluation=EvaluationOptions(every=2),
    )
    tracking = Tracking(progress="none", tensorboard=False, observers=[observer])
    return simulation.run(folder, resume=resume, tracking=tracking, config=RunConfig(settings=SETTINGS))


def losses(result: Any) -> dict[str, list[float]]:
    """Curve → its values, round by round."""
    values = np.array([row["train_loss"] for row in result.history]).reshape(-1, 2)
    return {
        "train_loss": values.mean(1).tolist(),
        "seed_2/train_loss": values[:, 0].tolist(),
        "seed_5/train_loss": values[:, 1].tolist(),
    }


@pytest.mark.parametrize("store", ["files", "database"])
def test_mlflow_has_curves_settings_results_and_pictures(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/store" if store == "files" else f"sqlite:///{tmp_path}/store.db"
    carried_out(tmp_path / "run", MLflow("mine", uri=uri), rounds=2)
    result = carried_out(tmp_path / "run", MLflow("mine", uri=uri), resume=True)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert json.loads((tmp_path / "run" / "observers.json").read_text()) == {"mlflow": found.info.run_id}
    for name, values in losses(result).items():
        history = client.get_metric_history(found.info.run_id, name)
        assert [metric.step for metric in history] == [0, 2, 4]
        assert [metric.value for metric in history] == values
    assert found.data.params["strategy"] == "fedavg"
    assert len(found.data.params) == len(SETTINGS)
    assert found.data.metrics["final/train_loss"] == result.final["train_loss"][0]
    pictures = [file.path for file in client.list_artifacts(found.info.run_id, "figures")]
    assert "figures/Over the rounds.png" in pictures


def pieces(content: bytes, block: int = 32768) -> Iterator[bytes]:
    """The messages in a file of wandb's, which is a log as LevelDB writes it: blocks of records, each with checksum,
    length and kind (whole, first, middle or last part of a message) before it; the first block begins with a mark."""
    assert content.startswith(b":W&B")
    place, whole = 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # no record begins at the end of a block
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_weights_and_biases_keeps_an_offline_run(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    result = carried_out(tmp_path / "run", WandB("mine", mode="offline"))
    wandb.teardown()  # its own process, which writes the file, has ended
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    curves: dict[str, list[tuple[int, float]]] = {}
    config, final = {}, {}
    for data in pieces(file.read_bytes()):
        record = wandb_internal_pb2.SweepRunRecord()
        record.ParseFromString(data)
        for item in [*record.run.config.update, *record.config.update]:
            config[item.key] = json.loads(item.value_json)
        seen = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in losses(result).keys() & seen.keys():
            curves.setdefault(name, []).append((seen["_step"], seen[name]))
        final |= {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    assert config["strategy"] == "fedavg"
    assert curves == {name: list(zip([0, 2, 4], values, strict=True)) for name, values in losses(result).items()}
    assert final["final/train_loss"] == result.final["train_loss"][0]


def test_trackio_has_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    if Path(trackio.utils.TRACKIO_DIR) != tmp_path / "trackio":
        pytest.skip("trackio was imported before, and has its folder elsewhere")
    result = carried_out(tmp_path / "run", Trackio("mine"))
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs("mine", "run")
    for name, values in losses(result).items():
        assert [(log["step"], log[name]) for log in logs if name in log] == list(zip([0, 2, 4], values, strict=True))


def test_a_service_is_sent_the_mean_and_of_several_seeds_each_ones_number_and_no_nan() -> None:
    rows = [
        {"round": 4, "seed": 2, "train_loss": 1.0, "fairness": math.nan},
        {"round": 4, "seed": 5, "train_loss": 3.0, "fairness": math.nan},
    ]
    both, alone = (EvaluationEvent(4, some, {}, lambda _: {}) for some in (rows, rows[:1]))
    assert mean_and_replicate_metrics(both, ["seed_2", "seed_5"]) == {
        "train_loss": 2.0, "seed_2/train_loss": 1.0, "seed_5/train_loss": 3.0
    }  # fmt: skip
    assert mean_and_replicate_metrics(alone, ["seed_2"]) == {"train_loss": 1.0}


class StandIn(ModuleType):
    """What trackio is asked for, written down."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.asked: list[tuple[str, Any]] = []

    def init(self, **given: Any) -> None:
        self.asked.append(("init", given["name"]))

    def log(self, values: dict[str, float], step: int) -> None:
        self.asked.append(("log", step))

    def finish(self) -> None:
        self.asked.append(("finish", None))


def test_a_record_of_trackio_is_ended_once_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an observer that is closed again, and that goes on to another run."""
    service = StandIn()
    monkeypatch.setitem(sys.modules, "trackio", service)
    observer = Trackio("mine")
    observer.close()  # nothing is open
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        observer.begin(RunStarted(tmp_path / name, (0,), 2))
        observer.evaluated(EvaluationEvent(2, [{"round": 2, "seed": 0, "train_loss": 1.0}], {}, lambda _: {}))
        observer.close()
        observer.close()
    logged = [("log", 2), ("finish", None)]
    assert service.asked == [("init", "one"), *logged, ("init", "other"), *logged]
