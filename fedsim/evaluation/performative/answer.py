"""Performative power and stability gap: columns of the diagnostics `power` and `stability`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core.errors import ConfigError
from fedsim.data.samples import ClientData
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.solvers import minimise
from fedsim.evaluation.registry import DIAGNOSTICS
from fedsim.models import StatelessModel
from fedsim.models.losses import weighted_mean
from fedsim.shift import Shift
from fedsim.shift.shift import pad_batches, unpadded_client_batches

POWER, GAP = "performative_power", "stability_gap"


class PerformativeDiagnostics:
    """Performative power and the stability gap of models, in double precision on the samples of `Risk`.

    Power is Σ_i w_i mean_j ‖z_ij(θ) − z_ij(0)‖ (after Hardt, Jagadeesan and Mendler-Dünner, 2022, for one model):
    inputs and real-valued targets of the same base sample under θ and under the zero model; Σ_i w_i |ε_i| ‖θ‖ if data
    move by ε_i θ. The gap is ‖θ − argmin R(·, θ)‖, which takes one minimisation per evaluated model; NaN if there is no
    minimum.

    Args:
        diagnostics: diagnostics, of which 'power' and 'stability' are used.
        model, shift, data: of the run.

    Raises:
        ConfigError: the data do not react to the model, or only by weights, or parts of the model stay with clients.
    """

    def __init__(self, diagnostics: Sequence[str], model: StatelessModel, shift: Shift, data: ClientData) -> None:
        self.columns = {
            name: DIAGNOSTICS[name].description
            for key, name in (("power", POWER), ("stability", GAP))
            if key in diagnostics
        }
        self.model, self.shift, self.data = model, shift, data
        if self.columns and not shift.active:
            raise ConfigError(
                f"diagnostics={list(diagnostics)}: with shift=none data do not react to the model; remove it"
            )
        if self.columns and model.columns.has_hidden_columns:
            raise ConfigError(
                f"diagnostics={list(diagnostics)}: clients deploy their own parts of the model; set columns=all"
            )
        if POWER in self.columns and getattr(getattr(shift, "inner", shift), "held_fractions", None) is not None:
            raise ConfigError(
                f"diagnostics={list(diagnostics)}: power measures how far samples move, but this shift changes the "
                "weights of stored samples; remove it"
            )

    @cached_property
    def replicate_risks(self) -> list[Risk]:
        """The risk of every replicate."""
        return [Risk(self.model, self.shift, self.data, r) for r in range(self.data.federation.num_replicates)]

    @torch.no_grad()
    def __call__(self, models: Tensor, t: int = 0) -> dict[str, np.ndarray]:
        """Column → [R], of models [R, d] on the data of round t."""
        measures = {POWER: self._performative_power, GAP: self._stability_gap}
        risks = [risk.at(t) for risk in self.replicate_risks] if self.columns else []
        pairs = list(zip(risks, models.to(torch.float64), strict=True)) if self.columns else []
        return {name: np.array([measures[name](risk, theta) for risk, theta in pairs]) for name in self.columns}

    def _performative_power(self, risk: Risk, theta: Tensor) -> float:
        if self.shift.runs_unpadded:
            client_batches = unpadded_client_batches(risk.base)
            at_model, at_zero = (
                pad_batches([self.shift(client_batch, point) for client_batch in client_batches])
                for point in (theta, torch.zeros_like(theta))
            )
            return self._mean_displacement(at_model, at_zero, at_model["weight"], risk.weights)
        of_clients = vmap(self.shift, in_dims=(0, None))
        at_model, at_zero = of_clients(risk.base, theta), of_clients(risk.base, torch.zeros_like(theta))
        return self._mean_displacement(at_model, at_zero, risk.base.get("weight"), risk.weights)

    @staticmethod
    def _mean_displacement(
        batch: dict[str, Tensor], other_batch: dict[str, Tensor], weight: Tensor | None, of_clients: Tensor
    ) -> float:
        float_names = [name for name in ("x", "y") if name in batch and batch[name].is_floating_point()]
        displacements = [(batch[name] - other_batch[name]).reshape(*batch[name].shape[:2], -1) for name in float_names]
        return float(weighted_mean(torch.cat(displacements, 2).norm(dim=2), weight) @ of_clients)

    def _stability_gap(self, risk: Risk, theta: Tensor) -> float:
        if not torch.isfinite(theta).all():
            return float("nan")
        best = minimise(lambda point: risk(point, theta), theta, self.shift.box)
        return float("nan") if best is None else float((best[0] - theta).norm())
