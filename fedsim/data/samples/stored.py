"""Samples assigned by a partition, gathered by index from tensors that are stored once on the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.federation import Federation
from fedsim.core.structural_equality import structurally_equal
from fedsim.data.datasets import Dataset
from fedsim.data.drift import Drift
from fedsim.data.partition import Table
from fedsim.data.samples.client_data import Batch, BatchKeys, ClientData
from fedsim.data.samples.work import LocalWork, Workload


class StoredClientData(ClientData):
    """Client data given by an index table per replicate.

    Args:
        dataset: on the federation's device.
        federation: clients and replicates.
        tables: one index table per replicate.
        drift: see `ClientData`.

    Attributes:
        sizes: [R·m] samples each virtual client holds (host).
        order: numbers of the samples, share by share, of all replicates.
        offsets: [R·m] where each virtual client's share begins in `order`.
        several: whether these are the clients of several runs, which may draw equal samples.
    """

    several = False

    def __init__(
        self, dataset: Dataset, federation: Federation, tables: list[Table], drift: Drift | None = None
    ) -> None:
        super().__init__(dataset, federation, drift)
        device = federation.device
        starts = np.concatenate([[0], np.cumsum([len(table.order) for table in tables])])
        offsets = [table.offsets[:-1] + s for table, s in zip(tables, starts[:-1], strict=True)]
        self.sizes = np.concatenate([table.sizes for table in tables])
        self.order = torch.as_tensor(np.concatenate([table.order for table in tables]), device=device)
        self.offsets = torch.as_tensor(np.concatenate(offsets), device=device)
        self.skew = tables[0].skew
        if self.skew is not None:
            self.skew.check(dataset.name, dataset.shape, dataset.tokens)

    def workload(self, local_work: LocalWork, rows: np.ndarray) -> Workload:
        sample_counts = self.sizes[rows]
        with_replacement = local_work.sampling == "replacement"  # a client may draw more than it has
        size = (
            sample_counts
            if local_work.batch_size is None
            else np.where(with_replacement, local_work.batch_size, np.minimum(sample_counts, local_work.batch_size))
        )
        per_pass = np.maximum(sample_counts // size, 1) if local_work.drop_last else -(-sample_counts // size)
        steps = np.full(len(rows), local_work.steps) if local_work.epochs is None else local_work.epochs * per_pass
        return Workload(
            sample_counts, size, per_pass, steps, local_work.sampling == "pass" and not local_work.drop_last
        )

    def one_epoch_work(self, local_work: LocalWork) -> LocalWork:
        return dataclasses.replace(local_work, steps=None, epochs=1)

    def make_feed(
        self, rows: Tensor, clients: Tensor, keys: BatchKeys, load: Workload, sizes: np.ndarray, sampling: str
    ) -> StoredBatchFeed:
        of_batches = keys.round_keys(rng.Purpose.BATCH)
        device = self.order.device
        if self.several:
            distinct_rows, representative = group_equal_draws(of_batches, load)
            sample_positions = positions(
                of_batches[distinct_rows], load.select_rows(distinct_rows), sizes.shape[1], sampling, device
            )
            sample_positions = sample_positions[:, torch.as_tensor(representative, device=device)]
        else:
            sample_positions = positions(of_batches, load, sizes.shape[1], sampling, device)
        return StoredBatchFeed(self, self.order[self.offsets[rows][:, None] + sample_positions], clients, keys)

    def width(self, limit: int | None, rows: np.ndarray | None = None) -> int:
        max_size = int((self.sizes if rows is None else self.sizes[rows]).max())
        return max_size if limit is None else min(limit, max_size)

    def fixed_samples(
        self, rows: Tensor, width: int, dtype: torch.dtype, purpose: rng.Purpose, by_seed: bool = False
    ) -> Batch:
        numbers, real_mask = self.numbers(rows, width)
        batch = self.gather(numbers, dtype)
        batch["x"] = self.apply_feature_skew(
            self.dataset.prepare(batch["x"], dtype), rows % self.federation.clients, numbers
        )
        return batch | {"weight": real_mask.to(dtype), "client": rows % self.federation.clients, "row": rows}

    def apply_feature_skew(self, x: Tensor, client: Tensor, numbers: Tensor) -> Tensor:
        """Prepared inputs [n, B, …] of samples [n, B], with the feature skew of clients [n]."""
        return x if self.skew is None else self.skew(x, client, numbers)

    def numbers(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """[n, width] numbers of stored samples of virtual clients [n], and which of them are not padding. Larger shares
        are subsampled evenly; smaller ones are padded with arbitrary samples.
        """
        slot = torch.arange(width, device=rows.device)
        sample_counts = torch.as_tensor(self.sizes, device=rows.device)[rows][..., None]
        taken_counts = sample_counts.clamp(max=width)
        sample_positions = torch.where(slot < taken_counts, slot * sample_counts // taken_counts.clamp(min=1), 0)
        order_index = (self.offsets[rows][..., None] + sample_positions).clamp(max=len(self.order) - 1)
        return self.order[order_index].to(torch.int64), slot < taken_counts

    def share(self, row: int) -> Tensor:
        """[n] numbers of all samples of one virtual client."""
        first_sample = int(self.offsets[row])
        return self.order[first_sample : first_sample + int(self.sizes[row])].to(torch.int64)

    def gather(self, samples: Tensor, dtype: torch.dtype) -> Batch:
        """Stored samples by number: [...] → x [..., *shape] as stored, y [...] if there are labels."""
        return self.unlabelled(samples, dtype) | self.labels(samples, dtype)

    def labels(self, samples: Tensor, dtype: torch.dtype) -> Batch:
        """'y' [..., *target] by number; empty without labels."""
        y = self.dataset.train_y
        if y is None:
            return {}
        targets = y.index_select(0, samples.reshape(-1)).reshape(*samples.shape, *y.shape[1:])
        return {"y": targets.to(dtype) if y.is_floating_point() else targets}

    def unlabelled(self, samples: Tensor, dtype: torch.dtype) -> Batch:
        """Everything except labels."""
        data = self.dataset
        batch = {"x": data.inputs(samples.reshape(-1)).reshape(*samples.shape, *data.shape)}
        return batch | data.extra_inputs(data.more, samples.to(torch.int64), dtype) if data.more else batch

    def data_for_members(self, members: Federation, dataset: Dataset) -> StoredClientData:
        data_view = copy.copy(self)
        data_view.federation, data_view.dataset = members, dataset
        data_view.offsets = self.offsets.repeat_interleave(members.clients // self.federation.clients)
        data_view.sizes = members.num_samples
        return data_view

    def same_samples(self, data: ClientData) -> bool:
        return (
            isinstance(data, StoredClientData)
            and structurally_equal(self.dataset, data.dataset)
            and structurally_equal(self.skew, data.skew)
        )

    def concatenate(self, data_list: Sequence[ClientData]) -> StoredClientData:
        joint_data, stored_list = (
            copy.copy(self),
            [self, *(stored for stored in data_list if isinstance(stored, StoredClientData))],
        )
        starts = np.cumsum([0, *(len(data.order) for data in stored_list[:-1])])
        joint_data.order = torch.cat([data.order for data in stored_list])
        joint_data.offsets = torch.cat(
            [data.offsets + int(start) for data, start in zip(stored_list, starts, strict=True)]
        )
        joint_data.sizes = np.concatenate([data.sizes for data in stored_list])
        joint_data.several = True
        return joint_data

    def means(self) -> Tensor | None:
        sizes = torch.as_tensor(self.sizes, device=self.order.device)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        x = self.dataset.prepare(self.dataset.inputs(self.order.to(torch.int64)), torch.float64).flatten(1)
        sums = x.new_zeros(len(sizes), x.shape[1]).index_add_(0, owner, x)
        return (sums / sizes.clamp(min=1)[:, None]).unflatten(0, (self.federation.num_replicates, -1))

    def example_samples(self, count: int, dtype: torch.dtype) -> Batch:
        data = self.dataset
        # Spread over the data set, which may be sorted by label; repeated if there are fewer samples.
        numbers = (
            torch.linspace(0, len(data.train_x) - 1, count, dtype=torch.float64, device=self.federation.device)
            .round()
            .to(torch.int64)
        )
        batch = self.gather(numbers, dtype)
        return batch | {"x": data.prepare(batch["x"], dtype)}


class StoredBatchFeed:
    """The batches of some rows by the numbers [S, c, B] of their samples, all drawn at once."""

    def __init__(self, data: StoredClientData, numbers: Tensor, clients: Tensor, keys: BatchKeys) -> None:
        self.data, self.numbers, self.clients, self.keys = data, numbers, clients, keys
        self._labels: Batch | None = None

    def batch_of_rows(self, step: int, row_selection: slice, width: int, dtype: torch.dtype) -> Batch:
        dataset = self.data.dataset
        numbers = self.numbers[step, row_selection, :width]
        batch = self.data.unlabelled(numbers, dtype) | self._y(step, row_selection, width, dtype)
        augment = dataset.augment if dataset.augment is not None and dataset.augment.active else None
        if augment is not None and augment.border == "black":
            batch["x"] = augment(batch["x"], self.keys.step_keys(rng.Purpose.AUGMENT, step, row_selection))
        batch["x"] = dataset.prepare(batch["x"], dtype)
        if augment is not None and augment.border == "mean":  # the mean colour is zero after normalisation
            batch["x"] = augment(batch["x"], self.keys.step_keys(rng.Purpose.AUGMENT, step, row_selection))
        batch["x"] = self.data.apply_feature_skew(batch["x"], self.clients[row_selection], numbers)
        return batch

    def _y(self, step: int, row_selection: slice, width: int, dtype: torch.dtype) -> Batch:
        """The labels of those samples; scalar labels are gathered for all steps at once."""
        y = self.data.dataset.train_y
        if y is None or y.dim() > 1:
            return self.data.labels(self.numbers[step, row_selection, :width], dtype)
        if self._labels is None:
            self._labels = self.data.labels(self.numbers, dtype)
        return {"y": self._labels["y"][step, row_selection, :width]}


def positions(keys: np.ndarray, load: Workload, steps: int, sampling: str, device: torch.device) -> Tensor:
    """[S, c, B] indices 0…held−1 among a row's own samples at every step; entries beyond a batch's size repeat valid
    ones.

    Args:
        keys: [c] (host).
        load: of the rows.
        steps: S.
        sampling: 'pass' or 'replacement'.
        device: of the numbers.
    """
    uniform_load = len(keys) > 0 and not any(map(np.ptp, (load.num_samples, load.size, load.per_pass, load.steps)))
    # equal rows share everything that does not depend on their keys
    shared_load = load.select_rows(np.arange(1)) if uniform_load else load
    sample_counts, size, per_pass = (
        numbers[:, None] for numbers in (shared_load.num_samples, shared_load.size, shared_load.per_pass)
    )
    step, slot = np.arange(steps)[:, None, None], np.arange(load.size.max(initial=0))
    if sampling == "replacement":
        return rng.integers(
            _to_device(keys[:, None], device), _to_device(step * size + slot, device), _to_device(sample_counts, device)
        )
    shuffled, pass_start, last_pass = permutations(keys, load, device)
    pass_number = np.minimum(step // per_pass, last_pass[: len(shared_load.num_samples), None])
    position = pass_number * sample_counts + np.minimum((step % per_pass) * size + slot, sample_counts - 1)
    return shuffled[_to_device(pass_start[:, None], device) + _to_device(position, device)]


def _to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Host numbers moved to the device."""
    return torch.as_tensor(numbers).to(device, non_blocking=True)


