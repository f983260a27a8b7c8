"""`local.estimator` by name: which part f of a client's law answers the model, as shift and data allow it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fedsim import checks
from fedsim.errors import ConfigError
from fedsim.local.estimators import Coefficients, Estimator, Fractions, GaussianMean, Nothing

if TYPE_CHECKING:
    from fedsim.shift import Shift
    from fedsim.trainer import Batches

NAMES = ("auto", "mean_x", "mean_y", "group_mean", "coefficients", "fractions", "none")


def estimator(name: str, variance: float | None, batches: Batches, shift: Shift) -> Estimator:
    """The estimator of f.

    Args:
        name: 'mean_x', 'mean_y': the mean of x or y; 'group_mean': of x in each class of y; 'coefficients': of y
            regressed on x; 'fractions': the groups' shares; 'none': f does not answer, L̂₂ = 0; 'auto': what the
            shift declares (`Shift.estimator`), and none where the data do not answer.
        variance: σ² where f is a mean or a coefficient; None estimates it.
        batches: where samples come from.
        shift: what moves them.
    """
    if name == "auto":
        declared = shift.estimator if shift.active else "none"
        if declared not in NAMES[1:]:
            raise ConfigError(
                f"local.estimator=auto, but shift={type(shift).__name__} does not declare which part of the data's law "
                f"answers the model; choose one of {', '.join(NAMES[1:])}"
            )
        name = declared
    data = batches.dataset
    numbers = math.prod(data.shape)
    if name == "none":
        return Nothing()
    if name == "fractions":
        if shift.groups is None:
            raise ConfigError(
                f"local.estimator=fractions needs samples that name their group, but shift={type(shift).__name__} "
                "has no groups; use shift=contribution, or local.estimator=mean_x"
            )
        return Fractions(shift.groups, "group" if data.stream else "y")
    if name == "mean_x":
        return GaussianMean("x", numbers, shift.moving, known=variance)
    target = _target(batches)
    if target is None:
        raise ConfigError(f"local.estimator={name} needs targets, which dataset={data.name} does not have; use mean_x")
    if name == "group_mean":
        if data.classes is None:
            raise ConfigError(f"local.estimator=group_mean needs class labels, but dataset={data.name} has none")
        return GaussianMean("x", numbers, shift.moving, data.classes, variance)
    if data.classes is not None:
        raise ConfigError(f"local.estimator={name} needs numbers as targets, but dataset={data.name} has classes")
    if name == "mean_y":
        return GaussianMean("y", math.prod(target), known=variance)
    return Coefficients(numbers, variance)


def check(name: str, variance: float | None) -> None:
    """Refuse what no shift could make sense of."""
    checks.choice("local.estimator", name, NAMES)
    if variance is not None:
        checks.positive("local.variance", variance)


def _target(batches: Batches) -> tuple[int, ...] | None:
    """Shape of one y, None where there is none."""
    data = batches.dataset
    if not data.stream:
        return None if data.train_y is None else tuple(data.train_y.shape[1:])
    nobody = torch.zeros(1, dtype=torch.int64, device=batches.federation.device)
    drawn = data.draw(nobody, nobody, 1, torch.float32)
    return tuple(drawn["y"].shape[2:]) if "y" in drawn else None
