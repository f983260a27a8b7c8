"""The samples of every row at every local step: planned on the host, then drawn chunk by chunk on the device.

plan = batches.plan(cohort, t)            # number of steps and samples of each row, on the host
chunk = plan.chunk(rows)                  # the sample numbers of some of its rows, all steps at once
batch = chunk.batch(step, first, stop, dtype)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.federation import Cohort
from fedsim.data.contamination import Contamination
from fedsim.data.samples.client_data import Batch, BatchKeys, ClientData
from fedsim.data.samples.work import LocalWork, Workload


class Batches:
    """The batches of a run under given local work.

    Args:
        data: the clients' samples.
        local_work: number of steps, batch size and sampling.
        contamination: applied to every batch after the shift.
        keyed: whether batches have an entry 'key' for dropout.
        redraw: number of rounds for which a stream's clients reuse one drawn batch; None: a fresh batch for every step.
    """

    def __init__(
        self,
        data: ClientData,
        local_work: LocalWork,
        contamination: Contamination,
        keyed: bool = False,
        redraw: int | None = None,
    ) -> None:
        self.data, self.local_work, self.contamination, self.keyed = data, local_work, contamination, keyed
        self.redraw = redraw if data.dataset.stream else None  # stored samples do not change
        self.federation, self.dataset = data.federation, data.dataset
        data.workload(local_work, np.arange(0))  # raises an error for work that such data do not allow

    @functools.cached_property
    def _all_clients_workload(self) -> Workload:
        """The workload of all virtual clients."""
        return self.data.workload(self.local_work, np.arange(len(self.federation.num_samples)))

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Maximum over clients of local steps per round, and of steps per pass."""
        return int(self._all_clients_workload.steps.max()), int(self._all_clients_workload.per_pass.max())

    @functools.cached_property
    def smallest(self) -> tuple[int, int]:
        """Size of the smallest batch that will occur, and a virtual client with such a batch."""
        load, sizes = self._all_clients_workload, self._all_clients_workload.size
        if load.short_last:
            remainder = load.num_samples % np.maximum(load.size, 1)
            sizes = np.where((remainder > 0) & (load.steps >= load.per_pass), np.minimum(remainder, sizes), sizes)
        return int(sizes.min()), int(sizes.argmin())

    @functools.cached_property
    def largest(self) -> int:
        """Size of the largest batch that may occur."""
        return int(self._all_clients_workload.size.max())

    @functools.cached_property
    def distinct_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes that occur among all clients, ascending, including those of shorter last batches."""
        load = self._all_clients_workload
        batch_sizes = set(np.unique(load.size[load.steps > 0]).tolist())
        if load.short_last:
            remainder = load.num_samples % np.maximum(load.size, 1)
            batch_sizes |= set(np.unique(remainder[(remainder > 0) & (load.steps >= load.per_pass)]).tolist())
        return tuple(sorted(batch_sizes - {0}))

    def with_work(self, local_work: LocalWork) -> Batches:
        """The same samples with different work."""
        return Batches(self.data, local_work, self.contamination, self.keyed, self.redraw)

    def with_data(self, data: ClientData) -> Batches:
        """The same work on other samples that allow it."""
        return Batches(data, self.local_work, self.contamination, self.keyed, self.redraw)

    def load(self, cohort: Cohort) -> Workload:
        """The workload of the cohort's clients in round t."""
        return self.data.workload(self.local_work, cohort.host_index.virtual_clients)

    def plan(self, cohort: Cohort, t: int, rounds: np.ndarray | None = None) -> RoundPlan:
        """The work of the cohort in round t; `rounds` [n] are those in which its rows began, where they differ."""
        requested_load, steps = self.load(cohort), cohort.host_index.steps
        load = requested_load if steps is None else dataclasses.replace(requested_load, steps=steps)
        replicate, names = np.divmod(cohort.host_index.virtual_clients, self.federation.clients)
        seeds = np.array(self.federation.seeds, dtype=np.int64)[replicate]
        rows = cohort.virtual_client_index
        return RoundPlan(
            self,
            t,
            load,
            rows,
            rows,
            cohort.client_index,
            seeds,
            names,
            requested_load,
            rounds,
            cohort.host_index.virtual_clients,
        )


