"""Refuses batches that are too small for the model, or too large for the machine, before anything runs."""

from __future__ import annotations

from fedsim.core.errors import ConfigError
from fedsim.core.placement import capacity_bytes
from fedsim.data.samples import Batches
from fedsim.models import StatelessModel

BATCH_COPIES = 2  # smallest number of copies of a batch: drawn or gathered, and the first layer's output


def check_batch_memory(batches: Batches, model: StatelessModel, numbers: int) -> None:
    """Check that the batches of all clients fit into memory.

    Args:
        batches: of the run.
        model: what is trained.
        numbers: in one input.

    Raises:
        ConfigError: with what to change.
    """
    size, row = batches.smallest
    if 0 < size < model.traits.min_batch:
        raise ConfigError(
            f"model: {type(model.training_module).__name__} cannot train on a batch of one sample, which "
            f"normalises to nothing, but client {row % batches.federation.clients} has one; give "
            "local.drop_last=true, fewer clients or another partition, or use nn.GroupNorm"
        )
    needed_bytes = BATCH_COPIES * batches.largest * numbers * model.dtype.itemsize
    if needed_bytes > capacity_bytes(model.device, "device"):
        batch_size = batches.local_work.batch_size
        raise ConfigError(
            f"batch_size={'null' if batch_size is None else batch_size}: one client's batch needs "
            f"{needed_bytes / 2**30:,.0f} GiB, more than device={model.device} has; lower it"
        )
