"""Rows that two replicates' clients send, sent through a chain of stages without a run around it."""

from __future__ import annotations

import numpy as np
import torch

from fedsim.core import Federation, Memory, rng
from fedsim.core.report import Report
from fedsim.uplink import Uplink

M, D, SEEDS = 4, 7, (3, 8)
# [T, R, m]: round 2 is empty, round 3 for the second replicate
COUNTS = np.array(
    [[[1, 0, 1, 1], [1, 1, 0, 0]], [[0, 1, 1, 0], [1, 0, 0, 0]], np.zeros((2, M)), [[0, 0, 1, 1], [0, 0, 0, 0]],
     [[0, 1, 1, 0], [1, 1, 0, 1]]]
)  # fmt: skip
FEDERATION = Federation(SEEDS, M, np.ones(len(SEEDS) * M), dtype=torch.float64)


def sent(t: int) -> np.ndarray:
    """[R·m, d] what everybody would send in round t."""
    return np.random.default_rng(t).standard_normal((len(SEEDS) * M, D)) * np.arange(1, 9)[:, None]


def through(chain: Uplink, rows: torch.Tensor, cohort, memory: Memory) -> torch.Tensor:
    """What arrives of the cohort's rows [n, d]."""
    one = rows[:, 0]
    report = Report(cohort, torch.zeros_like(rows), {"params": -rows}, one, one, one, np.ones(len(cohort)))
    got = chain(report, memory)
    assert torch.equal(got.end, got.start - got.innovation)
    return got.innovation


def arrived(chain: Uplink, counts: np.ndarray = COUNTS, federation: Federation = FEDERATION) -> list[dict]:
    """Round by round: virtual client → what the server gets of it."""
    memory, found = Memory(), []
    chain.add_stage_memory(memory, federation, torch.zeros(federation.num_replicates, D, dtype=torch.float64))
    for t, count in enumerate(counts):
        cohort = federation.make_cohort(count, np.ones(count.shape), t)
        got = through(chain, torch.as_tensor(sent(t))[cohort.virtual_client_index], cohort, memory)
        found.append(dict(zip(cohort.virtual_client_index.tolist(), got.numpy(), strict=True)))
    return found


def drawn(v: int, t: int, stage: int = 0) -> torch.Tensor:
    """[1, 1] the key of a client's random numbers."""
    r, i = divmod(v, M)
    return rng.row_keys(torch.tensor([SEEDS[r]]), rng.Purpose.UPLINK, torch.tensor([i]), t, stage)[:, None]
