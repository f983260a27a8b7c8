"""Work that is thrown away leaves no trace in what rules remember, whatever the server makes of that memory."""

from __future__ import annotations

import torch

from fedsim import Simulation
from fedsim.availability import UniformK
from fedsim.datasets import Pricing
from fedsim.local import ProFL
from fedsim.models import Mean
from fedsim.shift import Demand


def test_a_shared_derivative_is_not_touched_by_borrowed_work() -> None:
    local = ProFL(lr=0.01, steps=3, batch_size=20, history=2, box=[0, 10], server_derivative=True)
    shift = Demand(gamma=2.0, spread=0.5)
    simulation = Simulation(
        Pricing(clients=3, dimension=1), Mean, clients=3, shift=shift, local=local, availability=UniformK(1)
    )
    state = simulation.initial_state()
    memory = simulation.trainer.memory(state.model)

    def work(t: int, with_memory: object) -> None:
        cohort = simulation.strategy.cohort(state, simulation.availability.sample(t))
        start = simulation.strategy.start(state, cohort)
        simulation.trainer.run(start, cohort, t, state.model, with_memory)  # type: ignore[arg-type]

    for t in range(6):
        work(t, memory)
    before = {name: value.clone() for name, value in memory.tensors().items()}
    for t in range(6, 12):  # other clients are there
        work(t, memory.borrowed())
    assert all(torch.equal(before[name], value) for name, value in memory.tensors().items())
    work(6, memory)
    assert not all(torch.equal(before[name], value) for name, value in memory.tensors().items())
