"""Solvers on a box: zeros of a gradient field by projected Newton steps with gradient steps as fallback, and minimisers
by SciPy's L-BFGS-B with torch's gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

BoxBounds = tuple[float, float] | None
VectorField = Callable[[Tensor], Tensor]

MAX_SOLVER_STEPS = 200
DIVERGENCE_NORM = 1e8  # a point further out than this counts as divergence
FLAT_CURVATURE_RATIO = 1e-11  # relative curvature below which a direction counts as flat


def project_onto_box(theta: Tensor, box: BoxBounds) -> Tensor:
    """The nearest point of the box."""
    return theta if box is None else theta.clamp(*box)


def residual(theta: Tensor, gradient: Tensor, box: BoxBounds) -> float:
    """‖θ − Π(θ − g)‖: zero if the field vanishes or points out of the box."""
    return float((theta - project_onto_box(theta - gradient, box)).norm())


def free_coordinates(theta: Tensor, gradient: Tensor, box: BoxBounds) -> Tensor:
    """[d] bool: coordinates that are not at an active bound of the box."""
    if box is None:
        return torch.ones_like(theta, dtype=torch.bool)
    return ~(((theta <= box[0]) & (gradient > 0)) | ((theta >= box[1]) & (gradient < 0)))


def find_zero(
    field: VectorField, jacobian: VectorField, start: Tensor, box: BoxBounds, tolerance: float
) -> Tensor | None:
    """A zero of the field in the box, or None.

    A Newton step is taken if it at least halves the residual, else a gradient step of length 1/‖J‖₂, under which a
    monotone field contracts.

    Args:
        field: [d] → [d].
        jacobian: [d] → [d, d].
        start: [d] float64.
        box: bounds of every coordinate.
        tolerance: largest residual, relative to 1 + ‖θ‖.
    """
    lapack_driver = "gelsd" if start.device.type == "cpu" else None  # the default's last bits differ from call to call
    theta = project_onto_box(start, box)
    gradient = field(theta)
    for _ in range(MAX_SOLVER_STEPS):
        size = residual(theta, gradient, box)
        if size <= tolerance * (1 + float(theta.norm())):
            return theta
        slope = jacobian(theta)
        finite = bool(torch.isfinite(slope).all()) and bool(torch.isfinite(gradient).all())
        if not finite or float(theta.norm()) > DIVERGENCE_NORM:
            return None
        free_mask = free_coordinates(theta, gradient, box)
        step = torch.zeros_like(theta)
        try:
            solved = torch.linalg.lstsq(
                slope[free_mask][:, free_mask], -gradient[free_mask, None], driver=lapack_driver
            )
        except RuntimeError:  # overflow on the way
            return None
        step[free_mask] = solved.solution[:, 0]
        next_point = project_onto_box(theta + step, box)
        new_field = field(next_point)
        if not residual(next_point, new_field, box) <= 0.5 * size:  # also if it is NaN
            steepness = float(torch.linalg.matrix_norm(slope, 2))
            next_point = project_onto_box(theta - gradient / max(steepness, 1e-8), box)
            new_field = field(next_point)
        theta, gradient = next_point, new_field
    return None


def slowest_decay_rate(jacobian: Tensor, free_mask: Tensor) -> float:
    """The slowest decay rate of a small perturbation of the free coordinates under gradient descent, relative to the
    fastest: the smallest real part of an eigenvalue. Negative if a perturbation grows; 1 if there is no free coordinate
    or no information.
    """
    free_jacobian = jacobian[free_mask][:, free_mask]
    if not free_jacobian.numel() or not bool(torch.isfinite(free_jacobian).all()):
        return 1.0
    return float(
        torch.linalg.eigvals(free_jacobian).real.min() / max(float(torch.linalg.matrix_norm(free_jacobian, 2)), 1e-300)
    )


def minimise(function: Callable[[Tensor], Tensor], start: Tensor, box: BoxBounds) -> tuple[Tensor, float] | None:
    """A local minimiser [d] and its value, from `start` [d] float64; None if the function is unbounded below."""
    from scipy.optimize import minimize  # imported here: a run without references does not need it

    evaluate = grad_and_value(function)

    def objective_on_host(point: np.ndarray) -> tuple[float, np.ndarray]:
        gradient, value = evaluate(torch.tensor(point, dtype=torch.float64, device=start.device))
        # Copied: the last bit of a matrix product may depend on where in memory its factors begin.
        return float(value), gradient.cpu().numpy()

    if box is None:
        value, gradient = (torch.tensor(v) for v in objective_on_host(start.cpu().numpy()))
        distant_value = objective_on_host(
            (start.cpu() - DIVERGENCE_NORM * gradient / gradient.norm().clamp(min=1e-300)).numpy()
        )[0]
        if distant_value < value:  # a lower value at a point that is not returned as minimiser
            return None
    bounds = None if box is None else [box] * len(start)
    options = {"maxiter": 2000, "maxfun": 5000, "ftol": 0.0, "gtol": 1e-12, "maxcor": 20}
    result = minimize(
        objective_on_host, start.cpu().numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    if not (np.isfinite(result.fun) and np.isfinite(result.x).all() and np.abs(result.x).max() < DIVERGENCE_NORM):
        return None
    return torch.tensor(result.x, dtype=torch.float64, device=start.device), float(result.fun)
