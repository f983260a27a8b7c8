"""Which clients took part in which rounds, and the diagnostics `absent`, `drift`, `presence`, `staleness` and `utility`
of a run (`fedsim.evaluation.diagnostics`)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.evaluation import EvaluationResult, Evaluator
from fedsim.evaluation.measured import TEST, client_value_subject
from fedsim.evaluation.registry import DIAGNOSTICS

DRIFT_COLUMN, UTILITY_COLUMN, PRESENT_COLUMN = "client_drift", "availability_normalised_utility", "present_clients"
STALENESS_COLUMNS = ("staleness_mean", "staleness_max")


class ParticipationRecorder:
    """Records the participation of clients, as far as diagnostics ask for it; its memory is in checkpoints.

    Staleness is that of You and Pu (2025): with τ_i(t) the last round, up to t, in which client i took part, −1 before
    its first, τ_max and τ_avg are the largest and the mean t − τ_i(t) over clients and rounds. Drift is the mean
    ‖y_i − x^t‖ of Karimireddy et al. (SCAFFOLD, 2020), who square it. Utility is after Behfar and Mortier (2026): what
    a client has gained per opportunity to take part; a gain is taken here to be what its loss has fallen since round 0.

    Args:
        diagnostics: diagnostics.
        federation, availability: of the run.
        evaluator: whose numbers of clients are looked at.
        has_owners: whether test samples were held out of the run's own clients.
    """

    def __init__(
        self,
        diagnostics: list[str],
        federation: Federation,
        availability: Availability,
        evaluator: Evaluator,
        has_owners: bool,
    ) -> None:
        self.diagnostics, self.federation, self.availability, self.evaluator = (
            diagnostics,
            federation,
            availability,
            evaluator,
        )
        if "presence" in diagnostics and not availability.changes_population:
            raise ConfigError(
                f"diagnostics={list(diagnostics)}: presence compares clients that are present with those that have "
                f"left, and under availability={type(availability).__name__} all clients stay; remove it, or use "
                "availability=arrivals"
            )
        judged = evaluator.primary_client_column
        self.measure_name = (
            judged if has_owners or judged != TEST.format(evaluator.measure_name) else evaluator.own_data_column
        )
        self.last_round, self.longest_absence, self.summed_staleness = np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        self.num_opportunities, self.first_loss = np.zeros(0, int), np.zeros(0)

    def memory(self) -> dict[str, Tensor]:
        """The memory before round 0, [R·m'] each; arrays of it are updated in place by rounds."""
        rows, memory_arrays = self.federation.num_memory_rows, dict[str, np.ndarray]()
        if {"absent", "staleness"} & set(self.diagnostics):
            memory_arrays["last_round"] = self.last_round = np.full(rows, -1, dtype=np.int64)
        if "staleness" in self.diagnostics:
            memory_arrays["longest_absence"] = self.longest_absence = np.zeros(rows, dtype=np.int64)
            memory_arrays["summed_staleness"] = self.summed_staleness = np.zeros(rows)
        if "utility" in self.diagnostics:
            memory_arrays["opportunities"] = self.num_opportunities = np.zeros(rows, dtype=np.int64)
            memory_arrays["first_loss"] = self.first_loss = np.full(rows, np.nan)
        return {name: torch.from_numpy(values) for name, values in memory_arrays.items()}

    def view_memory_of(self, source: ParticipationRecorder, replicates: slice) -> None:
        """Share the memory of another run, in which this run has these replicates."""
        for name in ("last_round", "longest_absence", "summed_staleness", "num_opportunities", "first_loss"):
            values: np.ndarray = getattr(source, name)
            width = len(values) // source.federation.num_replicates
            setattr(self, name, values[replicates.start * width : replicates.stop * width])

    def update(self, t: int, cohort: Cohort) -> None:
        """Record that round t is complete."""
        if "utility" in self.diagnostics:
            self.num_opportunities += (self.availability.counts(t)[:, self.federation.local_clients] > 0).reshape(-1)
        if not len(self.last_round):
            return
        participating_rows = cohort.host_index.rows[cohort.host_index.multiplicity > 0]
        if len(self.longest_absence):
            rounds_absent = t - 1 - self.last_round[participating_rows]
            self.longest_absence[participating_rows] = np.maximum(
                self.longest_absence[participating_rows], rounds_absent
            )
            self.summed_staleness[participating_rows] += rounds_absent * (rounds_absent + 1) / 2
        self.last_round[participating_rows] = t

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns and their descriptions."""
        column_descriptions = {}
        if "absent" in self.diagnostics:
            mean_subject = client_value_subject(self.measure_name)
            column_descriptions[f"{self.measure_name}_absent"] = (
                f"mean over the clients that did not take part in the last round, of {mean_subject}"
            )
            column_descriptions[f"{self.measure_name}_unseen"] = (
                f"mean over the clients that never took part so far, of {mean_subject}"
            )
        if "presence" in self.diagnostics:
            mean_subject = client_value_subject(self.measure_name)
            column_descriptions[f"{self.measure_name}_present"] = (
                f"mean over the clients that are present, of {mean_subject}"
            )
            column_descriptions[f"{self.measure_name}_departed"] = (
                f"mean over the clients that have left for good, of {mean_subject}"
            )
            column_descriptions[PRESENT_COLUMN] = DIAGNOSTICS[PRESENT_COLUMN].description
        if "drift" in self.diagnostics:
            column_descriptions[DRIFT_COLUMN] = DIAGNOSTICS[DRIFT_COLUMN].description
        column_descriptions |= {
            name: DIAGNOSTICS[name].description for name in STALENESS_COLUMNS if "staleness" in self.diagnostics
        }
        if "utility" in self.diagnostics:
            column_descriptions |= {
                name: DIAGNOSTICS[name].description for name in (UTILITY_COLUMN, f"{UTILITY_COLUMN}_cv")
            }
        return column_descriptions

    def __call__(
        self, evaluation_result: EvaluationResult, completed_rounds: int, report: Report | None
    ) -> dict[str, np.ndarray]:
        """Return the columns [R] after so many rounds; `report` is that of the last one. NaN where they concern no
        client."""
        column_values: dict[str, np.ndarray] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mean of empty slice|Degrees of freedom", RuntimeWarning)
            if "absent" in self.diagnostics:
                column_values |= self._absent_clients_metric(
                    evaluation_result.by_client[self.measure_name], completed_rounds
                )
            if "presence" in self.diagnostics:
                column_values |= self._availability_metrics(
                    evaluation_result.by_client[self.measure_name], completed_rounds
                )
            if "utility" in self.diagnostics:
                column_values |= self._participation_utility(evaluation_result, completed_rounds)
        if "drift" in self.diagnostics:
            column_values[DRIFT_COLUMN] = self._mean_client_drift(report)
        if "staleness" in self.diagnostics:
            rounds_since_last = self._by_replicate(completed_rounds - 1 - self._all_gather_clients(self.last_round))
            column_values |= {"staleness_mean": rounds_since_last.mean(1), "staleness_max": rounds_since_last.max(1)}
        return column_values

    def summary(self, completed_rounds: int) -> dict[str, Any]:
        """Return the entry of summary.json: τ_max and τ_avg of each replicate over clients and rounds."""
        if "staleness" not in self.diagnostics or not completed_rounds:
            return {}
        rounds_since_last = completed_rounds - 1 - self.last_round
        longest_absence = self._by_replicate(
            self._all_gather_clients(np.maximum(self.longest_absence, rounds_since_last))
        ).max(1)
        mean_subject = (
            self._by_replicate(
                self._all_gather_clients(self.summed_staleness + rounds_since_last * (rounds_since_last + 1) / 2)
            ).mean(1)
            / completed_rounds
        )
        return {"staleness": {"tau_max": [int(value) for value in longest_absence], "tau_avg": mean_subject.tolist()}}

    def _absent_clients_metric(self, client_values: np.ndarray, completed_rounds: int) -> dict[str, np.ndarray]:
        last_round = self._by_replicate(self._all_gather_clients(self.last_round))
        last_round = (
            last_round[:, self.evaluator.evaluated_clients]
            if self.measure_name != TEST.format(self.evaluator.measure_name)
            else last_round
        )
        client_values = client_values[:, : last_round.shape[1]]
        column_values = {}
        for name, client_mask in (
            ("absent", last_round < completed_rounds - 1 if completed_rounds else last_round < 0),
            ("unseen", last_round < 0),
        ):
            column_values[f"{self.measure_name}_{name}"] = np.nanmean(
                np.where(client_mask, client_values, np.nan), axis=1
            )
        return column_values

    def _availability_metrics(self, client_values: np.ndarray, completed_rounds: int) -> dict[str, np.ndarray]:
        present_mask, departed_mask = (
            self.availability.present(completed_rounds),
            self.availability.departed(completed_rounds),
        )
        column_values = {PRESENT_COLUMN: present_mask.sum(1).astype(float)}
        for name, client_mask in (("present", present_mask), ("departed", departed_mask)):
            if self.measure_name != TEST.format(self.evaluator.measure_name):
                client_mask = client_mask[:, self.evaluator.evaluated_clients]
            column_values[f"{self.measure_name}_{name}"] = np.nanmean(
                np.where(client_mask, client_values[:, : client_mask.shape[1]], np.nan), axis=1
            )
        return column_values

    def _participation_utility(
        self, evaluation_result: EvaluationResult, completed_rounds: int
    ) -> dict[str, np.ndarray]:
        evaluated_clients, loss = self.evaluator.evaluated_clients, evaluation_result.client_loss
        assert loss is not None
        if not completed_rounds:
            local_mask = np.isin(self.federation.local_clients, evaluated_clients)
            positions = np.searchsorted(evaluated_clients, self.federation.local_clients[local_mask])
            self._by_replicate(self.first_loss)[:, local_mask] = loss[:, positions]
        first_loss, num_opportunities = (
            self._by_replicate(self._all_gather_clients(values))[:, evaluated_clients]
            for values in (self.first_loss, self.num_opportunities)
        )
        gains = np.where(num_opportunities > 0, (first_loss - loss) / np.maximum(num_opportunities, 1), np.nan)
        mean, spread = np.nanmean(gains, axis=1), np.nanstd(gains, axis=1)
        # if nobody has gained anything yet, there is no relative spread
        nonzero_mean = np.where(mean == 0, np.nan, mean)
        return {UTILITY_COLUMN: mean, f"{UTILITY_COLUMN}_cv": spread / nonzero_mean}

    def _mean_client_drift(self, report: Report | None) -> np.ndarray:
        if report is None or report.server is None:
            return np.full(self.federation.num_replicates, np.nan)
        cohort = report.cohort
        distances = (report.end - cohort.broadcast(report.server)).norm(dim=1)
        nonempty, mean = cohort.is_nonempty, cohort.mean(distances)
        return np.asarray(torch.where(nonempty, mean, torch.nan).cpu().numpy())

    def _all_gather_clients(self, values: np.ndarray) -> np.ndarray:
        return self.federation.all_gather_clients(values)

    def _by_replicate(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.federation.num_replicates, -1)
