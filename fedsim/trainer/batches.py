"""Which samples every row meets at every local step: planned on the host, indexed and gathered on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contamination import Contamination
from fedsim.datasets import Dataset
from fedsim.errors import ConfigError
from fedsim.federation import Cohort, Federation
from fedsim.local import LocalRule
from fedsim.partition import Table


def flattened(tables: list[Table], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables of all replicates as one: sample numbers, and where the share of each virtual client [R·m] starts."""
    starts = np.concatenate([[0], np.cumsum([len(table.order) for table in tables])])
    offsets = [table.offsets[:-1] + s for table, s in zip(tables, starts[:-1], strict=True)]
    order = np.concatenate([table.order for table in tables])
    return torch.as_tensor(order, device=device), torch.as_tensor(np.concatenate(offsets), device=device)


def thinned(order: Tensor, offsets: Tensor, held: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Numbers [..., width] of stored samples of shares that start at offsets [...] and hold [...], and which are real.

    A larger share is thinned evenly along its order; entries beyond a smaller one are any samples.
    """
    slot = torch.arange(width, device=order.device)
    taken = held.clamp(max=width)[..., None]
    own = torch.where(slot < taken, slot * held[..., None] // taken.clamp(min=1), 0)
    return order[(offsets[..., None] + own).clamp(max=len(order) - 1)].to(torch.int64), slot < taken


DRAWN_AHEAD = 2**18  # numbers of a stream's samples drawn together: those of one large batch, or of many small ones


class Batches:
    """Draws batches for the rows of a cohort.

    Args:
        dataset: on the federation's device.
        tables: one index table per replicate; empty for a stream.
        federation: who exists.
        rule: batch size, steps or epochs, sampling.
        contamination: applied to every batch, after the shift.
        keyed: whether batches carry a 'key' for dropout.
    """

    def __init__(
        self,
        dataset: Dataset,
        tables: list[Table],
        federation: Federation,
        rule: LocalRule,
        contamination: Contamination,
        keyed: bool = False,
    ) -> None:
        self.dataset, self.tables, self.federation, self.rule = dataset, tables, federation, rule
        self.contamination, self.keyed = contamination, keyed
        if dataset.stream:
            if rule.epochs is not None:
                raise ConfigError(
                    f"local_epochs={rule.epochs} has no meaning for dataset={dataset.name}, which draws fresh samples; "
                    "set local_steps"
                )
            if rule.batch_size is None:
                raise ConfigError(f"batch_size=null has no meaning for dataset={dataset.name}; give a number")
        else:
            self.order, self.offsets = flattened(tables, federation.device)

    def under(self, rule: LocalRule) -> Batches:
        """The same samples, drawn as another rule draws them."""
        return Batches(self.dataset, self.tables, self.federation, rule, self.contamination, self.keyed)

    def plan(self, cohort: Cohort, t: int) -> Plan:
        """Steps and batch sizes of every row of the cohort in round t."""
        size, per_pass, steps = self.schedule(cohort.host_virtual)
        return Plan(self, cohort, t, self.federation.sizes[cohort.host_virtual], size, per_pass, steps)

    def schedule(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Batch size, batches in a pass, and local steps of the given virtual clients: [n] each."""
        rule, held = self.rule, self.federation.sizes[rows]
        if self.dataset.stream:
            size, per_pass = np.full(len(rows), rule.batch_size, dtype=np.int64), np.ones(len(rows), dtype=np.int64)
        else:
            size = held if rule.batch_size is None else np.minimum(held, rule.batch_size)
            per_pass = held // size if rule.drop_last else -(-held // size)
        return size, per_pass, np.full(len(rows), rule.steps) if rule.epochs is None else rule.epochs * per_pass

    def subsample(self, rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Numbers of up to `most` stored samples of each virtual client, [..., q], and which entries are real."""
        held = torch.as_tensor(self.federation.sizes, device=rows.device)[rows]
        return thinned(self.order, self.offsets[rows], held, min(most, int(held.max())))

    def gather(self, samples: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored samples by number: [...] → x [..., *shape] as stored, y [...] where there are labels."""
        flat = samples.reshape(-1)
        batch = {"x": self.dataset.train_x.index_select(0, flat).reshape(*samples.shape, *self.dataset.shape)}
        if self.dataset.train_y is not None:
            y = self.dataset.train_y
            batch["y"] = y.index_select(0, flat).reshape(*samples.shape, *y.shape[1:])
            if y.is_floating_point():
                batch["y"] = batch["y"].to(dtype)
        return batch


@dataclass
class Plan:
    """A round's work, in host numbers.

    Attributes (n rows, in the cohort's order; host arrays):
        held: samples each row owns.
        size: batch size.
        per_pass: batches in one pass over the row's data.
        steps: local steps.
    """

    batches: Batches
    cohort: Cohort
    t: int
    held: np.ndarray
    size: np.ndarray
    per_pass: np.ndarray
    steps: np.ndarray

    @property
    def order(self) -> np.ndarray | None:
        """Rows sorted by steps, then batch size, both descending; None where they are all alike already."""
        if len(self.steps) < 2 or (np.ptp(self.steps) == 0 and np.ptp(self.size) == 0):
            return None
        return np.lexsort((-self.size, -self.steps))

    def batch_sizes(self) -> np.ndarray:
        """[n, S] samples in the batch of every row and step; 0 after a row's last step."""
        step = np.arange(self.steps.max(initial=0))
        full = np.broadcast_to(self.size[:, None], (len(self.size), len(step)))
        rule = self.batches.rule
        if rule.sampling == "pass" and not rule.drop_last and not self.batches.dataset.stream:
            position = (step % self.per_pass[:, None]) * self.size[:, None]
            full = np.minimum(full, self.held[:, None] - position)
        return np.where(step < self.steps[:, None], full, 0)

    def chunk(self, rows: np.ndarray) -> Chunk:
        """The work of the given rows (positions in the cohort), sorted as `order` sorts."""
        return Chunk(self, rows)


class Chunk:
    """The batches of some rows: all sample numbers drawn at once, samples gathered step by step.

    Attributes (c rows):
        steps: [c] host, descending.
        sizes: [c, S] host, samples in each batch.
    """

    def __init__(self, plan: Plan, rows: np.ndarray) -> None:
        self.batches, self.t = plan.batches, plan.t
        whole = len(rows) == len(plan.cohort) and bool((rows == np.arange(len(rows))).all())
        pick = slice(None) if whole else torch.as_tensor(rows, device=plan.cohort.rows.device)
        cohort = plan.cohort
        self.rows, self.clients, self.seeds = cohort.virtual[pick], cohort.client[pick], cohort.seed[pick]
        part = Plan(
            plan.batches, cohort, plan.t, plan.held[rows], plan.size[rows], plan.per_pass[rows], plan.steps[rows]
        )
        self.steps, self.sizes = part.steps, part.batch_sizes()
        self.ragged = bool(np.any(self.sizes != self.sizes[:1]))
        if self.ragged:
            self.device_sizes = torch.as_tensor(self.sizes, device=self.rows.device)
        self._keys: dict[rng.Purpose, Tensor] = {}
        self._ahead: tuple[range, dict[str, Tensor]] = (range(0), {})
        if not plan.batches.dataset.stream:
            self._numbers = self._draw(part)

    def _draw(self, plan: Plan) -> Tensor:
        """[c, S, B] numbers of the samples each row meets; entries past a batch's size repeat valid ones."""
        batches, device = self.batches, self.rows.device
        keys = rng.row_keys(self.seeds, rng.Purpose.BATCH, self.clients, self.t)
        held = torch.as_tensor(plan.held, device=device)[:, None, None]
        size = torch.as_tensor(plan.size, device=device)[:, None, None]
        step = torch.arange(self.sizes.shape[1], device=device)[None, :, None]
        slot = torch.arange(int(plan.size.max(initial=0)), device=device)
        if batches.rule.sampling == "replacement":
            own = rng.integers(keys[:, None, None], step * size + slot, held)
        else:
            per_pass = torch.as_tensor(plan.per_pass, device=device)[:, None, None]
            shuffled, first, last = self._shuffles(keys, plan)
            position = torch.minimum((step % per_pass) * size + slot, held - 1)
            own = shuffled[
                first[:, None, None] + torch.minimum(step // per_pass, last[:, None, None]) * held + position
            ]
        return batches.order[batches.offsets[self.rows][:, None, None] + own]

    @staticmethod
    def _shuffles(keys: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Permutations of 0…held−1 for every pass of every row, one after another; where each row's begin [c]; and the
        number of each row's last pass [c].

        One sort by (row and pass, random bits), so that a row costs what it holds, not what the largest one does. A row
        whose batch is all it has keeps its order: shuffling would change nothing but rounding.
        """
        device = keys.device
        whole = plan.size == plan.held
        passes = np.where(whole, 1, -(-plan.steps // plan.per_pass))
        row = np.repeat(np.arange(len(passes)), passes)
        turn = np.arange(len(row)) - np.repeat(np.cumsum(passes) - passes, passes)
        length = plan.held[row]
        begin = np.cumsum(length) - length
        of_row = torch.as_tensor(row, device=device)
        folded = rng.fold(keys[of_row], torch.as_tensor(turn, device=device))
        kept = torch.as_tensor(whole, device=device)[of_row]
        if np.ptp(length) == 0:  # many short sorts beat a long one
            slot = torch.arange(int(length[0]), dtype=torch.int32, device=device)
            random = rng.bits(folded[:, None], slot)
            shuffled = torch.where(kept[:, None], slot, random).argsort(dim=-1, stable=True).flatten()
        else:
            segment = torch.as_tensor(np.repeat(np.arange(len(row)), length), device=device)
            slot = torch.as_tensor(np.arange(len(segment)) - np.repeat(begin, length), device=device)
            random = rng.bits(folded[segment], slot)
            random = torch.where(kept[segment], slot, random)
            shuffled = slot[((segment << 32) + random + (1 << 31)).argsort(stable=True)]
        first = begin[np.cumsum(passes) - passes]
        return shuffled, torch.as_tensor(first, device=device), torch.as_tensor(passes - 1, device=device)

    def batch(self, step: int, first: int, stop: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The batch of rows first…stop−1 at a local step: x [c, B, …], y, client, row [c], weight [c, B] if padded."""
        dataset = self.batches.dataset
        pick = slice(first, stop)
        sizes = self.sizes[pick, step]
        width, clients = int(sizes.max()), self.clients[pick]
        if dataset.stream:
            batch = self._drawn(step, pick, width, dtype)
        else:
            batch = self.batches.gather(self._numbers[pick, step, :width], dtype)
            if dataset.augment is not None and dataset.augment.active:
                batch["x"] = dataset.augment(batch["x"], self._key(rng.Purpose.AUGMENT, step, pick))
            batch["x"] = dataset.prepare(batch["x"], dtype)
        batch["client"], batch["row"] = clients, self.rows[pick]
        if self.batches.keyed:
            batch["key"] = self._key(rng.Purpose.DROPOUT, step, pick)
        if self.ragged and int(sizes.min()) < width:
            slot = torch.arange(width, device=clients.device)
            batch["weight"] = (slot < self.device_sizes[pick, step, None]).to(dtype)
        return batch

    def _drawn(self, step: int, pick: slice, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh samples of some rows; those of all rows for the next steps too, where they are few."""
        stream = self.batches.dataset
        if (pick.start, pick.stop) != (0, len(self.clients)):
            return dict(stream.draw(self.clients[pick], self._key(rng.Purpose.NOISE, step, pick), width, dtype))
        steps, drawn = self._ahead
        if step not in steps:
            most = DRAWN_AHEAD // (len(self.clients) * width * math.prod(stream.shape))
            steps = range(step, min(step + max(most, 1), self.sizes.shape[1]))
            keys = torch.stack([self._key(rng.Purpose.NOISE, s, pick) for s in steps])
            drawn = stream.draw(self.clients.repeat(len(steps)), keys.flatten(), width, dtype)
            drawn = {name: value.unflatten(0, keys.shape) for name, value in drawn.items()}
            self._ahead = steps, drawn
        return {name: value[step - steps.start] for name, value in drawn.items()}

    def contaminate(self, batch: dict[str, Tensor], step: int, first: int, stop: int) -> dict[str, Tensor]:
        """The batch of those rows with its foreign samples; after the shift, which does not move them."""
        if not self.batches.contamination.active:
            return batch
        return self.batches.contamination(batch, self._key(rng.Purpose.CONTAMINATION, step, slice(first, stop)))

    def _key(self, purpose: rng.Purpose, step: int, pick: slice) -> Tensor:
        """[c] the keys of some rows at a local step; a purpose that no step asks for costs nothing."""
        if purpose not in self._keys:
            self._keys[purpose] = rng.row_keys(self.seeds, purpose, self.clients, self.t)
        return rng.fold(self._keys[purpose][pick], step)
