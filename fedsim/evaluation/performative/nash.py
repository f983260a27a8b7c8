"""The Nash equilibrium of players whose data depend on all decisions: no player gains by deviating alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from fedsim.core.errors import NoReferenceError
from fedsim.evaluation.performative.risk import JACOBIAN_ROWS_AT_ONCE, Risk
from fedsim.evaluation.performative.solvers import (
    FLAT_CURVATURE_RATIO,
    BoxBounds,
    find_zero,
    free_coordinates,
    project_onto_box,
    slowest_decay_rate,
)
from fedsim.evaluation.performative.stable import STABLE_POINT_TOLERANCE
from fedsim.shift import Players


def nash_point(risk: Risk, start: Tensor, box: BoxBounds = None, tolerance: float = STABLE_POINT_TOLERANCE) -> Tensor:
    """[d] θ with ∇_{x_i} ℓ_i(θ, D_i(θ)) = 0 for all players i, including the dependence of their own data on x_i.

    Args:
        risk: of a game, `shift=players`.
        start: [d].
        box: Θ.
        tolerance: of the gradients, relative to 1 + ‖θ‖.

    Raises:
        NoReferenceError: no equilibrium is found, or gradient play diverges from it.
    """
    shift = risk.shift
    assert isinstance(shift, Players)
    clients = risk.base["client"]
    own_masks = torch.stack([shift.client_block_mask(client, risk.weights) for client in clients])  # [m, d]

    def losses_of_players(theta: Tensor) -> Tensor:
        return vmap(risk.client_risk, in_dims=(None, None, 0))(theta, theta, risk.base)

    def gradient_field(theta: Tensor) -> Tensor:
        risk.search.count_evaluation()
        return (jacrev(losses_of_players, chunk_size=JACOBIAN_ROWS_AT_ONCE)(theta) * own_masks).sum(0)

    risk.search.activity = "searching for the Nash equilibrium by gradients"
    slope = jacrev(gradient_field, chunk_size=JACOBIAN_ROWS_AT_ONCE)
    point = find_zero(gradient_field, slope, project_onto_box(start.detach().to(torch.float64), box), box, tolerance)
    if (
        point is None
        or slowest_decay_rate(slope(point), free_coordinates(point, gradient_field(point), box)) <= FLAT_CURVATURE_RATIO
    ):
        raise NoReferenceError("shift=players has no Nash equilibrium that gradient play reaches; lower shift.coupling")
    return point
