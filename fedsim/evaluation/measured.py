"""What an evaluation found, and columns that say how the clients' numbers differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedsim.evaluation.columns import MEASURED
from fedsim.evaluation.spread import TENTH, meaning, spread

# What is known of each client, by whence its samples are: the column of the mean, or its beginning.
TEST, VALIDATION, TRAINING = "test_{}_by_client", "validation_{}", "client_{}"
WORST = f"worst{TENTH}"
MEAN = re.compile("^mean (over clients )?of ")


@dataclass
class Measured:
    """What one evaluation found, on the host.

    Attributes:
        metrics: name → [R].
        client_accuracy: [R, m'] accuracy on each evaluated client's own data, or None without labels.
        client_metrics: name → [R, m'] of the metrics that a user adds, NaN where a client has none.
        by_client: column of their mean → [R, n] accuracies, or losses where there are no labels, on the samples of each
            of n clients that the column is about; NaN where a client has none. The nearest to a model's use first.
        client_loss: [R, m'] loss on each evaluated client's own data.
        histograms: name → one number per client, of more that was measured.
    """

    metrics: dict[str, np.ndarray]
    client_accuracy: np.ndarray | None
    client_metrics: dict[str, np.ndarray] = field(default_factory=dict)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    by_client: dict[str, np.ndarray] = field(default_factory=dict)
    client_loss: np.ndarray | None = None

    @property
    def held_out(self) -> np.ndarray | None:
        """[R, n] accuracies on what was held out of each client; None without any, or without labels."""
        held_out_scores = [values for name, values in self.by_client.items() if name in MEASURED and "accuracy" in name]
        return held_out_scores[0] if held_out_scores else None


def spreads(by_client: Mapping[str, np.ndarray], pairs: Iterable[tuple[str, str]]) -> dict[str, np.ndarray]:
    """Column → [R] how clients differ.

    Args:
        by_client: see `Measured`.
        pairs: what it is of, and the measure's name.
    """
    return {
        f"{of}_{name}": np.array([spread(values, name, "accuracy" in of) for values in by_client[of]])
        for of, name in pairs
    }


def said_of(name: str, of: str) -> str:
    """What a column is that tells how clients differ."""
    return f"{meaning(name)}, of {subject(of)}"


def subject(of: str) -> str:
    """What a client's number is, for the rest of a sentence."""
    return MEAN.sub("", MEASURED[of if of in MEASURED else of.replace("client_", "train_")])
