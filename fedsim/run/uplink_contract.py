"""What a user's stage of the uplink must be like, an attack included, tried on made-up rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.rewind import Rewind
from fedsim.run.contracts import (
    RUN_OBJECT_TYPES,
    Invariance,
    changed_paths,
    check_invariances,
    close_to,
    contains_user_code,
    describe_type,
    first_difference,
    refuse_part,
    snapshot_of,
    trial_copy,
    user_code_errors,
)
from fedsim.run.setup import Setup
from fedsim.uplink import Stage, StageContext


class StageTrial:
    """A copy of a stage, on rows of up to three clients of every replicate.

    Args:
        run, memory: before the first round.
        number: of the stage in its chain.
    """

    def __init__(self, run: Setup, memory: Memory, number: int) -> None:
        self.run, self.number = run, number
        self.label = f"uplink={type(run.uplink.stages[number]).__name__}"
        self.stage: Stage = trial_copy(run.uplink.stages[number], run.federation, run.data, run.model)
        self.snapshot_before = snapshot_of(self.stage)
        self.rewind = Rewind(self.stage, skip=RUN_OBJECT_TYPES)
        memories = [
            {name: value.clone() for name, value in tensors.items()} for tensors in (memory.uplink, memory.server)
        ]
        self.memory = Memory(uplink=memories[0], server=memories[1])
        self.dimension = len(run.model.columns.shared) if run.model.columns.is_divided else run.model.dimension
        self.rounds = range(min(3, max(run.rounds, 1)))

    def arrived_rows(self, present: list[int], t: int, loud: bool = False) -> Tensor:
        """What arrives of so many clients of every replicate; `loud`: the first replicate's rows are far larger."""
        federation = self.run.federation
        counts = np.zeros((federation.replicates, federation.clients))
        for r in range(federation.replicates):
            counts[r, : min(present[min(r, 1)], federation.clients)] = 1
        cohort = federation.cohort(counts, np.ones_like(counts), t)
        rows = self.rows(cohort, t)
        if loud:
            rows = torch.where((cohort.replicate == 0)[:, None], 1000 * rows, rows)
        rows_before = rows.clone()
        memory = Memory(
            uplink={name: value.clone() for name, value in self.memory.uplink.items()},
            server={name: value.clone() for name, value in self.memory.server.items()},
        )
        with user_code_errors(f"{self.label}, in round {t}" if t else self.label, self.stage), torch.no_grad():
            arrived_rows = self.stage(rows, StageContext(cohort, memory, self.number))
        if not torch.equal(rows, rows_before):
            refuse_part(self, f"{self.label} writes into the rows that it is given; return new ones")
        if not isinstance(arrived_rows, Tensor) or (arrived_rows.shape, arrived_rows.dtype) != (rows.shape, rows.dtype):
            refuse_part(
                self, f"{self.label} must return rows {describe_type(rows)}, and returns {describe_type(arrived_rows)}"
            )
        return arrived_rows

    def rows(self, cohort: Cohort, t: int) -> Tensor:
        """[n, d], each in its own way."""
        phases = (cohort.virtual * 7 + 3 * t + 1).to(self.run.model.dtype)
        wave = torch.arange(1.0, self.dimension + 1, dtype=phases.dtype, device=phases.device)
        return 0.1 * torch.sin(phases[:, None] + wave)


def _check_repetition(trial: StageTrial) -> str | None:
    """A second time, other rounds in between; nobody at all."""
    first = [trial.arrived_rows([3, 1], t) for t in trial.rounds]
    for repetition in range(3):
        if repetition:
            trial.arrived_rows([0, 0], trial.rounds[-1])
        else:
            trial.rewind()  # the last round is then the first that is met, as when a run is resumed
        for t in reversed(trial.rounds):
            if first_difference({"rows": first[t]}, {"rows": trial.arrived_rows([3, 1], t)}) is not None:
                paths = changed_paths(trial.stage, trial.snapshot_before)
                hint = f"; it remembers in {paths[0]} what it met before, so return that" if paths else "; return it"
                return (
                    f"{trial.label} gives other rows when asked again for the same round{hint} from `memory` or "
                    "`initial_server_memory`, and draw by link.keys"
                )
    return None


def _check_replicates(trial: StageTrial) -> str | None:
    """Other rows of another replicate, and more of them."""
    federation = trial.run.federation
    if federation.replicates < 2 or federation.ranks.count > 1:
        return None
    base_rows = trial.arrived_rows([3, 1], 0)
    first, reduced_count = (min(count, federation.clients) for count in (3, 2))
    for changed_rows, start in (
        (trial.arrived_rows([3, 1], 0, loud=True), first),
        (trial.arrived_rows([2, 1], 0), reduced_count),
    ):
        if not close_to(base_rows[first:], changed_rows[start:]):
            return (
                f"{trial.label} mixes the clients of different seeds: a change in those of seed {federation.seeds[0]} "
                f"changes the rows of seed {federation.seeds[1]}; work row by row, or by link.cohort"
            )
    return None


INVARIANCES = (
    Invariance("a second time", _check_repetition, refuse_part),
    Invariance("other replicates", _check_replicates, refuse_part),
)


def check_stages(run: Setup, memory: Memory) -> None:
    """Try the stages that are somebody's own.

    Raises:
        ConfigError: naming what one did and what it must do.
    """
    for number, stage in enumerate(run.uplink.stages):
        if contains_user_code(stage):
            trial = StageTrial(run, memory, number)
            try:
                check_invariances(INVARIANCES, trial)
            finally:
                trial.rewind()
