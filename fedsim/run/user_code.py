"""User-defined parts during the rounds of a run: errors in one sentence, and a check that they draw from no global
random stream.

The trials before a run (`fedsim.run.rehearsal`) see some rounds. A part that fails or draws in another one ends the run
with a sentence that names it; the last checkpoint is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedsim.core import streams
from fedsim.core.errors import ConfigError, DivergenceError, OutputError, PeerError, RunError, first_message_line
from fedsim.core.numerical import is_numerical_error
from fedsim.run.contracts import contains_user_code, is_user_file
from fedsim.trainer import TaskGenerator

T = TypeVar("T")
RUN_ERROR_TYPES = (  # errors that have their own messages and are passed on
    ConfigError,
    RunError,
    DivergenceError,
    PeerError,
    OutputError,
    MemoryError,
    InterruptedError,
)


class UserCodeWatch:
    """Advances the rounds of a run, and watches its user-defined parts.

    Args:
        components: of the run, by group.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.components = {group: component for group, component in components.items() if contains_user_code(component)}
        self._read_rng_states = streams.fast_rng_state_reader()

    def watch_steps(self, steps: TaskGenerator[T], t: int) -> TaskGenerator[T]:
        """Yield the steps of round t. Work between them, such as that of other runs in lockstep, is not watched.

        Raises:
            RunError: a part raised an error, or drew from a global random stream.
        """
        if not self.components:
            return (yield from steps)
        result_of_task: Any = None
        try:
            while True:
                try:
                    with self._watch_round(t):
                        task = steps.send(result_of_task)
                except StopIteration as end:
                    result: T = end.value
                    return result
                result_of_task = yield task
        finally:
            steps.close()

    @contextlib.contextmanager
    def _watch_round(self, t: int) -> Iterator[None]:
        rng_state_before = self._read_rng_states()
        try:
            yield
        except StopIteration:
            self._check_global_rng_unused(rng_state_before, t)
            raise
        except RUN_ERROR_TYPES:
            raise
        except Exception as error:
            if is_numerical_error(error):
                raise
            message = failure_text(error, self.components, self._component_names_text())
            raise RunError(f"the run ended in round {t}: {message}") from error
        self._check_global_rng_unused(rng_state_before, t)

    def _check_global_rng_unused(self, rng_state_before: Any, t: int) -> None:
        if not streams.rng_states_equal(rng_state_before, self._read_rng_states()):
            raise RunError(
                f"the run ended in round {t}: {self._component_names_text()} drew from a global random stream, which "
                "depends on all that was drawn before; use fedsim.core.rng, whose numbers are functions of seed, round "
                "and client"
            )

    def _component_names_text(self) -> str:
        return " or ".join(
            f"{strip_part_number(group)}={type(component).__name__}" for group, component in self.components.items()
        )


def strip_part_number(group: str) -> str:
    """Return the name of a group without the number of one of its several parts."""
    return group.partition(".")[0]


def user_code_error_text(error: Exception, components: Mapping[str, Any]) -> str | None:
    """Return the error of a user-defined part as a sentence that names the part; None if no part raised it.

    A missing attribute of a part that fedsim asks for is due to an `__init__` or a `setup` that did not call its
    base's.
    """
    if not components:
        return None
    entries = [
        (entry, frame)
        for entry, (frame, _) in zip(
            traceback.extract_tb(error.__traceback__), traceback.walk_tb(error.__traceback__), strict=True
        )
        if is_user_file(entry.filename)
    ]
    if not entries:
        for group, component in components.items():
            if isinstance(error, AttributeError) and type(getattr(error, "obj", None)) is type(component):
                return (
                    f"{strip_part_number(group)}={type(component).__name__} has no attribute {error.name!r}, which its "
                    "base class sets; call super() in its __init__ and its setup"
                )
        return None
    last_entry = entries[-1][0]
    owners = [frame.f_locals.get("self") for _, frame in reversed(entries)]
    labels = [
        f"{strip_part_number(group)}={type(component).__name__}"
        for owner in owners
        for group, component in components.items()
        if type(component) is type(owner)
    ]
    name = labels[0] if labels else type(owners[0]).__name__ if owners[0] is not None else last_entry.name
    file = Path(last_entry.filename).name
    return f"{name} raised {type(error).__name__}: {first_message_line(error)} ({file}, line {last_entry.lineno})"


def failure_text(error: Exception, components: Mapping[str, Any], suspects_text: str) -> str:
    """Return the error of a user-defined part as a sentence; if no part raised it, the sentence says that
    `suspects_text` led to this error of fedsim or PyTorch."""
    return (
        user_code_error_text(error, components)
        or f"{suspects_text} led to {type(error).__name__}: {first_message_line(error)}"
    )


@contextlib.contextmanager
def user_code_error_context(components: Any) -> Iterator[None]:
    """Within the block, before a run, errors of user-defined parts are raised as a sentence that names the part.

    Raises:
        ConfigError: a part raised another error.
    """
    try:
        yield
    except RUN_ERROR_TYPES:
        raise
    except Exception as error:
        named_components = user_components(components)
        message = None if is_numerical_error(error) else user_code_error_text(error, named_components)
        if message is None and isinstance(error, TypeError) and named_components:  # a method with other parameters
            labels = [
                f"{strip_part_number(group)}={type(component).__name__}"
                for group, component in named_components.items()
            ]
            message = f"{' or '.join(labels)} led to TypeError: {first_message_line(error)}"
        if message is None:
            raise
        raise ConfigError(message) from error


def user_components(components: Any) -> dict[str, Any]:
    """Return the parts of a run that are user-defined, or contain such a part, by group."""
    groups = {entry.name: getattr(components, entry.name) for entry in dataclasses.fields(components)}
    stages = groups["uplink"].stages if groups["uplink"] is not None else ()
    groups |= {f"uplink.{number}": stage for number, stage in enumerate(stages)}
    return {
        group: component for group, component in groups.items() if group != "dataset" and contains_user_code(component)
    }
