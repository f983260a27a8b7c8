"""Options of what a run writes and shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fedsim.core import checks
from fedsim.core.constraints import AutoOrCount, OneOf, Validated
from fedsim.core.errors import ConfigError
from fedsim.run.tracking.observer import Observer, as_observer
from fedsim.run.tracking.services import SERVICES
from fedsim.run.tracking.tensorboard import TensorBoard


@dataclass
class Tracking(Validated):
    """Attributes:

    progress: 'auto' shows a live line on a terminal and plain log lines elsewhere; 'none' shows nothing.
    tensorboard: write event files (only with a run folder).
    observers: who else watches: 'wandb', 'mlflow', 'trackio', an `Observer`, or a function that gets each evaluation.
    checkpoint_every: rounds between checkpoints, or 'auto': as often as costs at most 3 % of the wall time.
    """

    progress: Annotated[str, OneOf("auto", "none")] = "auto"
    tensorboard: bool = True
    checkpoint_every: AutoOrCount = "auto"
    observers: Any = ()

    def __post_init__(self) -> None:
        if not isinstance(self.observers, (list, tuple)):
            raise ConfigError(
                f"{{observers}}={self.observers!r} must be a list, such as [wandb]", mentions=("observers",)
            )
        for observer in self.observers:
            if isinstance(observer, str):
                checks.check_choice("observers", observer, SERVICES)
        self.observers = [SERVICES[g]() if isinstance(g, str) else as_observer(g) for g in self.observers]

    @property
    def all_observers(self) -> list[Observer]:
        """All observers, TensorBoard's included."""
        return [TensorBoard(), *self.observers] if self.tensorboard else list(self.observers)
