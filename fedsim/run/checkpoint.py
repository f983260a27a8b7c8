"""Checkpoints: one safetensors file, written atomically; nothing is ever unpickled.

The file holds the strategy's state, what rule and shift remember and, as JSON in its header, the round and what the run
was. Everything else (data order, availability, noise) is a function of seed and round: this is all there is to save.
Every tensor has a checksum there, and the header one of its own: a disk or a copy that changed a bit is noticed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import fedsim
from fedsim.core import checksums
from fedsim.core.errors import CheckpointError
from fedsim.core.files import check_regular_path, replacement_file
from fedsim.core.memory import IN_FLIGHT, QUEUE, Memory
from fedsim.core.placement import is_memory_mapped
from fedsim.core.targets import with_current_class_paths
from fedsim.run import content as contents
from fedsim.run.layout import RankLayout
from fedsim.run.progress import Progress
from fedsim.run.run_files import CHECKPOINT_FILE
from fedsim.strategies import State

NAME = CHECKPOINT_FILE
CHECKPOINT_FORMAT = "fedsim-3"
MAX_WRITE_TIME_SHARE = 0.03  # share of wall time that `every: auto` may spend on writing
SINGLE_PROCESS_LAYOUT = RankLayout()
CONTENT_ENTRY, VERSIONS_ENTRY = "content", "versions"  # entries of the header

log = logging.getLogger(__name__)

S = TypeVar("S", bound=State)


def write(
    path: Path,
    state: State,
    progress: Progress,
    run_identity: dict[str, Any],
    memory: Memory | None = None,
    layout: RankLayout = SINGLE_PROCESS_LAYOUT,
    header: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint atomically: at every moment either the old or the new file is complete.

    Of several ranks each gives what it holds, the first writes, and all wait until it has.

    Args:
        path: of the file.
        state: the strategy's state.
        progress: where the run stands.
        run_identity: what the run is; a checkpoint is only resumed by a run of the same identity.
        memory: of rule and shift.
        layout: how ranks divide the tensors; the file is that of a single process, whoever wrote it.
        header: more entries of the header, such as what `fedsim.studies.results.StoredModelReader` reads.

    Raises:
        OutputError: it cannot be written; the old one is as it was.
    """
    memory = dataclasses.replace(memory or Memory())
    memory.in_flight = layout.gather_rows(memory.in_flight)
    local_tensors = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)} | memory.named_tensors()
    full_tensors = {name: layout.gather(name, value) for name, value in local_tensors.items()}
    if layout.ranks.is_main_rank:
        _write_checkpoint(path, full_tensors, progress, run_identity, header or {})
    layout.ranks.wait_for_all()


def _write_checkpoint(
    path: Path,
    full_tensors: dict[str, torch.Tensor],
    progress: Progress,
    identity: dict[str, Any],
    extra_header: dict[str, Any],
) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in full_tensors.items()}
    entries = {"progress": vars(progress), "identity": identity} | extra_header
    header = {"format": CHECKPOINT_FORMAT} | {name: json.dumps(value) for name, value in entries.items()}
    with replacement_file(path, "wb", durable=True) as file:
        file.write(save(tensors, metadata=checksums.add_checksums(header, tensors)))


