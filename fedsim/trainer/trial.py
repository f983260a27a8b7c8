"""Times several executors on rows of the run itself in its first round, and chooses the fastest.

All executors give the same numbers to rounding; a trial only looks at the clock. What it found is remembered in the
process, and kept in checkpoints, so that a resumed run goes on as it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.numerical import is_numerical_error
from fedsim.data.samples import RoundPlan
from fedsim.local.rule import Carry
from fedsim.trainer.choose import ExecutorChoice
from fedsim.trainer.device_memory import is_out_of_memory
from fedsim.trainer.executors import Executor

MIN_STEP_SECONDS = 0.01  # seconds of a step below which no alternative is tried
TARGET_STEP_SECONDS = 0.05  # of a step above which no more rows are taken: several share what a step costs beside them
MAX_TIMED_ROWS = 64  # at most
TIMING_REPEATS = 4  # number of measurements, of which the fastest counts: other load on the machine only adds time
MAX_TIME_RATIO = 0.95  # an alternative replaces the rule's choice only if it takes less than this share of its time
HOPELESS_RATIO = 3.0  # an executor this many times slower than another is not measured again

FASTEST_EXECUTOR_NAMES: dict[Hashable, str] = {}

TimedStep = Callable[[int], None]


def fastest_contender(
    contenders: Mapping[str, TimedStep], rows: int, device: torch.device, min_count: int = 1, per_thread: bool = False
) -> str:
    """Return the name of the fastest; the first one if it takes next to no time, or if no other is faster by
    `MAX_TIME_RATIO`.

    Args:
        contenders: name → what takes so many rows through a local step; the one of the stated rule first.
        rows: there are.
        device: on which they work.
        min_count: rows to begin with.
        per_thread: they work in this thread only, so that its own processor time tells, whoever else uses the machine.
    """
    clock = time.thread_time if per_thread else time.perf_counter

    def step_seconds(name: str, count: int) -> float:
        return _time_contender(contenders[name], count, device, clock)

    rule_choice, start_count = next(iter(contenders)), min(rows, min_count)
    row_count, elapsed_seconds = _measurable_row_count(
        lambda count: step_seconds(rule_choice, count), start_count, min(rows, MAX_TIMED_ROWS)
    )
    if elapsed_seconds < MIN_STEP_SECONDS:
        return rule_choice
    best_seconds = {rule_choice: math.inf}
    for contender_name in contenders:
        if contender_name != rule_choice:
            step_seconds(contender_name, start_count)  # warms up
            if (
                step_seconds(contender_name, start_count) > HOPELESS_RATIO * elapsed_seconds
            ):  # a few rows take longer than all of them do there
                continue
        best_seconds[contender_name] = math.inf
        step_seconds(contender_name, row_count)  # warm-up, with memory for this many rows
    _time_repeatedly(best_seconds, lambda name: step_seconds(name, row_count))
    winner = min(best_seconds, key=lambda name: best_seconds[name])
    if best_seconds[winner] < MAX_TIME_RATIO * best_seconds[rule_choice]:
        return winner
    return rule_choice  # within measurement noise the rule decides, which makes a run easier to repeat


def _time_contender(contender: TimedStep, count: int, device: torch.device, clock: Callable[[], float]) -> float:
    """Return the time of a contender for so many rows; infinite if its numbers or its memory do not allow it, since
    another one may still work."""
    start_time = clock()
    try:
        contender(count)
    except Exception as error:
        if not (is_numerical_error(error) or (isinstance(error, RuntimeError) and is_out_of_memory(error))):
            raise
        return math.inf
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a GPU continues after the call has returned
    return clock() - start_time


def _measurable_row_count(seconds: Callable[[int], float], start_count: int, max_rows: int) -> tuple[int, float]:
    """Return the number of rows to time, and the time of the first contender for them; more rows are taken until
    the time is long enough to measure."""
    row_count = start_count
    seconds(row_count)  # warms up
    elapsed = seconds(row_count)
    while elapsed < TARGET_STEP_SECONDS and row_count < max_rows:
        row_count = min(max_rows, 4 * row_count)
        elapsed = seconds(row_count)
    return row_count, elapsed


def _time_repeatedly(best_seconds: dict[str, float], seconds: Callable[[str], float]) -> None:
    """Lower the best times by `TIMING_REPEATS` rounds of measurements in turn, so that a slow moment of the machine
    affects all contenders."""
    for repetition in range(TIMING_REPEATS):
        limit = HOPELESS_RATIO * min(best_seconds.values())
        for name in best_seconds:
            if repetition == 0 or best_seconds[name] <= limit:
                best_seconds[name] = min(best_seconds[name], seconds(name))


@dataclass
class TimingRows:
    """All rows of a round: carry [n, …], rates [S, n], the parameters [n, d] that the data react to, or None."""

    carry: Carry
    learning_rates: Tensor
    deployed_models: Tensor | None


def make_timed_step(executor: Executor, plan: RoundPlan, all_rows: TimingRows) -> TimedStep:
    """Take one step of the first rows of a round, without keeping results."""
    order, rates, deployed = plan.load.order, all_rows.learning_rates, all_rows.deployed_models
    positions = np.arange(len(plan.load.steps)) if order is None else order

    def run_steps(count: int) -> None:
        chunk, row_selection = plan.chunk(positions[:count]), torch.as_tensor(positions[:count], device=rates.device)
        chunk.steps = np.minimum(chunk.steps, 1)
        carry = {name: value[row_selection] for name, value in all_rows.carry.items()}
        executor.run(chunk, carry, rates[:, row_selection], None if deployed is None else deployed[row_selection])

    return run_steps


def fastest_executor(
    executor_candidates: Sequence[ExecutorChoice],
    make_executor: Callable[[ExecutorChoice], Executor],
    batch_plan: RoundPlan,
    rows: TimingRows,
    timing_key: Hashable,
) -> str:
    """Return the executor that takes the round's rows through a step in the least time.

    Args:
        executor_candidates: the stated rule's choice first.
        make_executor: makes a candidate's executor.
        batch_plan, rows: the round.
        timing_key: what else the time depends on; what has been found in this process is not timed again.
    """
    if len(executor_candidates) == 1:
        return executor_candidates[0].executor
    count = min(len(batch_plan.load.steps), *(choice.chunk for choice in executor_candidates))
    key = (timing_key, tuple(executor_candidates), int(batch_plan.load.size.max()), count, tuple(sorted(rows.carry)))
    if key not in FASTEST_EXECUTOR_NAMES:
        contenders = {
            choice.executor: make_timed_step(make_executor(choice), batch_plan, rows) for choice in executor_candidates
        }
        FASTEST_EXECUTOR_NAMES[key] = fastest_of_contenders(
            contenders, rows, count, max(choice.workers for choice in executor_candidates)
        )
    return FASTEST_EXECUTOR_NAMES[key]


def fastest_of_contenders(contenders: Mapping[str, TimedStep], rows: TimingRows, count: int, workers: int) -> str:
    """Return the fastest of those that use so many threads on so many rows."""
    device = rows.learning_rates.device
    single_thread = device.type == "cpu" and workers == torch.get_num_threads() == 1
    return fastest_contender(contenders, count, device, workers, single_thread)
