"""What is kept of each client between rounds, in bytes."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fedsim.run.simulation import Simulation


def remembered(simulation: Simulation) -> float:
    """Bytes that the strategy's state and the local rule's memory hold of each client, before the first round."""
    clients = simulation.federation.replicates * simulation.federation.clients
    state = simulation.initial_state()
    tensors: list[Tensor] = [getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "model"]
    tensors += simulation.trainer.memory(state.model).clients.values()
    of_each = [tensor for tensor in tensors if len(tensor.shape) and tensor.shape[0] == clients]
    return sum(tensor.numel() * tensor.element_size() for tensor in of_each) / clients
