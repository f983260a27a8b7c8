"""Runs read from their folders: metrics, settings, models and predictions."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedsim.core import checks, targets
from fedsim.core.errors import ConfigError
from fedsim.core.settings import flatten_settings
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.dataset_kinds import DATASET_KIND
from fedsim.evaluation.columns import is_higher_better
from fedsim.evaluation.registry import NEWCOMER_PREFIX, MetricDescription, describe_metric
from fedsim.run.run_files import CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE
from fedsim.run.tracking import clients
from fedsim.run.tracking.clients import ClientSummary
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME, read_column_descriptions
from fedsim.run.tracking.result import MetricsRow, find_replicate, mean_std, result_columns
from fedsim.studies.results.prediction import Predictor
from fedsim.studies.results.reading import read_clients, read_config, read_environment_json, read_rows, read_summary
from fedsim.studies.results.stored_models import StoredModelReader

FRAME_LIBRARIES = ("pandas", "polars")


@dataclass
class Run:
    """A run read from its folder.

    Example:
        >>> run = fedsim.load("outputs/first")  # doctest: +SKIP
        >>> run.frame().groupby("round").test_accuracy.mean()  # doctest: +SKIP
        >>> module.load_state_dict(run.model(seed=0))  # doctest: +SKIP

    Attributes:
        folder: the folder of the run.
        rows: the rows of metrics.csv, one per evaluated round and replicate.
        settings: its configuration as dotted keys.
        clients: the data of clients.npz; None for an unfinished run.
        label: what distinguishes it from the runs it is compared with.
        newcomers: metrics of the newcomers after each of their epochs, from summary.json.
        column_descriptions: descriptions of the columns of metrics.csv.
        config: its nested configuration from config.yaml; empty for a run that was started without one.
        trusted: packages whose classes `dataset` may build, in addition to those of fedsim.
    """

    folder: Path
    rows: list[MetricsRow]
    settings: dict[str, Any]
    clients: ClientSummary | None = None
    label: str = ""
    newcomers: list[MetricsRow] = field(default_factory=list)
    column_descriptions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    trusted: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """The measured columns."""
        return result_columns(self.rows)

    @property
    def replicates(self) -> int:
        """The number of replicates R, which may share a seed."""
        return sum(row["round"] == self.rows[0]["round"] for row in self.rows)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the replicates."""
        return [row["seed"] for row in self.rows[: self.replicates]]

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty for an unfinished run."""
        return read_summary(self.folder / SUMMARY_FILE)

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json: command, versions, device."""
        return read_environment_json(self.folder / ENVIRONMENT_FILE)

    @functools.cached_property
    def _stored_models(self) -> StoredModelReader:
        return StoredModelReader(self.folder)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return metrics.csv as column → [E·R], with the replicates of a round next to each other."""
        return {name: np.array([row[name] for row in self.rows]) for name in self.rows[0]}

    def frame(self, library: str = "pandas") -> Any:
        """Return metrics.csv as a DataFrame of 'pandas' or 'polars', a row per evaluated round and replicate.

        Raises:
            ConfigError: the library is not installed.
        """
        checks.check_choice("library", library, FRAME_LIBRARIES)
        try:
            return importlib.import_module(library).DataFrame(self.arrays())
        except ImportError as error:
            raise ConfigError(f"{library} is an extra; pip install 'fedsim-torch[{library}]'") from error

    def model(self, seed: int | None = None, which: str = "last", replicate: int | None = None) -> dict[str, Tensor]:
        """Return a model as a `state_dict` for the module's `load_state_dict`, with statistics and frozen parameters.

        Args:
            seed: seed of the replicate; it may be left out if there is only one.
            which: 'last' is the server's model after the last saved round, 'best' the evaluated model of the round in
                which `stop.metric` was best.
            replicate: number of the replicate, if several have the same seed.

        Raises:
            ConfigError: there is no such model.
        """
        checks.check_choice("which", which, ("last", "best"))
        number = self._replicate_index(seed, replicate)
        return (
            self._stored_models.best_model(number) if which == "best" else self._stored_models.last_server_model(number)
        )

    def client_model(self, client: int, seed: int | None = None, replicate: int | None = None) -> dict[str, Tensor]:
        """Return the model that a client stores.

        It is the model of its local rule (APFL's is mixed with the server's by the client's α), else of the strategy
        (for IFCA the model that the client trained last), else the server's with the columns that stay on the client.

        Raises:
            ConfigError: clients store no model, or there is no such client.
        """
        return self._stored_models.client_model(self._replicate_index(seed, replicate), client)

    def dataset(self) -> Dataset:
        """Load the run's data set again, as configured in config.yaml.

        Its shape and classes determine a module for `model`, and `Table.encode` its inputs for other rows. Classes that
        are not part of fedsim, or of what it knows of torchvision, are built if `load` was given their package as
        trusted.

        Raises:
            ConfigError: the data are no longer there, the run was started in Python without a configuration, or the
                data set belongs to a package that is not trusted.
        """
        if not isinstance(self.config.get("dataset"), dict):
            raise ConfigError(
                f"{self.folder} has no {CONFIG_FILE}: it was started from Python; create its data set "
                "as that program did"
            )
        with self._trusted_context():
            dataset_part = targets.parse_object("dataset", self.config["dataset"], DATASET_KIND)
            try:
                dataset: Dataset = dataset_part.build()
                return dataset
            except ConfigError as error:
                raise ConfigError(f"the data set of {self.folder} cannot be made: {error}") from error

    def module(self, seed: int | None = None, which: str = "last", replicate: int | None = None) -> nn.Module:
        """Return the run's module with the weights of `model(seed, which, replicate)`, in evaluation mode.

        It takes preprocessed inputs; `predict` takes raw ones.

        Raises:
            ConfigError: there is no such model, or `dataset` cannot be made.
        """
        state = self.model(seed, which, replicate)
        with self._trusted_context():
            return copy.deepcopy(self._predictor.module(state))

    def predict(
        self,
        x: Any,
        seed: int | None = None,
        which: str = "last",
        replicate: int | None = None,
        **more: Tensor,
    ) -> Any:
        """Return the outputs [n, …] of a model of the run, such as class scores.

        Args:
            x: [n, *shape] raw inputs as the data set stores them. Bytes are pixels and are scaled and normalised as in
                the run; floating-point numbers are not changed. Of dataset=table and text_table also rows of the
                table: a path, a data frame, or a mapping from names to columns.
            seed, which, replicate: which model, see `model`.
            more: further inputs of the model by name, such as a mask.

        Raises:
            ConfigError: there is no such model, `dataset` cannot be made, or the inputs have another shape.
        """
        state = self.model(seed, which, replicate)
        with self._trusted_context():
            return self._predictor.outputs(state, self._predictor.input_tensor(x), more)

    def complete(
        self, rows: Any, seed: int | None = None, which: str = "last", replicate: int | None = None
    ) -> list[str]:
        """Return the text that a language model of the run predicts after each prompt, by greedy decoding.

        Args:
            rows: of prompts, as the run's data set has them (dataset=text_table, task=completion): a path, a data
                frame, or a mapping from names to columns.
            seed, which, replicate: which model, see `model`.

        Raises:
            ConfigError: there is no such model, `dataset` cannot be made, or it holds no texts to complete.
        """
        state = self.model(seed, which, replicate)
        with self._trusted_context():
            return self._predictor.text_completions(state, rows)

    def test(self, seed: int | None = None, which: str = "last", replicate: int | None = None) -> dict[str, float]:
        """Recompute test_loss, and test_accuracy if there are labels, of a model of the run on its test set.

        Raises:
            ConfigError: there is no such model, `dataset` cannot be made, or there are no test samples.
        """
        state = self.model(seed, which, replicate)
        with self._trusted_context():
            return self._predictor.test_metrics(state)

    def _trusted_context(self) -> contextlib.AbstractContextManager[None]:
        return targets.trust_packages(
            self.trusted, own_code=False, remedy="fedsim.load(folder, trusted=['{root}']) says so"
        )

    @functools.cached_property
    def _predictor(self) -> Predictor:
        dataset = self.dataset()
        if not isinstance(self.config.get("model"), dict):
            raise ConfigError(
                f"{self.folder}: {CONFIG_FILE} names no model; create it as the program that started the run did"
            )
        return Predictor(self.config["model"], dataset)

    def _replicate_index(self, seed: int | None, replicate: int | None) -> int:
        return find_replicate(self.seeds, seed, replicate, str(self.folder))

    def higher_is_better(self, metric: str) -> bool:
        """Return whether larger values of the metric are better."""
        return is_higher_better(metric, self.column_descriptions)

    def describe_metric(self, metric: str) -> MetricDescription:
        """Return the label, unit and description of a metric, and which direction is better."""
        return describe_metric(metric, self.column_descriptions)

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the rounds [E] and values [E, R] of one metric.

        'a or b' is the first that the run has: 'personal_… or localized_…' is the clients' own model of either kind.
        'newcomers a' is the metric a of clients that join after training, by their epochs.
        """
        if metric.startswith(NEWCOMER_PREFIX):
            name = _first_available_metric(metric.removeprefix(NEWCOMER_PREFIX), self.newcomers[-1])
            return np.array([e["epoch"] for e in self.newcomers]), np.array([e[name] for e in self.newcomers])
        metric = _first_available_metric(metric, self.rows[0])
        rounds = sorted({row["round"] for row in self.rows})
        values = [[row[metric] for row in self.rows if row["round"] == t] for t in rounds]
        return np.array(rounds), np.array(values)

    def curve_along(self, metric: str, x: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return positions [E] and values [E, R] of a metric along another increasing column, such as virtual_seconds.

        Replicates differ in that column; each is interpolated linearly at E positions in the range that all cover.
        """
        rounds, values = self.curve(metric)
        if x is None or metric.startswith(NEWCOMER_PREFIX):
            return rounds, values
        positions = self.curve(x)[1]
        common_positions = np.linspace(positions[0].max(), positions[-1].min(), len(rounds))
        return common_positions, np.stack(
            [np.interp(common_positions, *pair) for pair in zip(positions.T, values.T, strict=True)], axis=1
        )

    def has_metric(self, metric: str) -> bool:
        """Return whether the run measured the metric, or with 'newcomers a' whether its newcomers did."""
        if metric.startswith(NEWCOMER_PREFIX):
            name = metric.removeprefix(NEWCOMER_PREFIX)
            return bool(self.newcomers) and _first_available_metric(name, self.newcomers[-1]) in self.newcomers[-1]
        return _first_available_metric(metric, self.rows[0]) in self.rows[0]

    def final_values(self, metric: str, last: int = 1) -> np.ndarray:
        """Return the metric's mean over the last `last` evaluations [R]; NaN for a run that did not measure it."""
        if not self.has_metric(metric):
            return np.full(self.replicates, np.nan)
        return np.asarray(self.curve(metric)[1][-last:].mean(0))

    def final(self, metric: str) -> tuple[float, float]:
        """Return the mean and standard deviation over replicates after the last round."""
        return mean_std(list(self.final_values(metric)))


def final_metric_columns(runs: Sequence[Run]) -> list[str]:
    """Return the columns that at least one of the runs measured, in their order."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def run_that_measures(runs: Sequence[Run], metric: str) -> Run:
    """Return the first run that measured the metric."""
    return next(run for run in runs if run.has_metric(metric))


def _first_available_metric(metric: str, row: MetricsRow) -> str:
    """Return the first name of 'a or b' that is in the row; the last if none is."""
    names = metric.split(" or ")
    return next((name for name in names if name in row), names[-1])


def load(folder: str | Path, trusted: Sequence[str] = ()) -> Run:
    """Read a run folder, finished or not, without executing anything in it.

    Args:
        folder: the folder of the run.
        trusted: packages of your own, or installed ones, whose classes `Run.dataset` may build.

    Raises:
        ConfigError: the folder holds no run, or one without rows.
        CheckpointError: one of its files is damaged.
    """
    folder = Path(folder)
    path = folder / METRICS_FILENAME
    try:
        rows = read_rows(path)
    except OSError as error:
        if run_folders := sorted(match.parent for match in folder.glob(f"*/{METRICS_FILENAME}")):
            count_text = (
                f"{len(run_folders)} runs; load one of them, such as" if len(run_folders) > 1 else "1 run; load"
            )
            raise ConfigError(f"{folder} is a sweep of {count_text} {run_folders[0]}") from error
        raise ConfigError(f"{folder} holds no run: {path.name} cannot be read ({error.strerror})") from error
    if not rows:
        raise ConfigError(f"{path} has no rows yet")
    config = read_config(folder / CONFIG_FILE)
    run = Run(
        folder,
        rows,
        dict(flatten_settings(config)),
        read_clients(folder / clients.CLIENTS_FILENAME),
        config=config,
        trusted=tuple(trusted),
    )
    run.newcomers, run.column_descriptions = run.summary.get("newcomers") or [], read_column_descriptions(path)
    _ = run.environment  # a damaged file is reported now
    return run
