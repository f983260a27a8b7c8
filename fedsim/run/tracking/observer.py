"""Observers of a run: called at each evaluation, they may show metrics elsewhere, write files, and end the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedsim.core.constraints import Validated
from fedsim.core.errors import ConfigError, OutputError
from fedsim.run.tracking.result import MetricsRow, mean_std

if TYPE_CHECKING:  # imported later: a run need not wait for matplotlib before its first round
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStarted:
    """The start of a run, or its continuation.

    Attributes:
        folder: of the run, where an observer may write files of its own; None where the run keeps nothing.
        seeds: of the replicates.
        rounds: planned.
        completed_rounds: rounds that were run before; what an observer has seen of later ones comes again.
        settings: named values.
        config: config.yaml; None for a run that was begun without one.
    """

    folder: Path | None
    seeds: tuple[int, ...]
    rounds: int
    completed_rounds: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    config: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of the replicates: seed_0, seed_1, …"""
        seeds = self.seeds
        return [f"seed_{s}" + (f"_replicate_{r}" if seeds.count(s) > 1 else "") for r, s in enumerate(seeds)]


@dataclass(frozen=True)
class EvaluationEvent:
    """One evaluation.

    Attributes:
        round: completed ones; 0 is the initial model.
        rows: one per replicate, as in metrics.csv.
        clients: name → one number per client, of what was measured of each.
        model: number of a replicate → its evaluated model as a `state_dict`.
    """

    round: int
    rows: list[MetricsRow]
    clients: dict[str, np.ndarray]
    model: Callable[[int], dict[str, Tensor]]

    def mean(self) -> MetricsRow:
        """Return column → mean over the replicates that are not NaN."""
        return {name: mean_std([float(row[name]) for row in self.rows])[0] for name in self.rows[0] if name != "seed"}


@dataclass(frozen=True)
class RunEnded:
    """The end of a run.

    Attributes:
        round: completed ones.
        summary: summary.json.
        pictures: makes heading and figure of each picture; none of a run without a folder.
    """

    round: int
    summary: dict[str, Any]
    pictures: Callable[[], Iterator[tuple[str, Figure]]]


class Observer(Validated):
    """Observes a run. All methods do nothing unless overridden; an error disables the observer, and the run continues.

    Of several ranks the first one's observers are called. None are for a run that is finished already.

    Example:
        >>> class Patience(Observer):
        ...     def evaluated(self, seen):
        ...         return "it has learnt enough" if seen.mean()["train_loss"] < 0.1 else None
    """

    def begin(self, run: RunStarted) -> None:
        """Called before the first round, or before the next one of a resumed run; the run folder exists."""

    def round_completed(self, completed_rounds: int) -> None:
        """Called after each round, before it is evaluated."""

    def evaluated(self, event: EvaluationEvent) -> str | None:
        """Called after each evaluation. A returned sentence ends the run, as `stop` does: checkpoint and summary are
        written, and `resume` continues the run."""

    def drop_reason_by_replicate(self) -> Mapping[int, str]:
        """Return replicates to drop, and why; called at the start of the run and after each evaluation. Their metrics
        are NaN from the next evaluation on, and their clients compute no more."""
        return {}

    def finish(self, event: RunEnded) -> None:
        """Called after the last round, unless the run is interrupted."""

    def close(self) -> None:
        """Called once at the end, however the run ended."""


class CallbackObserver(Observer):
    """An observer that calls a function at each evaluation.

    Args:
        function: `Observer.evaluated`.
    """

    def __init__(self, function: Callable[[EvaluationEvent], str | None]) -> None:
        self.function = function

    def evaluated(self, event: EvaluationEvent) -> str | None:
        return self.function(event)


class Observers:
    """Calls several observers; one that fails is left out from then on.

    Args:
        observers: in the order in which they are called.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._active_observers = list(observers)

    def __bool__(self) -> bool:
        return bool(self._active_observers)

    def begin(self, run: RunStarted) -> None:
        self._notify(lambda observer: observer.begin(run), "as the run began")

    @property
    def observes_rounds(self) -> bool:
        """Whether an observer wants to be told of each round; calling all of them would cost time in short rounds."""
        return any(
            type(observer).round_completed is not Observer.round_completed for observer in self._active_observers
        )

    def round_completed(self, completed_rounds: int) -> None:
        self._notify(lambda observer: observer.round_completed(completed_rounds), f"after round {completed_rounds}")

    def evaluated(self, evaluation_event: EvaluationEvent) -> str | None:
        """Return the first sentence that ends the run, with the observer's name."""
        observer_replies = self._notify(
            lambda observer: observer.evaluated(evaluation_event), f"after round {evaluation_event.round}"
        )
        stop_reasons = [
            f"observer {name}: {reason} after round {evaluation_event.round}"
            for name, reason in observer_replies
            if isinstance(reason, str)
        ]
        return stop_reasons[0] if stop_reasons else None

    def drop_reason_by_replicate(self) -> dict[int, str]:
        """Return the replicates that an observer drops, and why."""
        observer_replies = self._notify(
            lambda observer: dict(observer.drop_reason_by_replicate()), "as it was asked what to drop"
        )
        return {replicate: reason for _, reasons in observer_replies for replicate, reason in reasons.items()}

    def finish(self, run_ended: RunEnded) -> None:
        self._notify(lambda observer: observer.finish(run_ended), "as the run ended")

    def close(self) -> None:
        self._notify(lambda observer: observer.close(), "as it was closed")
        self._active_observers = []

    def _notify(self, call: Callable[[Observer], Any], moment_name: str) -> Sequence[tuple[str, Any]]:
        observer_replies = []
        for observer in list(self._active_observers):
            observer_name = _observer_name(observer)
            try:
                observer_replies.append((observer_name, call(observer)))
            except OutputError:  # a file of the run itself: the run ends, as for metrics.csv
                raise
            except Exception as error:
                reason = next(iter(str(error).splitlines()), "")
                log.warning(
                    "observer %s failed %s (%s: %s); it is disabled, and the run continues",
                    *(observer_name, moment_name, type(error).__name__, reason),
                )
                self._active_observers.remove(observer)
                with contextlib.suppress(Exception):
                    observer.close()
        return observer_replies


def _observer_name(observer: Observer) -> str:
    implementation = observer.function if isinstance(observer, CallbackObserver) else type(observer)
    return str(getattr(implementation, "__name__", type(implementation).__name__))


def as_observer(candidate: Any) -> Observer:
    """Return an observer; a function is wrapped.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(candidate, Observer):
        return candidate
    if callable(candidate) and not isinstance(candidate, type):
        return CallbackObserver(candidate)
    raise ConfigError(
        f"tracking.observers: {candidate!r} is not an observer; give wandb, mlflow or trackio, or "
        f"{{_target_: package.Class}} "
        "of one derived from fedsim.run.tracking.Observer"
    )