def read(
    path: Path,
    template_state: S,
    run_identity: dict[str, Any],
    memory: Memory | None = None,
    layout: RankLayout = SINGLE_PROCESS_LAYOUT,
    content: dict[str, Any] | None = None,
) -> tuple[S, Progress]:
    """Read a checkpoint into a state of the same type, shapes and device as `template_state`. `memory`, and tensors of
    `template_state` that are memory-mapped, are filled in place.

    Of several ranks the first reads, and gives every other one its part. `content` is what the run is made of beside
    its settings, see `fedsim.run.content`; another version of PyTorch or fedsim is told.

    Raises:
        CheckpointError: for a damaged or foreign file, or one of another run; the message names the difference.
    """
    ranks = layout.ranks
    tensors, progress, made_of = (
        _load_state(path, run_identity, len(template_state.model)) if ranks.is_main_rank else ({}, Progress(), {})
    )
    state_fields = {f.name: getattr(template_state, f.name) for f in dataclasses.fields(template_state)}
    memory_tensors = (memory or Memory()).named_tensors()
    for tensor_name, expected_tensor in (state_fields | memory_tensors).items() if ranks.is_main_rank else ():
        tensor, whole_shape = tensors.get(tensor_name), layout.global_shape(tensor_name, expected_tensor)
        if tensor is None or tensor.shape != whole_shape or tensor.dtype != expected_tensor.dtype:
            description = (
                None if tensor is None else f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            )
            raise CheckpointError(
                f"checkpoint {path}: {tensor_name} is {description}, expected {list(whole_shape)} of "
                f"{str(expected_tensor.dtype).removeprefix('torch.')}; it belongs to another model"
            )
    if memory is not None and ranks.is_main_rank:
        memory.in_flight, memory.queue = (
            _in_flight(path, tensors, template_state.model),
            _group_tensors(tensors, QUEUE),
        )
    if memory is not None:
        memory.in_flight = layout.scatter_rows_to_ranks(memory.in_flight)
    if content is not None and ranks.is_main_rank:
        contents.check_content(path, made_of, content)
    for tensor_name, expected_tensor in (state_fields | memory_tensors).items():
        local_tensor = layout.scatter(tensor_name, tensors.get(tensor_name), expected_tensor)
        if tensor_name in memory_tensors or is_memory_mapped(expected_tensor):
            expected_tensor.copy_(local_tensor)
        else:
            state_fields[tensor_name] = local_tensor.to(expected_tensor.device)
    return type(template_state)(**state_fields), ranks.broadcast_object(progress)


def completed_rounds(path: Path) -> int | None:
    """Return the number of rounds after which a checkpoint was written: 0 if there is none, None if it does not say
    so."""
    if not path.exists():
        return 0
    try:
        with safe_open(check_regular_path(path), framework="pt") as file:
            return Progress.read(file.metadata()["progress"]).rounds
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError):
        return None


def _group_tensors(tensors: dict[str, torch.Tensor], group: str) -> dict[str, torch.Tensor]:
    """The entries of one group of the memory, of any length."""
    return {name.partition(".")[2]: rows for name, rows in tensors.items() if name.startswith(f"{group}.")}


