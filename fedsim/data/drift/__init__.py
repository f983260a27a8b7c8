"""Data drift: the law of the clients' samples changes from round to round, whatever the model is."""

from fedsim.data.drift.drift import Drift, NoDrift
from fedsim.data.drift.movements import MOVEMENTS
from fedsim.data.drift.paths import Abrupt, ByClient, Cyclic, Linear, RandomWalk
from fedsim.data.drift.replay import Replay

__all__ = ["MOVEMENTS", "Abrupt", "ByClient", "Cyclic", "Drift", "Linear", "NoDrift", "RandomWalk", "Replay"]
