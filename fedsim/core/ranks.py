"""Ranks: processes that share one run, the clients of each, and their communication.

`torchrun --nproc-per-node=N -m fedsim …` starts N processes, and PyTorch's own engine joins them: NCCL between GPUs,
gloo between CPUs. Every rank holds the same data and server's model and draws the same availability; client i, and
all that is remembered of it, belongs to rank i mod N. Sums over clients (`Federation.weighted_sum`) end in one
all-reduce, so every rank goes on with the same next model. Rank 0 writes, in the layout of a single process. A lone
process is one rank, and has nobody to talk to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.core.errors import ConfigError, PeerError

RANK_TIMEOUT = timedelta(minutes=30)  # without an answer a rank is given up; an ended one is noticed at once

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessRanks:
    """The ranks of a run, as one of them sees them.

    Attributes:
        rank: this process's number, from 0.
        num_ranks: N.
        local_rank: its number on its machine.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0

    @classmethod
    def join_group(cls, timeout: timedelta = RANK_TIMEOUT) -> ProcessRanks:
        """Join the process group that torchrun started; without torchrun there is one rank. Joining again changes
        nothing."""
        environment = os.environ
        count = int(environment.get("WORLD_SIZE", "1"))
        if count == 1 or "RANK" not in environment:
            return cls()
        ranks = cls(int(environment["RANK"]), count, int(environment.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            use_nccl = torch.cuda.is_available() and dist.is_nccl_available()
            ranks._run_collective(
                lambda: dist.init_process_group("cpu:gloo,cuda:nccl" if use_nccl else "gloo", timeout=timeout)
            )
        return ranks

    @property
    def is_main_rank(self) -> bool:
        """Whether this is the rank that tracks and writes the run."""
        return self.rank == 0

    @property
    def client_slice(self) -> slice:
        """The clients of each replicate that belong to this rank: every N-th, so that a sorted population is split
        evenly."""
        return slice(self.rank, None, self.num_ranks)

    def local_device(self, device_name: str) -> str:
        """Return the device of this rank: with several ranks 'auto' and 'cuda' are the GPU with the rank's number
        on its machine."""
        if self.num_ranks == 1 or device_name not in ("auto", "cuda") or not torch.cuda.is_available():
            return device_name
        gpus = torch.cuda.device_count()
        if self.local_rank >= gpus:
            raise ConfigError(
                f"device={device_name}: rank {self.rank} is number {self.local_rank + 1} on its machine, which has "
                f"{gpus} GPUs; start torchrun with --nproc-per-node={gpus}, or set device=cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place; bitwise equal on all ranks."""
        if self.num_ranks > 1:
            self._run_collective(lambda: dist.all_reduce(values))
        return values

    def all_reduce_host(self, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        """Sum host arrays over ranks in one exchange."""
        if self.num_ranks == 1:
            return values
        flat = self.all_reduce_sum(
            torch.from_numpy(np.concatenate([np.ravel(v).astype(np.float64) for v in values]))
        ).numpy()
        arrays = np.split(flat, np.cumsum([np.size(v) for v in values])[:-1])
        return tuple(array.reshape(np.shape(v)) for array, v in zip(arrays, values, strict=True))

    def all_reduce_min(self, numbers: np.ndarray) -> np.ndarray:
        """Return the minimum over ranks of each number."""
        if self.num_ranks > 1:
            minima = torch.from_numpy(numbers.copy())
            self._run_collective(lambda: dist.all_reduce(minima, dist.ReduceOp.MIN))
            return minima.numpy()
        return numbers

    def all_gather_objects(self, value: T) -> list[T]:
        """Return the values of the ranks, in the order of ranks."""
        if self.num_ranks == 1:
            return [value]
        gathered = [value] * self.num_ranks
        self._run_collective(lambda: dist.all_gather_object(gathered, value))
        return gathered

    def all_gather_rows(self, values: Tensor, lengths: list[int]) -> Tensor:
        """Return [n, …] of all ranks, rank after rank, given how many rows each has, by one all-gather."""
        if self.num_ranks == 1:
            return values
        padded = values.new_zeros(max(lengths), *values.shape[1:])
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in lengths]
        self._run_collective(lambda: dist.all_gather(gathered, padded))
        return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])

    def broadcast_object(self, value: T) -> T:
        """Return the value of rank 0 on each rank."""
        if self.num_ranks == 1:
            return value
        objects = [value]
        self._run_collective(lambda: dist.broadcast_object_list(objects, 0))
        return objects[0]

    def broadcast_tensor(self, values: Tensor | None, like: Tensor) -> Tensor:
        """Return the host tensor of rank 0 (None on other ranks) on each rank; `like` has its shape and dtype."""
        received_tensor = torch.empty(like.shape, dtype=like.dtype) if values is None else values
        if self.num_ranks > 1:
            self._run_collective(lambda: dist.broadcast(received_tensor, 0))
        return received_tensor

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this."""
        self.all_reduce_host(np.zeros(1))

    def leave_group(self) -> None:
        """Leave the process group."""
        if self.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def send(self, values: Tensor, receiver: int) -> None:
        """Send a host tensor to one rank, which must `receive` it."""
        self._run_collective(lambda: dist.send(values, receiver))

    def receive(self, like: Tensor, sender: int) -> Tensor:
        """Receive a host tensor of this shape and dtype from one rank, which must `send` it."""
        received = torch.empty(like.shape, dtype=like.dtype)
        self._run_collective(lambda: dist.recv(received, sender))
        return received

    def _run_collective(self, operation: Callable[[], Any]) -> None:
        """Run an exchange in which all ranks take part; errors of gloo and NCCL become one sentence."""
        try:
            operation()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            reason = re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error).strip().splitlines()[0]).split(". ")[0]
            raise PeerError(f"rank {self.rank} of {self.num_ranks} lost another rank ({reason})") from error
