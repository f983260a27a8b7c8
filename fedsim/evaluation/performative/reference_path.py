"""Reference points of data that drift: θ^PS_t and θ^PO_t, or the minimiser of the current risk, round by round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import NoReferenceError
from fedsim.core.numerical import is_numerical_error
from fedsim.data.samples import ClientData
from fedsim.evaluation.performative.nash import nash_point
from fedsim.evaluation.performative.optimal import optimal_point
from fedsim.evaluation.performative.references import (
    MINIMISER,
    References,
    ReplicateReferences,
    find_replicate_references,
    no_reference_points_reason,
    sought_points,
)
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.search import EvaluationCounter
from fedsim.evaluation.performative.solvers import (
    FLAT_CURVATURE_RATIO,
    BoxBounds,
    find_zero,
    free_coordinates,
    slowest_decay_rate,
)
from fedsim.evaluation.performative.stable import MAX_JACOBIAN_PARAMETERS, STABLE_POINT_TOLERANCE, stable_point
from fedsim.models import StatelessModel
from fedsim.shift import Shift

log = logging.getLogger(__name__)

STABLE, OPTIMAL = "distance_to_ps", "distance_to_po"


class ReferenceTrajectory(References):
    """The reference points as functions of the round. Its entries as a dictionary are the points of round 0.

    The points of round 0 are searched as those of data that do not drift. From there on each search starts from the
    point of the previous evaluated round, so that a path follows one minimum (which may cease to be the lowest). With a
    shift the tracking error is the distance to θ^PS_t, else to the minimiser of the risk on the data of round t.

    Args:
        risks: of every replicate.
        by_round: round → reference points of every replicate, of all evaluated rounds.
    """

    def __init__(self, risks: Sequence[Risk], by_round: dict[int, list[ReplicateReferences]]) -> None:
        last_references = by_round[max(by_round)]
        self.risks, self.by_round, self._expected = list(risks), by_round, sorted(by_round)
        super().__init__(by_round[0])
        for name in [name for name in self if not all(name in solved.points for solved in last_references)]:
            del self[name]
        if STABLE in self:
            self[MINIMISER] = self[STABLE]
        self.replicates = last_references

    @property
    def has_regret(self) -> bool:
        return OPTIMAL in self or (MINIMISER in self and STABLE not in self)

    def at(self, t: int) -> dict[str, Tensor]:
        solutions = self._references_of_round(t)
        points: dict[str, Tensor] = {}
        for name in self:
            point_name = STABLE if name == MINIMISER and STABLE in self else name
            missing_point = torch.full_like(self[name][0], torch.nan)
            points[name] = torch.stack([solved.points.get(point_name, missing_point) for solved in solutions])
        return points

    @torch.no_grad()
    def excess_risk(self, models: Tensor, t: int) -> np.ndarray:
        name = OPTIMAL if OPTIMAL in self else MINIMISER
        pairs = zip(self.risks, models.to(torch.float64), self._references_of_round(t), strict=True)
        return np.array(
            [
                float(risk.at(t).performative_risk(theta)) - solved.risks.get(name, float("nan"))
                for risk, theta, solved in pairs
            ]
        )

    def _references_of_round(self, t: int) -> list[ReplicateReferences]:
        """Return the points of round t; points of a round without a planned evaluation are searched now."""
        if t not in self.by_round:
            solved_round = max(expected for expected in self._expected if expected <= t)
            pairs = zip(self.risks, self.by_round[solved_round], strict=True)
            self.by_round[t] = [track_reference_points(risk, solved, solved_round, t) for risk, solved in pairs]
        return self.by_round[t]


def reference_point_trajectory(
    model: StatelessModel,
    shift: Shift,
    data: ClientData,
    initial: Tensor,
    rounds: Sequence[int],
    share: Callable[[Any], Any] = lambda solved: solved,
) -> References:
    """The reference points of drifting data in these rounds, if they exist; missing points are logged.

    Args:
        model, shift, data: of the run.
        initial: [R, d] initial models, from which the search in round 0 starts.
        rounds: that are evaluated, 0 among them, ascending.
        share: makes the points of one of several ranks those of all.
    """
    group, options = ("shift", shift) if shift.active else ("drift", data.drift)
    if options.references == "none":
        return References()
    reason = no_reference_points_reason(model, data, options.references, group)
    if reason:
        log.info("reference points are %s", reason)
        return References([ReplicateReferences(verdicts=dict.fromkeys(sought_points(shift), reason)) for _ in initial])
    search = EvaluationCounter(options.references_seconds, group=group)
    risks = [Risk(model, shift, data, r, search=search) for r in range(len(initial))]
    same_law_as, by_round = (
        _representative_replicates(risks, data, initial, rounds),
        dict[int, list[ReplicateReferences]](),
    )
    for previous_round, t in zip([-1, *rounds], rounds, strict=False):
        solutions = list[ReplicateReferences]()
        for r, start in enumerate(initial.to(torch.float64)):
            if same_law_as[r] < r:
                solutions.append(solutions[same_law_as[r]])
            elif previous_round < 0:
                solutions.append(find_replicate_references(risks[r].at(t), start, shift.box))
            else:
                solutions.append(track_reference_points(risks[r], by_round[previous_round][r], previous_round, t))
        by_round[t] = solutions
    search.seconds = None  # a point of another round, searched during the run, is no part of this search
    return ReferenceTrajectory(risks, share(by_round))


def _representative_replicates(
    risks: Sequence[Risk], data: ClientData, initial: Tensor, rounds: Sequence[int]
) -> list[int]:
    """[R] the first replicate with the same law in all these rounds and the same initial model: a stream's law does not
    depend on the seed, unless the drift does.
    """
    if not data.dataset.stream:
        return list(range(len(risks)))
    signatures = [
        (np.stack([risk.drift_displacements(t) for t in rounds]).tobytes(), model.cpu().numpy().tobytes())
        for risk, model in zip(risks, initial, strict=True)
    ]
    return [signatures.index(signature) for signature in signatures]


def track_reference_points(
    risk: Risk, previous_points: ReplicateReferences, previous_round: int, t: int
) -> ReplicateReferences:
    """Return the reference points of round t of one replicate, searched from those of an earlier round; the earlier
    points if the data have not moved since."""
    if np.array_equal(risk.drift_displacements(previous_round), risk.drift_displacements(t)):
        return previous_points
    drifted_risk, solved_points, box = risk.at(t), ReplicateReferences(), risk.shift.box
    for column, name in sought_points(risk.shift).items():
        if column not in previous_points.points:
            solved_points.verdicts[column] = previous_points.verdicts[column]
            continue
        start, slope = previous_points.points[column], previous_points.slopes.get(column)
        try:
            point = None if slope is None else _reused_slope_newton_step(drifted_risk, name, start, slope)
            if point is not None:
                assert slope is not None
                solved_points.slopes[column] = slope
            elif name == "optimal":
                point = _followed_optimum(drifted_risk, start, [*solved_points.points.values()], box)
            else:
                point = (
                    nash_point(drifted_risk, start, box) if name == "nash" else stable_point(drifted_risk, start, box)
                )
            if (
                column not in solved_points.slopes
                and name != "nash"
                and box is None
                and len(point) <= MAX_JACOBIAN_PARAMETERS
            ):
                solved_points.slopes[column] = (
                    drifted_risk.performative_hessian(point)
                    if name == "optimal"
                    else drifted_risk.decoupled_jacobian(point)
                )
            value = float(drifted_risk.performative_risk(point))
        except Exception as error:
            if not isinstance(error, NoReferenceError) and not is_numerical_error(error):
                raise
            message = " ".join(str(error).split())
            log.info("no %s from round %d on: %s", column, t, message)
            solved_points.verdicts[column] = f"lost in round {t}: {message}"
            continue
        solved_points.points[column], solved_points.verdicts[column], solved_points.risks[column] = (
            point,
            previous_points.verdicts[column],
            value,
        )
    return solved_points


def _reused_slope_newton_step(risk: Risk, name: str, start: Tensor, slope: Tensor) -> Tensor | None:
    """[d] a point after one Newton step with the slope of an earlier round; None unless it is a zero of its field.

    Where the drift moves the zero of an affine field, this is exact, and what was checked of the slope still holds.
    """
    field = risk.performative_gradient if name == "optimal" else risk.decoupled_gradient
    risk.search.activity = "following the reference points"
    try:
        point = start - torch.linalg.solve(slope, field(start))
    except RuntimeError:  # a singular slope
        return None
    return point if float(field(point).norm()) <= STABLE_POINT_TOLERANCE * (1 + float(point.norm())) else None


def _followed_optimum(risk: Risk, start: Tensor, other_starts: list[Tensor], box: BoxBounds) -> Tensor:
    """[d] a minimum of the performative risk near `start`, by Newton's method; else by a search from these points."""
    risk.search.activity = "following θ^PO"
    if len(start) <= MAX_JACOBIAN_PARAMETERS:
        point = find_zero(risk.performative_gradient, risk.performative_hessian, start, box, STABLE_POINT_TOLERANCE)
        if point is not None:
            is_free = free_coordinates(point, risk.performative_gradient(point), box)
            if slowest_decay_rate(risk.performative_hessian(point), is_free) > FLAT_CURVATURE_RATIO:
                return point
    return optimal_point(risk, [start, *other_starts], box)
