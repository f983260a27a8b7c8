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


@pytest.mark.filterwarnings("ignore:get_state and legacy")
@pytest.mark.parametrize("name", [*DRAWS, "normal", "other generator"])
@pytest.mark.parametrize("keeps_normal", [False, True])
def test_the_fast_reader_notices_what_the_slow_one_does(name: str, keeps_normal: bool) -> None:
    """NumPy draws normal numbers in pairs and keeps the second one, outside of the state that the reader sees."""
    draws = DRAWS | {"normal": lambda: np.random.randn(), "other generator": lambda: None}  # noqa: NPY002
    with streams.preserve_rng_states():
        np.random.seed(0)  # noqa: NPY002
        if keeps_normal:
            np.random.randn()  # noqa: NPY002
        read_states = streams.fast_rng_state_reader()
        before = read_states()
        assert streams.rng_states_equal(before, read_states())
        generator = np.random.get_bit_generator()
        try:
            if name == "other generator":
                np.random.set_bit_generator(np.random.PCG64(0))
            draws[name]()
            assert not streams.rng_states_equal(before, read_states())
        finally:
            np.random.set_bit_generator(generator)
