"""The random streams that a user's code could draw from: whether it did, and as they were before."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> tuple[Tensor, Any, Any]:
    """The states of the host's random streams."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 (a user's module may draw from it)


def states_equal(first: tuple[Tensor, Any, Any], second: tuple[Tensor, Any, Any]) -> bool:
    """Has nothing been drawn in between?"""
    legacy = all(np.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    return torch.equal(first[0], second[0]) and legacy and first[2] == second[2]


def reseed(seed: int) -> None:
    """All streams that a module could draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (a user's module may draw from it)
    random.seed(seed)


@contextlib.contextmanager
def restore_states() -> Iterator[None]:
    """Whatever is drawn inside, afterwards all streams are as before."""
    saved_state = rng_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_rng_state(saved_state[0])
        np.random.set_state(saved_state[1])  # noqa: NPY002 (a user's module may draw from it)
        random.setstate(saved_state[2])


@contextlib.contextmanager
def quiet_trial() -> Iterator[None]:
    """Something is tried inside: without warnings, and afterwards all streams are as before."""
    with warnings.catch_warnings(), restore_states():
        warnings.simplefilter("ignore")
        yield
