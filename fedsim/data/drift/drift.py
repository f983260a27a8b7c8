"""The interface of a data drift: a displacement of each client's samples as a function of the round.

The displacement of client i in round t is a_i s(t): a path s, and a factor of the client. What it displaces (features,
targets, label fractions) is a `SampleDisplacement`. The drift comes first: the samples of a round are displaced, then
they react to the model (`fedsim.shift`), then some are contaminated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, NonNegative, OneOf, Positive, Real, Validated
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import numbers_per_client
from fedsim.core.per_seed import NumberOrPerSeed, PerSeed
from fedsim.data.datasets import Dataset
from fedsim.data.drift.movements import (
    MOVEMENTS,
    FeatureMovement,
    LabelFractions,
    Rotation,
    SampleDisplacement,
    TargetMovement,
)

REFERENCES = ("auto", "always", "none")
Batch = dict[str, Tensor]


class Drift(Validated, ABC):
    """The samples of client i are displaced by a_i s(t) in round t.

    Args:
        moves: what is displaced. 'features': the inputs, along `direction`; 'rotation': the inputs are rotated by as
            many degrees; 'targets': real-valued targets, or class numbers, which are shifted cyclically by the rounded
            displacement (a change of concept); 'labels': the fractions of the classes, by importance weights.
        direction: of moves=features, one number per feature of the prepared input; null: all 1.
        plane: of moves=rotation for inputs that are no images, the two features that span the plane.
        spread: half-width of the factors a_i, which are uniform on [1 − spread, 1 + spread]; 0: all clients
            drift alike.
        factors: explicit a_i, one per client, instead of drawing them.
        references: whether the path of the minimiser is computed if there is no shift, for the columns tracking_error
            and dynamic_regret: 'always', 'none', or 'auto' (for small models). With a shift, `shift.references`
            decides.
        references_seconds: time limit for computing it, for all replicates together; None: no limit.
        seed: of the factors, which are the same for all replicates.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf("direction", lambda component, run: component.moves == "features", "{at}.moves=features"),
        EffectiveIf(
            "plane",
            lambda component, run: component.moves == "rotation" and len(run.dataset.shape) != 3,
            "{at}.moves=rotation and inputs that are no images",
        ),
        EffectiveIf("seed", lambda component, run: component.has_seeded_draws, "{at}.spread above 0"),
        EffectiveIf("references", lambda component, run: not run.simulation.shift.active, "shift=none"),
        EffectiveIf(
            "references_seconds",
            lambda component, run: run.computes_drift_references,
            "shift=none and {at}.references=auto or always",
        ),
    )

    active = True

    def __init__(
        self,
        moves: Annotated[str, OneOf(*MOVEMENTS)] = "features",
        direction: Sequence[Real] | None = None,
        plane: Sequence[CountOrZero] = (0, 1),
        spread: NonNegative = 0.0,
        factors: Sequence[Real] | None = None,
        references: Annotated[str, OneOf(*REFERENCES)] = "auto",
        references_seconds: Positive | None = 120.0,
        seed: CountOrZero = 0,
    ) -> None:
        self.moves, self.direction, self.plane = moves, direction, tuple(plane)
        self.spread, self.factors, self.seed = spread, factors, seed
        self.references, self.references_seconds = references, references_seconds
        if len(plane) != 2 or plane[0] == plane[1]:
            raise ConfigError(key="plane", value=list(plane), needs="must be two different features, such as [0,1]")
        self.seeds: tuple[int, ...] = ()
        self._factors = np.ones(0)
        self._movement: SampleDisplacement | None = None

    @property
    def has_seeded_draws(self) -> bool:
        """Whether something is drawn by `seed`."""
        return self.factors is None and self.spread > 0

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        """Draw the clients' factors, and refuse samples that cannot be displaced.

        Args:
            federation: all clients, newcomers included.
            dataset: of the run.
        """
        factors: Real | Sequence[Real] = 1.0 if self.factors is None else self.factors
        client_factors = numbers_per_client(
            "drift.factors", factors, self.spread, federation.clients, self.seed, rng.Purpose.DRIFT
        )
        self._factors, self.seeds = client_factors.numpy(), federation.seeds
        self._movement = self._make_movement(federation, dataset)

    def _make_movement(self, federation: Federation, dataset: Dataset) -> SampleDisplacement:
        if self.moves == "features":
            return FeatureMovement(dataset, self.direction)
        if self.moves == "rotation":
            return Rotation(dataset, self.plane)
        return TargetMovement(dataset) if self.moves == "targets" else LabelFractions(dataset, federation)

    @property
    def uses_importance_weights(self) -> bool:
        """Whether samples get importance weights instead of being displaced."""
        return self.moves == "labels"

    @abstractmethod
    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        """[c] s(t) in rounds [c] of replicates [c], float64."""

    def displacement(self, t: np.ndarray, replicate: np.ndarray, client: np.ndarray) -> np.ndarray:
        """[c] a_i s(t) of clients [c] in rounds [c] of replicates [c], float64."""
        return self._factors[client] * self.path(t, replicate)

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        """What was read from a file, by names of its own: a resumed run must meet the same."""
        return {}

    def displaced(
        self, batch: Batch, displacement: np.ndarray, replicate: np.ndarray, client: np.ndarray | None
    ) -> Batch:
        """A batch of c clients, 'x' [c, B, …], displaced; the batch itself where all displacements are 0.

        Args:
            batch: as clients hold it.
            displacement, replicate, client: [c]; client None: a sample of all clients, such as the test set.
        """
        if self._movement is None or not displacement.any():
            return batch
        return self._movement(batch, displacement, replicate, client)


class NoDrift(Drift):
    """The law of the samples is the same in every round."""

    active = False
    effective_if = ()

    def __init__(self) -> None:
        super().__init__()

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        """There is nothing to draw."""

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        return np.zeros(len(t))


def of_replicates(setting: NumberOrPerSeed, replicate: np.ndarray) -> np.ndarray | float:
    """A setting's number of each of these replicates [c], or the number that all share."""
    return np.asarray(setting.values)[replicate] if isinstance(setting, PerSeed) else setting