def permutations(keys: np.ndarray, load: Workload, device: torch.device) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Permutations of 0…held−1 for every pass of every row, concatenated; the offset of each row's [c]; and the number
    of each row's last pass [c].

    One sort by (row and pass, random bits), so the cost of a row depends on its own size, not on the largest. A row
    with full batches keeps its order: shuffling would change rounding only.
    """
    full_batch_mask = load.size == load.num_samples
    num_passes = np.where(full_batch_mask, 1, -(-load.steps // load.per_pass))
    row = np.repeat(np.arange(len(num_passes)), num_passes)
    pass_number = np.arange(len(row)) - np.repeat(np.cumsum(num_passes) - num_passes, num_passes)
    length = load.num_samples[row]
    starts = np.cumsum(length) - length
    pass_starts, last_passes = starts[np.cumsum(num_passes) - num_passes], num_passes - 1
    folded = _to_device(rng.fold_in_host(keys[row], pass_number)[:, None], device)
    unshuffled_mask = _to_device(full_batch_mask[row, None], device) if full_batch_mask.any() else None
    if np.ptp(length) == 0:  # many short sorts are faster than a long one
        slot = torch.arange(int(length[0]), dtype=torch.int32, device=device)
        random = rng.random_bits(folded, slot)
        random = random if unshuffled_mask is None else torch.where(unshuffled_mask, slot, random)
        return sort_slots_by_random(random, slot, int(length[0])).flatten(), pass_starts, last_passes
    segment = torch.as_tensor(np.repeat(np.arange(len(row)), length), device=device)
    slot = torch.as_tensor(np.arange(len(segment)) - np.repeat(starts, length), device=device)
    random = rng.random_bits(folded[segment, 0], slot)
    random = random if unshuffled_mask is None else torch.where(unshuffled_mask[segment, 0], slot, random)
    return sort_slots_by_random(random, slot, int(length.max()), segment, len(row)), pass_starts, last_passes


def sort_slots_by_random(
    random: Tensor, slot: Tensor, num_slots: int, segment: Tensor | None = None, segments: int = 1
) -> Tensor:
    """Slots sorted by their random numbers, ties by slot: along the last dimension, or within consecutive segments.
    Segment, random number and slot are packed into one integer, which takes an eighth of the time of argsort.

    Args:
        random: [..., n], of 32 signed bits.
        slot: [n], from 0 to below `num_slots`.
        segment: [n] ascending, from 0 to below `segments`; None where rows lie along the last dimension.
    """
    width = num_slots.bit_length()
    if width + segments.bit_length() > 31:  # they do not fit into a single integer
        sort_keys = random if segment is None else (segment << 32) + random + (1 << 31)
        order = sort_keys.argsort(dim=-1, stable=True)
        return order if segment is None else slot[order]
    packed_keys = ((random.to(torch.int64) + (1 << 31)) << width) | slot
    if segment is not None:
        packed_keys |= segment << (32 + width)
    sorted_keys = (
        torch.from_numpy(np.sort(packed_keys.numpy()))
        if packed_keys.device.type == "cpu"
        else packed_keys.sort().values
    )
    return sorted_keys & ((1 << width) - 1)


def group_equal_draws(keys: np.ndarray, load: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Rows with equal draws, by keys [c] and load: the first row of each group, and the group of each row [c]."""
    signatures = np.stack([keys, load.num_samples, load.size, load.per_pass, load.steps], axis=1)
    _, first_rows, signature_number = np.unique(signatures, axis=0, return_index=True, return_inverse=True)
    return first_rows, signature_number.reshape(-1)
