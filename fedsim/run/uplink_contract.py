"""The contract of user-defined stages of the uplink, attacks included, tried on synthetic rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.rewind import Rewind
from fedsim.run.contracts import (
    SHARED_OBJECT_TYPES,
    Invariance,
    changed_attribute_paths,
    check_invariances,
    contains_user_code,
    copy_for_trial,
    describe_type,
    first_differing_name,
    is_close,
    raise_violation,
    take_snapshot,
    user_code_errors,
)
from fedsim.run.setup import Setup
from fedsim.uplink import Stage, StageContext


class UplinkStageTrial:
    """A copy of a stage, for rows of up to three clients of each replicate.

    Args:
        simulation, memory: before the first round.
        number: of the stage in its chain.
    """

    def __init__(self, simulation: Setup, memory: Memory, number: int) -> None:
        self.simulation, self.stage_index = simulation, number
        self.label = f"uplink={type(simulation.uplink.stages[number]).__name__}"
        self.stage: Stage = copy_for_trial(
            simulation.uplink.stages[number], simulation.federation, simulation.data, simulation.model
        )
        self.snapshot_before = take_snapshot(self.stage)
        self.rewind = Rewind(self.stage, skipped_types=SHARED_OBJECT_TYPES)
        memories = [
            {name: value.clone() for name, value in tensors.items()} for tensors in (memory.uplink, memory.server)
        ]
        self.memory = Memory(uplink=memories[0], server=memories[1])
        self.dimension = (
            len(simulation.model.columns.shared)
            if simulation.model.columns.has_hidden_columns
            else simulation.model.dimension
        )
        self.rounds = range(min(3, max(simulation.rounds, 1)))

    def arrived_rows(self, present_clients: list[int], t: int, scales_first_replicate: bool = False) -> Tensor:
        """Return the rows that arrive from so many clients of each replicate; `scales_first_replicate`: the first
        replicate's rows are much larger."""
        federation = self.simulation.federation
        counts = np.zeros((federation.num_replicates, federation.clients))
        for r in range(federation.num_replicates):
            counts[r, : min(present_clients[min(r, 1)], federation.clients)] = 1
        cohort = federation.make_cohort(counts, np.ones_like(counts), t)
        rows = self.rows(cohort, t)
        if scales_first_replicate:
            rows = torch.where((cohort.replicate_index == 0)[:, None], 1000 * rows, rows)
        rows_before = rows.clone()
        memory = Memory(
            uplink={name: value.clone() for name, value in self.memory.uplink.items()},
            server={name: value.clone() for name, value in self.memory.server.items()},
        )
        with user_code_errors(f"{self.label}, in round {t}" if t else self.label, self.stage), torch.no_grad():
            arrived_rows = self.stage(rows, StageContext(cohort, memory, self.stage_index))
        if not torch.equal(rows, rows_before):
            raise_violation(self, f"{self.label} writes into the rows that it is given; return new ones")
        if not isinstance(arrived_rows, Tensor) or (arrived_rows.shape, arrived_rows.dtype) != (rows.shape, rows.dtype):
            raise_violation(
                self, f"{self.label} must return rows {describe_type(rows)}, and returns {describe_type(arrived_rows)}"
            )
        return arrived_rows

    def rows(self, cohort: Cohort, t: int) -> Tensor:
        """Return distinct rows [n, d]."""
        phases = (cohort.virtual_client_index * 7 + 3 * t + 1).to(self.simulation.model.dtype)
        sine_values = torch.arange(1.0, self.dimension + 1, dtype=phases.dtype, device=phases.device)
        return 0.1 * torch.sin(phases[:, None] + sine_values)


def _check_repeatability(trial: UplinkStageTrial) -> str | None:
    """Repeat the stage with other rounds in between, and without clients."""
    first_rows = [trial.arrived_rows([3, 1], t) for t in trial.rounds]
    for repetition in range(3):
        if repetition:
            trial.arrived_rows([0, 0], trial.rounds[-1])
        else:
            trial.rewind()  # the last round is then the first call, as in a resumed run
        for t in reversed(trial.rounds):
            if first_differing_name({"rows": first_rows[t]}, {"rows": trial.arrived_rows([3, 1], t)}) is not None:
                paths = changed_attribute_paths(trial.stage, trial.snapshot_before)
                hint = f"; it remembers in {paths[0]} what it met before, so return that" if paths else "; return it"
                return (
                    f"{trial.label} gives other rows when asked again for the same round{hint} from `memory` or "
                    "`initial_server_memory`, and draw by link.keys"
                )
    return None


def _check_replicate_independence(trial: UplinkStageTrial) -> str | None:
    """Check that the rows of a replicate do not depend on those of another one, or on how many those are."""
    federation = trial.simulation.federation
    if federation.num_replicates < 2 or federation.ranks.num_ranks > 1:
        return None
    base_rows = trial.arrived_rows([3, 1], 0)
    first_count, reduced_count = (min(count, federation.clients) for count in (3, 2))
    for changed_rows, start in (
        (trial.arrived_rows([3, 1], 0, scales_first_replicate=True), first_count),
        (trial.arrived_rows([2, 1], 0), reduced_count),
    ):
        if not is_close(base_rows[first_count:], changed_rows[start:]):
            return (
                f"{trial.label} mixes the clients of different seeds: a change in those of seed {federation.seeds[0]} "
                f"changes the rows of seed {federation.seeds[1]}; work row by row, or by link.cohort"
            )
    return None


INVARIANCES = (
    Invariance("a second time", _check_repeatability, raise_violation),
    Invariance("other replicates", _check_replicate_independence, raise_violation),
)


def check_uplink_stages(simulation: Setup, memory: Memory) -> None:
    """Try the user-defined stages.

    Raises:
        ConfigError: naming what one did and what it must do.
    """
    for number, stage in enumerate(simulation.uplink.stages):
        if contains_user_code(stage):
            trial = UplinkStageTrial(simulation, memory, number)
            try:
                check_invariances(INVARIANCES, trial)
            finally:
                trial.rewind()
