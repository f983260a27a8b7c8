"""Costs of an algorithm: processor time of a round, alone and on one thread, and bytes stored per client."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from torch import Tensor

from fedsim.app.build import build
from fedsim.run.simulation import Simulation
from fedsim.studies.board.track_settings import TunedTrackRecords
from fedsim.studies.reproduce.runner import RecipeJob

TIMED_ROUNDS = 100  # rounds that are run; only the second half is timed, after one-time work has been done


class AlgorithmRoundTimes(TunedTrackRecords):
    """The processor time per round of each algorithm in a track.

    A record is {'ms': median processor time of a round of all seeds, 'made': command, commit, versions}; 'ms' is None
    where the algorithm cannot run.
    """

    file_name = "times.json"

    def milliseconds_per_round(self, track: str, entry: str) -> float | None:
        """Return the milliseconds per round; None where the entry has not been timed or cannot run."""
        timing = self.record_of(track, entry)
        return None if timing is None or timing["ms"] is None else float(timing["ms"])


def milliseconds_per_round(job: RecipeJob, shared_objects: dict[str, Any]) -> float:
    """Return the median processor time of a round in milliseconds, without evaluations; nothing is written.

    Args:
        job: the run to time; its configuration has at least two rounds.
        shared_objects: data sets, in the form that `fedsim.app.build.build` takes.

    Raises:
        ConfigError: the configuration cannot run.
    """
    steps = build(job.config, shared=shared_objects)[0].run_as_generator()
    round_seconds = []
    try:
        work = next(steps)
        while True:
            start = time.process_time()
            work = steps.send(work.trainer.run_local_steps(work))
            round_seconds.append(time.process_time() - start)
    except StopIteration:
        return 1000 * statistics.median(round_seconds[len(round_seconds) // 2 :])


def client_memory_bytes(simulation: Simulation) -> float:
    """Return the bytes per client in the strategy's state and the local rule's memory, before the first round."""
    clients = simulation.federation.num_replicates * simulation.federation.clients
    state = simulation.initial_state()
    tensors: list[Tensor] = [getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "model"]
    tensors += simulation.trainer.initial_memory(state.model).clients.values()
    of_each = [tensor for tensor in tensors if len(tensor.shape) and tensor.shape[0] == clients]
    return sum(tensor.numel() * tensor.element_size() for tensor in of_each) / clients
