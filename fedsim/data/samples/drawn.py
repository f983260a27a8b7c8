"""Samples of a stream: drawn afresh for every batch, as a function of client, round and step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.structural_equality import structurally_equal
from fedsim.data.datasets import Dataset
from fedsim.data.samples.client_data import Batch, BatchKeys, ClientData
from fedsim.data.samples.work import LocalWork, Workload

MAX_NUMBERS_DRAWN_AHEAD = 2**18  # numbers drawn at once: those of one large batch, or of many small ones
DEFAULT_SAMPLES_PER_CLIENT = 1000  # default number of samples that represent a stream client's distribution


class StreamClientData(ClientData):
    """Client data of a stream."""

    def workload(self, local_work: LocalWork, rows: np.ndarray) -> Workload:
        if local_work.epochs is not None:
            raise ConfigError(
                f"local_epochs={local_work.epochs} has no meaning for dataset={self.dataset.name}, which draws fresh "
                "samples; set local_steps"
            )
        if local_work.batch_size is None:
            raise ConfigError(f"batch_size=null has no meaning for dataset={self.dataset.name}; give a number")
        size, per_pass = np.full(len(rows), local_work.batch_size, dtype=np.int64), np.ones(len(rows), dtype=np.int64)
        return Workload(self.federation.num_samples[rows], size, per_pass, np.full(len(rows), local_work.steps), False)

    def one_epoch_work(self, local_work: LocalWork) -> LocalWork:
        return local_work

    def make_feed(
        self, rows: Tensor, clients: Tensor, keys: BatchKeys, load: Workload, sizes: np.ndarray, sampling: str
    ) -> DrawnFeed:
        return DrawnFeed(self.dataset, clients, keys, sizes.shape[1])

    def width(self, limit: int | None, rows: np.ndarray | None = None) -> int:
        return self.dataset.num_exact_samples(DEFAULT_SAMPLES_PER_CLIENT if limit is None else limit)

    def fixed_samples(
        self, rows: Tensor, width: int, dtype: torch.dtype, purpose: rng.Purpose, by_seed: bool = False
    ) -> Batch:
        clients = rows % self.federation.clients
        seeds = self.federation.seed_of_replicate[rows // self.federation.clients] if by_seed else clients.new_zeros(())
        keys = rng.row_keys(seeds, purpose, clients)
        return self.dataset.exact(clients, keys, width, dtype) | {"client": clients, "row": rows}

    def data_for_members(self, members: Federation, dataset: Dataset) -> StreamClientData:
        return StreamClientData(dataset, members, self.drift)

    def same_samples(self, data: ClientData) -> bool:
        return isinstance(data, StreamClientData) and structurally_equal(self.dataset, data.dataset)

    def concatenate(self, data_list: Sequence[ClientData]) -> StreamClientData:
        return self  # a client's draws depend only on its number and on keys

    def means(self) -> Tensor | None:
        means = self.dataset.client_means()
        if means is None:
            return None
        means = means[: self.federation.clients]
        return means.expand(self.federation.num_replicates, *means.shape)

    def example_samples(self, count: int, dtype: torch.dtype) -> Batch:
        zero_client = torch.zeros(1, dtype=torch.int64, device=self.federation.device)
        drawn_samples = self.dataset.draw(zero_client, zero_client, count, dtype)
        return {name: drawn_samples[name][0] for name in ("x", "y") if name in drawn_samples}


class DrawnFeed:
    """The fresh samples of c rows; small batches of several steps are drawn at once. Rows with equal seed and client,
    whose replicates or runs differ in a numeric setting, have equal samples, which are drawn once.
    """

    def __init__(self, stream: Dataset, clients: Tensor, keys: BatchKeys, steps: int) -> None:
        self.stream, self.clients, self.keys, self.steps = stream, clients, keys, steps
        self._drawn_ahead: tuple[range, Batch] = (range(0), {})

    @functools.cached_property
    def _distinct_drawn_rows(self) -> tuple[BatchKeys, Tensor, Tensor | None]:
        """Keys and clients [u] of the samples that are drawn, and the index of each row's [c] among them."""
        distinct_rows_and_inverse = self.keys.distinct_rows()
        if distinct_rows_and_inverse is None:
            return self.keys, self.clients, None
        distinct_rows, inverse_index = (
            torch.as_tensor(indices).to(self.clients.device, non_blocking=True) for indices in distinct_rows_and_inverse
        )
        return self.keys.at(distinct_rows_and_inverse[0]), self.clients[distinct_rows], inverse_index

    def batch_of_rows(self, step: int, row_selection: slice, width: int, dtype: torch.dtype) -> Batch:
        clients = self.clients
        if (row_selection.start, row_selection.stop) != (0, len(clients)):
            keys = self.keys.step_keys(rng.Purpose.NOISE, step, row_selection)
            return dict(self.stream.draw(clients[row_selection], keys, width, dtype))
        drawing, clients, inverse_index = self._distinct_drawn_rows
        steps, drawn_samples = self._drawn_ahead
        if step not in steps:
            max_steps = MAX_NUMBERS_DRAWN_AHEAD // (len(clients) * width * math.prod(self.stream.shape))
            steps = range(step, min(step + max(max_steps, 1), self.steps))
            keys = drawing.keys_of_steps(rng.Purpose.NOISE, steps)
            drawn_samples = self.stream.draw(clients.repeat(len(steps)), keys.flatten(), width, dtype)
            drawn_samples = {name: value.unflatten(0, keys.shape) for name, value in drawn_samples.items()}
            self._drawn_ahead = steps, drawn_samples
        step_samples = {name: value[step - steps.start] for name, value in drawn_samples.items()}
        return (
            step_samples
            if inverse_index is None
            else {name: value[inverse_index] for name, value in step_samples.items()}
        )
