"""Several players whose data react to the decisions of all (multiplayer performative prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.core import checks, rng
from fedsim.core.constraints import NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import PerClientNumbers, entry_of_client, numbers_per_client
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.shift import Shift

DEFAULT_SPREAD = 0.5  # half-width of the values, if one value is given for all


class Players(Shift):
    """z_i ← z_i − γ_i x_i + Σ_{j≠i} κ_ij x_j, with dataset=market: the game of Narang et al. (2023; from its abstract,
    with a linear reaction and the losses of `Market`).

    Distances to three points are reported. At the stable equilibrium no player can improve on the current data, (λ +
    γ_i) x_i − Σ κ_ij x_j = a_i: θ^PS of the joint model, distance_to_ps. At the Nash equilibrium no player can improve
    if its own data react to its decision, (λ + 2γ_i) x_i − Σ κ_ij x_j = a_i: distance_to_nash. The social optimum
    minimises the sum of all losses, (λ + 2γ_i) x_i − Σ (κ_ij + κ_ji) x_j = a_i: θ^PO, distance_to_po. `local=play`
    converges to each of them.

    Args:
        gamma, spread: γ_i, uniform on gamma ± spread, or m given numbers.
        coupling: κ_ij, an m × m matrix with a zero diagonal; or Σ_j κ_ij, with equal κ_ij.
        seed: seed of the sensitivities, which are the same for all replicates.
        **options: of every shift.
    """

    effective_if = (EffectiveIf("seed", lambda component, run: component.spread, "{at}.spread above 0"),)

    estimator = "mean_x"

    def __init__(
        self,
        gamma: PerClientNumbers = 2.0,
        spread: NonNegative = DEFAULT_SPREAD,
        coupling: float | Sequence[Sequence[float]] = 0.8,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.gamma, self.spread, self.coupling, self.seed = gamma, spread, coupling, seed

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        m, num_goods = federation.clients, getattr(data.dataset, "goods", None)
        if num_goods is None:
            raise ConfigError(
                f"shift=players needs players, which dataset={data.dataset.name} does not have; use dataset=market"
            )
        if m != getattr(data.dataset, "players", m) or federation.num_newcomers:
            raise ConfigError(
                f"shift=players: all {m + federation.num_newcomers} clients play from the start; no newcomers"
            )
        if model.dimension != m * num_goods:
            raise ConfigError(
                f"shift=players: the model must be the {m * num_goods} decisions of all players; use model=mean"
            )
        if model.ridge:
            raise ConfigError(
                f"model.ridge={model.ridge:g} would penalise the decisions of all players; use dataset.cost, which is "
                "each player's own"
            )
        gammas = numbers_per_client(
            "shift.gamma", self.gamma, self.spread, m, self.seed, rng.Purpose.SHIFT, default_value=DEFAULT_SPREAD
        )
        if isinstance(self.coupling, Sequence) and not isinstance(self.coupling, str):
            rows = [list(row) if isinstance(row, Sequence) else [] for row in self.coupling]
            if [len(row) for row in rows] != [m] * m or any(rows[i][i] for i in range(m)):
                raise ConfigError(
                    f"shift.coupling={rows} must be one number, or {m} rows of {m} with zeros on the diagonal"
                )
            kappa = torch.tensor(
                [[checks.check_finite("shift.coupling", k) for k in row] for row in rows], dtype=torch.float64
            )
        else:
            pair_coupling = checks.check_finite("shift.coupling", self.coupling) / max(m - 1, 1)
            kappa = pair_coupling * (1 - torch.eye(m, dtype=torch.float64))
        self.response_matrix = (kappa - torch.diag(gammas)).to(federation.device)  # [m, m]
        self.players, self.goods = m, num_goods

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        joint_model = theta.reshape(self.players, self.goods)
        joint_demand = entry_of_client(self.response_matrix, batch["client"]).to(theta.dtype) @ joint_model  # [d]
        return batch | {
            "x": batch["x"] + self.client_block_mask(batch["client"], theta) * joint_demand.repeat(self.players)
        }

    def client_block_mask(self, client: Tensor, like: Tensor) -> Tensor:
        """[m·d] 1 in the client's block."""
        block = torch.arange(self.players * self.goods, device=client.device) // self.goods
        return (block == client).to(like.dtype)
