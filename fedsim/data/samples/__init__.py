"""Samples of clients: training batches step by step, and samples for evaluation."""

from fedsim.data.samples.batches import Batches, Chunk, RoundPlan
from fedsim.data.samples.client_data import Batch, ClientData
from fedsim.data.samples.client_samples import ClientSamples
from fedsim.data.samples.drawn import StreamClientData
from fedsim.data.samples.stored import StoredClientData
from fedsim.data.samples.work import LocalWork, Workload

__all__ = [
    "Batch",
    "Batches",
    "Chunk",
    "ClientData",
    "ClientSamples",
    "LocalWork",
    "RoundPlan",
    "StoredClientData",
    "StreamClientData",
    "Workload",
]
