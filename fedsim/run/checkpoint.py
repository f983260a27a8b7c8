"""Checkpoints: one safetensors file, written atomically; nothing is ever unpickled.

The file holds the strategy's state, what rule and shift remember and, as JSON in its header, the round and what the run
was. Everything else (data order, availability, noise) is a function of seed and round: this is all there is to save.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedsim.core.errors import CheckpointError
from fedsim.core.files import replacing
from fedsim.core.memory import Memory
from fedsim.core.placement import mapped
from fedsim.results.files import CHECKPOINT
from fedsim.results.models import HEADER
from fedsim.run.layout import Layout
from fedsim.strategies import State

NAME = CHECKPOINT
FORMAT = "fedsim-3"
OVERHEAD = 0.03  # share of wall time that `every: auto` may spend on writing
UNDIVIDED = Layout()

S = TypeVar("S", bound=State)


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        rounds: completed ones.
        seconds: spent.
        samples: [R] processed by each replicate.
        participants: [R] clients that took part since the last evaluation, summed over `unevaluated` rounds.
        links: [R] how often clients were connected with the server: those that took part, summed over all rounds.
        unevaluated: rounds since the last evaluation.
        dropped: clients or replicates that became non-finite and were dropped, see `fedsim.run.divergence`.
        executors: what a trial settled, by the local rules' names, see `fedsim.trainer.trial`.
    """

    rounds: int = 0
    seconds: float = 0.0
    samples: list[int] = field(default_factory=list)
    participants: list[float] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    unevaluated: int = 0
    dropped: list[dict[str, Any]] = field(default_factory=list)
    executors: dict[str, str] = field(default_factory=dict)


def write(
    path: Path,
    state: State,
    progress: Progress,
    identity: dict[str, Any],
    memory: Memory | None = None,
    layout: Layout = UNDIVIDED,
    about: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint so that at every moment either the old or the new file is whole.

    Of several ranks each gives what it holds, the first writes, and all wait until it has.

    Args:
        path: of the file.
        state: the strategy's state.
        progress: where the run stands.
        identity: what the run is; a checkpoint is only resumed by a run of the same identity.
        memory: of rule and shift.
        layout: how ranks divide the tensors; the file is that of a single process, whoever wrote it.
        about: what is told of the models in it, see `fedsim.results.StoredModels`.

    Raises:
        OutputError: it cannot be written; the old one is as it was.
    """
    kept = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)} | (memory or Memory()).tensors()
    whole = {name: layout.gather(name, value) for name, value in kept.items()}
    if layout.ranks.first:
        _write(path, whole, progress, identity, about or {})
    layout.ranks.wait()


def _write(
    path: Path, kept: dict[str, torch.Tensor], progress: Progress, identity: dict[str, Any], about: dict[str, Any]
) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    told = {"progress": vars(progress), "identity": identity, HEADER: about}
    header = {"format": FORMAT} | {name: json.dumps(value) for name, value in told.items()}
    with replacing(path, "wb", durable=True) as file:
        file.write(save(tensors, metadata=header))


def read(
    path: Path, like: S, identity: dict[str, Any], memory: Memory | None = None, layout: Layout = UNDIVIDED
) -> tuple[S, Progress]:
    """Read a checkpoint into a state of the same type, shapes and device as `like`; `memory` is filled in place, as is
    what of `like` lies in a file.

    Of several ranks the first reads, and gives every other one its part.

    Raises:
        CheckpointError: for a damaged or foreign file, or one of another run; the message names the difference.
    """
    ranks = layout.ranks
    tensors, progress = _load(path, identity, len(like.model)) if ranks.first else ({}, Progress())
    fields = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
    remembered = (memory or Memory()).tensors()
    for name, expected in (fields | remembered).items():
        found, shape = tensors.get(name), layout.whole_shape(name, expected)
        if ranks.first and (found is None or found.shape != shape or found.dtype != expected.dtype):
            was = None if found is None else list(found.shape)
            raise CheckpointError(f"checkpoint {path}: {name} is {was}, expected {list(shape)}")
        part = layout.deal(name, found, expected)
        if name in remembered or mapped(expected):
            expected.copy_(part)
        else:
            fields[name] = part.to(expected.device)
    return type(like)(**fields), ranks.tell(progress)


def _load(path: Path, identity: dict[str, Any], replicates: int) -> tuple[dict[str, torch.Tensor], Progress]:
    """The tensors of a whole file that was written by a run of this identity, and where that stood."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({error}); delete it to start afresh") from error
    if header.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} was not written by this version of fedsim; delete it to start afresh")
    was, progress = _told(path, header)
    for key in sorted(was.keys() | identity.keys(), key=lambda name: (name.count("."), name)):
        if was.get(key) != json.loads(json.dumps(identity.get(key))):
            raise CheckpointError(
                f"checkpoint {path} belongs to another run: {key} was {was.get(key)!r}, now {identity.get(key)!r}; "
                "give the same settings, or another out"
            )
    if not len(progress.samples) == len(progress.participants) == len(progress.links) == replicates:
        raise CheckpointError(f"checkpoint {path} has a damaged header (its counts); delete it to start afresh")
    return tensors, progress


def _told(path: Path, header: dict[str, str]) -> tuple[dict[str, Any], Progress]:
    """Identity and progress, or an error where the header does not hold them."""
    try:
        identity, progress = json.loads(header["identity"]), Progress(**json.loads(header["progress"]))
        if not isinstance(identity, dict) or not isinstance(progress.rounds, int) or progress.rounds < 1:
            raise ValueError(f"it tells of {progress.rounds!r} rounds")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged header ({error}); delete it to start afresh") from error
    return identity, progress


class Checkpointer:
    """Decides when to write. `every` counts rounds; 'auto' writes as often as costs at most 3 % of the wall time.

    Attributes:
        path: of the file, or None where the run keeps nothing.
    """

    def __init__(
        self,
        folder: Path | None,
        every: int | str,
        identity: dict[str, Any],
        memory: Memory,
        layout: Layout = UNDIVIDED,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.about = about
        self.path = None if folder is None else folder / NAME
        self.every, self.identity, self.memory, self.layout = every, identity, memory, layout
        self._last, self._cost = time.monotonic(), 0.0

    def due(self, rounds: int) -> bool:
        """Is it time to write after this many completed rounds? Of several ranks the first says so."""
        if self.path is None or not self.layout.ranks.first:
            return False
        if self.every == "auto":
            return time.monotonic() - self._last >= self._cost / OVERHEAD
        return rounds % int(self.every) == 0

    def write(self, state: State, progress: Progress) -> None:
        """Write now (nothing, where the run keeps nothing)."""
        if self.path is None:
            return
        begin = time.monotonic()
        write(self.path, state, progress, self.identity, self.memory, self.layout, self.about)
        self._last = time.monotonic()
        self._cost = self._last - begin
