"""Finished runs on disk: find them, read them, name them by what makes them differ."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from fedsim.config import flatten
from fedsim.errors import ConfigError
from fedsim.tracking.metrics_csv import NAME, read_metrics
from fedsim.tracking.result import Row, mean_std, measured

NEWCOMERS = "newcomers "  # before a metric of those who join when training is over
_NOT_A_LABEL = ("out", "resume", "device", "tracking.progress")


@dataclass
class Run:
    """One run folder.

    Attributes:
        folder: where it is.
        rows: of its metrics.csv.
        settings: its configuration as dotted keys.
        label: what distinguishes it from the runs it is compared with.
        newcomers: of its summary.json: what they measured after each of their epochs.
    """

    folder: Path
    rows: list[Row]
    settings: dict[str, Any]
    label: str = ""
    newcomers: list[Row] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """Measured columns."""
        return measured(self.rows)

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Rounds [E] and values [E, R] of one metric.

        Of 'a or b' the first that the run has: 'personal_… or localized_…' is the clients' own model, whichever they
        have. 'newcomers a' is a of those who join when training is over, by their epochs.
        """
        if metric.startswith(NEWCOMERS):
            name = _first(metric.removeprefix(NEWCOMERS), self.newcomers[-1])
            return np.array([e["epoch"] for e in self.newcomers]), np.array([e[name] for e in self.newcomers])
        metric = _first(metric, self.rows[0])
        rounds = sorted({row["round"] for row in self.rows})
        values = [[row[metric] for row in self.rows if row["round"] == t] for t in rounds]
        return np.array(rounds), np.array(values)

    def final(self, metric: str) -> tuple[float, float]:
        """Mean and standard deviation over replicates after the last round."""
        return mean_std(list(self.curve(metric)[1][-1]))


def _first(metric: str, row: Row) -> str:
    """Of 'a or b' the first that is in the row; the last where none is."""
    names = metric.split(" or ")
    return next((name for name in names if name in row), names[-1])


def load(folder: Path) -> Run:
    """Read a run folder."""
    path = folder / NAME
    try:
        rows = read_metrics(path)
    except OSError as error:
        raise ConfigError(f"{folder} holds no run: {path.name} cannot be read ({error.strerror})") from error
    if not rows:
        raise ConfigError(f"{path} has no rows yet")
    config = folder / "config.yaml"
    plain = OmegaConf.to_container(OmegaConf.load(config)) if config.exists() else {}
    assert isinstance(plain, dict)
    summary = folder / "summary.json"
    newcomers = json.loads(summary.read_text()).get("newcomers", []) if summary.exists() else []
    return Run(folder, rows, dict(flatten({str(k): v for k, v in plain.items()})), newcomers=newcomers)


def find(folders: list[Path]) -> list[Run]:
    """The runs in the given folders, or one or more levels below them (a sweep), labelled by their differences."""
    found: dict[Path, None] = {}
    for folder in folders:
        below = sorted(path.parent for path in folder.rglob(NAME))
        if not below:
            raise ConfigError(f"{folder} holds no run: there is no {NAME} in it or below it")
        found.update(dict.fromkeys(below))
    runs = [load(folder) for folder in found]
    label(runs)
    return runs


def label(runs: list[Run]) -> None:
    """Name every run by the settings in which the runs differ; a target class goes by its own name."""
    keys = {key for run in runs for key in run.settings}
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    differing = {k for k, seen in values.items() if any(v != seen[0] for v in seen) and k not in _NOT_A_LABEL}
    differing -= {k for k in differing if k.rpartition(".")[2] in differing and "." in k}  # lr says local.lr too
    targets = {k for k in differing if k.endswith("_target_")}
    inside = tuple(
        k.removesuffix("_target_") for k in targets
    )  # options of another class are no difference of their own
    for run in runs:
        parts = [str(run.settings.get(k, "")).rpartition(".")[2] for k in sorted(targets, key=_strategy_first)]
        parts += [f"{k}={run.settings.get(k)}" for k in sorted(differing - targets) if not k.startswith(inside)]
        run.label = " ".join(p for p in parts if p) or run.folder.name
    labels = [run.label for run in runs]
    for run in runs:
        if labels.count(run.label) > 1:
            run.label = f"{run.label} ({run.folder})"


def _strategy_first(key: str) -> tuple[bool, str]:
    return (not key.startswith("strategy"), key)
