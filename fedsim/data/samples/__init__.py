"""Samples of clients: training batches step by step, and samples for evaluation."""

from fedsim.data.samples.batches import Batches, Chunk, Plan
from fedsim.data.samples.client_data import Batch, ClientData
from fedsim.data.samples.client_samples import ClientSamples
from fedsim.data.samples.drawn import Drawn
from fedsim.data.samples.stored import Stored
from fedsim.data.samples.work import LocalWork, Workload

__all__ = [
    "Batch",
    "Batches",
    "Chunk",
    "ClientData",
    "ClientSamples",
    "Drawn",
    "LocalWork",
    "Plan",
    "Stored",
    "Workload",
]
