"""clients.npz: statistics of each client at the end of a run, readable without the data set.

Pictures need it: how accuracies differ from client to client, who holds what, who was there when.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from fedsim.availability import Availability
from fedsim.core.federation import Federation
from fedsim.core.files import replacement_file

CLIENTS_FILENAME = "clients.npz"
METRIC_PREFIX = "metric_"  # prefix of the name of a metric that a user adds
MAX_DETAILED_CLIENTS = 200  # of whom more than an accuracy is kept
MAX_DETAILED_ROUNDS = 200


@dataclass
class ClientSummary:
    """Attributes (all but accuracies and `metrics` of the first replicate, and of the first m' ≤ 200 clients):

    number: m, how many clients there are.
    accuracy: [R', c] accuracy of the last model on the own data of c clients, thinned evenly, in the R' replicates that
        were not given up; None without labels.
    metrics: name → [R', c], the same of the metrics that a user adds; NaN where a client has none.
    samples: [m'] samples each client holds; None where they are drawn afresh.
    class_fractions: [m', C] label distribution of each client; None without labels.
    present: [m', T'] who could take part in the first T' ≤ 200 rounds.
    names: [m'] what clients are called in the data; None where they have no names, or others in every replicate.
    accuracy_names: [c] likewise, of those whose accuracy, or other metrics, are there.
    held_out: [R', c'] accuracy of the last model on what was held out of each client, test samples or else validation
        samples, NaN where that is nothing; None where nobody has any, or without labels.
    labels: [C] what the classes are called in the data; None where they are numbers alone.
    """

    number: int
    accuracy: np.ndarray | None
    samples: np.ndarray | None
    class_fractions: np.ndarray | None
    present: np.ndarray
    names: np.ndarray | None = None
    accuracy_names: np.ndarray | None = None
    labels: np.ndarray | None = None
    held_out: np.ndarray | None = None
    metrics: dict[str, np.ndarray] = field(default_factory=dict)


def gather_client_statistics(
    federation: Federation,
    availability: Availability,
    rounds: int,
    is_stored: bool,
    accuracy: np.ndarray | None,
    measured_values: np.ndarray,
    metrics: dict[str, np.ndarray],
    labels: tuple[str, ...] | None = None,
    held_out: np.ndarray | None = None,
) -> ClientSummary:
    """Gather the statistics of the clients; availability is a function of the round, so that it need not be recorded.

    Args:
        federation, availability, rounds: of the run.
        is_stored: whether clients hold samples, or draw them afresh.
        accuracy: [R', c] of the last evaluation.
        measured_values: [c] the numbers of the clients it is of.
        metrics: name → [R', c] of the last evaluation.
        labels: what the data call their classes.
        held_out: [R', c'] of the last evaluation.
    """
    client_names = None if federation.client_names is None else np.array(federation.client_names)
    label_fractions = federation.class_fractions
    recorded_rounds = range(min(rounds, MAX_DETAILED_ROUNDS))
    return ClientSummary(
        number=federation.clients,
        accuracy=accuracy,
        samples=federation.num_samples[: federation.clients][:MAX_DETAILED_CLIENTS] if is_stored else None,
        class_fractions=None if label_fractions is None else label_fractions[0, :MAX_DETAILED_CLIENTS],
        present=np.stack([availability.counts(t)[0, :MAX_DETAILED_CLIENTS] > 0 for t in recorded_rounds], axis=1),
        names=None if client_names is None else client_names[:MAX_DETAILED_CLIENTS],
        accuracy_names=None
        if client_names is None or (accuracy is None and not metrics)
        else client_names[measured_values],
        labels=None if labels is None else np.array(labels),
        metrics=metrics,
        held_out=held_out,
    )


def write(path: Path, clients: ClientSummary) -> None:
    """Write the file atomically; raise OutputError if that is impossible."""
    arrays = {name: value for name, value in vars(clients).items() if name != "metrics" and value is not None}
    arrays |= {f"{METRIC_PREFIX}{name}": values for name, values in clients.metrics.items()}
    with replacement_file(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def read(path: Path) -> ClientSummary:
    """Read the file; nothing is unpickled."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {field.name: file.get(field.name) for field in fields(ClientSummary) if field.name != "metrics"}
        metrics = {name.removeprefix(METRIC_PREFIX): file[name] for name in file if name.startswith(METRIC_PREFIX)}
        return ClientSummary(**arrays | {"number": int(file["number"])}, metrics=metrics)
