"""Several runs in lockstep: round by round the local work of all their clients is one matrix; everything else is
computed per run.

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

from fedsim.core.torch_warnings import suppress_vmap_warning
from fedsim.run import determinism
from fedsim.run.simulation import Simulation
from fedsim.run.stopping import Stopped, StopSignals
from fedsim.run.tracking import Result
from fedsim.trainer import LocalResult, LocalTask, LockstepExecutor, TaskGenerator

T = TypeVar("T")


class LockstepRunner(Generic[T]):
    """Advances several runs together. A run that ends, early or by an error, leaves, and the others continue.

    Args:
        at_once: how many runs are under way together; the next ones begin when these have ended. None: all.
        company: does their works.
        report_progress: hears of every round that has been worked on: its number, from 0, and how many runs are in it.
        counts: how many runs each of the runs stands for, where some are several in one.
    """

    def __init__(
        self,
        at_once: int | None = None,
        company: LockstepExecutor | None = None,
        report_progress: Callable[[int, int], None] = lambda t, runs: None,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.max_concurrent_runs, self.report_progress, self.num_runs_by_job = at_once, report_progress, counts
        self.joint_executor = company or LockstepExecutor()

    def __call__(self, runs: Iterable[Callable[[], TaskGenerator[T]]]) -> Iterator[tuple[int, T | BaseException]]:
        """Start each run by its call; yield, as each run ends, its number and its result or error.

        Runs that have rounds to catch up do so first. Asked to stop (Ctrl-C, SIGTERM), all that are under way end after
        the same round, and no further run begins.

        Raises:
            KeyboardInterrupt: asked a second time; the runs that were under way are closed.
        """
        waiting_runs = enumerate(runs)
        stop_requested = False
        while not stop_requested and (batch := list(itertools.islice(waiting_runs, self.max_concurrent_runs))):
            for number, outcome in self._interleave_runs(dict(batch)):
                stop_requested = stop_requested or isinstance(outcome, Stopped)
                yield number, outcome

    def _interleave_runs(
        self, runs: dict[int, Callable[[], TaskGenerator[T]]]
    ) -> Iterator[tuple[int, T | BaseException]]:
        in_flight: dict[int, tuple[TaskGenerator[T], LocalTask]] = {}
        try:
            for run_index, first_message in runs.items():
                if StopSignals.is_stop_pending():
                    break
                yield from self._advance_run(run_index, first_message, None, in_flight)
            while in_flight:
                earliest_round = min(local_task.batch_plan.t for _, local_task in in_flight.values())
                run_indices = [
                    run_index
                    for run_index, (_, local_task) in in_flight.items()
                    if local_task.batch_plan.t == earliest_round
                ]
                local_results = self.joint_executor([in_flight[run_index][1] for run_index in run_indices])
                self.report_progress(
                    earliest_round,
                    sum(1 if self.num_runs_by_job is None else self.num_runs_by_job[n] for n in run_indices),
                )
                # a signal between two runs must not end the second one a round earlier
                with StopSignals.delay_signals():
                    outcomes = [
                        outcome
                        for run_index, local_result in zip(run_indices, local_results, strict=True)
                        for outcome in self._advance_run(
                            run_index, in_flight.pop(run_index)[0], local_result, in_flight
                        )
                    ]
                yield from outcomes
        finally:
            for steps, _ in in_flight.values():
                steps.close()

    @staticmethod
    def _advance_run(
        run_index: int,
        run_or_start: TaskGenerator[T] | Callable[[], TaskGenerator[T]],
        outcome: LocalResult | Exception | None,
        in_flight: dict[int, tuple[TaskGenerator[T], LocalTask]],
    ) -> list[tuple[int, T | BaseException]]:
        """Advance a run to its next local task, or to its end, and return its result or error."""
        try:
            steps = run_or_start() if callable(run_or_start) else run_or_start
            local_task = steps.throw(outcome) if isinstance(outcome, Exception) else steps.send(outcome)  # type: ignore[arg-type]
        except StopIteration as end:
            return [(run_index, end.value)]
        except (Exception, Stopped) as error:
            return [(run_index, error)]
        in_flight[run_index] = (steps, local_task)
        return []


def run_together(simulations: Sequence[Simulation], at_once: int | None = None) -> list[Result]:
    """Return the results of all runs in their order. They are the results of each run alone: to float tolerance where
    rows are vmapped, bitwise where they are computed one by one.

    Args:
        simulations: those that share model, samples and local work meet in one call of a trainer a round; they may
            differ in learning rates, strategies, availability, partitions and seeds. The others go side by side.
        at_once: see `LockstepRunner`.

    Raises:
        Exception: that of the first which failed, when all others have come to their end.
    """
    result_by_index: dict[int, Result | BaseException] = {}
    is_deterministic = any(simulation.deterministic for simulation in simulations)
    with determinism.numerical_settings(is_deterministic), suppress_vmap_warning():
        for number, outcome in LockstepRunner[Result](at_once)(
            [simulation.run_as_generator for simulation in simulations]
        ):
            result_by_index[number] = outcome
    run_errors = [outcome for _, outcome in sorted(result_by_index.items()) if isinstance(outcome, BaseException)]
    for error in sorted(run_errors, key=lambda error: isinstance(error, Exception)):  # a request to stop comes first
        raise error
    return [result for _, result in sorted(result_by_index.items()) if not isinstance(result, BaseException)]