def _in_flight(path: Path, tensors: dict[str, torch.Tensor], model: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the rows in flight: any number of them, for a model like this one [R, d]."""
    in_flight_rows = _group_tensors(tensors, IN_FLIGHT)
    if in_flight_rows and (
        len({len(rows) for rows in in_flight_rows.values()}) != 1
        or in_flight_rows["start"].shape[1:] != model.shape[1:]
    ):
        raise CheckpointError(f"checkpoint {path}: the delayed rows do not match; they belong to another model")
    return in_flight_rows


def _load_state(
    path: Path, run_identity: dict[str, Any], replicates: int
) -> tuple[dict[str, torch.Tensor], Progress, dict[str, Any]]:
    """Return the tensors, progress and content of a complete file that was written by a run of this identity."""
    try:
        with safe_open(check_regular_path(path), framework="pt") as file:
            file_header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"checkpoint {path} cannot be read ({reason}); delete it to start over") from error
    if file_header.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"checkpoint {path} was not written by this version of fedsim; delete it to start over")
    stored_identity, progress, content, library_versions = _read_header(path, file_header, tensors)
    stored_identity = with_current_class_paths(stored_identity)
    for key in sorted(stored_identity.keys() | run_identity.keys(), key=lambda name: (name.count("."), name)):
        if stored_identity.get(key) != json.loads(json.dumps(run_identity.get(key))):
            raise CheckpointError(
                f"checkpoint {path} belongs to another run: {key} was {stored_identity.get(key)!r}, now "
                f"{run_identity.get(key)!r}; use the same settings, or another out"
            )
    if not len(progress.samples) == len(progress.participants) == len(progress.links) == replicates:
        raise CheckpointError(f"checkpoint {path} has a damaged header (its counts); delete it to start over")
    progress.unanswered = progress.unanswered or [0] * replicates  # earlier versions did not count them
    current_versions = _library_versions()
    if version_changes := [
        f"{name} {library_versions[name]}, not {current_versions[name]}"
        for name in current_versions
        if library_versions.get(name, current_versions[name]) != current_versions[name]
    ]:
        log.warning(
            "the run was started with %s: further results may differ by rounding", " and ".join(version_changes)
        )
    return tensors, progress, content


def _read_header(
    path: Path, file_header: dict[str, str], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], Progress, dict[str, Any], dict[str, Any]]:
    """Return identity, progress, content and versions of a file; raise an error if the header lacks them or a checksum
    differs."""
    try:
        run_identity, progress = json.loads(file_header["identity"]), Progress.read(file_header["progress"])
        content, library_versions = (
            json.loads(file_header.get(name, "{}")) for name in (CONTENT_ENTRY, VERSIONS_ENTRY)
        )
        if not all(isinstance(entry, dict) for entry in (run_identity, content, library_versions)):
            raise ValueError("an entry is not a mapping")
        if library_versions and checksums.CHECKSUMS_KEY not in file_header:  # earlier versions wrote neither
            raise ValueError("it has no checksums")
        damaged_name = checksums.find_damaged_entry(file_header, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged header ({error}); delete it to start over") from error
    if damaged_name is not None:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {damaged_name} has changed since it was written (its checksum differs); "
            "restore "
            "the file from a copy, or delete it to start over"
        )
    return run_identity, progress, content, library_versions


def _library_versions() -> dict[str, str]:
    return {"fedsim": fedsim.__version__, "torch": str(torch.__version__)}


class Checkpointer:
    """Decides when to write checkpoints. `every` counts rounds; 'auto' writes as often as costs at most 3 % of the wall
    time.

    Attributes:
        path: of the file, or None where the run keeps nothing.
    """

    def __init__(
        self,
        folder: Path | None,
        every: int | str,
        identity: dict[str, Any],
        memory: Memory,
        layout: RankLayout = SINGLE_PROCESS_LAYOUT,
        header: dict[str, Any] | None = None,
    ) -> None:
        self.header = (header or {}) | {VERSIONS_ENTRY: _library_versions()}
        self.path = None if folder is None else folder / NAME
        self.every, self.identity, self.memory, self.layout = every, identity, memory, layout
        self._last_write_time, self._write_seconds = time.monotonic(), 0.0

    def exists(self) -> bool:
        """Return whether there is a checkpoint to resume from; with several ranks the first one looks."""
        return self.path is not None and bool(self.layout.ranks.broadcast_object(self.path.exists()))

    def read(self, template_state: S) -> tuple[S, Progress]:
        """Return the state, of the same type, shapes and device as `template_state`, and the progress; the run's memory
        is filled in place.

        Raises:
            CheckpointError: the file is damaged, or another run's.
        """
        assert self.path is not None
        content = self.header.get(CONTENT_ENTRY)
        return read(self.path, template_state, self.identity, self.memory, self.layout, content)

    def is_due(self, rounds: int, num_runs: int = 1) -> bool:
        """Return whether a checkpoint is due after this many completed rounds; with several ranks the first one
        decides. Runs in lockstep share the time that checkpoints may take."""
        if self.path is None or not self.layout.ranks.is_main_rank:
            return False
        if self.every == "auto":
            return time.monotonic() - self._last_write_time >= self._write_seconds * num_runs / MAX_WRITE_TIME_SHARE
        return rounds % int(self.every) == 0

    def write(self, state: State, progress: Progress) -> None:
        """Write a checkpoint now; do nothing for a run without a folder."""
        if self.path is None:
            return
        start_time = time.monotonic()
        write(self.path, state, progress, self.identity, self.memory, self.layout, self.header)
        self._last_write_time = time.monotonic()
        self._write_seconds = self._last_write_time - start_time
