"""Repeated risk minimisation: descend the risk on one draw of data until the next model is deployed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.constraints import NonNegative
from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch, ClientData
from fedsim.local.performative import PFL
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.shift import Shift


class RRM(PFL):
    """Repeated risk minimisation (Perdomo et al. 2020): θ^{k+1} = argmin_Θ Σ_i w_i E_{z∼D_i(θ^k)} ℓ(z; θ), whose fixed
    point is θ^PS. Local steps descend that risk for `shift.redraw` rounds, on the draw that reacts to θ^k.

    What is left of the minimisation is up to rounds, steps and rate. A client that was away when θ^k was deployed draws
    when it comes, by the same law. With `reg` it is regularised: + reg ‖θ − θ^k‖²; in mean estimation with mean
    sensitivity ε̄, θ^{k+1} = (m̄ + (ε̄ + 2 reg) θ^k) / (1 + 2 reg), which helps where ε̄ < −1, never where ε̄ > 1.
    Under inertia θ^k is what the data react to, θ̃. Needs a shift with deploy=round and redraw.

    Args:
        reg: of the regularised form; 0 is the plain one.
        **options: of PFL.
    """

    knows_deployed = True

    def __init__(self, reg: NonNegative = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.reg = reg

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        if not shift.active or shift.redraw is None:
            raise ConfigError(
                f"local=rrm minimises on data that react to one model, but shift={type(shift).__name__} deploys others "
                "meanwhile; use a shift with shift.deploy=round shift.redraw=10, or local=pfl"
            )

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        params = carry["params"]
        samples = {name: value for name, value in batch.items() if name != "deployed"}
        gradient, loss = objective.gradient(params, samples)
        return self.updated(carry, gradient + 2 * self.reg * (params - batch["deployed"]), lr), loss
