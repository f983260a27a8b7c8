"""The local work of a round and its result; tasks of several runs can be computed together."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.data.samples import RoundPlan
from fedsim.local.rule import Carry

T = TypeVar("T")


@dataclass
class LocalResult:
    """The rows after their local steps.

    Attributes:
        carry: [n, …] per entry.
        loss_sums: [n] sums of losses over steps.
        num_samples: [n] that each row met (host).
    """

    carry: Carry
    loss_sums: Tensor
    num_samples: np.ndarray


class TaskRunner(Protocol):
    """The interface of a trainer for the holder of its task."""

    def run_local_steps(self, local_task: LocalTask) -> LocalResult:
        """Take all rows through their local steps."""


@dataclass
class LocalTask:
    """The local steps of n rows in a round.

    Attributes:
        trainer: whose they are.
        batch_plan: on which samples.
        carry: [n, …] per entry.
        learning_rates: [S, n] of every step and row.
        replicate_index: [n] of each row.
        deployed_models: [R, d] the parameters that the data of a replicate react to; None where they react to none, or
            each row's own.
    """

    trainer: TaskRunner
    batch_plan: RoundPlan
    carry: Carry
    learning_rates: Tensor
    replicate_index: Tensor
    deployed_models: Tensor | None

    def __len__(self) -> int:
        return len(self.batch_plan.load.steps)


TaskGenerator = Generator[LocalTask, LocalResult, T]


def run_to_completion(steps: TaskGenerator[T]) -> T:
    """Run a generator to its result, computing each task by its own trainer."""
    try:
        local_task = next(steps)
        while True:
            local_task = steps.send(local_task.trainer.run_local_steps(local_task))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def is_row_finite(loss: Tensor, carry: Carry) -> Tensor:
    """Return whether loss [n] and everything in the row's carry [n, …] are finite, [n] bool, judged by sums."""
    for value in carry.values():
        if value.is_floating_point():
            sums = value.reshape(len(value), math.prod(value.shape[1:])).sum(1)
            loss = loss + sums.sub_(sums)  # zero, or not a number
    return torch.isfinite(loss)
