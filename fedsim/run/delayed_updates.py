"""Rows in flight: started in one round, delivered in a later one.

A client that is asked begins at once, from the model of that round and on data that react to it; what comes out is kept
until it arrives. Until the round after, the client is busy, and is not asked again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.availability.clock import Delay
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.report import Report
from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.run.round_clock import RoundClock
from fedsim.strategies import Strategy
from fedsim.trainer import TaskGenerator, Trainer
from fedsim.trainer.trainer import AcceptRows

# Optional fields of a report: name in the memory, and so in checkpoints → attribute.
ROW_NAME_BY_REPORT_FIELD = {
    "start": "start",
    "loss": "loss",
    "lr_sum": "lr_sum",
    "weight": "gradient_weight",
    "finite": "finite",
    "whole": "end_with_private",
}
HOST_ROW_NAMES = ("virtual", "began", "due", "samples", "count", "probability")  # numbers of the host, [k] each
CARRY_PREFIX = "carry "


class DelayedUpdates:
    """Keeps the rows in flight in `Memory.in_flight`, which is part of checkpoints. With several ranks each keeps the
    rows of its own clients.

    Args:
        delay: how long rows take.
        pace: which knows it where the clock delivers what is late.
        strategy, trainer: of the run, which must allow it.

    Attributes:
        net_delayed: [R] clients that began in the last round and have not arrived, less those that began before it and
            have.
    """

    def __init__(self, delay: Delay, pace: RoundClock, strategy: Strategy[Any], trainer: Trainer) -> None:
        self.delay, self.round_clock, self.federation = delay, pace, pace.batches.federation
        self.strategy, self.trainer = strategy, trainer
        self.net_delayed = np.zeros(self.federation.num_replicates, dtype=np.int64)

    def setup(self) -> None:
        """Set up the delay for the clients, once before the first round.

        Raises:
            ConfigError: the run does not allow late rows.
        """
        self.delay.setup(self.federation)
        if self.active:
            self._check_delay_support(self.strategy, self.trainer.local_rule, self.trainer.model)

    @property
    def active(self) -> bool:
        """Whether a row may arrive in a later round than that in which it was started."""
        return self.delay.active or self.round_clock.clock.delivers_late_rows

    def _check_delay_support(self, strategy: Strategy[Any], local_rule: LocalRule, model: StatelessModel) -> None:
        """Refuse settings that have no meaning for late rows, or that would deliver them on time by another way."""
        name = type(strategy).__name__
        if self.delay.active and self.round_clock.clock.delivers_late_rows:
            raise ConfigError("delay and clock.late=deliver both determine when a row arrives; set delay=none")
        if not strategy.supports_stale:
            raise ConfigError(
                f"strategy={name} is not defined for rows that started from an older model; set delay=none, or choose "
                "fedbuff, fedasync, fedavg, fedavg_all, fedavgm, fedopt, fedprox, fednova, mifa, afa_cd, afa_cs, "
                "ca2fl, ace or aced"
            )
        if len(model.columns.averaged):
            raise ConfigError(
                f"statistics ({next(iter(model.statistics))}, …) that the server averages would not be delayed; keep "
                "them with the client by columns=fedbn, or set delay=none"
            )
        if any(local_rule.extra_transmitted_numbers(model.dimension)):
            raise ConfigError(
                f"what local={type(local_rule).__name__} sends besides rows would not be delayed; set delay=none"
            )

    def check_nonfinite_handling(self, on_nonfinite: str) -> None:
        """Refuse a treatment of rows that are not finite which has no meaning for late rows."""

    def idle_clients(self, active: Cohort, memory: Memory) -> Cohort:
        """Return the clients of the cohort that have no row in flight."""
        self.net_delayed = np.zeros(self.federation.num_replicates, dtype=np.int64)
        rows = self._in_flight_entries(memory)
        if not rows:
            return active
        free_mask = ~np.isin(active.host_index.virtual_clients, rows["virtual"].numpy())
        return active if free_mask.all() else active.subset(np.flatnonzero(free_mask))

    def _in_flight_entries(self, memory: Memory) -> dict[str, Tensor]:
        """Return the stored entries of clients that have rows in flight, whose numbers are under 'virtual'."""
        return memory.in_flight

    def generate_round_tasks(
        self,
        start: Tensor | dict[str, Tensor],
        cohort: Cohort,
        t: int,
        deployed: Tensor,
        memory: Memory,
        accept_rows: AcceptRows | None = None,
    ) -> TaskGenerator[Report]:
        """Do a round's local work, and return the report of the rows that arrive in it; the arguments are those of
        `Trainer.generate_round_tasks`."""
        report = yield from self.trainer.generate_round_tasks(start, cohort, t, deployed, memory, accept_rows)
        return self(report, memory)

    def __call__(self, report: Report, memory: Memory) -> Report:
        """Return the report of the rows that arrive in this round, in place of those that were computed in it."""
        if not self.active:
            return report
        t, virtual_clients = report.cohort.round, report.cohort.host_index.virtual_clients
        delays = (
            self._delays(t, virtual_clients) if self.delay.active else self.round_clock.arrival_delays[virtual_clients]
        )
        new_rows = _rows_by_name(report, t + delays)
        in_flight = memory.in_flight or {name: rows[:0] for name, rows in new_rows.items()}
        due_mask, on_time_mask = in_flight["due"].numpy() <= t, delays == 0
        device = self.federation.device
        compute_device, storage_device = device, device if self.federation.storage == "device" else torch.device("cpu")
        arrived_rows, on_time_rows = (
            _select_rows(in_flight, np.flatnonzero(due_mask), compute_device),
            _select_rows(new_rows, np.flatnonzero(on_time_mask), compute_device),
        )
        waiting_rows, delayed_rows = (
            _select_rows(in_flight, np.flatnonzero(~due_mask), storage_device),
            _select_rows(new_rows, np.flatnonzero(~on_time_mask), storage_device),
        )
        memory.in_flight = {name: torch.cat([waiting_rows[name], delayed_rows[name]]) for name in new_rows}
        (self.net_delayed,) = self.federation.ranks.all_reduce_host(
            self._count_clients(delayed_rows) - self._count_clients(arrived_rows)
        )
        order = torch.argsort(torch.cat([arrived_rows["virtual"], on_time_rows["virtual"]]))
        return self._report_of_arrivals(
            report, {name: _index_rows(torch.cat([arrived_rows[name], on_time_rows[name]]), order) for name in new_rows}
        )

    def _delays(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """Return by how many rounds the rows of clients that start now are late, [n]."""
        label = f"delay={type(self.delay).__name__}: rounds({t}, …)"
        return checks.check_number_per_client(
            label, self.delay.rounds(t, virtual_clients.copy()), len(virtual_clients), whole_numbers=True
        )

    def _count_clients(self, rows_by_name: dict[str, Tensor]) -> np.ndarray:
        """Return the number of clients of each replicate among those that take part, [R]."""
        virtual_clients = rows_by_name["virtual"][rows_by_name["count"] > 0].numpy()
        return np.bincount(virtual_clients // self.federation.clients, minlength=self.federation.num_replicates)

    def _report_of_arrivals(self, report: Report, rows_by_name: dict[str, Tensor]) -> Report:
        """Return a report of these rows; its entries of the round and of replicates are those of the round's report."""
        virtual_clients, start_rounds, _, samples, count, probability = (
            rows_by_name[name].numpy() for name in HOST_ROW_NAMES
        )
        cohort = Cohort(
            self.federation, self.federation.local_rows(virtual_clients), count, probability, report.cohort.round
        )
        carry = {
            name.removeprefix(CARRY_PREFIX): rows
            for name, rows in rows_by_name.items()
            if name.startswith(CARRY_PREFIX)
        }
        of_rows = {
            attribute: rows_by_name[name]
            for name, attribute in ROW_NAME_BY_REPORT_FIELD.items()
            if name in rows_by_name
        }
        staleness = report.cohort.round - start_rounds
        return replace(report, cohort=cohort, carry=carry, samples=samples, staleness=staleness, **of_rows)  # type: ignore[arg-type]


