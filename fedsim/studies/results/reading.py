"""Readers of the files of a run folder; a damaged file raises an error of one sentence that names it."""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from fedsim.core.errors import CheckpointError, ConfigError
from fedsim.core.files import check_regular_path
from fedsim.run.tracking import clients
from fedsim.run.tracking.clients import ClientSummary
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.run.tracking.result import MetricsRow

MAX_MESSAGE_LENGTH = 200  # characters of another library's message


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Convert errors of the block to an error that says that this file is damaged.

    Raises:
        CheckpointError: the block raised an error other than ConfigError; the message names the file and the reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # such as NumPy's of sizes that overflow
            yield
    except ConfigError:
        raise
    except Exception as error:  # readers raise all kinds: of YAML, ZIP and JSON, memory, recursion, attributes
        reason = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
        reason = reason if len(reason) <= MAX_MESSAGE_LENGTH else f"{reason[: MAX_MESSAGE_LENGTH - 1]}…"
        raise CheckpointError(f"{path} is damaged ({reason}); restore it, or run again") from error


def require(condition: bool, reason: str) -> None:
    """Raise ValueError with this reason unless the fact is true."""
    if not condition:
        raise ValueError(reason)


def read_rows(path: Path) -> list[MetricsRow]:
    """Read the rows of a metrics.csv, each round with all replicates; an incomplete last round is left out.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged.
    """
    rows = read_metrics(path)
    with translate_read_errors(path):
        replicates = sum(row["round"] == rows[0]["round"] for row in rows) if rows else 0
        seeds = [row["seed"] for row in rows[:replicates]]
        while rows and len(rows) % replicates:
            rows.pop()
        rounds = [row["round"] for row in rows[::replicates]] if rows else []
        require(all(a < b for a, b in itertools.pairwise(rounds)), "its rounds are not in order")
        for number, row in enumerate(rows):
            is_expected_row = row["round"] == rounds[number // replicates] and row["seed"] == seeds[number % replicates]
            require(is_expected_row, f"round {row['round']} does not have the replicates of the first one")
    return rows


def read_config(path: Path) -> dict[str, Any]:
    """Read the nested configuration; empty if there is no file."""
    if not _path_occupied(path):
        return {}
    with translate_read_errors(path):
        plain_settings = OmegaConf.to_container(OmegaConf.load(check_regular_path(path)))
        require(isinstance(plain_settings, dict), "it holds no settings")
        assert isinstance(plain_settings, dict)
        rounds = plain_settings.get("rounds")
        require(rounds is None or _is_whole(rounds), f"rounds is {rounds!r}")
        return {str(key): value for key, value in plain_settings.items()}


def read_summary(path: Path) -> dict[str, Any]:
    """Read summary.json; empty if there is no file."""
    with translate_read_errors(path):
        summary = _read_json(path)
        _require_entry_types(summary, {"stopped": str, "samples_per_second": Real, "final": dict, "newcomers": list})
        newcomers = summary.get("newcomers") or []
        for epoch in newcomers:
            require(isinstance(epoch, dict) and epoch.keys() == newcomers[0].keys(), "newcomers are no rows")
            per_seed = (value if isinstance(value, list) else [value] for value in epoch.values())
            require(
                "epoch" in epoch and all(map(_is_number_or_none, itertools.chain(*per_seed))), "newcomers are no rows"
            )
        return summary


def read_environment_json(path: Path) -> dict[str, Any]:
    """Read environment.json; empty if there is no file."""
    with translate_read_errors(path):
        environment = _read_json(path)
        kinds: dict[str, type] = dict.fromkeys(("command", "device", "gpu", "commit", "started"), str)
        _require_entry_types(environment, {"settings": dict, "versions": dict} | kinds)
        return environment


def read_clients(path: Path) -> ClientSummary | None:
    """Read clients.npz; None if there is no file."""
    if not _path_occupied(path):
        return None
    with translate_read_errors(path):
        stored_clients = clients.read(check_regular_path(path))
        require(stored_clients.number > 0, f"number is {stored_clients.number}")
        arrays = {"accuracy": 2, "samples": 1, "class_fractions": 2, "present": 2, "held_out": 2}
        array_by_name = {name: getattr(stored_clients, name) for name in arrays} | stored_clients.metrics
        require(stored_clients.present is not None, "present is missing")
        for name, array in array_by_name.items():
            is_expected_row = array is None or (array.ndim == arrays.get(name, 2) and array.dtype.kind in "biuf")
            require(is_expected_row, f"{name} has changed since it was written")
        for name in ("names", "accuracy_names", "labels"):
            array = getattr(stored_clients, name)
            require(
                array is None or (array.ndim == 1 and array.dtype.kind in "Uiuf"),
                f"{name} has changed since it was written",
            )
        rows = {
            len(array)
            for array in (stored_clients.samples, stored_clients.class_fractions, stored_clients.present)
            if array is not None
        }
        require(len(rows) == 1, "its arrays are of different clients")
        require(stored_clients.names is None or {len(stored_clients.names)} == rows, "its names are of other clients")
        fractions = stored_clients.class_fractions
        if fractions is not None:
            require(bool(np.isfinite(fractions).all() and (fractions >= 0).all()), "class_fractions are no fractions")
            require(
                stored_clients.labels is None or len(stored_clients.labels) == fractions.shape[1],
                "labels are of other classes",
            )
        return stored_clients


def _path_occupied(path: Path) -> bool:
    """Return whether the path exists; a broken link or a folder also counts, so that it is reported as damaged."""
    return path.exists() or path.is_symlink()


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is no file."""
    if not _path_occupied(path):
        return {}
    content = json.loads(check_regular_path(path).read_text(encoding="utf-8"))
    require(isinstance(content, dict), "it holds no names and values")
    json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair cannot be shown
    return dict(content)


def _require_entry_types(content: dict[str, Any], kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        value = content.get(name)
        require(value is None or (isinstance(value, kind) and not isinstance(value, bool)), f"{name} is {value!r:.40}")


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, Real) and not isinstance(value, bool))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
