"""Global random streams, which user code could draw from: detect draws, and restore the states."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def global_rng_state() -> tuple[Tensor, Any, Any]:
    """Return the states of the host's random streams."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 (a user's module may draw from it)


def rng_states_equal(first_state: tuple[Tensor, Any, Any], second_state: tuple[Tensor, Any, Any]) -> bool:
    """Return whether nothing was drawn between two states."""
    (name, keys, *rest), (other_name, other_keys, *other_rest) = first_state[1], second_state[1]
    numpy_states_equal = (name, rest) == (other_name, other_rest) and np.array_equal(keys, other_keys)
    return torch.equal(first_state[0], second_state[0]) and numpy_states_equal and first_state[2] == second_state[2]


def reseed_global_generators(seed: int) -> None:
    """Seed all global random streams."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (a user's module may draw from it)
    random.seed(seed)


@contextlib.contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore all random streams after the block, PyTorch's by `fork_rng`."""
    saved_state = global_rng_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        np.random.set_state(saved_state[1])  # noqa: NPY002 (a user's module may draw from it)
        random.setstate(saved_state[2])


@contextlib.contextmanager
def suppress_trial_effects() -> Iterator[None]:
    """Within the block warnings are suppressed; afterwards all random streams are restored. For trials."""
    with warnings.catch_warnings(), preserve_rng_states():
        warnings.simplefilter("ignore")
        yield
