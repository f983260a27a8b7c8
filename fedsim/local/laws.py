"""`local.estimator` by name: which statistic f of a client's distribution reacts to the model."""

from __future__ import annotations

import math
from typing import Annotated

import torch

from fedsim.core.constraints import OneOf
from fedsim.core.errors import ConfigError
from fedsim.data.samples import ClientData
from fedsim.local.estimators import (
    DistributionEstimator,
    FractionEstimator,
    LeastSquaresEstimator,
    MeanEstimator,
    NoEstimator,
)
from fedsim.shift import Shift

LAW_NAMES = ("auto", "mean_x", "mean_y", "group_mean", "coefficients", "fractions", "none")
LawName = Annotated[str, OneOf(*LAW_NAMES)]


def make_estimator(
    law_name: str, variance: float | None, client_data: ClientData, shift: Shift
) -> DistributionEstimator:
    """The estimator of f.

    Args:
        law_name: 'mean_x', 'mean_y': the mean of x or y; 'group_mean': of x in each class of y; 'coefficients': of y
            regressed on x; 'fractions': the groups' shares; 'none': f does not react, L̂₂ = 0; 'auto': what the
            shift declares (`Shift.estimator`), and none where the data do not react.
        variance: σ² where f is a mean or a coefficient; None estimates it.
        client_data: the clients' samples.
        shift: what moves them.
    """
    if law_name == "auto":
        law_name = _auto_estimator_name(shift)
    dataset = client_data.dataset
    num_features = math.prod(dataset.shape)
    if law_name == "none":
        return NoEstimator()
    if law_name == "fractions":
        if shift.groups is None:
            raise ConfigError(
                f"local.estimator=fractions needs samples that name their group, but shift={type(shift).__name__} "
                "has no groups; use shift=contribution, or local.estimator=mean_x"
            )
        return FractionEstimator(shift.groups, shift.group_entry)
    if law_name == "mean_x":
        return MeanEstimator("x", num_features, shift.shifted_columns, known_variance=variance)
    return _estimator_using_targets(law_name, variance, client_data, shift)


def _auto_estimator_name(shift: Shift) -> str:
    """What 'auto' stands for."""
    if not shift.active:
        return "none"
    if shift.estimator not in LAW_NAMES[1:]:
        raise ConfigError(
            f"local.estimator=auto, but shift={type(shift).__name__} does not declare which part of the data's law "
            f"reacts to the model; choose one of {', '.join(LAW_NAMES[1:])}"
        )
    return shift.estimator


def _estimator_using_targets(
    law_name: str, variance: float | None, data: ClientData, shift: Shift
) -> DistributionEstimator:
    """The estimators that look at y."""
    dataset = data.dataset
    num_features = math.prod(dataset.shape)
    target_samples = data.two_samples(torch.float32).get("y")
    if target_samples is None:
        raise ConfigError(
            f"local.estimator={law_name} needs targets, which dataset={dataset.name} does not have; use mean_x"
        )
    if law_name == "group_mean":
        if dataset.classes is None:
            raise ConfigError(f"local.estimator=group_mean needs class labels, but dataset={dataset.name} has none")
        return MeanEstimator("x", num_features, shift.shifted_columns, dataset.classes, variance)
    if dataset.classes is not None:
        raise ConfigError(
            f"local.estimator={law_name} needs numbers as targets, but dataset={dataset.name} has classes"
        )
    if law_name == "mean_y":
        return MeanEstimator("y", target_samples[0].numel(), known_variance=variance)
    return LeastSquaresEstimator(num_features, variance)
