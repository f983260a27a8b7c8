"""Who took part when, and what became of those who did not: `absent`, `drift`, `staleness` and `utility` of a run's
diagnostics (`fedsim.evaluation.diagnostics`)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.evaluation import EvaluationResult, Evaluator
from fedsim.evaluation.measured import TEST, client_value_subject
from fedsim.evaluation.registry import DIAGNOSTICS

DRIFT, UTILITY = "client_drift", "availability_normalised_utility"
STALENESS_COLUMNS = ("staleness_mean", "staleness_max")


class Participation:
    """Follows the clients from round to round, as far as it is asked to; what it remembers is in the checkpoints.

    Staleness is that of You and Pu (2025): with τ_i(t) the last round, up to t, in which client i took part, −1 before
    its first, τ_max and τ_avg are the largest and the mean t − τ_i(t) over clients and rounds. Drift is the mean
    ‖y_i − x^t‖ of Karimireddy et al. (SCAFFOLD, 2020), who square it. Utility is after Behfar and Mortier (2026): what
    a client has gained per opportunity to take part; a gain is taken here to be what its loss has fallen since round 0.

    Args:
        diagnostics: diagnostics.
        federation, availability: of the run.
        evaluator: whose numbers of clients are looked at.
        owners: whether test samples were held out of the run's own clients.
    """

    def __init__(
        self,
        diagnostics: list[str],
        federation: Federation,
        availability: Availability,
        evaluator: Evaluator,
        owners: bool,
    ) -> None:
        self.diagnostics, self.federation, self.availability, self.evaluator = (
            diagnostics,
            federation,
            availability,
            evaluator,
        )
        judged = evaluator.primary_column
        self.of = judged if owners or judged != TEST.format(evaluator.of) else evaluator.local_column
        self.last, self.longest_absence, self.past_staleness = np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        self.opportunities, self.first_loss = np.zeros(0, int), np.zeros(0)

    def memory(self) -> dict[str, Tensor]:
        """[R·m'] each, before round 0; the same memory as the arrays that a round changes."""
        rows, arrays = self.federation.rows, dict[str, np.ndarray]()
        if {"absent", "staleness"} & set(self.diagnostics):
            arrays["last_round"] = self.last = np.full(rows, -1, dtype=np.int64)
        if "staleness" in self.diagnostics:
            arrays["longest_absence"] = self.longest_absence = np.zeros(rows, dtype=np.int64)
            arrays["past_staleness"] = self.past_staleness = np.zeros(rows)
        if "utility" in self.diagnostics:
            arrays["opportunities"] = self.opportunities = np.zeros(rows, dtype=np.int64)
            arrays["first_loss"] = self.first_loss = np.full(rows, np.nan)
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def follow(self, source: Participation, replicates: slice) -> None:
        """Share what another one remembers of these of its replicates, which are this one's."""
        for name in ("last", "longest_absence", "past_staleness", "opportunities", "first_loss"):
            values: np.ndarray = getattr(source, name)
            width = len(values) // source.federation.replicates
            setattr(self, name, values[replicates.start * width : replicates.stop * width])

    def update(self, t: int, cohort: Cohort) -> None:
        """Round t is complete."""
        if "utility" in self.diagnostics:
            self.opportunities += (self.availability.counts(t)[:, self.federation.local_clients] > 0).reshape(-1)
        if not len(self.last):
            return
        participating_rows = cohort.host.rows[cohort.host.count > 0]
        if len(self.longest_absence):
            gap = t - 1 - self.last[participating_rows]
            self.longest_absence[participating_rows] = np.maximum(self.longest_absence[participating_rows], gap)
            self.past_staleness[participating_rows] += gap * (gap + 1) / 2
        self.last[participating_rows] = t

    @property
    def columns(self) -> dict[str, str]:
        """Column → what it is."""
        descriptions = {}
        if "absent" in self.diagnostics:
            mean = client_value_subject(self.of)
            descriptions[f"{self.of}_absent"] = (
                f"mean over the clients that did not take part in the last round, of {mean}"
            )
            descriptions[f"{self.of}_unseen"] = f"mean over the clients that never took part so far, of {mean}"
        if "drift" in self.diagnostics:
            descriptions[DRIFT] = DIAGNOSTICS[DRIFT].description
        descriptions |= {
            name: DIAGNOSTICS[name].description for name in STALENESS_COLUMNS if "staleness" in self.diagnostics
        }
        if "utility" in self.diagnostics:
            descriptions |= {name: DIAGNOSTICS[name].description for name in (UTILITY, f"{UTILITY}_cv")}
        return descriptions

    def __call__(self, measured: EvaluationResult, completed: int, report: Report | None) -> dict[str, np.ndarray]:
        """Columns [R] after so many rounds; `report` is the last's. NaN where they are of nobody."""
        column_values: dict[str, np.ndarray] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mean of empty slice|Degrees of freedom", RuntimeWarning)
            if "absent" in self.diagnostics:
                column_values |= self._absent_clients_metric(measured.by_client[self.of], completed)
            if "utility" in self.diagnostics:
                column_values |= self._utility(measured, completed)
        if "drift" in self.diagnostics:
            column_values[DRIFT] = self._drift(report)
        if "staleness" in self.diagnostics:
            age = self._by_replicate(completed - 1 - self._gather_clients(self.last))
            column_values |= {"staleness_mean": age.mean(1), "staleness_max": age.max(1)}
        return column_values

    def summary(self, completed: int) -> dict[str, Any]:
        """For summary.json: τ_max and τ_avg of every replicate over clients and rounds."""
        if "staleness" not in self.diagnostics or not completed:
            return {}
        age = completed - 1 - self.last
        longest = self._by_replicate(self._gather_clients(np.maximum(self.longest_absence, age))).max(1)
        mean = self._by_replicate(self._gather_clients(self.past_staleness + age * (age + 1) / 2)).mean(1) / completed
        return {"staleness": {"tau_max": [int(value) for value in longest], "tau_avg": mean.tolist()}}

    def _absent_clients_metric(self, values: np.ndarray, completed: int) -> dict[str, np.ndarray]:
        last = self._by_replicate(self._gather_clients(self.last))
        last = last[:, self.evaluator.everyone] if self.of != TEST.format(self.evaluator.of) else last
        values = values[:, : last.shape[1]]
        column_values = {}
        for name, client_mask in (("absent", last < completed - 1 if completed else last < 0), ("unseen", last < 0)):
            column_values[f"{self.of}_{name}"] = np.nanmean(np.where(client_mask, values, np.nan), axis=1)
        return column_values

    def _utility(self, measured: EvaluationResult, completed: int) -> dict[str, np.ndarray]:
        evaluated_clients, loss = self.evaluator.everyone, measured.client_loss
        assert loss is not None
        if not completed:
            local_mask = np.isin(self.federation.local_clients, evaluated_clients)
            positions = np.searchsorted(evaluated_clients, self.federation.local_clients[local_mask])
            self._by_replicate(self.first_loss)[:, local_mask] = loss[:, positions]
        first_loss, opportunities = (
            self._by_replicate(self._gather_clients(values))[:, evaluated_clients]
            for values in (self.first_loss, self.opportunities)
        )
        gains = np.where(opportunities > 0, (first_loss - loss) / np.maximum(opportunities, 1), np.nan)
        mean, spread = np.nanmean(gains, axis=1), np.nanstd(gains, axis=1)
        # where nobody has gained anything yet, there is no spread relative to it
        nonzero_mean = np.where(mean == 0, np.nan, mean)
        return {UTILITY: mean, f"{UTILITY}_cv": spread / nonzero_mean}

    def _drift(self, report: Report | None) -> np.ndarray:
        if report is None or report.server is None:
            return np.full(self.federation.replicates, np.nan)
        cohort = report.cohort
        distances = (report.end - cohort.broadcast(report.server)).norm(dim=1)
        nonempty, mean = cohort.nonempty, cohort.mean(distances)
        return np.asarray(torch.where(nonempty, mean, torch.nan).cpu().numpy())

    def _gather_clients(self, values: np.ndarray) -> np.ndarray:
        return self.federation.all_gather_clients(values)

    def _by_replicate(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.federation.replicates, -1)
