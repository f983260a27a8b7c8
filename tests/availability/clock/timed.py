"""Numbers of a run round by round, as tests of time read them."""

from __future__ import annotations

import numpy as np

from fedsim.run.tracking import Tracking

SIZES = (4, 2, 8, 6)
SEEDS = (3, 11)
FULL = np.ones((6, 2, 4), dtype=np.int8)
QUIET = Tracking(progress="none", tensorboard=False)


def column(result, name, seed=SEEDS[0]):
    return [row[name] for row in result.history if row["seed"] == seed]


def run_of(simulation, **options):
    return simulation.run(tracking=QUIET, **options)
