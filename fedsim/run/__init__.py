"""A run: its parts wired up, the round, what is written and shown of it, how it ends and goes on."""

from fedsim.run.rules import Stop
from fedsim.run.simulation import Simulation
from fedsim.run.stopping import Stopped

__all__ = ["Simulation", "Stop", "Stopped"]
