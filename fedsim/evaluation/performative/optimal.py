"""θ^PO, the minimiser of the performative risk, with gradients through the shift."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.errors import NoReferenceError
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.solvers import (
    FLAT_CURVATURE_RATIO,
    BoxBounds,
    find_zero,
    free_coordinates,
    minimise,
    project_onto_box,
    residual,
    slowest_decay_rate,
)
from fedsim.evaluation.performative.stable import MAX_JACOBIAN_PARAMETERS, STABLE_POINT_TOLERANCE

GRADIENT_TOLERANCE = 1e-5  # largest gradient of a minimum, relative to 1 + ‖θ‖, if found by L-BFGS-B only


def optimal_point(
    risk: Risk, starts: list[Tensor], box: BoxBounds = None, tolerance: float = STABLE_POINT_TOLERANCE
) -> Tensor:
    """[d] θ^PO, a minimiser of R(θ, θ) on Θ: the best of those found from the starts.

    Up to 300 parameters it is polished by Newton steps until the gradient is within `tolerance` · (1 + ‖θ‖).

    Args:
        risk: R(θ, θ').
        starts: [d] each; a performative risk may have several minima.
        box: Θ.
        tolerance: of the gradient.

    Raises:
        NoReferenceError: the performative risk is unbounded below, or no minimum was found.
    """
    best: tuple[Tensor, float] | None = None
    for number, start in enumerate(starts, 1):
        risk.search.activity = (
            f"searching for θ^PO by minimising the performative risk from start {number} of {len(starts)}"
        )
        candidate = minimise(risk.performative_risk, project_onto_box(start.detach().to(torch.float64), box), box)
        if candidate is None:
            raise NoReferenceError(
                f"the performative risk of shift={type(risk.shift).__name__} is unbounded below; set shift.box"
            )
        if best is None or candidate[1] < best[1]:
            best = candidate
    assert best is not None
    theta = best[0]
    if len(theta) <= MAX_JACOBIAN_PARAMETERS:
        refined_point = find_zero(risk.performative_gradient, risk.performative_hessian, theta, box, tolerance)
        if refined_point is not None and float(risk.performative_risk(refined_point)) <= best[1] + 1e-12 * (
            1 + abs(best[1])
        ):
            theta = refined_point
    gradient = risk.performative_gradient(theta)
    if not residual(theta, gradient, box) <= GRADIENT_TOLERANCE * (1 + float(theta.norm())):
        problem = f"no minimum of the performative risk of shift={type(risk.shift).__name__} was found"
        if risk.shift.nonsmooth:
            raise NoReferenceError(
                f"{problem} at a point with a gradient: the shift has kinks, and the minimum may lie on one"
            )
        raise NoReferenceError(f"{problem}; set shift.box")
    free_mask = free_coordinates(theta, gradient, box)
    if (
        len(theta) <= MAX_JACOBIAN_PARAMETERS
        and slowest_decay_rate(risk.performative_hessian(theta), free_mask) <= FLAT_CURVATURE_RATIO
    ):
        raise NoReferenceError(
            f"the performative risk of shift={type(risk.shift).__name__} has no isolated minimum; set model.ridge"
        )
    return theta
