"""Random lengths of mean 1: of sessions, absences and lifetimes."""

from __future__ import annotations

import numpy as np

from fedsim.core.errors import ConfigError

SHAPE_RANGE_BY_LAW = {
    "exponential": (1.0, 1.0),
    "lognormal": (0.0, 3.0),
    "weibull": (0.3, 20.0),
}  # and what `shape` may be


def check_shape_parameter(distribution_name: str, shape_parameter: float) -> None:
    """Refuse a shape parameter outside of its range.

    Raises:
        ConfigError: naming what it may be.
    """
    minimum, maximum = SHAPE_RANGE_BY_LAW[distribution_name]
    if distribution_name != "exponential" and not minimum <= shape_parameter <= maximum:
        raise ConfigError(
            key="shape",
            value=shape_parameter,
            needs=f"must lie between {minimum:g} and {maximum:g} for {distribution_name}",
        )


def unit_mean_lengths(
    distribution_name: str, shape_parameter: float, u: np.ndarray, length_biased: bool = False
) -> np.ndarray:
    """Lengths of mean 1, by inversion of uniform numbers; `length_biased`: of the one that covers a given moment, of
    density ∝ x f(x).
    """
    from scipy.special import gamma, gammaincinv, ndtri  # imported here: other processes do not need it

    if distribution_name == "lognormal":
        normal = ndtri(np.clip(u, 1e-300, None))
        return np.asarray(
            np.exp(shape_parameter * normal + (shape_parameter**2 / 2 if length_biased else -(shape_parameter**2) / 2))
        )
    k = shape_parameter if distribution_name == "weibull" else 1.0
    power = gammaincinv(1 + 1 / k, u) if length_biased else -np.log1p(-u)
    return np.asarray(power ** (1 / k) / gamma(1 + 1 / k))
