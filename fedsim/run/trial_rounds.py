"""Trial of a few rounds of a run with its own clients, stage by stage, before the run folder is created.

Whatever parts a user brings, four things must make no difference to what a replicate's rounds give: that the same
rounds were tried before, what the global random streams are, which other replicates there are, and with how many
threads PyTorch computes. A replica of some of the run's replicates (`Setup.copy_for_trials`) is taken through its
rounds twice, and once for each of them alone with another number of threads; the first stage that differs names the
part. Clients are trained one at a time there, so that numbers do not depend on who else is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core import streams
from fedsim.core.errors import ConfigError, DivergenceError, RunError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.numerical import is_numerical_error
from fedsim.core.rewind import Rewind
from fedsim.core.speaking import without_logging
from fedsim.run.contracts import (
    SHARED_OBJECT_TYPES,
    changed_attribute_paths,
    contains_user_code,
    fields_of_state,
    first_differing_name,
    is_close,
    take_snapshot,
)
from fedsim.run.setup import Setup
from fedsim.run.user_code import failure_text, strip_part_number
from fedsim.strategies import State
from fedsim.trainer import run_to_completion

MAX_TRIAL_SECONDS = 0.35  # number of seconds after which further rounds are skipped
MAX_TRIAL_CLIENTS = 8  # number of clients of each replicate in a round
MAX_SMALL_MODEL_PARAMETERS = 10_000  # of models that so many clients train
MAX_CLIENT_MEMORY_NUMBERS = 2e7  # of client memory
LARGE_MODEL_TRIAL_CLIENTS, NUM_TRIAL_STEPS = 2, 2  # with larger models; and local steps
TRIAL_ROUNDS = (0, 1, 2, 3, 5, 10, 100)  # and the last

GROUPS_BY_STAGE: dict[str, tuple[str, ...]] = {
    "who is available": ("availability", "delay", "clock"),
    "who computes": ("strategy", "clock", "work"),
    "what clients start from": ("strategy", "capacity"),
    "what clients send": ("local", "shift", "contamination", "partition", "delay", "clock", "work"),
    "what the server receives": ("uplink", "attack"),
    "the server's next state": ("strategy",),
}

NamedValues = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class RoundStageOutput:
    """The output of one stage of a round.

    Attributes:
        round: t.
        name: of the stage.
        values: of each replicate, name → tensor.
    """

    round: int
    name: str
    values: list[NamedValues]


class TrialReplica:
    """Rounds of a replica of a run.

    Args:
        run: whose parts are tried.
        replicates: of the run, that the replica has.
    """

    def __init__(self, run: Setup, replicates: Sequence[int]) -> None:
        self.replica = run.copy_for_trials(replicates, NUM_TRIAL_STEPS)
        self.max_clients = (
            MAX_TRIAL_CLIENTS if run.model.dimension <= MAX_SMALL_MODEL_PARAMETERS else LARGE_MODEL_TRIAL_CLIENTS
        )
        self.is_limited = False
        self._stage = "who is available"  # that is at work
        self.components = self.replica.components_by_group
        self.stages: list[RoundStageOutput] = []

    def run_rounds(self, rounds: Sequence[int], end_time: float) -> list[RoundStageOutput]:
        """Run rounds from the initial model on; rounds that would begin after `end_time` on the clock are left out.

        Raises:
            ConfigError: a part raised an error.
        """
        run, self.stages = self.replica, []
        with self._rename_errors("before round 0"):
            models = run.model.columns.select_shared(run.model.initial(run.federation.seeds))
            state = run.strategy.initial(models, run.federation)
            memory = run.initial_memory(state)
            run.round_clock.start_round(None, memory)
        for position, t in enumerate(rounds):
            if position and time.process_time() > end_time:
                break
            with self._rename_errors(f"in round {t}"), torch.no_grad():
                state = self._round(state, memory, t)
            if not torch.isfinite(state.model).all():
                break
        return self.stages

    def _round(self, state: State, memory: Memory, t: int) -> State:
        simulation, self._stage = self.replica, "who is available"
        active = self._reduced_cohort(
            simulation.delayed_updates.idle_clients(simulation.availability.sample(t), memory)
        )
        self._record_stage_output(t, "who is available", active, {}, {})
        self._stage = "who computes"
        cohort = simulation.round_clock(simulation.strategy.cohort(state, active), t)
        seconds = {"virtual seconds": torch.tensor(simulation.round_clock.seconds)}
        self._record_stage_output(t, "who computes", cohort, _as_named_values(cohort.host_index.steps), seconds)
        self._stage = "what clients start from"
        start = simulation.submodels(simulation.strategy.start(state, cohort), cohort, t)
        start_rows = start if isinstance(start, dict) else {"params": start}
        self._record_stage_output(t, "what clients start from", cohort, start_rows, {})
        self._stage, model = "what clients send", state.model.clone()
        report = run_to_completion(
            simulation.delayed_updates.generate_round_tasks(start, cohort, t, state.model, memory)
        )
        if not torch.equal(model.nan_to_num(), state.model.nan_to_num()):
            raise ConfigError(f"{self.label('what clients send')} writes into the server's model that it is given")
        rows = {f"end {name}": value for name, value in report.carry.items()} | {"loss": report.loss}
        rows |= {"rates": report.lr_sum, "samples": torch.as_tensor(report.samples)} | _as_named_values(
            report.rounds_late
        )
        rows |= {} if report.gradient_weight is None else {"gradient weight": report.gradient_weight}
        lasting_values = memory.clients | memory.server | {"rate": report.lr}
        lasting_values |= {} if report.deployed is None else {"deployed": report.deployed}
        self._record_stage_output(t, "what clients send", report.cohort, rows, lasting_values)
        self._stage = "what the server receives"
        report = simulation.uplink(report, memory)
        self._record_stage_output(
            t, "what the server receives", report.cohort, {"rows": report.innovation}, memory.uplink
        )
        self._stage = "the server's next state"
        state = simulation.strategy.aggregate(state, report, t)
        self._record_stage_output(t, "the server's next state", report.cohort, {}, fields_of_state(state))
        return state

    def _reduced_cohort(self, active: Cohort) -> Cohort:
        positions = [range(a, min(b, a + self.max_clients)) for a, b in itertools.pairwise(active.replicate_bounds)]
        count = sum(map(len, positions))
        self.is_limited = self.is_limited or count < len(active)
        return active if count == len(active) else active.subset(np.concatenate([np.array(p, int) for p in positions]))

    def _record_stage_output(
        self, t: int, name: str, cohort: Cohort, rows: Mapping[str, Tensor], lasting_values: Mapping[str, Tensor]
    ) -> None:
        """Record, of each replicate, its rows of the cohort, [n, …] of all, and its entries of `lasting_values`, [R, …]
        or [R·m, …]."""
        replicates, clients = cohort.shape
        by_replicate: list[NamedValues] = []
        numbers = (
            cohort.host_index.virtual_clients % clients,
            cohort.host_index.multiplicity,
            cohort.host_index.probability,
        )
        host = dict(zip(("clients", "counts", "chances"), map(torch.as_tensor, numbers), strict=True))
        for r, (a, b) in enumerate(itertools.pairwise(cohort.replicate_bounds)):
            values = {key: value[a:b].clone() for key, value in (host | dict(rows)).items()}
            for key, value in lasting_values.items():
                if value.dim() and len(value) % replicates == 0:
                    values[f"{key} of the replicate"] = value.unflatten(0, (replicates, -1))[r].clone()
            by_replicate.append(values)
        self.stages.append(RoundStageOutput(t, name, by_replicate))

    @contextlib.contextmanager
    def _rename_errors(self, moment: str) -> Iterator[None]:
        rng_state_before = streams.global_rng_state()
        try:
            yield
        except (ConfigError, DivergenceError):
            raise
        except RunError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            if is_numerical_error(error):
                raise
            message = failure_text(error, self.components, self.label(self._stage))
            raise ConfigError(f"{message}, {moment}") from error
        if not streams.rng_states_equal(rng_state_before, streams.global_rng_state()):
            raise ConfigError(
                f"{' or '.join(_user_part_labels(self.components))} draws from a global random stream {moment}, which "
                "depends on all that was drawn before; use fedsim.core.rng, whose numbers are functions of seed, round "
                "and client"
            )

    def label(self, stage: str) -> str:
        """The user-defined parts that a stage uses; all user-defined parts if it uses none."""
        return " or ".join(
            _user_part_labels(
                {g: p for g, p in self.components.items() if strip_part_number(g) in GROUPS_BY_STAGE[stage]}
            )
            or _user_part_labels(self.components)
        )

    def changed_part_text(self, stage: str, snapshots_before: Mapping[str, Any]) -> str:
        """Return where a part of the stage has changed, in parentheses."""
        for group, component in self.components.items():
            if strip_part_number(group) in GROUPS_BY_STAGE[stage] and (
                paths := changed_attribute_paths(component, snapshots_before[group])
            ):
                return f" ({paths[0]} has changed)"
        return ""


def _user_part_labels(components: Mapping[str, Any]) -> list[str]:
    return [
        f"{strip_part_number(group)}={type(component).__name__}"
        for group, component in components.items()
        if contains_user_code(component)
    ]


def _as_named_values(values: np.ndarray | None) -> NamedValues:
    return {} if values is None else {"numbers": torch.as_tensor(values)}


def rehearse_rounds(simulation: Setup) -> None:
    """Try a few rounds of a run with user-defined parts.

    Raises:
        ConfigError: what a part gave depends on what must make no difference.
    """
    federation = simulation.federation
    if (
        not _user_part_labels(simulation.components_by_group)
        or federation.ranks.num_ranks > 1
        or simulation.trainer.local_rule.pooled
    ):
        return
    if 2 * federation.clients * simulation.model.dimension > MAX_CLIENT_MEMORY_NUMBERS:
        return
    replicates = trial_replicates(federation.seeds)
    rewind = Rewind(*simulation.components_by_group.values(), skipped_types=SHARED_OBJECT_TYPES)
    try:
        with without_logging(), streams.suppress_trial_effects(), streams.preserve_rng_states():
            _check_trial_rounds(simulation, replicates)
    finally:
        rewind()


def trial_replicates(seeds: Sequence[int]) -> list[int]:
    """Return the first replicate, the first of another seed, and the first later one of the same seed, which differs
    only in settings that are given per seed: a part must not confuse them."""
    same_seed = [r for r, seed in enumerate(seeds) if r and seed == seeds[0]]
    another_seed = [r for r, seed in enumerate(seeds) if seed != seeds[0]]
    return sorted([0, *same_seed[:1], *another_seed[:1]])


def _check_trial_rounds(simulation: Setup, replicates: Sequence[int]) -> None:
    trial_round_numbers = [t for t in sorted({*TRIAL_ROUNDS, simulation.rounds - 1}) if 0 <= t < simulation.rounds]
    trial = _replica_without_global_draws(simulation, replicates)
    if trial is None:
        return
    snapshots_before = {group: take_snapshot(component) for group, component in trial.components.items()}
    start = time.process_time()
    try:
        stages = trial.run_rounds(trial_round_numbers, start + MAX_TRIAL_SECONDS)
        streams.reseed_global_generators(1)
        _run_rounds_between(trial, trial_round_numbers, len(stages) // len(GROUPS_BY_STAGE))
        repeated_stages = trial.run_rounds(trial_round_numbers, time.process_time() + MAX_TRIAL_SECONDS)
    except ConfigError:
        if trial.is_limited or not _fails_with_all_seeds(simulation, replicates):
            return
        raise
    except Exception:  # the cause is not the user's code, so the run itself reports it
        return
    for stage, repeated_stage in zip(stages, repeated_stages, strict=False):
        pairs = zip(stage.values, repeated_stage.values, strict=True)
        if any(first_differing_name(values, repeated_values) is not None for values, repeated_values in pairs):
            raise ConfigError(
                f"{trial.label(stage.name)}: {stage.name} in round {stage.round} differs when the same rounds are "
                f"simulated a second time{trial.changed_part_text(stage.name, snapshots_before)}; what "
                "is kept outside of a State or "
                "`memory` is in no checkpoint, so make it a function of seed, client and round (fedsim.core.rng)"
            )
    for position, replicate in reversed(list(enumerate(replicates))):
        _check_replicate_alone(simulation, trial, stages, position, replicate, trial_round_numbers)


def _run_rounds_between(trial: TrialReplica, trial_round_numbers: Sequence[int], num_rounds: int) -> None:
    """Run rounds between two trials of so many rounds each, so that what a part keeps is not by chance what it was at
    the beginning.

    The number of rounds from one beginning to the next is no multiple of 2 or 3, after which a part that takes turns
    would be where it was; and the last one is not round 0, after which the last model would be the initial one.
    """
    num_between = next(count for count in itertools.count(2) if math.gcd(num_rounds + count, 6) == 1)
    for numbers in [trial_round_numbers[:1]] * (num_between - 2) + [trial_round_numbers[:2]]:
        trial.run_rounds(numbers, time.process_time() + MAX_TRIAL_SECONDS)


def _fails_with_all_seeds(simulation: Setup, replicates: Sequence[int]) -> bool:
    """Return whether a part also fails in the first rounds with all of the run's seeds. If not, it was made for this
    number of seeds."""
    count = simulation.federation.num_replicates
    if count == len(replicates):
        return True
    try:
        TrialReplica(simulation, range(count)).run_rounds(
            [t for t in TRIAL_ROUNDS[:3] if t < simulation.rounds], time.process_time() + MAX_TRIAL_SECONDS
        )
    except ConfigError:
        return True
    return False


def _replica_without_global_draws(simulation: Setup, replicates: Sequence[int]) -> TrialReplica | None:
    """Return a replica that was set up without a draw from a global stream; None if the parts were made for the run's
    own seeds."""
    streams_before = streams.global_rng_state()
    try:
        trial = TrialReplica(simulation, replicates)
    except ConfigError:
        if len(replicates) == simulation.federation.num_replicates:
            raise
        return None
    if not streams.rng_states_equal(streams_before, streams.global_rng_state()):
        raise ConfigError(
            f"{' or '.join(_user_part_labels(trial.components))} draws from a global random stream while it is set "
            "up; use fedsim.core.rng, whose numbers are functions of seed, round and client"
        )
    return trial


def _check_replicate_alone(
    simulation: Setup,
    trial: TrialReplica,
    stages: list[RoundStageOutput],
    position: int,
    replicate: int,
    rounds: Sequence[int],
) -> None:
    threads = 2 if torch.get_num_threads() == 1 else 1
    try:
        with _patched_thread_count(threads):
            single_stages = TrialReplica(simulation, (replicate,)).run_rounds(
                rounds, time.process_time() + MAX_TRIAL_SECONDS / 2
            )
    except Exception:  # made for all of the run's seeds
        return
    for stage, single_stage in zip(stages, single_stages, strict=False):
        if not (_are_finite(stage.values[position]) and _are_finite(single_stage.values[0])):
            return  # rows that diverge are handled together
        if _are_close(stage.values[position], single_stage.values[0]):
            continue
        finding = f"{trial.label(stage.name)}: {stage.name} in round {stage.round} differs"
        if _depends_on_threads(simulation, replicate, rounds, single_stage):
            raise ConfigError(
                f"{finding} when PyTorch has {threads} thread{'s' * (threads > 1)}; a result must not depend "
                "on torch.get_num_threads()"
            )
        if len(stages[0].values) == 1:
            raise ConfigError(
                f"{finding} in a second simulation of the same parts; what they keep in classes and globals is shared "
                "by all simulations, so keep it in attributes that `setup` or `initial` sets"
            )
        raise ConfigError(
            f"{finding} for seed {simulation.federation.seeds[replicate]} when no other seed is simulated with it; use "
            "numbers of clients and seeds in place of rows and positions, and the cohort's sums and means, which work "
            "seed by seed"
        )


def _depends_on_threads(run: Setup, replicate: int, rounds: Sequence[int], tried_stage: RoundStageOutput) -> bool:
    """Return whether the output of this stage, for the replicate alone, depends on the number of threads."""
    stages = TrialReplica(run, (replicate,)).run_rounds(rounds, time.process_time() + MAX_TRIAL_SECONDS)
    key = tried_stage.round, tried_stage.name
    same_stage = next((stage for stage in stages if (stage.round, stage.name) == key), tried_stage)
    return not _are_close(same_stage.values[0], tried_stage.values[0])


@contextlib.contextmanager
def _patched_thread_count(count: int) -> Iterator[None]:
    """Within the block `torch.get_num_threads` returns this number.

    The threads themselves stay as they are: a process that has once used more than one thread for an operator can hang
    in processes that are forked from it.
    """
    get_num_threads = torch.get_num_threads
    torch.get_num_threads = lambda: count
    try:
        yield
    finally:
        torch.get_num_threads = get_num_threads


def _are_finite(values: NamedValues) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values.values())


def _are_close(values: NamedValues, single_values: NamedValues) -> bool:
    return all(is_close(value, single_values[name]) for name, value in values.items() if name in single_values)
