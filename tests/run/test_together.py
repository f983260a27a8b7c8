"""Runs in lockstep: each has the numbers that it has alone, whatever the others do."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim import DivergenceError, EvaluationOptions, Execution, Simulation, Tracking
from fedsim.availability import Bernoulli, Markov, Uniform
from fedsim.data.contamination import LabelFlip
from fedsim.data.datasets import Digits, GaussianMean
from fedsim.data.partition import IID, Dirichlet
from fedsim.local import SAM, SGD, PerStep
from fedsim.models import MLP, Linear, Mean
from fedsim.run.together import LockstepRunner, run_together
from fedsim.shift import Location
from fedsim.strategies import MIFA, FedAvg, FedAWE, FedPBC, Scaffold
from fedsim.trainer import LockstepExecutor, Trainer

small = functools.partial(MLP, hidden=(8,))
LOOP = Execution(executor="loop", trial=False)
QUIET = Tracking(progress="none", tensorboard=False)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def one(digits: Digits, **own: Any) -> Simulation:
    settings = {"clients": 6, "rounds": 4, "seeds": (0, 1), "local": sgd(), "execution": LOOP}
    return Simulation(digits, **({"model": Linear} | settings | {"evaluation": EvaluationOptions(every=2)} | own))


def sgd(**own: Any) -> SGD:
    return SGD(**({"steps": 2, "batch_size": 8} | own))


def numbers(result: Any) -> list[tuple[float, ...]]:
    """All that was measured, but how long it took."""
    return [tuple(value for name, value in row.items() if name != "seconds") for row in result.history]


def agree(makes: list[Any], exactly: bool = True) -> list[Simulation]:
    """Each alone and all together give the same numbers; returns those that went together."""
    alone, company = [make().run() for make in makes], [make() for make in makes]
    for own, joint in zip(alone, run_together(company), strict=True):
        if exactly:
            assert np.array_equal(numbers(own), numbers(joint), equal_nan=True)
            assert torch.equal(own.state.model, joint.state.model)
        else:
            assert np.allclose(numbers(own), numbers(joint), rtol=1e-4, atol=1e-5, equal_nan=True)
    return company


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of a trainer had."""
    seen: list[int] = []
    genuine = Trainer.run_local_steps
    monkeypatch.setattr(Trainer, "run_local_steps", lambda self, work: seen.append(len(work)) or genuine(self, work))
    return seen


def test_a_sweep_of_rates_strategies_availability_partitions_seeds(digits, calls):
    makes = [
        lambda: one(digits, strategy=FedAvg(), local=sgd(lr=0.5)),
        lambda: one(digits, strategy=FedAWE(), local=sgd(lr=[0.1, 0.2]), availability=Bernoulli(Uniform(0.5))),
        lambda: one(digits, strategy=MIFA(), local=sgd(schedule=PerStep(0.9)), partition=Dirichlet(0.3), seeds=(5,)),
        lambda: one(digits, strategy=FedPBC(), availability=Markov(), clients=9, rounds=3),
    ]
    agree(makes)
    alone = 4 + 4 + 4 + 3
    assert len(calls) == alone + 4  # together one call a round


@pytest.mark.parametrize("execution", [Execution(executor="fused"), Execution(executor="vmap", chunk=5)], ids=str)
def test_stacked_and_vmapped_rows_to_float_tolerance(digits, execution, calls):
    execution = Execution(executor=execution.executor, chunk=execution.chunk, trial=False)
    makes = [
        lambda: one(digits, model=small, execution=execution, local=sgd(lr=0.2)),
        lambda: one(digits, model=small, execution=execution, partition=Dirichlet(0.5), strategy=FedAWE()),
    ]
    agree(makes, exactly=False)
    assert len(calls) == 4 + 4 + 4


