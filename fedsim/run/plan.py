"""What a run will cost: its first rounds are run in a temporary folder and extrapolated.

A model of costs from micro-benchmarks would have to know each strategy, rule and shift; the first rounds know them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fedsim.run.simulation import Simulation
from fedsim.run.tracking import EvaluationEvent, Observer, Tracking
from fedsim.run.tracking.result import MetricsRow

MIN_ROUNDS = 2  # rounds that are measured in any case: the first one includes one-time work
BYTE_COLUMNS = ("total_bytes_up", "total_bytes_down")


@dataclass(frozen=True)
class RunCostEstimate:
    """What a run is expected to cost on this machine.

    Attributes:
        rounds, evaluations: of the whole run, without the evaluation of the initial model.
        measured_rounds: rounds that were run in order to estimate the others.
        may_end_earlier: whether a stopping criterion is set.
        seconds: expected, from the start of the command to its end.
        seconds_before: before the first round, and by how much the first rounds take longer than later ones.
        seconds_per_round, seconds_per_evaluation: medians.
        seconds_after: after the last round, for the summary and pictures.
        memory_gib: most memory that the process held; None where the system does not say.
        device_memory_gib: most memory that tensors held on the GPU; None without one.
        total_bytes_up, total_bytes_down: expected, from clients to the server and back; means over the seeds.
    """

    rounds: int
    evaluations: int
    measured_rounds: int
    may_end_earlier: bool
    seconds: float
    seconds_before: float
    seconds_per_round: float
    seconds_per_evaluation: float
    seconds_after: float
    memory_gib: float | None
    device_memory_gib: float | None
    total_bytes_up: float
    total_bytes_down: float


class TimingObserver(Observer):
    """Notes how long rounds and evaluations take, and ends the run after so many seconds of them.

    Attributes:
        round_seconds, evaluation_seconds: in their order; the evaluation of the initial model is left out.
        first_evaluation_end, last_event_time: by `time.perf_counter`.
        rows: of the last evaluation.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.round_seconds: list[float] = []
        self.evaluation_seconds: list[float] = []
        self.first_evaluation_end = self.last_event_time = 0.0
        self.rows: list[MetricsRow] = []

    def round_completed(self, completed_rounds: int) -> None:
        self.round_seconds.append(self._lap_seconds())

    def evaluated(self, event: EvaluationEvent) -> str | None:
        duration = self._lap_seconds()
        if event.round:
            self.evaluation_seconds.append(duration)
        else:
            self.first_evaluation_end = self.last_event_time
        self.rows = event.rows
        is_over = self.last_event_time - self.first_evaluation_end >= self.seconds
        return "enough was measured" if is_over and len(self.round_seconds) >= MIN_ROUNDS else None

    def _lap_seconds(self) -> float:
        previous, self.last_event_time = self.last_event_time, time.perf_counter()
        return self.last_event_time - previous


def estimate_run_cost(
    simulation: Simulation, tracking: Tracking, eval_every: int, seconds: float, start: float
) -> RunCostEstimate:
    """Run the first rounds and extrapolate.

    Args:
        simulation: what is planned; it may evaluate more often than the run will.
        tracking: of the run; observers of the user's are left out, since they would report a run that is none.
        eval_every: rounds between evaluations of the run.
        seconds: how many of rounds and evaluations to measure.
        start: when the command was called, by `time.perf_counter`.
    """
    stopwatch = TimingObserver(seconds)
    measured_tracking = dataclasses.replace(tracking, progress="none", observers=[stopwatch])
    with tempfile.TemporaryDirectory() as folder:
        simulation.run(folder, False, measured_tracking)
        end = time.perf_counter()
    return extrapolate_plan(simulation, stopwatch, eval_every, start, end)


def extrapolate_plan(
    simulation: Simulation, stopwatch: TimingObserver, eval_every: int, start: float, end: float
) -> RunCostEstimate:
    """The plan that follows from the measured rounds; `start` and `end` are those of the measurement."""
    rounds, measured_rounds = simulation.rounds, len(stopwatch.round_seconds)
    early, late = stopwatch.round_seconds[: measured_rounds // 2], stopwatch.round_seconds[measured_rounds // 2 :]
    round_median = statistics.median(late or [0.0])
    evaluation_median = statistics.median(stopwatch.evaluation_seconds or [0.0])
    evaluations = math.ceil(rounds / eval_every)
    # one-time work, such as trying executors: excess of the first half over the median of the second half
    one_time_work = max(sum(early) - len(early) * round_median, 0.0)
    before, after = stopwatch.first_evaluation_end - start + one_time_work, end - stopwatch.last_event_time
    device_memory_gib = None
    if simulation.device.type == "cuda":
        device_memory_gib = torch.cuda.max_memory_allocated(simulation.device) / 2**30
    bytes_per_round = [
        statistics.mean(float(row[name]) for row in stopwatch.rows) / max(measured_rounds, 1) for name in BYTE_COLUMNS
    ]
    return RunCostEstimate(
        rounds,
        evaluations,
        measured_rounds,
        may_end_earlier=simulation.stop.active,
        seconds=before + rounds * round_median + evaluations * evaluation_median + after,
        seconds_before=before,
        seconds_per_round=round_median,
        seconds_per_evaluation=evaluation_median,
        seconds_after=after,
        memory_gib=peak_memory_gib(),
        device_memory_gib=device_memory_gib,
        total_bytes_up=rounds * bytes_per_round[0],
        total_bytes_down=rounds * bytes_per_round[1],
    )


def peak_memory_gib() -> float | None:
    """The most memory that this process has held; None where the system does not say (Windows)."""
    try:  # `ru_maxrss` would count what the parent held when this process began
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    except FileNotFoundError:  # not Linux
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
