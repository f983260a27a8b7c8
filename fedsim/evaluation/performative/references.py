"""θ^PS and θ^PO of a run, computed before round 0 if cheap or requested; no run fails for lack of them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from fedsim.core.errors import ConfigError, NoReferenceError
from fedsim.core.numerical import is_numerical_error
from fedsim.data.samples import ClientData
from fedsim.evaluation.performative.nash import nash_point
from fedsim.evaluation.performative.optimal import optimal_point
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.search import EvaluationCounter
from fedsim.evaluation.performative.solvers import BoxBounds
from fedsim.evaluation.performative.stable import stable_point
from fedsim.models import StatelessModel
from fedsim.shift import NoShift, Players, Shift

log = logging.getLogger(__name__)

MAX_AUTO_PARAMETERS = 100  # largest problem for `references: auto`
POINT_NAME_BY_COLUMN = {
    "distance_to_ps": "stable",
    "distance_to_po": "optimal",
}  # column of metrics.csv → its name in summary.json
GAME_POINT_NAME_BY_COLUMN = {"distance_to_nash": "nash"}  # and of a game's players
MINIMISER = "tracking_error"  # column of the distance to the minimiser of the current risk, of data that drift
OF_DRIFT = {MINIMISER: "minimiser"}
FOUND_VERDICT = "found"
GRADIENT_CHECK_DISTANCES = (
    0.01,
    1.0,
    10.0,
)  # distance from the initial model at which the gradient of a shift is checked
GRADIENT_REMEDY = "give it a `respond_differentiably` with torch operations on theta, or set shift.references=none"
MAX_AUTO_INPUT_ENTRIES = 5_000_000  # largest number of input entries


@dataclass
class ReplicateReferences:
    """The reference points of one replicate.

    Attributes:
        points: 'distance_to_ps' and 'distance_to_po' → [d] float64, if they exist.
        risks: their performative risks R(θ, θ).
        verdicts: for both, 'found' or a sentence with the reason why not.
        slopes: Jacobians [d, d] of the fields of which the points are zeros, of points that are followed.
    """

    points: dict[str, Tensor] = field(default_factory=dict)
    risks: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    slopes: dict[str, Tensor] = field(default_factory=dict)


class References(dict[str, Tensor]):
    """'distance_to_ps' and 'distance_to_po' → [R, d] float64, if they exist in all replicates.

    Attributes:
        replicates: the points of each; empty if points are not requested.
    """

    def __init__(self, replicates: list[ReplicateReferences] | None = None) -> None:
        self.replicates = replicates or []
        points = [solved.points for solved in self.replicates]
        names = points[0] if points else {}
        super().__init__(
            {name: torch.stack([f[name] for f in points]) for name in names if all(name in f for f in points)}
        )

    @property
    def has_regret(self) -> bool:
        """Whether `excess_risk` can be computed."""
        return False

    def at(self, t: int) -> dict[str, Tensor]:
        """The points of round t, which differ between rounds if the data drift."""
        return self

    def excess_risk(self, models: Tensor, t: int) -> np.ndarray:
        """[R] performative risk of models [R, d] on the data of round t minus its minimum, if the data drift."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """For summary.json: θ^PS ('stable') and θ^PO ('optimal') by replicate, each with the verdict and its norm,
        performative risk and, up to 100 parameters, values (null if the point does not exist). If the data drift, they
        are those of the last round; without a shift, those of the minimiser of the current risk ('minimiser').
        """
        summary: dict[str, Any] = {}
        verdicts = self.replicates[0].verdicts if self.replicates else {}
        for column, name in (POINT_NAME_BY_COLUMN | GAME_POINT_NAME_BY_COLUMN | OF_DRIFT).items():
            if column not in verdicts:
                continue
            points = [solved.points.get(column) for solved in self.replicates]
            summary[name] = {
                "verdict": [solved.verdicts[column] for solved in self.replicates],
                "risk": [solved.risks.get(column) for solved in self.replicates],
                "norm": [None if point is None else float(point.norm()) for point in points],
            }
            if all(point is None or len(point) <= MAX_AUTO_PARAMETERS for point in points):
                summary[name]["values"] = [None if point is None else point.tolist() for point in points]
        return summary


def references(model: StatelessModel, shift: Shift, data: ClientData, initial: Tensor) -> References:
    """θ^PS and θ^PO of every replicate, if they exist; missing points are logged.

    Args:
        model, shift, data: of the run.
        initial: [R, d] initial models, from which the search starts (for θ^PO also from θ^PS and from zero).
    """
    if not shift.active or shift.references == "none":
        return References()
    reason = no_reference_points_reason(model, data, shift.references)
    if reason:
        log.info("θ^PS and θ^PO are %s", reason)
        return References([ReplicateReferences(verdicts=dict.fromkeys(sought_points(shift), reason)) for _ in initial])
    solutions, search = list[ReplicateReferences](), EvaluationCounter(shift.references_seconds)
    for r, start in enumerate(initial.to(torch.float64)):
        same_law_replicates = [q for q in range(r) if data.dataset.stream and torch.equal(initial[q], initial[r])]
        if same_law_replicates:  # a stream's law does not depend on the seed
            solutions.append(solutions[same_law_replicates[0]])
        else:
            solutions.append(find_replicate_references(Risk(model, shift, data, r, search=search), start, shift.box))
    return References(solutions)


def unshifted_minimisers(model: StatelessModel, data: ClientData, initial: Tensor) -> Tensor:
    """[R, d] float64 minimisers of the risk on the clients' data before any model is deployed.

    Args:
        model, data: of the run.
        initial: [R, d] initial models, from which the search starts.

    Raises:
        ConfigError: no minimiser is found, or it is not unique.
    """
    no_shift, search = NoShift(), EvaluationCounter()
    try:
        return torch.stack(
            [
                stable_point(Risk(model, no_shift, data, r, search=search), start)
                for r, start in enumerate(initial.to(torch.float64))
            ]
        )
    except Exception as error:
        if not isinstance(error, NoReferenceError) and not is_numerical_error(error):
            raise
        raise ConfigError(f"start=erm, but {' '.join(str(error).split())}") from error


def sought_points(shift: Shift) -> dict[str, str]:
    """Column → name of the points that are searched under a shift; of data that drift alone, the minimiser."""
    if not shift.active:
        return OF_DRIFT
    return POINT_NAME_BY_COLUMN | (GAME_POINT_NAME_BY_COLUMN if isinstance(shift, Players) else {})


def no_reference_points_reason(
    model: StatelessModel, data: ClientData, requested_points: str, group: str = "shift"
) -> str:
    """Return why no points are computed, or ''; `requested_points` is the value of the setting `references`."""
    if model.loss_mixes_samples:
        return "not computed: the loss is defined on batches, but these points are defined for means over samples"
    expense_reason = too_expensive_reason(model, data)
    return (
        f"not computed: {expense_reason}; set {group}.references=always to compute them"
        if requested_points == "auto" and expense_reason
        else ""
    )


def find_replicate_references(risk: Risk, start: Tensor, box: BoxBounds) -> ReplicateReferences:
    """The points of one replicate, if they exist."""
    solved, starts = ReplicateReferences(), [start, torch.zeros_like(start)]
    for column, name in sought_points(risk.shift).items():
        try:
            if name == "optimal":
                check_shift_gradient(risk, start)
            if name == "nash":
                point = nash_point(risk, start, box)
            else:
                point = optimal_point(risk, starts, box) if name == "optimal" else stable_point(risk, start, box)
            value = float(risk.performative_risk(point))
        except Exception as error:
            if not isinstance(error, NoReferenceError) and not is_numerical_error(error):
                raise
            message = " ".join(str(error).split())
            reason = message if isinstance(error, NoReferenceError) else f"the search failed: {message}"
            log.info("no %s: %s", column, reason)
            solved.verdicts[column] = reason
            continue
        starts.append(point)
        solved.points[column], solved.verdicts[column] = point, FOUND_VERDICT
        solved.risks[column] = value
    return solved


def check_shift_gradient(risk: Risk, start: Tensor) -> None:
    """Check that gradients flow through a user's shift; otherwise θ^PO would be wrong.

    Raises:
        NoReferenceError: the risk changes with the deployed model, near the start or far from it, but its gradient with
            respect to that model is zero or cannot be computed.
    """
    if type(risk.shift).__module__.startswith("fedsim."):
        return
    shift_name = f"shift={type(risk.shift).__name__}"
    values, gradient_magnitude = [float(risk(start, start))], 0.0
    for scale in GRADIENT_CHECK_DISTANCES:
        deployed = start + scale * torch.cos(1.0 + torch.arange(len(start), device=start.device)).to(start)
        values.append(float(risk(start, deployed)))
        try:
            gradient_magnitude += float(grad(risk, argnums=1)(start, deployed).abs().sum())
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise NoReferenceError(f"{shift_name} cannot be differentiated ({reason}); {GRADIENT_REMEDY}") from error
    if gradient_magnitude == 0 and max(values) - min(values) > 1e-9 * (1 + abs(values[0])):
        raise NoReferenceError(
            f"{shift_name} changes the data, but no gradient flows from the data to the model; {GRADIENT_REMEDY}"
        )


def too_expensive_reason(model: StatelessModel, data: ClientData) -> str:
    """The reason why `auto` does not compute the points, or an empty string."""
    if model.columns.has_hidden_columns:
        return "the model has columns that strategies do not see"
    if model.dimension > MAX_AUTO_PARAMETERS:
        return f"the model has {model.dimension} parameters, more than {MAX_AUTO_PARAMETERS}"
    numbers = data.federation.clients * data.width(None) * math.prod(data.dataset.shape)
    if numbers > MAX_AUTO_INPUT_ENTRIES:
        return f"the clients' inputs have {numbers:,} entries, more than {MAX_AUTO_INPUT_ENTRIES:,}"
    return ""
