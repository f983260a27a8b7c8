"""Who was there: a picture of clients × rounds."""

from __future__ import annotations

import numpy as np

from fedsim.availability import Availability

_PRESENT = np.array([0.12, 0.38, 0.63])
_ABSENT = np.array([0.95, 0.95, 0.93])


def availability_raster(
    availability: Availability, rounds: int, most_rounds: int = 200, most_clients: int = 200
) -> np.ndarray:
    """[H, W, 3] in [0, 1]: the first replicate's clients (rows) in the first rounds (columns), enlarged to be seen.

    Availability is a function of the round, so the picture needs no record of the run.
    """
    seen = np.stack([availability.counts(t)[0, :most_clients] > 0 for t in range(min(rounds, most_rounds))], axis=1)
    scale = max(1, 600 // max(seen.shape))
    return np.where(seen[..., None], _PRESENT, _ABSENT).repeat(scale, 0).repeat(scale, 1)
