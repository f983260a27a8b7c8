"""Global random streams, which user code could draw from: detect draws, and restore the states."""

from __future__ import annotations

import contextlib
import ctypes
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

MT19937_BYTES = 624 * 4 + 4  # of NumPy's mt19937_state: the numbers, and the position of the next one


def global_rng_state() -> tuple[Tensor, Any, Any]:
    """Return the states of the host's random streams."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 (a user's module may draw from it)


def fast_rng_state_reader() -> Callable[[], tuple[Tensor, Any, Any]]:
    """Return a function that reads the same states several times a round, for comparisons only.

    `numpy.random.get_state` copies 624 numbers one by one, which takes most of the time of `global_rng_state`; here
    they are read from memory. A normal number that NumPy keeps for its next draw is not there: if it keeps one now,
    the function is `global_rng_state`. To keep one later, it must draw, which the function shows.
    """
    generator = _numpy_generator()
    keeps_normal = bool(np.random.get_state(legacy=False)["has_gauss"])  # noqa: NPY002 (a user may draw from it)
    if not isinstance(generator, np.random.MT19937) or keeps_normal:
        return global_rng_state

    def read_states() -> tuple[Tensor, Any, Any]:
        if _numpy_generator() is not generator:
            return global_rng_state()
        numpy_state = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
        return torch.get_rng_state(), numpy_state, random.getstate()

    return read_states


def _numpy_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in NumPy's annotations


def rng_states_equal(first_state: tuple[Tensor, Any, Any], second_state: tuple[Tensor, Any, Any]) -> bool:
    """Return whether nothing was drawn between two states, which were read by the same function."""
    if isinstance(first_state[1], bytes) or isinstance(second_state[1], bytes):
        return torch.equal(first_state[0], second_state[0]) and first_state[1:] == second_state[1:]
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
