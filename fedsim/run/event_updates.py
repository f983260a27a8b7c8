"""Updates in flight of an event-driven run: what each client started from, and its result, until it arrives.

A client's local work depends on the model that it started from and on its own random numbers alone, so it may be
computed at any time between its start and its arrival. It is computed when the first client that is still to be
computed arrives, in one call of the trainer with all others in flight: their start models are known by then. With c
clients in flight and one arrival per server update such a call has in the order of √c rows or more, where computing at
the start would take one row at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.availability.clock import Delay
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory
from fedsim.core.report import Report
from fedsim.run.delayed_updates import CARRY_PREFIX, ROW_NAME_BY_REPORT_FIELD, DelayedUpdates
from fedsim.run.event_clock import EventClock
from fedsim.strategies import Strategy
from fedsim.trainer import TaskGenerator, Trainer
from fedsim.trainer.trainer import AcceptRows

STRATEGY_CARRY_PREFIX = "handed "  # what the strategy sent besides the start row
HOST_ROW_NAMES = (
    "virtual",
    "began",
    "steps",
    "samples",
    "pending",
    "count",
    "probability",
)  # numbers of the host, [k] each
FREE_SLOT = -1  # in place of a virtual client


class RowSlots:
    """Rows of clients in flight, each in a slot until it arrives. Slots are reused, so that an update costs its own
    row, not those of all in flight.

    Args:
        rows: name → [k, …], empty before the first client starts.
        federation: of the run.
    """

    def __init__(self, rows: dict[str, Tensor], federation: Federation) -> None:
        self.rows, self.federation = rows, federation
        device = federation.device if federation.storage == "device" else torch.device("cpu")
        for name, value in rows.items():  # tensors of a checkpoint are on the host
            rows[name] = value if name in HOST_ROW_NAMES else value.to(device)
        self._device = device

    def select_occupied_slots(self, condition: np.ndarray) -> np.ndarray:
        """Return the occupied slots that satisfy a condition [k], in the order of their virtual clients."""
        virtual_clients = self.host_values("virtual")
        slot_indices = np.flatnonzero(condition & (virtual_clients != FREE_SLOT))
        return slot_indices[np.argsort(virtual_clients[slot_indices])]

    def host_values(self, name: str) -> np.ndarray:
        """Return [k] host numbers, as a copy that may be changed."""
        return self.rows[name].numpy() if name in self.rows else np.zeros(0, dtype=np.int64)

    def take_free_slots(self, slot_count: int) -> np.ndarray:
        """Return the lowest free slots, as many as asked for; the number of slots grows to the most ever in use at
        once."""
        if slot_count:
            self.rows.setdefault("virtual", torch.zeros(0, dtype=torch.int64))
        free_slots = np.flatnonzero(self.host_values("virtual") == FREE_SLOT)
        if (num_missing := slot_count - len(free_slots)) > 0:
            size = len(self.host_values("virtual"))
            for name, value in self.rows.items():
                self.rows[name] = torch.cat([value, value.new_zeros(num_missing, *value.shape[1:])])
            free_slots = np.append(free_slots, np.arange(size, size + num_missing))
        return free_slots[:slot_count]

    def write(self, slot_indices: np.ndarray, rows: dict[str, Tensor]) -> None:
        """Write rows [n, …] by name into n slots."""
        if not len(slot_indices):
            return
        row_selection = torch.as_tensor(slot_indices)
        for name, value in rows.items():
            device = torch.device("cpu") if name in HOST_ROW_NAMES else self._device
            if name not in self.rows:
                self.rows[name] = value.new_zeros(len(self.host_values("virtual")), *value.shape[1:], device=device)
            self.rows[name][row_selection.to(device)] = value.to(device)

    def read(self, slot_indices: np.ndarray, name: str) -> Tensor:
        """Return copies of rows [n, …], on the device where rows are computed."""
        value = self.rows[name]
        return value[torch.as_tensor(slot_indices).to(value.device)].to(self.federation.device)

    def cohort(self, slot_indices: np.ndarray, t: int, with_planned_steps: bool = False) -> Cohort:
        """Return the clients in these slots as a cohort; `with_planned_steps`: with their planned numbers of local
        steps."""
        virtual_clients, steps = self.host_values("virtual")[slot_indices], self.host_values("steps")[slot_indices]
        count, probability = (self.host_values(name)[slot_indices] for name in ("count", "probability"))
        rows = self.federation.local_rows(virtual_clients)
        return Cohort(
            self.federation, rows, count, probability, t, steps if with_planned_steps and (steps >= 0).all() else None
        )

    def read_by_prefix(self, slot_indices: np.ndarray, prefix: str) -> dict[str, Tensor]:
        """Return the entries of these slots whose names begin with a prefix, by the rest of the name."""
        return {
            name.removeprefix(prefix): self.read(slot_indices, name) for name in self.rows if name.startswith(prefix)
        }


class EventUpdates(DelayedUpdates):
    """Keeps the rows of clients in flight in `Memory.in_flight`, and passes those that arrive to the server.

    Args:
        delay, pace, strategy, trainer: see `DelayedUpdates`.

    Attributes:
        is_computed_lazily: whether work is computed when it is needed; else at its start, because it reads or changes
            what other clients or evaluations read in between.
    """

    round_clock: EventClock

    def __init__(self, delay: Delay, pace: EventClock, strategy: Strategy[Any], trainer: Trainer) -> None:
        super().__init__(delay, pace, strategy, trainer)
        columns, batches = trainer.model.columns, trainer.batches
        self.is_computed_lazily = not (
            trainer.shift.active
            or columns.has_hidden_columns
            or batches.contamination.active
            or trainer.local_rule.own_models
        )

    @property
    def active(self) -> bool:
        return self.round_clock.clock.asynchronous

    def setup(self) -> None:
        self.delay.setup(self.federation)
        if self.delay.active:
            raise ConfigError("delay and clock=events both determine when an update arrives; set delay=none")
        if self.federation.ranks.num_ranks > 1:
            raise ConfigError(
                f"clock=events runs in one process, and there are {self.federation.ranks.num_ranks} ranks; start one, "
                "or set clock=devices"
            )
        if self.active:
            self._check_delay_support(self.strategy, self.trainer.local_rule, self.trainer.model)

    def check_nonfinite_handling(self, on_nonfinite: str) -> None:
        if self.active and on_nonfinite == "drop_client":
            raise ConfigError(
                "on_nonfinite=drop_client makes a client absent in a round, and under clock=events its update would be "
                "missing in a buffer; set on_nonfinite=stop, or drop_replicate"
            )

    def _in_flight_entries(self, memory: Memory) -> dict[str, Tensor]:
        return memory.queue  # some slots of `in_flight` may be free

    def generate_round_tasks(
        self,
        start: Tensor | dict[str, Tensor],
        cohort: Cohort,
        t: int,
        deployed: Tensor,
        memory: Memory,
        accept_rows: AcceptRows | None = None,
    ) -> TaskGenerator[Report]:
        if not self.active:
            return (yield from self.trainer.generate_round_tasks(start, cohort, t, deployed, memory, accept_rows))
        row_slots = RowSlots(memory.in_flight, self.federation)
        self._put_into_slots(row_slots, start, cohort, t)
        arrived_slots = row_slots.select_occupied_slots(
            np.isin(row_slots.host_values("virtual"), self.round_clock.arrived_clients)
        )
        pending_slots = row_slots.select_occupied_slots(row_slots.host_values("pending") > 0)
        if not (self.is_computed_lazily and not memory.clients and not memory.server):
            report = yield from self._compute_updates(row_slots, pending_slots, t, deployed, memory)
        elif row_slots.host_values("pending")[arrived_slots].any():
            report = yield from self._compute_updates(
                row_slots, pending_slots, t, deployed, memory, row_slots.host_values("began")[pending_slots]
            )
        elif not len(arrived_slots):
            report = yield from self._compute_updates(row_slots, arrived_slots, t, deployed, memory)
        else:
            no_rows = deployed[:0, 0]
            report = Report(
                cohort, deployed[:0], {}, no_rows, self.trainer.learning_rate(t), no_rows, np.zeros(0, dtype=np.int64)
            )
            report = replace(report, deployed=deployed, memory=memory, server=deployed)
        return self._build_arrivals_report(row_slots, arrived_slots, t, report)

    def _put_into_slots(self, row_slots: RowSlots, start: Tensor | dict[str, Tensor], cohort: Cohort, t: int) -> None:
        """Put the cohort's start rows into slots."""
        carry = start if isinstance(start, dict) else {"params": start}
        slot_indices, host_index, n = row_slots.take_free_slots(len(cohort)), cohort.host_index, len(cohort)
        steps = np.full(n, -1) if host_index.steps is None else host_index.steps
        numbers = (
            host_index.virtual_clients,
            np.full(n, t),
            steps,
            np.zeros(n),
            np.ones(n),
            host_index.multiplicity,
            host_index.probability,
        )
        kinds = (np.int64,) * 5 + (np.float64,) * 2
        rows = {k: torch.as_tensor(v.astype(kind)) for k, v, kind in zip(HOST_ROW_NAMES, numbers, kinds, strict=True)}
        row_slots.write(
            slot_indices,
            rows | {STRATEGY_CARRY_PREFIX + name: value for name, value in carry.items() if name != "params"},
        )
        row_slots.write(slot_indices, {"start": carry["params"]})
        self.net_delayed = np.bincount(
            host_index.virtual_clients // self.federation.clients, minlength=self.federation.num_replicates
        )

    def _compute_updates(
        self,
        row_slots: RowSlots,
        slot_indices: np.ndarray,
        t: int,
        deployed_rows: Tensor,
        memory: Memory,
        rounds: np.ndarray | None = None,
    ) -> TaskGenerator[Report]:
        """Do the local work of the clients in these slots in one call of the trainer; `rounds` [n] are those in which
        they started, None: all in this one."""
        cohort, start = row_slots.cohort(slot_indices, t, with_planned_steps=True), {"params": deployed_rows[:0]}
        if len(slot_indices):
            start = row_slots.read_by_prefix(slot_indices, STRATEGY_CARRY_PREFIX) | {
                "params": row_slots.read(slot_indices, "start")
            }
        report = yield from self.trainer.generate_round_tasks(start, cohort, t, deployed_rows, memory, rounds=rounds)
        rows = {
            name: value
            for name, attribute in ROW_NAME_BY_REPORT_FIELD.items()
            if (value := getattr(report, attribute)) is not None
        }
        rows |= {CARRY_PREFIX + name: value for name, value in report.carry.items()}
        rows["samples"] = torch.as_tensor(report.samples.astype(np.int64))
        rows["pending"] = torch.zeros(len(slot_indices), dtype=torch.int64)
        row_slots.write(slot_indices, rows)
        return report

    def _build_arrivals_report(self, row_slots: RowSlots, slot_indices: np.ndarray, t: int, report: Report) -> Report:
        """Return the report of the updates that arrive, and free their slots."""
        if not len(slot_indices):
            no_clients = np.zeros(0, dtype=np.int64)
            if len(report.cohort):
                report = _without_row_entries(report)
            return replace(report, cohort=report.cohort.subset(no_clients), samples=no_clients, staleness=no_clients)
        cohort, start_rounds = row_slots.cohort(slot_indices, t), row_slots.host_values("began")[slot_indices]
        of_replicate = cohort.host_index.virtual_clients // self.federation.clients
        self.net_delayed = self.net_delayed - np.bincount(of_replicate, minlength=self.federation.num_replicates)
        samples, carry = (
            row_slots.host_values("samples")[slot_indices],
            row_slots.read_by_prefix(slot_indices, CARRY_PREFIX),
        )
        rows = {
            attribute: row_slots.read(slot_indices, name)
            for name, attribute in ROW_NAME_BY_REPORT_FIELD.items()
            if name in row_slots.rows
        }
        row_slots.host_values("virtual")[slot_indices] = FREE_SLOT
        return replace(report, cohort=cohort, carry=carry, samples=samples, staleness=t - start_rounds, **rows)  # type: ignore[arg-type]


def _without_row_entries(report: Report) -> Report:
    """Return the entries of a report that concern the round and the replicates, not rows."""
    rows = {
        name: value[:0] for name in ROW_NAME_BY_REPORT_FIELD.values() if (value := getattr(report, name)) is not None
    }
    return replace(report, carry={name: value[:0] for name, value in report.carry.items()}, **rows)
