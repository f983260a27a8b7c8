"""One run: how its parts are set up, its rounds, its files and progress, and how it ends or resumes."""

from fedsim.run.rules import Stop
from fedsim.run.simulation import Simulation
from fedsim.run.stopping import Stopped

__all__ = ["Simulation", "Stop", "Stopped"]
