"""How many kernels a round of plain descents takes, counted on a CPU by PyTorch's dispatcher."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim import Execution, Simulation
from fedsim.data.datasets import Digits
from fedsim.local import SGD, Momentum
from fedsim.models import MLP, Linear

# No kernels: views, and memory that nothing is written to.
FREE = {
    "view", "_unsafe_view", "expand", "slice", "select", "split", "split_with_sizes", "t", "transpose", "permute",
    "unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "diagonal", "_reshape_alias", "unfold",
    "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def of_a_round(model, local) -> Counter[str]:
    """Those of the third round's local work: from who takes part to their rows."""
    simulation = Simulation(Digits(), model, clients=20, local=local, rounds=4, execution=Execution("fused"))
    strategy, trainer = simulation.strategy, simulation.trainer
    state = simulation.initial_state()
    memory = trainer.initial_memory(state.model)
    for t in range(3):
        cohort = strategy.cohort(state, simulation.availability.sample(t))
        start = strategy.start(state, cohort)
        with Kernels() as kernels:
            report = trainer.run(start, cohort, t, state.model, memory)
        state = strategy.aggregate(state, report, t)
    return kernels.by_name


MODELS = {"logistic": Linear, "MLP": lambda shape, classes: MLP(shape, classes, hidden=[16, 16])}


@pytest.mark.parametrize(("name", "most"), [("logistic", 12), ("MLP", 25)])
def test_kernels_of_a_step_and_of_a_round(name: str, most: int) -> None:
    few, many = (of_a_round(MODELS[name], SGD(lr=0.1, steps=steps, batch_size=20)) for steps in (2, 6))
    of_a_step = (many.total() - few.total()) / 4
    assert 5 < of_a_step <= most, many - few
    assert few.total() - 2 * of_a_step <= 75, few  # a GPU is asked for 60: some ten are numbers of the host's


def test_the_host_waits_for_nothing() -> None:
    for rule in (SGD(lr=0.1, steps=3, batch_size=20), Momentum(lr=0.1, steps=3, batch_size=20, weight_decay=0.1)):
        assert not WAITS & of_a_round(MODELS["MLP"], rule).keys()
