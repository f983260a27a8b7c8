"""Minimisation on a box: SciPy's L-BFGS-B with torch's gradients.

NumPy's arrays are copied: the last bit of a matrix product may depend on where in memory its factors begin, and torch's
own memory always begins alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

from fedsim.performative.roots import FAR, Box


def minimise(function: Callable[[Tensor], Tensor], start: Tensor, box: Box) -> tuple[Tensor, float] | None:
    """A local minimiser [d] and its value, from `start` [d] float64; None where the function falls without bound."""
    from scipy.optimize import minimize  # here: a run without references need not wait for it

    evaluate = grad_and_value(function)

    def on_host(point: np.ndarray) -> tuple[float, np.ndarray]:
        gradient, value = evaluate(torch.tensor(point, dtype=torch.float64, device=start.device))
        return float(value), gradient.cpu().numpy()

    if box is None:
        value, gradient = (torch.tensor(v) for v in on_host(start.cpu().numpy()))
        away = on_host((start.cpu() - FAR * gradient / gradient.norm().clamp(min=1e-300)).numpy())[0]
        if away < value:  # lower still where no minimiser is looked for
            return None
    bounds = None if box is None else [box] * len(start)
    options = {"maxiter": 2000, "maxfun": 5000, "ftol": 0.0, "gtol": 1e-12, "maxcor": 20}
    result = minimize(on_host, start.cpu().numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    if not (np.isfinite(result.fun) and np.isfinite(result.x).all() and np.abs(result.x).max() < FAR):
        return None
    return torch.tensor(result.x, dtype=torch.float64, device=start.device), float(result.fun)
