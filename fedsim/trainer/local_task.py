"""What a round asks of a trainer, and what comes back: whoever holds several works may do them together."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.data.samples import Plan
from fedsim.local.rule import Carry

T = TypeVar("T")


@dataclass
class LocalResult:
    """The rows after their local steps.

    Attributes:
        carry: [n, …] per entry.
        loss: [n] sums of losses over steps.
        samples: [n] that each row met (host).
    """

    carry: Carry
    loss: Tensor
    samples: np.ndarray


class TaskRunner(Protocol):
    """A trainer, seen from whoever holds its work."""

    def run_local_steps(self, work: LocalTask) -> LocalResult:
        """All rows through their local steps."""


@dataclass
class LocalTask:
    """The local steps of n rows in a round.

    Attributes:
        trainer: whose they are.
        plan: on which samples.
        carry: [n, …] per entry.
        rates: [S, n] of every step and row.
        replicate: [n] of each row.
        deployed: [R, d] the parameters that the data of a replicate answer to; None where they answer none, or each
            row's own.
    """

    trainer: TaskRunner
    plan: Plan
    carry: Carry
    rates: Tensor
    replicate: Tensor
    deployed: Tensor | None

    def __len__(self) -> int:
        return len(self.plan.load.steps)


TaskGenerator = Generator[LocalTask, LocalResult, T]


def run_to_completion(steps: TaskGenerator[T]) -> T:
    """What comes out of it where every work is done on its own, by the trainer whose it is."""
    try:
        work = next(steps)
        while True:
            work = steps.send(work.trainer.run_local_steps(work))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def finite_rows(loss: Tensor, carry: Carry) -> Tensor:
    """[n] bool: are loss [n] and everything that the row carries [n, …] finite? A sum is the quickest look at a row."""
    for value in carry.values():
        if value.is_floating_point():
            sums = value.reshape(len(value), math.prod(value.shape[1:])).sum(1)
            loss = loss + sums.sub_(sums)  # zero, or not a number
    return torch.isfinite(loss)
