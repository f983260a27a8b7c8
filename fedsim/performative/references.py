"""θ^PS and θ^PO of a run, solved once before round 0 where that is cheap or asked for; no run fails for their want."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError, NoReferenceError
from fedsim.models import RowModel
from fedsim.performative.optimal import optimal_point
from fedsim.performative.risk import Risk
from fedsim.performative.roots import Box
from fedsim.performative.stable import stable_point
from fedsim.samples import ClientData
from fedsim.shift import NoShift, Shift

log = logging.getLogger(__name__)

PARAMETERS = 100  # most that `references: auto` solves for
NUMBERS = 5_000_000  # most entries of the inputs it looks at


def references(model: RowModel, shift: Shift, data: ClientData, initial: Tensor) -> dict[str, Tensor]:
    """'distance_to_ps' and 'distance_to_po' → [R, d] float64, as far as they exist; what is left out is logged.

    Args:
        model, shift, data: of the run.
        initial: [R, d] initial models, from which the points are sought (θ^PO also from θ^PS and from zero).
    """
    if not shift.active or shift.references == "none":
        return {}
    dear = _too_dear(model, data)
    if shift.references == "auto" and dear:
        log.info("θ^PS and θ^PO are not solved for: %s; shift.references=always does it", dear)
        return {}
    found: list[dict[str, Tensor]] = []
    for r, start in enumerate(initial.to(torch.float64)):
        twins = [q for q in range(r) if data.dataset.stream and torch.equal(initial[q], initial[r])]
        if twins:  # a stream's law does not depend on the seed
            found.append(found[twins[0]])
        else:
            found.append(_points(Risk(model, shift, data, r), start, shift.box))
    return {name: torch.stack([f[name] for f in found]) for name in found[0] if all(name in f for f in found)}


def unshifted(model: RowModel, data: ClientData, initial: Tensor) -> Tensor:
    """[R, d] float64 minimisers of the risk on the clients' data as they are before any model is deployed.

    Args:
        model, data: of the run.
        initial: [R, d] initial models, from which the minimisers are sought.

    Raises:
        ConfigError: where no minimiser is found, or it is not unique.
    """
    still = NoShift()
    try:
        return torch.stack(
            [stable_point(Risk(model, still, data, r), start) for r, start in enumerate(initial.to(torch.float64))]
        )
    except NoReferenceError as error:
        raise ConfigError(f"start=erm, but {error}") from error


def _points(risk: Risk, start: Tensor, box: Box) -> dict[str, Tensor]:
    """Both points of one replicate, or those that exist."""
    found, starts = {}, [start, torch.zeros_like(start)]
    try:
        found["distance_to_ps"] = stable_point(risk, start, box)
        starts.append(found["distance_to_ps"])
    except NoReferenceError as error:
        log.info("no distance_to_ps: %s", error)
    try:
        found["distance_to_po"] = optimal_point(risk, starts, box)
    except NoReferenceError as error:
        log.info("no distance_to_po: %s", error)
    return found


def _too_dear(model: RowModel, data: ClientData) -> str:
    """Why `auto` does not solve, or nothing."""
    if model.columns.divided:
        return "the model has columns that strategies do not see"
    if model.dimension > PARAMETERS:
        return f"the model has {model.dimension} parameters, more than {PARAMETERS}"
    numbers = data.federation.clients * data.width(None) * math.prod(data.dataset.shape)
    if numbers > NUMBERS:
        return f"the clients' inputs have {numbers:,} entries, more than {NUMBERS:,}"
    return ""
