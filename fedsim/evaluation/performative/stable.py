"""θ^PS, the minimiser of the risk on the data that it induces: by gradients, or by repeated risk minimisation."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.errors import NoReferenceError
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.solvers import (
    FLAT_CURVATURE_RATIO,
    BoxBounds,
    find_zero,
    free_coordinates,
    minimise,
    project_onto_box,
    slowest_decay_rate,
)

STABLE_POINT_METHODS = ("auto", "gradient", "repeated")
STABLE_POINT_TOLERANCE = 1e-9
MAX_JACOBIAN_PARAMETERS = 300  # a Jacobian grows with its square
MAX_RETRAINING_ROUNDS = 2000
MAX_CONTRACTION_FACTOR = 1 - 1e-6  # of a contraction, with tolerance for rounding


def stable_point(
    risk: Risk, start: Tensor, box: BoxBounds = None, method: str = "auto", tolerance: float = STABLE_POINT_TOLERANCE
) -> Tensor:
    """[d] θ^PS ∈ Θ with ∇_θ R(θ, θ')|_{θ'=θ} = 0 on Θ's inside, near `start`.

    Args:
        risk: R(θ, θ').
        start: [d].
        box: Θ.
        method: 'gradient' finds a zero of the gradient with the shift detached, and rejects one from which repeated
            gradient descent diverges; 'repeated' iterates θ ← argmin_Θ R(·, θ). 'auto' is 'gradient' up to 300
            parameters and 'repeated' above, or if 'gradient' finds none.
        tolerance: relative to 1 + ‖θ‖: of the gradient; of the distance to the limit, estimated from the last
            contraction.

    Raises:
        NoReferenceError: there is no point that repeated training could reach, as with ε̄ ≥ 1 in mean estimation.
    """
    checks.check_choice("method", method, STABLE_POINT_METHODS)
    start = project_onto_box(start.detach().to(torch.float64), box)
    if method == "repeated" or (method == "auto" and len(start) > MAX_JACOBIAN_PARAMETERS):
        return _repeated_minimisation(risk, start, box, tolerance)
    risk.search.activity = "searching for θ^PS by gradients"
    point = find_zero(risk.decoupled_gradient, risk.decoupled_jacobian, start, box, tolerance)
    if point is None:
        if method == "auto":
            return _repeated_minimisation(risk, start, box, tolerance)
        raise NoReferenceError(
            f"the gradient method finds no performatively stable point of shift={_shift_name(risk)}; set shift.box, or "
            "weaken the shift"
        )
    gradient = risk.decoupled_gradient(point)
    slowest_rate = slowest_decay_rate(risk.decoupled_jacobian(point), free_coordinates(point, gradient, box))
    if abs(slowest_rate) <= FLAT_CURVATURE_RATIO:
        raise NoReferenceError(
            f"the performatively stable point of shift={_shift_name(risk)} is not unique: the loss is flat along some "
            "direction; set model.ridge"
        )
    if slowest_rate < 0:
        raise NoReferenceError(
            f"shift={_shift_name(risk)} "
            "has no performatively stable point: data react to the model at least as strongly as "
            "the model to the data, and repeated training diverges from its only fixed point; weaken the shift"
        )
    return point


def _repeated_minimisation(risk: Risk, start: Tensor, box: BoxBounds, tolerance: float) -> Tensor:
    """θ ← argmin_Θ R(·, θ) until the remaining distance, by the last contraction, is within the tolerance."""
    theta, previous_distance = start, 0.0
    num_growing_steps = 0
    for count in range(MAX_RETRAINING_ROUNDS):
        risk.search.activity = (
            f"searching for θ^PS by repeated minimisation, round {count + 1} of at most {MAX_RETRAINING_ROUNDS}"
        )
        minimum = minimise(lambda point, at=theta: risk(point, at), theta, box)  # type: ignore[misc]
        if minimum is None:
            raise NoReferenceError(
                f"repeated minimisation under shift={_shift_name(risk)} "
                "diverges, so it reaches no performatively stable "
                "point; set shift.box, or weaken the shift"
            )
        next_point = minimum[0]
        step = float((next_point - theta).norm())
        contraction_factor = step / previous_distance if count else 1.0  # the first step gives no contraction factor
        scale = 1 + float(next_point.norm())
        if step <= 1e-14 * scale or (
            contraction_factor < 1 and step * contraction_factor / (1 - contraction_factor) <= tolerance * scale
        ):
            return next_point
        num_growing_steps = (
            num_growing_steps + 1
            if count and contraction_factor >= MAX_CONTRACTION_FACTOR and step > 1e-7 * scale
            else 0
        )
        if num_growing_steps >= 20:
            raise NoReferenceError(
                f"repeated minimisation under shift={_shift_name(risk)} "
                "does not contract, so it reaches no performatively "
                "stable point; weaken the shift"
            )
        theta, previous_distance = next_point, step
    raise NoReferenceError(
        f"repeated minimisation under shift={_shift_name(risk)} has not converged to {tolerance:g} "
        f"after {MAX_RETRAINING_ROUNDS} rounds; "
        "weaken the shift"
    )


def _shift_name(risk: Risk) -> str:
    return type(risk.shift).__name__
