"""Data sets in their published formats, written small."""

from __future__ import annotations

import torch
from hypothesis import settings

from fedsim.core import rng

SETTINGS = settings(max_examples=25, deadline=None)


def keys_of(clients: int) -> torch.Tensor:
    return rng.row_keys(torch.zeros(clients, dtype=torch.int64), rng.Purpose.AUGMENT, torch.arange(clients), 0)
