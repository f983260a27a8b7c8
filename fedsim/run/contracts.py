"""How user-defined parts are tried: which parts are user-defined, their errors in one sentence, and changes they leave
behind.

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
from fedsim.core.errors import ConfigError, first_message_line
from fedsim.core.federation import Federation
from fedsim.core.ranks import ProcessRanks
from fedsim.core.snapshot import SnapshotNode, differing_paths, is_library_file, snapshot
from fedsim.data.datasets import Dataset
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.run.ownership import PartCopier

PACKAGE_FOLDER = Path(fedsim.__file__).parent
NamedTensors = dict[str, Tensor]
SHARED_OBJECT_TYPES = (
    Federation,
    ClientData,
    StatelessModel,
    Dataset,
    ProcessRanks,
)  # which parts are set up with but do not own
ROUNDING_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
}  # between two computations of the same number, relative to the largest

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
    """A change that must make no difference to what a part computes.

    Attributes:
        name: of what makes none.
        violation: tries a part; how it makes a difference, in a sentence, or None where it makes none.
        refuse: what happens then: an execution for which the invariance holds, or a ConfigError.
    """

    name: str
    violation: Callable[[P], str | None]
    refuse: Callable[[P, str], None]


def check_invariances(invariances: Iterable[Invariance[P]], trial: P) -> None:
    """Check the invariances in their order."""
    for invariance in invariances:
        violation_text = invariance.violation(trial)
        if violation_text is not None:
            invariance.refuse(trial, violation_text)


def raise_violation(_of: Any, violation_text: str) -> None:
    """Raise the error of an invariance that does not hold under any execution."""
    raise ConfigError(violation_text)


def is_user_defined(component: Any) -> bool:
    """Return whether the class of a part is user-defined."""
    return not type(component).__module__.startswith("fedsim.")


def contains_user_code(component: Any, search_depth: int = 3) -> bool:
    """Return whether a part is user-defined or contains a user-defined part, such as a schedule."""
    if component is None or isinstance(
        component, (*SHARED_OBJECT_TYPES, Tensor, np.ndarray, nn.Module, str, bytes, int, float, type)
    ):
        return False
    if isinstance(component, (list, tuple, Mapping)):
        members = list(component.values()) if isinstance(component, Mapping) else list(component)
        return any(contains_user_code(member, search_depth - 1) for member in members[:100]) if search_depth else False
    if type(component).__module__.startswith("fedsim."):
        return (
            any(contains_user_code(member, search_depth - 1) for member in getattr(component, "__dict__", {}).values())
            if search_depth
            else False
        )
    return bool(getattr(type(component), "__module__", "").partition(".")[0] not in LIBRARY_PACKAGES)


def copy_for_trial(component: P, *of_run: Any) -> P:
    """Return a copy of a part for a trial; it shares with the run the objects that it was set up with."""
    return PartCopier(*of_run, *_find_shared_objects(component, 4))(component)


def _find_shared_objects(component: Any, search_depth: int) -> Iterator[Any]:
    if isinstance(component, SHARED_OBJECT_TYPES):
        yield component
    elif search_depth and not isinstance(component, (Tensor, np.ndarray, str, bytes, int, float, type)):
        members = list(component.values()) if isinstance(component, Mapping) else []
        members += list(component) if isinstance(component, (list, tuple)) else []
        for member in [*members, *getattr(component, "__dict__", {}).values()]:
            yield from _find_shared_objects(member, search_depth - 1)


def take_snapshot(component: Any) -> SnapshotNode:
    """Return a snapshot of a part without the objects that it was set up with."""
    return snapshot(component, skipped_types=SHARED_OBJECT_TYPES)


def changed_attribute_paths(component: Any, snapshot_before: SnapshotNode) -> list[str]:
    """Return the paths at which a part has changed since a snapshot by `take_snapshot`."""
    return differing_paths(snapshot_before, take_snapshot(component))


def increased_attribute_names(component: Any, snapshot_before: SnapshotNode) -> list[str]:
    """Return the names of a part's own attributes that have increased since a snapshot by `take_snapshot`."""
    return [
        path
        for path in changed_attribute_paths(component, snapshot_before)
        if path.isidentifier() and path in getattr(component, "__dict__", {})
    ]


def is_close(first_tensor: Tensor, second_tensor: Tensor, scale: float | None = None) -> bool:
    """Return whether two tensors are equal up to rounding, relative to `scale`, by default the largest of the
    numbers."""
    if first_tensor.shape != second_tensor.shape or first_tensor.dtype != second_tensor.dtype:
        return False
    if not first_tensor.is_floating_point() or not first_tensor.numel():
        return torch.equal(first_tensor, second_tensor)
    max_magnitude = float(second_tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if scale is None else scale
    return torch.allclose(
        first_tensor,
        second_tensor,
        rtol=0,
        atol=ROUNDING_TOLERANCE.get(first_tensor.dtype, 1e-2) * max_magnitude,
        equal_nan=True,
    )


def first_differing_name(first_tensors: NamedTensors, second_tensors: NamedTensors) -> str | None:
    """Return the first name under which two batches, carries or states are not bitwise equal."""
    for tensor_name, value in first_tensors.items():
        if (
            tensor_name not in second_tensors
            or value.dtype != second_tensors[tensor_name].dtype
            or value.shape != second_tensors[tensor_name].shape
        ):
            return tensor_name
        if not torch.equal(
            value.nan_to_num(0.0) if value.is_floating_point() else value,
            (second_tensors[tensor_name].nan_to_num(0.0) if value.is_floating_point() else second_tensors[tensor_name]),
        ):
            return tensor_name
    return next((tensor_name for tensor_name in second_tensors if tensor_name not in first_tensors), None)


@contextlib.contextmanager
def user_code_errors(component_label: str, component: Any) -> Iterator[None]:
    """Within the block, errors of a user-defined part are raised as one sentence, and draws from a global stream are
    refused."""
    snapshot_before = streams.global_rng_state()
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        if not contains_user_code(component):
            raise
        user_frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
        location = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
        raise ConfigError(
            f"{component_label} raised {type(error).__name__}: {first_message_line(error)}{location}"
        ) from error
    if not streams.rng_states_equal(snapshot_before, streams.global_rng_state()):
        raise ConfigError(
            f"{component_label} draws from a global random stream, which depends on all that was drawn before; use "
            "fedsim.core.rng, whose numbers are functions of seed, round and client"
        )


def is_user_file(file: str) -> bool:
    """Return whether a file belongs neither to fedsim nor to a library."""
    return PACKAGE_FOLDER not in Path(file).parents and not is_library_file(file)


def fields_of_state(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def copy_tensors(component: Any) -> Any:
    """Return the same structure with copies of its tensors and arrays, which may be written to."""
    return dataclasses.replace(
        component, **{name: _copied_value(value) for name, value in fields_of_state(component).items()}
    )


def _copied_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied_value(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def undeclared_attributes(state: Any) -> list[str]:
    """Return the attributes of a state that are not fields, and are therefore not in checkpoints."""
    return sorted(vars(state).keys() - fields_of_state(state).keys())


def describe_type(value: Any) -> str:
    """Return the type of an object in a word."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else type(value).__name__
