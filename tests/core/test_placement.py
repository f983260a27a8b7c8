"""Client memory on the device, in host memory or in a file: the same numbers, and nothing left behind."""

from __future__ import annotations

import functools
import tempfile

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.core import ConfigError
from fedsim.core.placement import is_memory_mapped, on_device
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD, PFedMe
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Location
from fedsim.strategies import MIFA, FedAWE, FedPBC, FedVARP, LocalOnly, Scaffold

QUIET = Tracking(progress="none", tensorboard=False)
RULES = {
    "apfl": functools.partial(APFL, alpha=0.3, adaptive=True),
    "pfedme": functools.partial(PFedMe, warm_start=True),
    "sgd": SGD,
}


STRATEGIES = {
    "fedawe": FedAWE(),
    "fedpbc": FedPBC(),
    "local_only": LocalOnly(),
    "scaffold": Scaffold(),
    "fedvarp": FedVARP(memory_dtype="float32"),
    "mifa": MIFA(wait_for_all=True),
}


def run(place, rule, folder=None, rounds=4, resume=False, strategy="fedawe"):
    """State, memory and history of a run with memory of strategy, rule (model and number) and shift."""
    simulation = Simulation(
        GaussianMean(clients=6), Mean, clients=6, seeds=(3, 5), rounds=rounds, evaluation=EvaluationOptions(every=2),
        shift=Location(0.5, 0.3, inertia=0.6), strategy=STRATEGIES[strategy], personal=Personal(over="online"),
        availability=Bernoulli(Uniform(0.6), Sine()), local=RULES[rule](lr=0.1, steps=3, batch_size=4),
        execution=Execution(dtype="float64", memory=place),
    )  # fmt: skip
    memories, initial = [], simulation.trainer.initial_memory
    simulation.trainer.initial_memory = lambda model: memories.append(initial(model)) or memories[-1]
    result = simulation.run(folder, resume=resume, tracking=QUIET)
    return result, memories[0].named_tensors()


def rows_of(result):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("rule", ["apfl", "pfedme"])
def test_where_memory_lies_does_not_matter(rule, place, tmp_path):
    """Bit for bit, and so it is for a run that is resumed with its memory elsewhere."""
    plain, kept = run("device", rule)
    placed, same = run(place, rule)
    run("device", rule, tmp_path, rounds=2)
    resumed, again = run(place, rule, tmp_path, resume=True)
    for other, memory in ((placed, same), (resumed, again)):
        np.testing.assert_equal(rows_of(other), rows_of(plain))
        assert torch.equal(other.state.models, plain.state.models)
        assert set(memory) == set(kept)
        assert all(torch.equal(memory[name], kept[name]) for name in kept)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategys_memory_may_lie_elsewhere_too(strategy, tmp_path):
    """Bit for bit, resumed or not; and it is in the file, not beside it."""
    plain, _ = run("device", "sgd", strategy=strategy)
    run("disk", "sgd", tmp_path, rounds=2, strategy=strategy)
    for other in (run("disk", "sgd", strategy=strategy), run("disk", "sgd", tmp_path, resume=True, strategy=strategy)):
        np.testing.assert_equal(rows_of(other[0]), rows_of(plain))
        state = vars(other[0].state)
        assert all(torch.equal(value, vars(plain.state)[name]) for name, value in state.items())
        assert {name for name, value in state.items() if is_memory_mapped(value)} == state.keys() & {"models", "memory"}


def test_a_file_holds_the_rows_and_has_no_name(tmp_path, monkeypatch):
    """Mapped, not copied: the process' own memory does not grow by the models (64 MB), and the folder stays empty."""

    def own() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dataset = Dataset("ones", torch.ones(200, 199), torch.zeros(200, dtype=torch.int64), classes=200)
    simulation = Simulation(
        dataset, Linear, clients=200, local=APFL(), seeds=(0, 1), execution=Execution(memory="disk")
    )
    federation, model = simulation.federation, torch.randn(2, simulation.model.dimension)
    assert simulation.model.dimension == 40_000
    before = own()
    memory = simulation.trainer.initial_memory(model)
    assert own() - before < 16e6
    assert not list(tmp_path.iterdir())
    assert torch.equal(memory.clients["personal"], model.repeat_interleave(200, dim=0))
    counts = np.zeros((2, 200))
    counts[0, 7] = counts[1, [0, 199]] = 1
    cohort = federation.make_cohort(counts, counts)
    rows = memory.gather(cohort)
    memory.scatter(cohort, {name: value + 1 for name, value in rows.items()})
    changed = torch.nonzero((memory.clients["personal"] != model.repeat_interleave(200, dim=0)).any(1))[:, 0]
    assert changed.tolist() == [7, 200, 399]
    memory.read_only_copy().scatter(cohort, {name: value * 0 for name, value in rows.items()})
    assert torch.equal(memory.clients["personal"][7], model[0] + 1)


def test_a_place_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"memory='attic' is unknown; choose one of device, host, disk"):
        run("attic", "apfl")


def test_a_copy_on_another_device_is_shared_until_the_tensor_is_written_to() -> None:
    """The device 'meta' stands for a GPU."""
    value, meta = torch.arange(3.0), torch.device("meta")
    assert on_device(value, value.device) is value
    first = on_device(value, meta)
    assert first.device == meta
    assert on_device(value, meta) is first
    assert on_device(value.clone(), meta) is not first
    value.add_(1)
    assert on_device(value, meta) is not first
