"""What a run writes and shows."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.errors import ConfigError


@dataclass
class Tracking:
    """Attributes:

    progress: 'auto' shows a live line on a terminal and plain log lines elsewhere; 'none' shows nothing.
    tensorboard: write event files (only with a run folder).
    checkpoint_every: rounds between checkpoints, or 'auto': as often as costs at most 5 % of the wall time.
    """

    progress: str = "auto"
    tensorboard: bool = True
    checkpoint_every: int | str = "auto"

    def __post_init__(self) -> None:
        if self.progress not in ("auto", "none"):
            raise ConfigError(f"tracking.progress={self.progress!r} is unknown; choose 'auto' or 'none'")
        every = self.checkpoint_every
        if every != "auto" and (not isinstance(every, int) or every < 1):
            raise ConfigError(f"tracking.checkpoint_every={every!r} must be 'auto' or a whole number of at least 1")
