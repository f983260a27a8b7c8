"""The contract of a performative shift: a reparameterised map from base samples and deployed parameters to samples.

A client's law is a map θ ↦ D_i(θ), written as a pushforward of base samples that do not depend on θ. If the gradient
flows through the map, autograd gives the exact performative gradient; if it is stopped, the gradient of the decoupled
risk (repeated minimisation). The map is written for ONE client; the trainer vmaps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from fedsim import checks
from fedsim.federation import Federation

if TYPE_CHECKING:
    from fedsim.datasets import Dataset

DEPLOYMENTS = ("step", "round")


class Shift(ABC):
    """A performative shift.

    Attributes:
        deploy: 'step': every client's own current model moves its data at every local step (P-FedAvg, ProFL);
            'round': the server's model does, once a round.
    """

    active = True

    def __init__(self, deploy: str = "step") -> None:
        self.deploy = checks.choice("shift.deploy", deploy, DEPLOYMENTS)

    def setup(self, federation: Federation, dataset: Dataset, dimension: int) -> None:
        """Draw per-client sensitivities and refuse what cannot work.

        Args:
            federation: who exists.
            dataset: whose samples are moved.
            dimension: d, the number of model parameters.
        """

    @abstractmethod
    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """Move one client's batch.

        Args:
            batch: 'x' [B, …], 'y' [B, …] where there are labels, 'client' [] the client's number.
            theta: [d] the deployed parameters.

        Returns:
            A batch like `batch`; the inputs are left as they are.
        """


class NoShift(Shift):
    """Ordinary federated learning: the data do not answer."""

    active = False

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return batch
