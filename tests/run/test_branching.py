"""Some replicates of a run continue as a run of their own, or are given up: the numbers of the others are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation, Tracking
from fedsim.availability import Bernoulli, Uniform
from fedsim.availability.clock import ConstantDelay
from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Digits
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.run.branching import write_replicate_subset
from fedsim.run.tracking import Observer
from fedsim.strategies import MIFA, FedAWE

pytestmark = pytest.mark.slow
SEEDS, RATES = (0, 1, 0, 1), (0.1, 0.1, 0.4, 0.4)


class Halting(Observer):
    """Ends a run after a round, and gives up some of its replicates."""

    def __init__(self, until: int | None, dropped: tuple[int, ...] = ()) -> None:
        self.until, self.dropped = until, dropped

    def evaluated(self, event):
        return "enough" if event.round == self.until else None

    def drop_reason_by_replicate(self):
        return dict.fromkeys(self.dropped, "in a test")


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def simulation(digits: Digits, which=(0, 1, 2, 3), **settings) -> Simulation:
    rates, seeds = [RATES[k] for k in which], [SEEDS[k] for k in which]
    options = {"clients": 5, "rounds": 6, "strategy": FedAWE(), "availability": Bernoulli(Uniform(0.5))} | settings
    return Simulation(
        digits, Linear, seeds=seeds, local=SGD(lr=rates, steps=2, batch_size=8),
        evaluation=EvaluationOptions(every=2), execution=Execution(executor="loop", trial=False), **options,
    )  # fmt: skip


def quiet(*observers) -> Tracking:
    return Tracking(progress="none", tensorboard=False, observers=list(observers))


@pytest.mark.parametrize("strategy", [FedAWE, MIFA], ids=lambda strategy: strategy.__name__)
def test_replicates_that_branch_off_end_as_in_the_run_of_all(digits, tmp_path: Path, strategy):
    whole = simulation(digits, strategy=strategy()).run()
    first = simulation(digits, strategy=strategy())
    first.run(tmp_path / "all", False, quiet(Halting(4)))
    identity = {"seeds": [1, 0], "strategy": strategy.__name__}
    assert write_replicate_subset(tmp_path / "all", tmp_path / "some", [3, 2], 4, identity)
    some = simulation(digits, (3, 2), strategy=strategy()).run(tmp_path / "some", True, quiet())
    assert torch.equal(some.state.model, whole.state.model[[3, 2]])
    expected = [row for of in range(0, 16, 4) for row in (whole.history[of + 3], whole.history[of + 2])]
    assert [row["round"] for row in some.history] == [0, 0, 2, 2, 4, 4, 6, 6]
    for row, other in zip(some.history, expected, strict=True):
        assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def test_replicates_that_an_observer_drops_do_not_disturb_the_others_and_stay_away(digits, tmp_path: Path):
    whole = simulation(digits).run()
    simulation(digits).run(tmp_path, False, quiet(Halting(2)))
    simulation(digits).run(tmp_path, True, quiet(Halting(4, (0, 3))))
    result = simulation(digits).run(tmp_path, True, quiet())  # nobody says it again
    assert torch.equal(result.state.model[1:3], whole.state.model[1:3])
    final = result.history[-4:]
    assert [np.isnan(row["train_loss"]) for row in final] == [True, False, False, True]
    at_the_drop = whole.history[4:8]
    assert [row["train_loss"] for row in result.history[4:8]] == [row["train_loss"] for row in at_the_drop]
    samples = [row["samples"] for row in at_the_drop]
    assert (final[0]["samples"], final[3]["samples"]) == (samples[0], samples[3])  # nothing was computed afterwards


def test_updates_on_the_way_are_not_divided(digits, tmp_path: Path):
    delayed = simulation(digits, delay=ConstantDelay(3), strategy=MIFA())
    delayed.run(tmp_path / "all", False, quiet(Halting(2)))
    assert not write_replicate_subset(tmp_path / "all", tmp_path / "some", [0], 4, {})
    assert not (tmp_path / "some").exists()


def test_an_observer_cannot_drop_what_is_not_there(digits):
    with pytest.raises(ConfigError, match="an observer drops replicate 4, but there are 4"):
        simulation(digits).run(None, False, quiet(Halting(None, (4,))))