def test_those_of_more_and_of_fewer_steps_share_a_call(digits, calls):
    """An epoch of a fifth of the samples is of twice as many steps as one of a ninth."""
    makes = [
        functools.partial(one, digits, local=SGD(epochs=1, batch_size=64), rounds=2, clients=clients)
        for clients in (5, 9)
    ]
    agree(makes)
    assert len(calls) == 2 + 2 + 2


def test_those_that_do_not_fit_go_side_by_side(digits, calls):
    makes = [
        lambda: one(digits, rounds=2),
        lambda: one(digits, rounds=2, local=sgd(batch_size=9)),
        lambda: one(digits, rounds=2, strategy=Scaffold()),
        lambda: one(digits, rounds=2, local=SAM(rho=0.1, steps=2, batch_size=8)),
        lambda: one(digits, rounds=2, local=SAM(rho=0.2, steps=2, batch_size=8)),
    ]
    agree(makes)
    assert len(calls) == 2 * 5 * 2


def test_streams_that_answer_the_model(calls):
    def mean(epsilon: float, lr: float, **own: Any) -> Simulation:
        shift = Location(epsilon=epsilon, references="none")
        return Simulation(
            GaussianMean(clients=5), Mean, clients=5, rounds=3, shift=shift, local=sgd(lr=lr), execution=LOOP, **own
        )

    makes = [lambda: mean(0.5, 0.1), lambda: mean(0.5, 0.2, seeds=(3, 4)), lambda: mean(0.2, 0.1)]
    agree(makes)
    assert len(calls) == 3 * 3 + 2 * 3  # another ε is another answer


def test_what_changes_a_step_is_each_runs_own(digits, calls):
    """Each differs from the first in one setting of the local steps: no two of them may share a call."""
    changes = [
        {},
        {"local": sgd(weight_decay=0.3)},
        {"local": sgd(clip=0.1)},
        {"local": sgd(sampling="replacement")},
        {"contamination": LabelFlip(fraction=0.4)},
        {"contamination": LabelFlip(fraction=0.5)},
        {"ridge": 0.2},
    ]
    makes = [functools.partial(one, digits, rounds=2, **change) for change in changes]
    agree(makes)
    assert len(calls) == 2 * 2 * len(makes)
    ends = [make().run().state.model for make in makes]
    assert not any(torch.equal(a, b) for n, a in enumerate(ends) for b in ends[:n])


def test_data_answer_the_model_of_their_own_run(calls):
    """Where a round's data answer what the server deployed, each run deployed a model of its own."""

    def mean(lr: float, seeds: tuple[int, ...]) -> Simulation:
        shift = Location(epsilon=0.5, deploy="round", references="none")
        data = GaussianMean(clients=5)
        return Simulation(data, Mean, clients=5, rounds=3, shift=shift, local=sgd(lr=lr), execution=LOOP, seeds=seeds)

    agree([lambda: mean(0.1, (0,)), lambda: mean(0.4, (0,)), lambda: mean(0.3, (2, 3))])
    assert len(calls) == 3 * 3 + 3


def test_one_that_fails_leaves_and_the_others_go_on(digits):
    makes = [lambda: one(digits), lambda: one(digits, local=sgd(lr=3e38)), lambda: one(digits, seeds=(7,))]
    ended = dict(LockstepRunner()([make().run_as_generator for make in makes]))
    assert isinstance(ended[1], DivergenceError)
    for number in (0, 2):
        assert numbers(ended[number]) == numbers(makes[number]().run())
    with pytest.raises(DivergenceError):
        run_together([make() for make in makes])


def test_a_failing_call_of_the_trainer_is_tried_by_each_alone(digits, monkeypatch):
    genuine = Trainer.run_local_steps

    def perform(self: Trainer, work: Any) -> Any:
        if len(work) > 12:
            raise RuntimeError("too many rows")
        return genuine(self, work)

    monkeypatch.setattr(Trainer, "run_local_steps", perform)
    first, second, third = LockstepRunner()(
        [
            one(digits).run_as_generator,
            one(digits, clients=7).run_as_generator,
            one(digits, seeds=(1,)).run_as_generator,
        ]
    )
    assert (first[0], first[1].__class__) == (1, RuntimeError)
    assert {second[0], third[0]} == {0, 2}
    assert numbers(second[1])
    assert numbers(third[1])


