"""A shuffle is a sort by random numbers, and rows that draw alike are drawn once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.data.samples import Workload
from fedsim.data.samples.stored import group_equal_draws, positions, sort_slots_by_random


@pytest.mark.parametrize("most", [5, 2**20])
def test_slots_by_their_random_numbers(most):
    """Also where the numbers repeat, and where all that counts does not fit into one integer."""
    random = torch.randint(-3, 3, (4000, 5), dtype=torch.int32) * 2**29
    slot = torch.arange(5)
    assert torch.equal(sort_slots_by_random(random, slot, most), random.argsort(dim=-1, stable=True))
    flat, segment = random.flatten(), torch.arange(4000).repeat_interleave(5)
    found = sort_slots_by_random(flat, slot.repeat(4000), most, segment, 4000)
    assert torch.equal(found, random.argsort(dim=-1, stable=True).flatten())


def test_rows_that_draw_alike():
    keys, cpu = np.array([7, 3, 7, 7, 3]), torch.device("cpu")
    held = np.array([10, 4, 10, 9, 4])
    load = Workload(held, np.full(5, 2), held // 2, np.array([3, 3, 3, 3, 3]), True)
    first, kind = group_equal_draws(keys, load)
    assert len(first) == 3
    assert kind[0] == kind[2] != kind[3]
    assert kind[1] == kind[4]
    own = positions(keys, load, 3, "pass", cpu)
    assert torch.equal(positions(keys[first], load.select_rows(first), 3, "pass", cpu)[:, kind], own)
