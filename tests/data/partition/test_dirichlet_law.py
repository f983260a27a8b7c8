"""How far clients of partition=dirichlet form=equal are from Dir(α): what its docstring says, counted."""

from __future__ import annotations

import numpy as np

from fedsim.core import rng
from fedsim.data.partition import Dirichlet
from fedsim.data.partition.partition import Samples

CLIENTS, CLASSES, ALPHA = 100, 10, 0.1


def test_whoever_is_filled_last_is_more_concentrated():
    labels = np.repeat(np.arange(CLASSES), 600)
    first, last = [], []
    for seed in range(20):
        table = Dirichlet(ALPHA).table(Samples(len(labels), labels), CLIENTS, seed)
        draw = rng.generator(seed, rng.Purpose.PARTITION)
        for label in range(CLASSES):  # the pools are shuffled before the order is drawn
            draw.permutation(np.flatnonzero(labels == label))
        order = draw.permutation(CLIENTS)
        above = table.class_fractions(labels, CLASSES).max(1) > 0.9
        first.append(above[order[: CLIENTS // 2]].mean())
        last.append(above[order[-CLIENTS // 10 :]].mean())
    draws = np.random.default_rng(0).dirichlet([ALPHA] * CLASSES, 100_000)
    assert abs((draws.max(1) > 0.9).mean() - 0.145) < 0.005
    assert abs(np.mean(first) - 0.14) < 0.03
    assert abs(np.mean(last) - 0.38) < 0.10
