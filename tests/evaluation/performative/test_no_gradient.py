"""A shift of one's own through which no gradient flows has no θ^PO that anybody could find, and that is told."""

from __future__ import annotations

import logging

import pytest
import torch

from fedsim import Simulation
from fedsim.core import NoReferenceError
from fedsim.data.datasets import GaussianMean
from fedsim.evaluation.performative import Risk
from fedsim.evaluation.performative.references import POINT_NAME_BY_COLUMN, References, check_shift_gradient, references
from fedsim.models import Mean
from fedsim.shift import Location, Shift


class Detached(Location):
    """Moves the data as `location` does, by numbers that no gradient goes through."""

    def __call__(self, batch, theta):
        return super().__call__(batch, theta.detach())


class WithSmooth(Detached):
    """And says how, in a form with a gradient."""

    def respond_differentiably(self, batch, theta):
        return Location.__call__(self, batch, theta)


class Jumping(Shift):
    """People who step over a threshold once the model has reached it."""

    def __call__(self, batch, theta):
        return batch | {"x": batch["x"] + torch.where(theta > 1, -4.0, 4.0)}


def simulation_of(shift: Shift) -> Simulation:
    return Simulation(GaussianMean(3, means=[1.0, 2.0, 3.0]), Mean, clients=3, shift=shift)


def found_by(shift: Shift) -> References:
    run = simulation_of(shift)
    return references(run.model, run.shift, run.data, run.model.initial(run.federation.seeds))


def test_a_shift_without_gradient_is_told_where_the_optimum_needs_it(caplog):
    caplog.set_level(logging.INFO)
    assert set(found_by(Detached(0.4))) == {"distance_to_ps"}
    assert (
        "no distance_to_po: shift=Detached changes the data, but no gradient flows from the data to the mod"
        in caplog.text
    )
    assert (
        "give it a `respond_differentiably` with torch operations on theta, or set shift.references=none" in caplog.text
    )


def test_its_smooth_form_is_enough():
    whole, smooth = found_by(Location(0.4)), found_by(WithSmooth(0.4))
    assert all(torch.equal(whole[name], smooth[name]) for name in POINT_NAME_BY_COLUMN)


def test_a_shift_in_jumps_has_no_gradient_either():
    run = simulation_of(Jumping())
    risk = Risk(run.model, run.shift, run.data)
    with pytest.raises(NoReferenceError, match="shift=Jumping changes the data, but no gradient flows"):
        check_shift_gradient(risk, torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_what_rounding_moves_is_no_shift(size: float) -> None:
    """The risk changes with the deployed model by a share of 1 + |risk|: 10⁻¹¹ is rounding, 10⁻⁷ is not."""

    def check(share: float) -> None:
        def risk(theta: torch.Tensor, deployed: torch.Tensor) -> torch.Tensor:
            return size + share * (1 + size) * torch.sign(deployed.sum()).detach() + 0 * theta.sum()

        risk.shift = Jumping()
        check_shift_gradient(risk, torch.zeros(1, dtype=torch.float64))

    check(1e-11)
    with pytest.raises(NoReferenceError, match="no gradient flows"):
        check(1e-7)
