"""Recorded availability: assignment of records to clients, and repetition of records."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedsim.availability.availability import Availability, Population
from fedsim.availability.processes import bernoulli
from fedsim.core import checks, rng
from fedsim.core.constraints import OneOf
from fedsim.core.errors import ClientCountError, ConfigError

MATCH_MODES = ("names", "order", "draw")
MatchMode = Annotated[str, OneOf(*MATCH_MODES)]
UnmatchedRecordsPolicy = Annotated[str, OneOf("refuse", "ignore")]
MissingRecordsPolicy = Annotated[str, OneOf("refuse", "away")]
MAX_NAMES_IN_MESSAGE = 3  # names in a message
UNKNOWN_PROBABILITIES_REASON = "replays recorded availability, whose probabilities are unknown"


class RecordedAvailability(Availability):
    """A record of n clients, by name, over some rounds.

    Names are those of the data, as in `clients.npz`; clients without names are numbered 0 to m − 1. A record without a
    client, or a client without a record, raises an error unless the options say otherwise.

    Args:
        path: of the file; in Python also a data frame, or a mapping from names to columns.
        repeat: start again at the end; otherwise a run longer than the record is an error.
        match: names: a client has the record with its name; order: the k-th client has the k-th record (sorted by name,
            numbers numerically); draw: each replicate draws a record for each client, without replacement.
        unknown: records of unknown clients: refuse (error) or ignore.
        missing: clients without a record: refuse (error), or away (not available in the run).

    Attributes:
        names: [n] the recorded clients; None: columns without names, which are the clients in their order.
        length: rounds of the record.
        source: what messages call it.
    """

    law = "trace"
    names: list[str] | None
    length: int

    def __init__(
        self,
        path: Any,
        repeat: bool,
        match: MatchMode,
        unknown: UnmatchedRecordsPolicy,
        missing: MissingRecordsPolicy,
    ) -> None:
        self.path, self.repeat = Path(path).expanduser() if isinstance(path, (str, Path)) else path, repeat
        self.source = f"availability.path={self.path}" if isinstance(self.path, Path) else "availability.path"
        self.match = match
        self.unmatched_policy = unknown
        self.missing = missing

    @abstractmethod
    def recorded_probabilities(self, t: int) -> np.ndarray:
        """[n] probabilities of the recorded clients in round t < length."""

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        arrays = {name.strip("_"): value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {name: value for name, value in arrays.items() if value.dtype.kind in "biuf"}

    def setup(self, population: Population) -> None:
        names_by_replicate = population.names_by_replicate or [population.names] * len(population.seeds)
        record_indices: dict[tuple[str, ...] | None, np.ndarray] = {}  # usually all replicates use the same records
        for replicate_names in names_by_replicate:
            if replicate_names not in record_indices and self.match != "draw":
                record_indices[replicate_names] = self._client_record_indices(replicate_names, population.clients)
        if self.match == "draw":
            self._record_index = np.stack([self._draw_records(seed, population.clients) for seed in population.seeds])
        else:
            self._record_index = np.stack([record_indices[replicate_names] for replicate_names in names_by_replicate])
        super().setup(population)

    def _draw_records(self, seed: int, clients: int) -> np.ndarray:
        """[m] records for the clients of a replicate."""
        num_records = len(self.recorded_probabilities(0))
        if num_records < clients:
            raise ClientCountError(
                f"{self.source} has {num_records} clients, too few to draw {{clients}} from; set clients={{settable}}",
                clients=clients,
                settable=num_records,
            )
        return rng.generator(seed, rng.Purpose.ROSTER).permutation(num_records)[:clients]

    def _client_record_indices(self, names: tuple[str, ...] | None, clients: int) -> np.ndarray:
        """[m] the record of each client, −1 for none."""
        recorded_names = self.names
        if recorded_names is None or self.match == "order":
            num_records = len(self.recorded_probabilities(0))
            is_mismatch_refused = (num_records > clients and self.unmatched_policy == "refuse") or (
                num_records < clients and self.missing == "refuse"
            )
            if is_mismatch_refused:
                option = "availability.unknown=ignore" if num_records > clients else "availability.missing=away"
                raise ClientCountError(
                    f"{self.source} has {num_records} clients, but {{clients}}; set clients={{settable}}, or {option}",
                    clients=clients,
                    settable=num_records,
                )
            numbers = np.arange(clients)
            return np.where(numbers < num_records, numbers, -1)
        client_names = [str(number) for number in range(clients)] if names is None else list(names)
        index_by_name = {name: record_index for record_index, name in enumerate(recorded_names)}
        record_index = np.array([index_by_name.get(name, -1) for name in client_names])
        self._refuse_unmatched_records(client_names, names is not None, record_index)
        return record_index

    def _refuse_unmatched_records(self, client_list: list[str], has_names: bool, record_index: np.ndarray) -> None:
        """Refuse records without a client, and clients without a record."""
        assert self.names is not None
        client_names = set(client_list)
        unmatched_names = [name for name in self.names if name not in client_names]
        clients_without_record = [name for name, record in zip(client_list, record_index, strict=True) if record < 0]
        client_names_text = (
            f"the run's clients are {_first_names(client_list)}"
            if has_names
            else self._numbered_clients_text(len(client_list))
        )
        if len(clients_without_record) == len(client_list):
            raise ConfigError(
                f"{self.source} has none of the run's clients: it has {_first_names(self.names)}, and "
                f"{client_names_text}; "
                "use the same names, or set availability.match=order or draw"
            )
        if unmatched_names and self.unmatched_policy == "refuse":
            suggestion_text = checks.nearest_name_hint(unmatched_names[0], clients_without_record)
            raise ConfigError(
                f"{self.source} has {_first_names(unmatched_names)}, and {client_names_text}{suggestion_text or '; '}"
                f"{' else ' if suggestion_text else ''}availability.unknown=ignore excludes such records"
            )
        if clients_without_record and self.missing == "refuse":
            raise ClientCountError(
                f"{self.source} has no record of client {_first_names(clients_without_record)} ({{clients}}); "
                "availability.missing=away makes such clients unavailable in all rounds",
                clients=len(client_list),
            )

    @staticmethod
    def _numbered_clients_text(clients: int) -> str:
        return f"the data have no client names, so clients are named 0 to {clients - 1}"

    def check_rounds(self, rounds: int) -> None:
        if rounds > self.length and not self.repeat:
            raise ConfigError(
                f"rounds={rounds} exceeds the {self.length} rounds of {self.source}; lower rounds, or set "
                "availability.repeat=true"
            )

    def probabilities(self, t: int) -> np.ndarray:
        return np.append(self.recorded_probabilities(t % self.length), 0.0)[self._record_index]

    def counts(self, t: int) -> np.ndarray:
        return bernoulli(self.probabilities(t), self.population, t)


def _first_names(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    quoted_names = ", ".join(repr(name) for name in names[:MAX_NAMES_IN_MESSAGE])
    remaining_count = len(names) - MAX_NAMES_IN_MESSAGE
    return quoted_names if remaining_count <= 0 else f"{quoted_names} and {remaining_count} more"
