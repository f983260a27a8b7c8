"""The result of an evaluation, and columns for the spread over clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedsim.evaluation.columns import MEASURED_COLUMNS
from fedsim.evaluation.spread import TENTH_PERCENT, measure_description, spread

# Numbers per client, by the origin of its samples: the column of the mean, or its prefix.
TEST, VALIDATION, TRAINING = "test_{}_by_client", "validation_{}", "client_{}"
WORST_DECILE_SUFFIX = f"worst{TENTH_PERCENT}"
MEAN_PREFIX_PATTERN = re.compile("^mean (over clients )?of ")


@dataclass
class EvaluationResult:
    """The result of one evaluation, on the host.

    Attributes:
        metrics: name → [R].
        client_accuracy: [R, m'] accuracy on each evaluated client's own data, or None without labels.
        client_metrics: name → [R, m'] of the user's metrics, NaN if undefined for a client.
        by_client: column of their mean → [R, n] accuracies (losses without labels) on the samples of each of n clients
            that the column is about; NaN for a client without samples. The most relevant first.
        client_loss: [R, m'] loss on each evaluated client's own data.
        histograms: name → one number per client, for other quantities.
    """

    metrics: dict[str, np.ndarray]
    client_accuracy: np.ndarray | None
    client_metrics: dict[str, np.ndarray] = field(default_factory=dict)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    by_client: dict[str, np.ndarray] = field(default_factory=dict)
    client_loss: np.ndarray | None = None

    @property
    def held_out(self) -> np.ndarray | None:
        """[R, n] accuracies on held-out samples of each client; None without such samples or without labels."""
        held_out_scores = [
            values for name, values in self.by_client.items() if name in MEASURED_COLUMNS and "accuracy" in name
        ]
        return held_out_scores[0] if held_out_scores else None


def client_spread_columns(
    by_client: Mapping[str, np.ndarray], pairs: Iterable[tuple[str, str]]
) -> dict[str, np.ndarray]:
    """Column → [R] measures of the spread over clients.

    Args:
        by_client: see `EvaluationResult`.
        pairs: column, and name of the measure.
    """
    return {
        f"{measure_name}_{name}": np.array(
            [spread(values, name, "accuracy" in measure_name) for values in by_client[measure_name]]
        )
        for measure_name, name in pairs
    }


def spread_description(name: str, measure_name: str) -> str:
    """The description of a column about the spread over clients."""
    return f"{measure_description(name)}, of {client_value_subject(measure_name)}"


def client_value_subject(measure_name: str) -> str:
    """The description of a client's number, as part of a sentence."""
    return MEAN_PREFIX_PATTERN.sub(
        "",
        MEASURED_COLUMNS[
            measure_name if measure_name in MEASURED_COLUMNS else measure_name.replace("client_", "train_")
        ],
    )
