"""Whoever watches a run: called with each evaluation, it may show it elsewhere, write files, and end the run."""

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

if TYPE_CHECKING:  # no run need wait for matplotlib before its first round
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStarted:
    """The run that begins, or goes on.

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
        """Of the replicates: seed_0, seed_1, …"""
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
        """Column → mean over the replicates that are numbers."""
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
    """Watches a run. Every method does nothing unless overridden; an error ends the observer, not the run.

    Of several ranks the first one's observers are called. None are for a run that is finished already.

    Example:
        >>> class Patience(Observer):
        ...     def evaluated(self, seen):
        ...         return "it has learnt enough" if seen.mean()["train_loss"] < 0.1 else None
    """

    def begin(self, run: RunStarted) -> None:
        """Before the first round, or the next one of a run that is resumed; its folder is there."""

    def round_completed(self, completed_rounds: int) -> None:
        """After each round, before it is evaluated."""

    def evaluated(self, event: EvaluationEvent) -> str | None:
        """After each evaluation. A sentence that is returned ends the run, as `stop` does: checkpoint and summary are
        written, and `resume` goes on with it."""

    def replicates_to_drop(self) -> Mapping[int, str]:
        """Replicates that the run gives up, and why; asked for as the run begins and after each evaluation. Their
        metrics are NaN from the next evaluation on, and none of their clients computes any more."""
        return {}

    def finish(self, event: RunEnded) -> None:
        """After the last round; not where the run is interrupted."""

    def close(self) -> None:
        """Nothing comes any more, however the run ended."""


class CallbackObserver(Observer):
    """A function as an observer: it gets each evaluation.

    Args:
        function: `Observer.evaluated`.
    """

    def __init__(self, function: Callable[[EvaluationEvent], str | None]) -> None:
        self.function = function

    def evaluated(self, event: EvaluationEvent) -> str | None:
        return self.function(event)


class Observers:
    """Calls all of them; one that fails is left out from then on.

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
    def watch_rounds(self) -> bool:
        """Whether one of them is to be told of each round; calling them all would cost time in runs of short rounds."""
        return any(
            type(observer).round_completed is not Observer.round_completed for observer in self._active_observers
        )

    def round_completed(self, completed_rounds: int) -> None:
        self._notify(lambda observer: observer.round_completed(completed_rounds), f"after round {completed_rounds}")

    def evaluated(self, evaluation_event: EvaluationEvent) -> str | None:
        """The first sentence that ends the run, with who said it."""
        observer_replies = self._notify(
            lambda observer: observer.evaluated(evaluation_event), f"after round {evaluation_event.round}"
        )
        stop_reasons = [
            f"observer {name}: {reason} after round {evaluation_event.round}"
            for name, reason in observer_replies
            if isinstance(reason, str)
        ]
        return stop_reasons[0] if stop_reasons else None

    def replicates_to_drop(self) -> dict[int, str]:
        """Those that one of them gives up, and why."""
        observer_replies = self._notify(
            lambda observer: dict(observer.replicates_to_drop()), "as it was asked what to drop"
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
            except OutputError:  # a file of the run's own: that is an end of the run, as of metrics.csv
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
    """An observer, or a function that is made one.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(candidate, Observer):
        return candidate
    if callable(candidate) and not isinstance(candidate, type):
        return CallbackObserver(candidate)
    raise ConfigError(
        f"tracking.observers: {candidate!r} is no observer; give wandb, mlflow or trackio, or "
        f"{{_target_: package.Class}} "
        "of one derived from fedsim.run.tracking.Observer"
    )
