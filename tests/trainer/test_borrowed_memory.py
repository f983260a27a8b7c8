"""Work that is thrown away leaves no trace in what rules remember, whatever the server makes of that memory."""

from __future__ import annotations

import torch

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import UniformK
from fedsim.core import Memory
from fedsim.data.datasets import GaussianMean, Pricing
from fedsim.evaluation.personal import Personal
from fedsim.local import SGD, ProFL
from fedsim.models import Mean
from fedsim.shift import Demand, Location


def test_a_shared_derivative_is_not_touched_by_borrowed_work() -> None:
    local = ProFL(lr=0.01, steps=3, batch_size=20, history=2, box=[0, 10], server_derivative=True)
    shift = Demand(gamma=2.0, spread=0.5)
    simulation = Simulation(
        Pricing(clients=3, dimension=1), Mean, clients=3, shift=shift, local=local, availability=UniformK(1)
    )
    state = simulation.initial_state()
    memory = simulation.trainer.initial_memory(state.model)

    def work(t: int, with_memory: object) -> None:
        cohort = simulation.strategy.cohort(state, simulation.availability.sample(t))
        start = simulation.strategy.start(state, cohort)
        simulation.trainer.run(start, cohort, t, state.model, with_memory)  # type: ignore[arg-type]

    for t in range(6):
        work(t, memory)
    before = {name: value.clone() for name, value in memory.named_tensors().items()}
    for t in range(6, 12):  # other clients are there
        work(t, memory.read_only_copy())
    assert all(torch.equal(before[name], value) for name, value in memory.named_tensors().items())
    work(6, memory)
    assert not all(torch.equal(before[name], value) for name, value in memory.named_tensors().items())


def test_what_the_server_remembers_is_lent_as_a_copy() -> None:
    """Whoever works on borrowed memory may write into it in place."""
    memory = Memory(server={"deployments": torch.zeros(2, 3)})
    lent = memory.read_only_copy()
    lent.server["deployments"] += 1
    assert not memory.server["deployments"].any()
    assert not lent.writable


def test_localized_models_leave_no_trace_in_what_data_answer() -> None:
    """With inertia θ̃ moves in place at every deployment; the deployments of an evaluation are none."""

    def run(over: str) -> torch.Tensor:
        shift = Location(0.5, deploy="round", inertia=0.5, references="none")
        options = {"shift": shift, "personal": Personal(over=over), "evaluation": EvaluationOptions(every=1)}
        data, local = GaussianMean(clients=3), SGD(lr=0.3, steps=2, batch_size=8)
        return Simulation(data, Mean, clients=3, rounds=4, local=local, **options).run().state.model

    assert torch.equal(run("none"), run("all"))