def _rows_by_name(report: Report, due_rounds: np.ndarray) -> dict[str, Tensor]:
    """Return all entries of a report that have a row per client, by name: [n, …] each."""
    host, n = report.cohort.host_index, len(report.cohort)
    start_rounds = np.full(n, report.cohort.round)
    numbers = (host.virtual_clients, start_rounds, due_rounds, report.samples, host.multiplicity, host.probability)
    rows_by_name = {name: torch.as_tensor(values) for name, values in zip(HOST_ROW_NAMES, numbers, strict=True)}
    rows_by_name |= {
        name: value
        for name, attribute in ROW_NAME_BY_REPORT_FIELD.items()
        if (value := getattr(report, attribute)) is not None
    }
    return rows_by_name | {f"{CARRY_PREFIX}{name}": rows for name, rows in report.carry.items()}


def _index_rows(rows: Tensor, positions: Tensor) -> Tensor:
    return rows[positions.to(rows.device)]


def _select_rows(rows_by_name: dict[str, Tensor], positions: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Return some of the rows; tensors stay on their devices."""
    row_selection = torch.as_tensor(positions)
    picked_rows = {name: _index_rows(rows, row_selection) for name, rows in rows_by_name.items()}
    return {name: rows if name in HOST_ROW_NAMES else rows.to(device) for name, rows in picked_rows.items()}
