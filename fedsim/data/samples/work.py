"""The local work of a client in a round: number of local steps, batch size and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.core.constraints import Count, OneOf, Validated
from fedsim.core.errors import ConfigError

SAMPLING_MODES = ("pass", "replacement")
SamplingMode = Annotated[str, OneOf(*SAMPLING_MODES)]
DEFAULT_LOCAL_STEPS = 10  # if neither steps nor epochs are given


@dataclass
class LocalWork(Validated):
    """Attributes:

    steps: local steps per round; give this or `epochs`.
    epochs: passes over the client's own data per round.
    batch_size: samples per step; None: all samples of the client. In a pass, a client with fewer samples uses all
        of them.
    sampling: 'pass' goes through the client's data in random order and reshuffles after every pass; 'replacement'
        draws every batch of `batch_size` independently with replacement.
    drop_last: whether a pass drops its last, short batch (a client's only batch is not dropped).
    """

    steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count | None = 32
    sampling: SamplingMode = "pass"
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"{{steps}}={self.steps} and {{epochs}}={self.epochs} are mutually exclusive; set one to null",
                mentions=("steps", "epochs"),
            )
        if self.steps is None and self.epochs is None:
            self.steps = DEFAULT_LOCAL_STEPS


@dataclass
class Workload:
    """The work of n rows in a round, on the host.

    Attributes:
        num_samples: [n] samples of each row; 0 for a stream.
        size: [n] batch size.
        per_pass: [n] batches in one pass over the row's data.
        steps: [n] local steps.
        short_last: whether the last batch of a pass is shorter, if the batch size does not divide the number of
            samples.
    """

    num_samples: np.ndarray
    size: np.ndarray
    per_pass: np.ndarray
    steps: np.ndarray
    short_last: bool

    @property
    def order(self) -> np.ndarray | None:
        """Rows sorted by steps, then batch size, both descending; None if all are equal."""
        if len(self.steps) < 2 or (np.ptp(self.steps) == 0 and np.ptp(self.size) == 0):
            return None
        return np.lexsort((-self.size, -self.steps))

    def select_rows(self, rows: np.ndarray) -> Workload:
        """The workload of the rows at these positions."""
        return Workload(self.num_samples[rows], self.size[rows], self.per_pass[rows], self.steps[rows], self.short_last)

    def batch_sizes(self) -> np.ndarray:
        """[n, S] samples in the batch of every row and step; 0 after a row's last step."""
        step = np.arange(self.steps.max(initial=0))
        full_sizes = np.broadcast_to(self.size[:, None], (len(self.size), len(step)))
        if self.short_last:
            position = (step % self.per_pass[:, None]) * self.size[:, None]
            full_sizes = np.minimum(full_sizes, self.num_samples[:, None] - position)
        return np.where(step < self.steps[:, None], full_sizes, 0)