def test_memory_is_bounded_and_the_split_is_said(digits, calls, caplog):
    sizes = 12 * 650 * 4
    with caplog.at_level(logging.INFO, "fedsim"):
        ended = dict(
            LockstepRunner(company=LockstepExecutor(most_bytes=2 * sizes))(
                [one(digits).run_as_generator for _ in range(5)]
            )
        )
    assert calls[:3] == [24, 24, 12]
    assert [m for m in caplog.messages if "parts" in m] == [
        "lockstep: 5 runs of about 12 rows are split into parts of at most 0.0595 MiB"
    ]
    assert len({str(numbers(result)) for result in ended.values()}) == 1


def test_so_many_at_once_and_no_more(digits):
    begun: list[int] = []

    def begin(number: int) -> Any:
        begun.append(number)
        return one(digits, rounds=2).run_as_generator()

    lockstep = LockstepRunner(at_once=2)([lambda n=n: begin(n) for n in range(3)])
    assert next(lockstep)[0] == 0
    assert begun == [0, 1]
    assert [number for number, _ in lockstep] == [1, 2]


def test_those_behind_catch_up_and_the_rest_is_done_together(digits, calls, tmp_path: Path):
    one(digits, rounds=3).run(tmp_path / "a", tracking=QUIET)
    del calls[:]
    makes = [lambda: one(digits, rounds=5), lambda: one(digits, rounds=5, strategy=FedAWE())]
    ahead, behind = makes[0](), makes[1]()
    ended = dict(
        LockstepRunner()([lambda: ahead.run_as_generator(tmp_path / "a", True, QUIET), behind.run_as_generator])
    )
    assert calls == [12, 12, 12, 24, 24]
    for number, make in enumerate(makes):
        assert numbers(ended[number])[-1] == numbers(make().run())[-1]


def test_stopped_together_each_has_its_checkpoint_and_goes_on_alone(digits, tmp_path: Path):
    import signal

    def watch(t: int, runs: int) -> None:
        if t == 1:
            signal.raise_signal(signal.SIGTERM)

    runs = [one(digits, rounds=4), one(digits, rounds=4, local=sgd(lr=0.3))]
    begins = [lambda n=n: runs[n].run_as_generator(tmp_path / str(n), True, QUIET) for n in range(2)]
    ended = dict(LockstepRunner(report_progress=watch)(begins))
    assert {str(stop) for stop in ended.values()} == {"stopped by SIGTERM after round 2 of 4"}
    for n, make in enumerate((lambda: one(digits), lambda: one(digits, local=sgd(lr=0.3)))):
        assert numbers(make().run(tmp_path / str(n), True, QUIET)) == numbers(make().run())


def test_random_sweeps(digits):
    """Whatever is drawn for each run: alone and together it is the same."""
    random = np.random.default_rng(11)

    def draw() -> Any:
        strategy = [FedAvg, FedAWE, FedPBC, MIFA, Scaffold][random.integers(5)]
        lr, partition = float(random.uniform(0.05, 0.5)), [IID, Dirichlet][random.integers(2)]
        seeds = tuple(int(s) for s in random.choice(9, random.integers(1, 3), replace=False))
        clients, p, size = int(random.integers(1, 6)), float(random.uniform(0.2, 1)), int(random.choice([4, 50]))
        return lambda: one(
            digits, strategy=strategy(), local=sgd(lr=lr, batch_size=size), partition=partition(), seeds=seeds,
            clients=clients, availability=Bernoulli(Uniform(p)), rounds=3,
        )  # fmt: skip

    agree([draw() for _ in range(6)])
