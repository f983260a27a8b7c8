"""What clients say of all their data at a model, beside what training tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """Attributes (n clients, in the cohort's order):

    loss: [n] the mean loss of all the client's data.
    gradient: [n, d] and its gradient.
    """

    loss: Tensor
    gradient: Tensor


Ask = Callable[[Any, Tensor], Answers]  # of a cohort's clients, at their replicate's model [R, d]
