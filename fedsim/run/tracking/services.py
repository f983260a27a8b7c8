"""Observers that send a run to Weights & Biases, MLflow or trackio. Each is an extra, and needs no network."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file
from fedsim.run.tracking.observer import EvaluationEvent, Observer, RunEnded, RunStarted
from fedsim.run.tracking.result import MetricsRow

IDENTITIES_FILE = "observers.json"  # file in a run's folder with the names by which services know a resumed run
MAX_MLFLOW_VALUE_LENGTH = 500  # largest length of a setting in older versions of MLflow
MLFLOW_SETTINGS_PER_CALL = 100  # largest number of settings in one call


def import_service(package_name: str) -> Any:
    """Import the service's package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package_name)
    except ImportError as error:
        raise ConfigError(
            f"tracking.observers={package_name} is an extra; pip install 'fedsim-torch[{package_name}]'"
        ) from error


def mean_and_replicate_metrics(event: EvaluationEvent, names: list[str]) -> MetricsRow:
    """Return what is shown of an evaluation: the mean over replicates under the column's name, and each replicate's
    value under its own; NaN is left out."""
    scalar_values = {name: value for name, value in event.mean().items() if name != "round"}
    if len(event.rows) > 1:
        for replicate_name, row in zip(names, event.rows, strict=True):
            scalar_values |= {
                f"{replicate_name}/{name}": value for name, value in row.items() if name not in ("round", "seed")
            }
    return {name: float(value) for name, value in scalar_values.items() if math.isfinite(value)}


class TrackingService(Observer):
    """Common base of services; stores the identity with which a resumed run continues its record.

    Args:
        project: under which runs are shown.
        name: of the run; its folder's unless given.
    """

    package: str

    def __init__(self, project: str = "fedsim", name: str | None = None) -> None:
        self.project, self.name = project, name
        self.service_module = import_service(self.package)
        self._names: list[str] = []

    def begin(self, run: RunStarted) -> None:
        self._names = run.names
        identities = _stored_service_run_ids(run.folder)
        previous_id = identities.get(self.package) if run.completed_rounds else None
        run_id = self.start(run, self.name or (run.folder.name if run.folder else None), previous_id)
        if run.folder is not None:
            with replacement_file(run.folder / IDENTITIES_FILE) as file:
                file.write(json.dumps(identities | {self.package: run_id}) + "\n")

    def start(self, run_started: RunStarted, name: str | None, identity: str | None) -> str:
        """Start a record, or continue the one with this identity; return the identity."""
        raise NotImplementedError


def _stored_service_run_ids(folder: Path | None) -> dict[str, str]:
    path = None if folder is None else folder / IDENTITIES_FILE
    return dict(json.loads(path.read_text())) if path is not None and path.exists() else {}


def _flat_summary(event: RunEnded) -> MetricsRow:
    """Return results under 'final/NAME', and timings."""
    final_means = {f"final/{name}": statistics["mean"] for name, statistics in event.summary["final"].items()}
    totals = {name: event.summary[name] for name in ("rounds", "seconds", "samples", "parameters")}
    return {name: value for name, value in (final_means | totals).items() if value is not None and math.isfinite(value)}


class WandB(TrackingService):
    """Weights & Biases: curves of the mean and of each replicate, settings, results.

    Args:
        project, name: see `TrackingService`.
        mode: 'offline' keeps everything in the run's folder until `wandb sync`; None is what WANDB_MODE says.
    """

    package = "wandb"

    def __init__(self, project: str = "fedsim", name: str | None = None, mode: str | None = None) -> None:
        super().__init__(project, name)
        self.mode = mode
        self._run: Any = None

    def start(self, run_started: RunStarted, name: str | None, identity: str | None) -> str:
        self._run = self.service_module.init(
            project=self.project, name=name, config=run_started.settings, mode=self.mode, id=identity, resume="allow",
            dir=None if run_started.folder is None else str(run_started.folder),
            settings=self.service_module.Settings(console="off", silent=True),
        )  # fmt: skip
        return str(self._run.id)

    def evaluated(self, event: EvaluationEvent) -> None:
        self._run.log(mean_and_replicate_metrics(event, self._names), step=event.round)

    def finish(self, event: RunEnded) -> None:
        self._run.summary.update(_flat_summary(event))
        for heading, figure in event.pictures():
            self._run.log({f"figures/{heading}": self.service_module.Image(figure)}, step=event.round)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow(TrackingService):
    """MLflow: metrics by round, settings as parameters, pictures as artifacts.

    Args:
        project: its experiment.
        name: see `TrackingService`.
        uri: of its store; None is what MLflow itself takes (the variable MLFLOW_TRACKING_URI, else a database here).
    """

    package = "mlflow"

    def __init__(self, project: str = "fedsim", name: str | None = None, uri: str | None = None) -> None:
        super().__init__(project, name)
        self.uri, self._run, self._status = uri, "", "KILLED"

    def start(self, run_started: RunStarted, name: str | None, identity: str | None) -> str:
        self._client = self.service_module.MlflowClient(tracking_uri=self.uri)
        if identity is not None:
            self._run = identity
            self._client.update_run(identity, status="RUNNING")
            return identity
        existing_experiment = self._client.get_experiment_by_name(self.project)
        experiment = (
            self._client.create_experiment(self.project)
            if existing_experiment is None
            else existing_experiment.experiment_id
        )
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        parameters = [(key, str(value)[:MAX_MLFLOW_VALUE_LENGTH]) for key, value in run_started.settings.items()]
        for batch_start in range(0, len(parameters), MLFLOW_SETTINGS_PER_CALL):
            params = [
                self.service_module.entities.Param(key, value)
                for key, value in parameters[batch_start : batch_start + MLFLOW_SETTINGS_PER_CALL]
            ]
            self._client.log_batch(self._run, params=params)
        return str(self._run)

    def evaluated(self, event: EvaluationEvent) -> None:
        self._log(mean_and_replicate_metrics(event, self._names), event.round)

    def _log(self, values: MetricsRow, step: int) -> None:
        timestamp = self.service_module.utils.time.get_current_time_millis()
        metrics = [self.service_module.entities.Metric(name, value, timestamp, step) for name, value in values.items()]
        for batch_start in range(0, len(metrics), 10 * MLFLOW_SETTINGS_PER_CALL):
            self._client.log_batch(
                self._run, metrics=metrics[batch_start : batch_start + 10 * MLFLOW_SETTINGS_PER_CALL]
            )

    def finish(self, event: RunEnded) -> None:
        self._log(_flat_summary(event), event.round)
        for heading, figure in event.pictures():
            self._client.log_figure(self._run, figure, f"figures/{heading}.png")
        self._status = "FINISHED"

    def close(self) -> None:
        if self._run:
            self._client.set_terminated(self._run, self._status)
            self._run = ""


class Trackio(TrackingService):
    """trackio: curves of the mean and of each replicate, in a database on this machine.

    Args:
        project, name: see `TrackingService`.
    """

    package = "trackio"

    def start(self, run_started: RunStarted, name: str | None, identity: str | None) -> str:
        name = identity or name
        self.service_module.init(project=self.project, name=name, config=run_started.settings, resume="allow")
        self._is_open = True
        return str(name)

    def evaluated(self, event: EvaluationEvent) -> None:
        self.service_module.log(mean_and_replicate_metrics(event, self._names), step=event.round)

    def close(self) -> None:
        if getattr(self, "_is_open", False):
            self._is_open = False
            self.service_module.finish()


SERVICES = {service.package: service for service in (WandB, MLflow, Trackio)}
