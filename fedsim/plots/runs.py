"""Finished runs on disk, as they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from fedsim.core.errors import ConfigError
from fedsim.core.settings import flatten
from fedsim.tracking import clients
from fedsim.tracking.clients import Clients
from fedsim.tracking.metrics_csv import NAME, read_metrics
from fedsim.tracking.result import Row, mean_std, measured

NEWCOMERS = "newcomers "  # before a metric of those who join when training is over


@dataclass
class Run:
    """One run folder.

    Attributes:
        folder: where it is.
        rows: of its metrics.csv.
        settings: its configuration as dotted keys.
        clients: what is known of its clients; None of a run that is not finished.
        label: what distinguishes it from the runs it is compared with.
        newcomers: of its summary.json: what they measured after each of their epochs.
    """

    folder: Path
    rows: list[Row]
    settings: dict[str, Any]
    clients: Clients | None = None
    label: str = ""
    newcomers: list[Row] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """Measured columns."""
        return measured(self.rows)

    @property
    def replicates(self) -> int:
        """R; replicates may share a seed."""
        return sum(row["round"] == self.rows[0]["round"] for row in self.rows)

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

    def has(self, metric: str) -> bool:
        """Did the run measure it?"""
        return _first(metric, self.rows[0]) in self.rows[0]

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
    settings = dict(flatten({str(k): v for k, v in plain.items()}))
    known, summary = folder / clients.NAME, folder / "summary.json"
    newcomers = json.loads(summary.read_text()).get("newcomers", []) if summary.exists() else []
    return Run(folder, rows, settings, clients.read(known) if known.exists() else None, newcomers=newcomers)
