"""What the server and the clients keep, and how a round's work becomes the next model."""

from fedsim.strategies.base import State, Strategy
from fedsim.strategies.fedavg import FedAvg, FedAvgAll, FedAvgKnown
from fedsim.strategies.fedawe import FedAWE
from fedsim.strategies.fedpbc import FedPBC

__all__ = ["FedAWE", "FedAvg", "FedAvgAll", "FedAvgKnown", "FedPBC", "State", "Strategy"]