@dataclass
class RoundPlan:
    """The work of n rows in a round.

    Attributes:
        batches: the batches of the run.
        t: round.
        load: workload of every row, in the cohort's order.
        rows: [n] virtual clients of the run.
        stored: [n] their numbers in `batches.data`: the same, unless `data` holds the clients of several runs.
        clients: [n] the client's number of each row, from 0 in every replicate.
        seeds, names: [n] the replicate's seed of each row, and the client's number (host).
        planned_work: the workload if all clients completed the full work of the round; used by schedules.
        rounds: [n] in which each row began, by which its samples are drawn; None: all in t.
        virtual_clients: `rows`, on the host; None for rows of several runs.
    """

    batches: Batches
    t: int
    load: Workload
    rows: Tensor
    stored: Tensor
    clients: Tensor
    seeds: np.ndarray
    names: np.ndarray
    planned_work: Workload | None = None
    rounds: np.ndarray | None = None
    virtual_clients: np.ndarray | None = None

    def select_rows(self, rows: np.ndarray) -> RoundPlan:
        """The loads of the rows at these positions, as rows of one round."""
        planned_work = None if self.planned_work is None else self.planned_work.select_rows(rows)
        return dataclasses.replace(self, load=self.load.select_rows(rows), planned_work=planned_work, rounds=None)

    def chunk(self, rows: np.ndarray) -> Chunk:
        """The batches of the rows at these positions in the cohort, in the order of `load.order`."""
        return Chunk(self, rows)

    @staticmethod
    def concatenate(plans: Sequence[RoundPlan], data: ClientData) -> RoundPlan:
        """Concatenate the rows of several runs in the same round; `data` holds their clients in the same order."""
        first_plan = plans[0]
        batches = first_plan.batches.with_data(data)
        row_offsets = np.cumsum([0, *(len(plan.batches.federation.num_samples) for plan in plans[:-1])])
        loads = [plan.load for plan in plans]
        sample_counts, size, per_pass, steps = (
            np.concatenate([getattr(load, name) for load in loads])
            for name in ("num_samples", "size", "per_pass", "steps")
        )
        load = Workload(sample_counts, size, per_pass, steps, first_plan.load.short_last)
        stored = torch.cat([plan.stored + int(start) for plan, start in zip(plans, row_offsets, strict=True)])
        rows, clients = (torch.cat([getattr(p, name) for p in plans]) for name in ("rows", "clients"))
        seeds, names = (np.concatenate([getattr(p, name) for p in plans]) for name in ("seeds", "names"))
        rounds = None
        if any(plan.rounds is not None for plan in plans):
            rounds = np.concatenate([np.full(len(p.names), p.t) if p.rounds is None else p.rounds for p in plans])
        return RoundPlan(batches, first_plan.t, load, rows, stored, clients, seeds, names, rounds=rounds)


class Chunk:
    """The batches of c rows.

    Attributes:
        steps: [c] local steps of each row (host), descending.
        sizes: [c, S] samples in each of its batches (host), 0 after its last.
    """

    def __init__(self, plan: RoundPlan, rows: np.ndarray) -> None:
        self._batches, self._t = plan.batches, plan.t
        all_rows = len(rows) == len(plan.load.steps) and bool((rows == np.arange(len(rows))).all())
        row_selection = slice(None) if all_rows else torch.as_tensor(rows, device=plan.rows.device)
        load = plan.load.select_rows(rows)
        self.steps, self.sizes = load.steps, load.batch_sizes()
        self.rows = plan.rows[row_selection]
        stored = self.rows if plan.stored is plan.rows else plan.stored[row_selection]
        t = plan.t if plan.rounds is None else plan.rounds[rows]
        redraw_round = None if self._batches.redraw is None else t - t % self._batches.redraw
        self._drawn_in = t if redraw_round is None else redraw_round
        self._virtual_clients = (
            None if plan.virtual_clients is None or not self._batches.data.drift.active else plan.virtual_clients[rows]
        )
        names = plan.seeds[rows], plan.names[rows]
        self.clients, self.keys = plan.clients[row_selection], BatchKeys(*names, self.rows.device, t, redraw_round)
        feed_options = (self.keys, load, self.sizes, self._batches.local_work.sampling)
        self._feed = self._batches.data.make_feed(stored, self.clients, *feed_options)
        ragged = bool(np.any(self.sizes != self.sizes[:1]))
        self._device_sizes = torch.as_tensor(self.sizes, device=self.rows.device) if ragged else None

    def active_row_counts(self) -> list[int]:
        """[S] number of rows that take each step; empty without rows."""
        number = np.arange(self.steps.max(initial=0))
        return np.count_nonzero(self.steps[:, None] > number, axis=0).tolist()

    def batch(self, step: int, first_row: int, stop: int, dtype: torch.dtype) -> Batch:
        """The batch of rows first…stop−1 at a local step: x [c, B, …], y, client, row [c], weight [c, B] if padded."""
        row_selection = slice(first_row, stop)
        sizes, ragged = self.sizes[row_selection, step], self._device_sizes
        width = int(sizes[0] if ragged is None else sizes.max())
        batch = self._feed.batch_of_rows(step, row_selection, width, dtype)
        all_rows = stop - first_row == len(self.rows)
        batch["client"], batch["row"] = (
            values if all_rows else values[row_selection] for values in (self.clients, self.rows)
        )
        if self._batches.keyed:
            batch["key"] = self.keys.step_keys(rng.Purpose.DROPOUT, step, row_selection)
        if ragged is not None and int(sizes.min()) < width:
            slot = torch.arange(width, device=self.rows.device)
            batch["weight"] = (slot < ragged[row_selection, step, None]).to(dtype)
        if self._virtual_clients is None:
            return batch
        drawn_in = self._drawn_in[row_selection] if isinstance(self._drawn_in, np.ndarray) else self._drawn_in
        return self._batches.data.drifted(batch, self._virtual_clients[row_selection], drawn_in)

    def contaminate(self, batch: Batch, step: int, first_row: int, stop: int) -> Batch:
        """The batch of those rows with contaminated samples, added after the shift, which does not affect them."""
        contamination = self._batches.contamination.at(self._t)
        if not contamination.active:
            return batch
        keys = self.keys.step_keys(rng.Purpose.CONTAMINATION, step, slice(first_row, stop))
        return contamination(batch, keys)
