"""How what a user wrote is tried: whose it is, its errors in one sentence, what it left behind.

An `Invariance` is something that must make no difference to what a part computes, such as padding or a second call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import fedsim
from fedsim.core import streams
from fedsim.core.errors import ConfigError, first_line
from fedsim.core.federation import Federation
from fedsim.core.ranks import Ranks
from fedsim.core.snapshot import Node, differing_paths, in_a_library, snapshot
from fedsim.data.datasets import Dataset
from fedsim.data.samples import ClientData
from fedsim.models import RowModel
from fedsim.run.ownership import PartCopies

PACKAGE_FOLDER = Path(fedsim.__file__).parent
NamedTensors = dict[str, Tensor]
RUN_OBJECT_TYPES = (Federation, ClientData, RowModel, Dataset, Ranks)  # what parts are set up with, and do not own
ROUNDING_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
}  # of two ways to compute one number, relative to the largest

LIBRARY_PACKAGES = {
    "builtins",
    "numpy",
    "torch",
    "collections",
    "functools",
    "pathlib",
    "itertools",
    "types",
    "omegaconf",
}

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class Invariance(Generic[P]):
    """Something that must make no difference to what a part computes.

    Attributes:
        name: of what makes none.
        violation: tries a part; how it makes a difference, in a sentence, or None where it makes none.
        otherwise: what happens then: an execution for which the invariance holds, or a ConfigError.
    """

    name: str
    violation: Callable[[P], str | None]
    otherwise: Callable[[P, str], None]


def check_invariances(invariances: Iterable[Invariance[P]], trial: P) -> None:
    """Try them, in their order."""
    for invariance in invariances:
        broken = invariance.violation(trial)
        if broken is not None:
            invariance.otherwise(trial, broken)


def refuse_part(_of: Any, broken: str) -> None:
    """What happens where no execution helps."""
    raise ConfigError(broken)


def is_user_defined(component: Any) -> bool:
    """Is it somebody's own?"""
    return not type(component).__module__.startswith("fedsim.")


def contains_user_code(component: Any, depth: int = 3) -> bool:
    """Is it somebody's own, or does it hold something that is, such as a schedule?"""
    if component is None or isinstance(
        component, (*RUN_OBJECT_TYPES, Tensor, np.ndarray, nn.Module, str, bytes, int, float, type)
    ):
        return False
    if isinstance(component, (list, tuple, Mapping)):
        members = list(component.values()) if isinstance(component, Mapping) else list(component)
        return any(contains_user_code(member, depth - 1) for member in members[:100]) if depth else False
    if type(component).__module__.startswith("fedsim."):
        return (
            any(contains_user_code(member, depth - 1) for member in getattr(component, "__dict__", {}).values())
            if depth
            else False
        )
    return bool(getattr(type(component), "__module__", "").partition(".")[0] not in LIBRARY_PACKAGES)


def trial_copy(component: P, *of_run: Any) -> P:
    """A part to be tried, which shares with the run what it was set up with."""
    return PartCopies(*of_run, *_run_objects(component, 4))(component)


def _run_objects(component: Any, depth: int) -> Iterator[Any]:
    if isinstance(component, RUN_OBJECT_TYPES):
        yield component
    elif depth and not isinstance(component, (Tensor, np.ndarray, str, bytes, int, float, type)):
        members = list(component.values()) if isinstance(component, Mapping) else []
        members += list(component) if isinstance(component, (list, tuple)) else []
        for member in [*members, *getattr(component, "__dict__", {}).values()]:
            yield from _run_objects(member, depth - 1)


def snapshot_of(component: Any) -> Node:
    """A snapshot of a part, but for what it was set up with."""
    return snapshot(component, skip=RUN_OBJECT_TYPES)


def changed_paths(component: Any, before: Node) -> list[str]:
    """Where a part has changed since a snapshot by `snapshot_of`."""
    return differing_paths(before, snapshot_of(component))


def moved_counters(component: Any, before: Node) -> list[str]:
    """Names of a part's own attributes that have moved since a snapshot by `snapshot_of`."""
    return [
        path
        for path in changed_paths(component, before)
        if path.isidentifier() and path in getattr(component, "__dict__", {})
    ]


def close_to(first: Tensor, second: Tensor, scale: float | None = None) -> bool:
    """Equal but for rounding; `scale` is of the numbers that count, the largest one's unless given."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point() or not first.numel():
        return torch.equal(first, second)
    largest = float(second.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if scale is None else scale
    return torch.allclose(
        first, second, rtol=0, atol=ROUNDING_TOLERANCE.get(first.dtype, 1e-2) * largest, equal_nan=True
    )


def first_difference(first: NamedTensors, second: NamedTensors) -> str | None:
    """The first name under which two batches, carries or states are not bit for bit the same."""
    for name, value in first.items():
        if name not in second or value.dtype != second[name].dtype or value.shape != second[name].shape:
            return name
        if not torch.equal(
            value.nan_to_num(0.0) if value.is_floating_point() else value,
            (second[name].nan_to_num(0.0) if value.is_floating_point() else second[name]),
        ):
            return name
    return next((name for name in second if name not in first), None)


@contextlib.contextmanager
def user_code_errors(label: str, component: Any) -> Iterator[None]:
    """Errors of somebody's own part in one sentence; nothing may be drawn from a global stream."""
    before = streams.rng_state()
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        if not contains_user_code(component):
            raise
        user_frames = [f for f in traceback.extract_tb(error.__traceback__) if in_user_code(f.filename)]
        location = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
        raise ConfigError(f"{label} raised {type(error).__name__}: {first_line(error)}{location}") from error
    if not streams.states_equal(before, streams.rng_state()):
        raise ConfigError(
            f"{label} draws from a global random stream, which depends on all that was drawn before; use "
            "fedsim.core.rng, whose numbers are functions of seed, round and client"
        )


def in_user_code(file: str) -> bool:
    """Is this file neither fedsim's nor a library's?"""
    return PACKAGE_FOLDER not in Path(file).parents and not in_a_library(file)


def state_fields(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def copy_tensors(of: Any) -> Any:
    """The same with tensors and arrays of its own, which may be written to."""
    return dataclasses.replace(of, **{name: _copied(value) for name, value in state_fields(of).items()})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def unlisted(state: Any) -> list[str]:
    """Attributes of a state that are none of its fields, and so in no checkpoint."""
    return sorted(vars(state).keys() - state_fields(state).keys())


def describe_type(value: Any) -> str:
    """What it is, in a word."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else type(value).__name__
