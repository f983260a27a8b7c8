"""Several runs at once: round by round their clients' local work is one matrix, and all else is each run's own.

>>> from fedsim import Simulation
>>> from fedsim.data.datasets import Digits
>>> from fedsim.local import SGD
>>> from fedsim.models import Linear
>>> data = Digits()
>>> fast, slow = run_together([Simulation(data, Linear, clients=10, rounds=2, local=SGD(lr=lr)) for lr in (0.5, 0.1)])
>>> fast.final["train_loss"][0] < slow.final["train_loss"][0]
True
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from fedsim.run import determinism
from fedsim.run.simulation import Simulation
from fedsim.run.stopping import Stopped, StopSignals
from fedsim.run.tracking import Result
from fedsim.trainer import JointExecutor, LocalResult, LocalTask, TaskGenerator

T = TypeVar("T")


class Lockstep(Generic[T]):
    """Advances several runs together. A run that ends, early or by an error, leaves, and the others go on.

    Args:
        at_once: how many runs are under way together; the next ones begin when these have ended. None: all.
        company: does their works.
        watch: hears of every round that has been worked on: its number, from 0, and how many runs are in it.
        counts: how many runs each of the runs stands for, where some are several in one.
    """

    def __init__(
        self,
        at_once: int | None = None,
        company: JointExecutor | None = None,
        watch: Callable[[int, int], None] = lambda t, runs: None,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.at_once, self.watch, self.counts = at_once, watch, counts
        self.company = company or JointExecutor()

    def __call__(self, runs: Iterable[Callable[[], TaskGenerator[T]]]) -> Iterator[tuple[int, T | BaseException]]:
        """The runs, each begun by its call, and as each ends its number and what came of it: a result or an error.

        Runs that have rounds to catch up do so first. Asked to stop (Ctrl-C, SIGTERM), all that are under way end after
        the same round, and no further run begins.

        Raises:
            KeyboardInterrupt: asked a second time; the runs that were under way are closed.
        """
        waiting = enumerate(runs)
        stop_requested = False
        while not stop_requested and (batch := list(itertools.islice(waiting, self.at_once))):
            for number, outcome in self._run_batch(dict(batch)):
                stop_requested = stop_requested or isinstance(outcome, Stopped)
                yield number, outcome

    def _run_batch(self, runs: dict[int, Callable[[], TaskGenerator[T]]]) -> Iterator[tuple[int, T | BaseException]]:
        in_flight: dict[int, tuple[TaskGenerator[T], LocalTask]] = {}
        try:
            for number, first_message in runs.items():
                if StopSignals.pending():
                    break
                yield from self._advance(number, first_message, None, in_flight)
            while in_flight:
                earliest_round = min(work.plan.t for _, work in in_flight.values())
                numbers = [number for number, (_, work) in in_flight.items() if work.plan.t == earliest_round]
                local_results = self.company([in_flight[number][1] for number in numbers])
                self.watch(earliest_round, sum(1 if self.counts is None else self.counts[n] for n in numbers))
                with (
                    StopSignals.postponed()
                ):  # one that arrives between two of them must not end the second a round earlier
                    outcomes = [
                        outcome
                        for number, local_result in zip(numbers, local_results, strict=True)
                        for outcome in self._advance(number, in_flight.pop(number)[0], local_result, in_flight)
                    ]
                yield from outcomes
        finally:
            for steps, _ in in_flight.values():
                steps.close()

    @staticmethod
    def _advance(
        number: int,
        run: TaskGenerator[T] | Callable[[], TaskGenerator[T]],
        outcome: LocalResult | Exception | None,
        in_flight: dict[int, tuple[TaskGenerator[T], LocalTask]],
    ) -> list[tuple[int, T | BaseException]]:
        """To the run's next work, or its end: then what came of it."""
        try:
            steps = run() if callable(run) else run
            work = steps.throw(outcome) if isinstance(outcome, Exception) else steps.send(outcome)  # type: ignore[arg-type]
        except StopIteration as end:
            return [(number, end.value)]
        except (Exception, Stopped) as error:
            return [(number, error)]
        in_flight[number] = (steps, work)
        return []


def run_together(simulations: Sequence[Simulation], at_once: int | None = None) -> list[Result]:
    """The results of all, in their order, with the numbers that each would have alone (to float tolerance where rows
    are vmapped, bit for bit where they run one by one).

    Args:
        simulations: those that share model, samples and local work meet in one call of a trainer a round; they may
            differ in learning rates, strategies, availability, partitions and seeds. The others go side by side.
        at_once: see `Lockstep`.

    Raises:
        Exception: that of the first which failed, when all others have come to their end.
    """
    results: dict[int, Result | BaseException] = {}
    with determinism.deterministic(any(simulation.deterministic for simulation in simulations)):
        for number, outcome in Lockstep[Result](at_once)([simulation.steps for simulation in simulations]):
            results[number] = outcome
    failed = [outcome for _, outcome in sorted(results.items()) if isinstance(outcome, BaseException)]
    for error in sorted(failed, key=lambda error: isinstance(error, Exception)):  # being asked to stop comes first
        raise error
    return [result for _, result in sorted(results.items()) if not isinstance(result, BaseException)]
