"""The models of a run folder by the module's parameter names: the last, the best, and those that clients store."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.core import checksums
from fedsim.core.columns import AVERAGED_COLUMNS_ENTRY, OWN_COLUMNS_ENTRY
from fedsim.core.errors import CheckpointError, ConfigError
from fedsim.core.files import check_regular_path
from fedsim.models.naming import StateDictLayout
from fedsim.run.run_files import BEST_MODELS_FILE, CHECKPOINT_FILE, CONSTANTS_FILE, MODEL_HEADER_KEY
from fedsim.studies.results.reading import translate_read_errors


class _SafetensorsFile:
    """An open safetensors file that returns rows of a tensor after the tensor's checksum was verified.

    Args:
        path: path of the file.
        checked_files: the tensors that were verified already; newly verified ones are added.
    """

    def __init__(self, path: Path, checked_files: set[tuple[Any, ...]]) -> None:
        self._path, self._checked_files = path, checked_files
        try:
            self._file = safe_open(check_regular_path(path), framework="pt")
            self._version = (path.name, path.stat().st_mtime_ns)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); the run has left no model there") from error
        self.header: dict[str, str] = self._file.metadata() or {}
        self.tensor_names = set(self._file.keys())

    def __enter__(self) -> _SafetensorsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def rows(self, name: str) -> Any:
        """Return an object whose slices are rows of the tensor.

        Raises:
            CheckpointError: the tensor or the header is damaged.
        """
        if (*self._version, name) not in self._checked_files:
            try:
                damaged_name = checksums.find_damaged_entry(self.header, {name: self._file.get_tensor(name)})
            except (SafetensorError, ValueError) as error:
                damaged_name = str(error)
            if damaged_name is not None:
                raise CheckpointError(
                    f"{self._path} is damaged: {damaged_name} has changed since it was written; restore it from a copy"
                )
            self._checked_files.add((*self._version, name))
        return self._file.get_slice(name)

    def full_tensor(self, name: str) -> Tensor:
        """Return the whole tensor.

        Raises:
            CheckpointError: the tensor or the header is damaged.
        """
        self.rows(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class StoredModelReader:
    """A reader of stored models, which holds only the rows of the requested replicate or client in memory.

    A tensor is compared with its checksum once, as long as the file does not change.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checked_files: set[tuple[Any, ...]] = set()

    def last_server_model(self, replicate: int) -> dict[str, Tensor]:
        """Return the server's model in the run's checkpoint; columns that stay on clients are averaged over them."""
        with translate_read_errors(self.folder / CHECKPOINT_FILE), self._open_file(CHECKPOINT_FILE) as file:
            naming, header, rows = self._read_header(file)
            row = file.rows("model")[replicate]
            if naming.columns.has_hidden_columns:
                private_columns, averaged = self._private_columns(file, replicate, range(rows))
                row = naming.columns.merge_parts(
                    row, private_columns.mean(0) if len(header["naming"]["private_parameters"]) else row[:0], averaged
                )
        return naming.state_dict(row)

    def best_model(self, replicate: int) -> dict[str, Tensor]:
        """Return the evaluated model of the round in which the selecting metric was best."""
        if not (self.folder / BEST_MODELS_FILE).exists():
            raise ConfigError(
                f"{self.folder} keeps no best model: the run had no metric to choose it by; give it validation "
                "samples by partition.validation=0.2, or a metric by stop.metric"
            )
        with translate_read_errors(self.folder / BEST_MODELS_FILE), self._open_file(BEST_MODELS_FILE) as file:
            naming, _, _ = self._read_header(file)
            return naming.state_dict(file.rows("model")[replicate])

    def client_model(self, replicate: int, client: int) -> dict[str, Tensor]:
        """Return the model that this client stores.

        It is the local rule's, else the strategy's (of several server models the one that the client trained last),
        else the server's with the columns that stay on the client.

        Raises:
            ConfigError: there is no such client, or clients store no model.
        """
        with translate_read_errors(self.folder / CHECKPOINT_FILE), self._open_file(CHECKPOINT_FILE) as file:
            naming, header, rows = self._read_header(file)
            if not 0 <= client < rows:
                raise ConfigError(f"client={client}, but {self.folder} has the clients 0 to {rows - 1}")
            client_row = replicate * rows + client
            if header["own"]:
                return naming.state_dict(file.rows(f"clients.{header['own'][0]}")[client_row])
            is_clustered = bool(header.get("clustered"))
            if not (header["kept"] or is_clustered or naming.private_parameters):
                raise ConfigError(
                    f"the clients of {self.folder} have no models of their own, since neither the local rule, the "
                    "strategy nor the columns define any"
                )
            row = file.rows("models")[client_row] if header["kept"] else file.rows("model")[replicate]
            if is_clustered and (choice := int(file.rows("choice")[client_row : client_row + 1])) >= 0:
                row = file.rows("clusters")[replicate][choice]
            if naming.columns.has_hidden_columns:
                private_columns, averaged = self._private_columns(file, replicate, range(client, client + 1))
                row = naming.columns.merge_parts(
                    row, private_columns[0] if naming.private_parameters else row[:0], averaged
                )
        return naming.state_dict(row)

    def _private_columns(self, file: _SafetensorsFile, replicate: int, clients: range) -> tuple[Tensor, Tensor]:
        """Return the private columns [c, d_o] of some clients, and the averaged ones [d_a]; empty if there are none."""
        no_columns, stored_names = torch.zeros(0), file.tensor_names
        private_name, averaged_name = f"clients.{OWN_COLUMNS_ENTRY}", f"server.{AVERAGED_COLUMNS_ENTRY}"
        rows = file.rows(private_name) if private_name in stored_names else None
        first_row = 0 if rows is None else replicate * (rows.get_shape()[0] // file.rows("model").get_shape()[0])
        return (
            no_columns[None] if rows is None else rows[first_row + clients.start : first_row + clients.stop],
            file.rows(averaged_name)[replicate] if averaged_name in stored_names else no_columns,
        )

    def _read_header(self, file: _SafetensorsFile) -> tuple[StateDictLayout, dict[str, Any], int]:
        """Return the parameter names, the header of the models, and the number of clients of each replicate."""
        try:
            header = json.loads(file.header[MODEL_HEADER_KEY])
            return StateDictLayout.from_json(header["naming"], self._constant_tensors), header, int(header["clients"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.folder} does not contain the names of its model's parts: it "
                "was written by an "
                "earlier version; run it again"
            ) from error

    @functools.cached_property
    def _constant_tensors(self) -> dict[str, Tensor]:
        if not (self.folder / CONSTANTS_FILE).exists():
            return {}
        with translate_read_errors(self.folder / CONSTANTS_FILE), self._open_file(CONSTANTS_FILE) as file:
            return {name: file.full_tensor(name) for name in sorted(file.tensor_names)}

    def _open_file(self, name: str) -> _SafetensorsFile:
        return _SafetensorsFile(self.folder / name, self._checked_files)
