"""Random streams that a user's code could draw from: noticed, and put back."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedsim.core import streams

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(()),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "random": random.random,
    "reseeded": lambda: streams.reseed_global_generators(3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_noticed_and_put_back(name: str) -> None:
    before = streams.global_rng_state()
    assert streams.rng_states_equal(before, streams.global_rng_state())
    with streams.preserve_rng_states():
        DRAWS[name]()
        assert not streams.rng_states_equal(before, streams.global_rng_state())
    assert streams.rng_states_equal(before, streams.global_rng_state())
    with streams.suppress_trial_effects():
        DRAWS[name]()
        warnings.warn("not heard", stacklevel=1)
    assert streams.rng_states_equal(before, streams.global_rng_state())


def test_a_seed_is_that_of_all_streams() -> None:
    with streams.preserve_rng_states():
        drawn = []
        for seed in (1, 1, 2):
            streams.reseed_global_generators(seed)
            drawn.append([torch.rand(()).item(), np.random.rand(), random.random()])  # noqa: NPY002
    assert drawn[0] == drawn[1]
    assert not {*drawn[0]} & {*drawn[2]}
