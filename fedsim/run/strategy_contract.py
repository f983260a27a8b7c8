"""The contract of user-defined strategies, tried on synthetic rows before the run folder is created.

Its state must be tensors of the right shapes; the same state and report must give the same next state, since what it
keeps elsewhere is in no checkpoint; and what one replicate's clients bring must not reach another's model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core import streams
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, FullDataGradients
from fedsim.core.memory import Memory
from fedsim.core.per_seed import PerSeed
from fedsim.core.report import Report
from fedsim.core.rewind import Rewind
from fedsim.core.snapshot import enlarged_counter
from fedsim.run.contracts import (
    SHARED_OBJECT_TYPES,
    Invariance,
    NamedTensors,
    changed_attribute_paths,
    check_invariances,
    copy_for_trial,
    copy_tensors,
    describe_type,
    fields_of_state,
    first_differing_name,
    increased_attribute_names,
    is_close,
    is_user_defined,
    raise_violation,
    take_snapshot,
    undeclared_attributes,
    user_code_errors,
)
from fedsim.run.setup import Setup
from fedsim.strategies import State

MAX_OPTIONAL_CHECK_SECONDS = 0.7  # number of seconds after which repeated checks are skipped
LATE_TRIAL_ROUNDS = (3, 10, 100)  # and the last
MAX_PRESENT_CLIENTS = 8  # clients of a replicate; a small federation takes part as a whole
MAX_REPETITION_SECONDS = 0.2  # in which rounds are repeated where attributes change
MAX_STALENESS = 3  # number of rounds by which rows of an event-driven run are delayed
MEASURED_REPORT_FIELDS = ("loss", "lr", "lr_sum", "samples", "deployed")  # of which the run measures its columns
MAX_TRIAL_MEMORY_NUMBERS = 2e7  # size of client memory above which fewer clients are simulated


def check_initial_state(simulation: Setup, state: Any) -> None:
    """Check the initial state of a user-defined strategy: its tensors share no memory, and its models are [R, d]."""
    if not is_user_defined(simulation.strategy):
        return
    component_label = f"strategy={type(simulation.strategy).__name__}"
    if not isinstance(state, State):
        raise ConfigError(f"{component_label}: initial must return a State, and returns {describe_type(state)}")
    if undeclared_names := undeclared_attributes(state):
        raise ConfigError(
            f"{component_label}: {undeclared_names[0]!r} is an attribute of {type(state).__name__} and none of "
            "its fields, so no checkpoint "
            "holds it; decorate the class with @dataclass, and declare it there"
        )
    rows = simulation.federation.num_replicates
    expected_shape = [
        rows,
        len(simulation.model.columns.select_shared(simulation.model.initial(simulation.federation.seeds[:1]))[0]),
    ]
    names_by_address: dict[int, str] = {}
    for field_name, field_value in fields_of_state(state).items():
        if not isinstance(field_value, Tensor):
            raise ConfigError(
                f"{component_label}: {field_name} of the state must be a tensor, which a checkpoint can hold, and is "
                f"{describe_type(field_value)}"
            )
        memory_address = field_value.untyped_storage().data_ptr()
        if field_value.numel() and field_name != "model" and memory_address in names_by_address:
            raise ConfigError(
                f"{component_label}: {field_name} and {names_by_address[memory_address]} of the state share "
                f"memory, so that writing to one writes to both; make it {field_name}.clone()"
            )
        names_by_address[memory_address] = field_name
    if list(state.model.shape) != expected_shape:
        raise ConfigError(
            f"{component_label}: the state's model must be {expected_shape}, one row per seed, and is "
            f"{describe_type(state.model)}"
        )


def trial_round_numbers(count: int) -> list[int]:
    """Return the rounds to try: the first three, and later ones, since some strategies change over time (warm-up,
    periods, the end)."""
    late_rounds = {t for t in (*LATE_TRIAL_ROUNDS, count - 1) if 2 < t < count}
    return [*range(min(3, max(count, 1))), *sorted(late_rounds)]


class StrategyContractTrial:
    """A copy of a run's strategy, tried on synthetic reports in federations of one or two of the run's seeds.

    Args:
        simulation, memory: before the first round.
    """

    def __init__(self, simulation: Setup, memory: Memory) -> None:
        self.simulation, self.memory = simulation, memory
        self.label = f"strategy={type(simulation.strategy).__name__}"
        federation = simulation.federation
        self.rounds = trial_round_numbers(simulation.rounds)
        self.models = simulation.model.columns.select_shared(simulation.model.initial(federation.seeds[:2]))
        # replicates at different models, as they are after a round
        sine_values = torch.sin(torch.arange(1.0, self.models.numel() + 1)).reshape(self.models.shape)
        self.models = self.models + 0.05 * sine_values.to(self.models)
        self.snapshot_before = take_snapshot(simulation.strategy)
        self.rewind = Rewind(
            simulation.strategy, skipped_types=SHARED_OBJECT_TYPES
        )  # state that copies share, such as a module's globals
        self.counters: dict[str, Any] = {}  # attributes of a copy at its start
        self.last_strategy, self.initial_snapshot = (
            simulation.strategy,
            self.snapshot_before,
        )  # the copy that ran, and its initial state
        self.start_time = time.process_time()
        # a strategy may support only processes with a fixed number of clients
        self.has_fixed_cohort_size = simulation.availability.law in ("full", "uniform_k")
        self.present_clients = (
            int(min(simulation.availability.counts(0).sum(1).max(), simulation.federation.clients))
            if self.has_fixed_cohort_size
            else 0
        )
        self.uses_constant_weights = False
        if self.has_fixed_cohort_size:
            self.uses_constant_weights = self._refuses_weights(constant=False) and not self._refuses_weights(
                constant=True
            )

    def _refuses_weights(self, constant: bool) -> bool:
        self.uses_constant_weights = constant
        try:
            self.states_after_rounds([[3, 1], [1, 2], [2, 3]], range(len(self.models)))
        except ConfigError:
            return True
        return False

    def is_over_time(self) -> bool:
        return time.process_time() - self.start_time > MAX_OPTIONAL_CHECK_SECONDS

    def strategy(self, replicates: range) -> Any:
        """Return a copy of the strategy for some of the replicates, with their entries of settings that are given per
        seed."""
        self.rewind()
        strategy_copy = copy_for_trial(
            self.simulation.strategy, self.simulation.federation, self.simulation.data, self.simulation.model
        )
        for name, value in list(getattr(strategy_copy, "__dict__", {}).items()):
            if isinstance(value, PerSeed) and strategy_copy is not self.simulation.strategy:
                setattr(strategy_copy, name, PerSeed(value.values[replicates.start : replicates.stop]))
        return strategy_copy

    def _federation(self, replicates: range) -> Federation:
        """Return a federation of these replicates."""
        federation, row_selection = self.simulation.federation, slice(replicates.start, replicates.stop)
        m = federation.clients
        if (
            federation.ranks.num_ranks == 1
            and federation.num_replicates * m * self.models.shape[1] > MAX_TRIAL_MEMORY_NUMBERS
        ):
            m = min(m, 8)  # setting up memory of all clients would take longer than the check
        sizes = federation.num_samples.reshape(federation.num_replicates, federation.clients)[
            row_selection, :m
        ].reshape(-1)
        trial_federation = dataclasses.replace(
            federation, seeds=federation.seeds[row_selection], clients=m, num_samples=sizes, num_objective_clients=None,
            class_fractions=None
            if federation.class_fractions is None
            else federation.class_fractions[row_selection, :m],
            client_shares=None if federation.client_shares is None else federation.client_shares[:m],
            client_names=None if federation.client_names is None else federation.client_names[:m],
        )  # fmt: skip
        trial_federation.full_data_oracle = None if federation.full_data_oracle is None else _synthetic_gradients
        trial_federation.validation_oracle = None if federation.validation_oracle is None else _synthetic_losses
        return trial_federation

    def states_after_rounds(
        self,
        participation_counts: Sequence[Sequence[int]],
        replicates: range,
        use_new_copies: bool = False,
        with_other_calls: bool = False,
        rewind_first: bool = True,
    ) -> list[State]:
        """Return the states after rounds with so many clients of each replicate, counts [T][R] in turn.

        `use_new_copies`: every round is played by another copy, as after a resumed run. `with_other_calls`: before
        each round the one before it is played with other numbers. Not `rewind_first`: the copy that played last plays
        on.
        """
        federation = self._federation(replicates)
        strategy, component_label = (self.strategy(replicates) if rewind_first else self.last_strategy), self.label
        self.last_strategy = strategy
        models = self.models[replicates.start : replicates.stop]
        with user_code_errors(f"{component_label}: initial", strategy):
            state = strategy.initial(models.clone(), federation)
        if not use_new_copies and rewind_first:
            self.initial_snapshot = take_snapshot(strategy)
        vars(strategy).update(self.counters)
        states: list[State] = []
        previous_state_and_report: tuple[State, Report] | None = None
        for round_number, t in enumerate(self.rounds):
            if use_new_copies:
                strategy = self.strategy(replicates)
                with user_code_errors(f"{component_label}: initial", strategy):
                    strategy.initial(models.clone(), federation)
            client_counts = np.zeros((len(replicates), federation.clients))
            for r in range(len(replicates)):
                num_clients = participation_counts[round_number % len(participation_counts)][r]
                count = (
                    self.present_clients
                    if self.uses_constant_weights
                    else max(num_clients, 1)
                    if self.has_fixed_cohort_size
                    else num_clients
                )
                positions = np.arange(min(count, federation.clients))
                client_counts[r, (positions + t + replicates.start + r) % federation.clients] = 1
            active = federation.make_cohort(
                client_counts, np.full_like(client_counts, 1.0 if self.uses_constant_weights else 0.5), t
            )
            state_copy = copy_tensors(state)
            cohort, carry = self._cohort_and_start_rows(strategy, state_copy, active, t)
            report = _synthetic_round_report(
                self.simulation, state, self._memory_of_replicates(replicates), cohort, carry, replicates, t
            )
            if with_other_calls and previous_state_and_report is not None:
                with contextlib.suppress(ConfigError):
                    _next_state(
                        strategy,
                        component_label,
                        _changed_copy(previous_state_and_report[0]),
                        _changed_copy(previous_state_and_report[1]),
                        self.rounds[round_number - 1],
                    )
            previous_state_and_report = copy_tensors(state), copy_tensors(report)
            next_state = _next_state(strategy, component_label, state_copy, report, t)
            if not use_new_copies and t == self.rounds[0]:
                repeated_state = _next_state(strategy, component_label, copy_tensors(state), report, t)
                name = first_differing_name(fields_of_state(next_state), fields_of_state(repeated_state))
                if name is not None:
                    raise ConfigError(self.hidden_state_message(name, strategy))
            state = next_state
            states.append(state)
        return states

    def _cohort_and_start_rows(
        self, strategy: Any, state: State, active: Cohort, t: int
    ) -> tuple[Cohort, NamedTensors]:
        """Return the clients that compute, and the rows that they start from."""
        component_label = self.label
        with user_code_errors(f"{component_label}: cohort, in round {t}", strategy):
            cohort = strategy.cohort(state, active)
        if not isinstance(cohort, Cohort):
            raise ConfigError(f"{component_label}: cohort must return a Cohort, and returns {describe_type(cohort)}")
        if (np.diff(cohort.host_index.virtual_clients) <= 0).any():
            raise ConfigError(
                f"{component_label}: cohort, in round {t}, returns clients that are not in ascending order, "
                "each once; give Cohort.subset sorted positions without repetition"
            )
        with user_code_errors(f"{component_label}: start, in round {t}", strategy):
            start = strategy.start(state, cohort)
        carry = start if isinstance(start, dict) else {"params": start}
        shape = [len(cohort), state.model.shape[1]]
        params = carry.get("params")
        if not isinstance(params, Tensor) or list(params.shape) != shape or params.dtype != state.model.dtype:
            raise ConfigError(
                f"{component_label}: start must return rows {shape} "
                f"{str(state.model.dtype).removeprefix('torch.')}, one per "
                f"client, and returns {describe_type(start if params is None else params)}"
            )
        for name, value in carry.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (len(cohort),):
                raise ConfigError(
                    f"{component_label}: start must return {name!r} with one entry for each of {len(cohort)} "
                    f"clients, and returns {describe_type(value)}"
                )
        return cohort, carry

    def _memory_of_replicates(self, replicates: range) -> Memory:
        federation, client_count = self.simulation.federation, len(self._federation(replicates).local_clients)
        rows_by_replicate = {
            name: value.unflatten(0, (federation.num_replicates, -1)) for name, value in self.memory.clients.items()
        }
        row_selection = slice(replicates.start, replicates.stop)
        return Memory(
            {
                name: value[row_selection, :client_count].flatten(0, 1).clone()
                for name, value in rows_by_replicate.items()
            }
        )

    def hidden_state_message(self, name: str, strategy: Any) -> str:
        """Describe how a value came to differ from an earlier one."""
        paths = changed_attribute_paths(strategy, self.snapshot_before) or changed_attribute_paths(
            self.simulation.strategy, self.snapshot_before
        )
        location = f" ({paths[0]})" if paths else ""
        return (
            f"{self.label}: the same state and report give another {name} the second time; what it keeps in attributes "
            f"of its own{location} is in no checkpoint, so make it a field of its State"
        )


def _check_repeatability(trial: StrategyContractTrial) -> str | None:
    """Repeat the same rounds: with another copy for each round, then with one copy for all, with another global
    seed."""
    all_replicates = range(len(trial.models))
    counts = [[3, 3], [0, 2], [2, 1]]
    right = trial.states_after_rounds(counts, all_replicates)
    with streams.preserve_rng_states():
        streams.reseed_global_generators(1)
        return _repeated_rounds_violation(trial, counts, right)


def _repeated_rounds_violation(
    trial: StrategyContractTrial, participation_counts: Sequence[Sequence[int]], expected_states: list[State]
) -> str | None:
    all_replicates = range(len(trial.models))
    for uses_new_copy in (True,) if trial.is_over_time() else (True, False):
        for expected_state, repeated_state in zip(
            expected_states, trial.states_after_rounds(participation_counts, all_replicates, uses_new_copy), strict=True
        ):
            name = first_differing_name(fields_of_state(expected_state), fields_of_state(repeated_state))
            if name is not None:
                return trial.hidden_state_message(name, trial.strategy(all_replicates))
    return None if trial.is_over_time() else _other_calls_violation(trial, participation_counts, expected_states)


def _other_calls_violation(
    trial: StrategyContractTrial, participation_counts: Sequence[Sequence[int]], expected_states: list[State]
) -> str | None:
    """Repeat the same rounds with others in between, and with a copy whose counters are a thousand times as large."""
    all_replicates, tried_counters = range(len(trial.models)), dict[str, Any]()
    trial.states_after_rounds(participation_counts, all_replicates)
    for counter_name in increased_attribute_names(trial.last_strategy, trial.initial_snapshot):
        original_value = vars(trial.last_strategy)[counter_name]
        value = (
            enlarged_counter(original_value) if isinstance(original_value, (int, float)) else None
        )  # a strategy may cache an array by its round
        tried_counters |= {} if value is None else {counter_name: value}
    for calls_between, trial.counters in (
        (True, {}),
        *((False, {counter_name: value}) for counter_name, value in tried_counters.items()),
    ):
        try:
            other_states = trial.states_after_rounds(
                participation_counts, all_replicates, with_other_calls=calls_between
            )
            differing_field = _first_differing_field(expected_states, other_states)
            if differing_field is not None:
                return trial.hidden_state_message(differing_field, trial.last_strategy)
        finally:
            trial.counters = {}
    end_time = time.process_time() + MAX_REPETITION_SECONDS
    trial.states_after_rounds(participation_counts, all_replicates)
    state_changes = bool(
        changed_attribute_paths(trial.last_strategy, trial.initial_snapshot)
        or changed_attribute_paths(trial.simulation.strategy, trial.snapshot_before)
    )
    while state_changes and time.process_time() < end_time:  # a counter may take effect at its hundredth call
        later_states = trial.states_after_rounds(participation_counts, all_replicates, rewind_first=False)
        differing_field = _first_differing_field(expected_states, later_states)
        if differing_field is not None:
            return trial.hidden_state_message(differing_field, trial.last_strategy)
    return None


def _first_differing_field(expected_states: Sequence[State], other_states: Sequence[State]) -> str | None:
    """Return the field in which the states of a round differ first, or None."""
    for expected_state, other_state in zip(expected_states, other_states, strict=True):
        differing_field = first_differing_name(fields_of_state(expected_state), fields_of_state(other_state))
        if differing_field is not None:
            return differing_field
    return None


def _changed_copy(tensors_or_object: Any) -> Any:
    """Return a state or a report with other numbers."""
    moved_tensors = {
        name: value + 0.1 * torch.cos(torch.arange(value.numel())).reshape(value.shape).to(value)
        for name, value in fields_of_state(tensors_or_object).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    }
    return dataclasses.replace(copy_tensors(tensors_or_object), **moved_tensors)


def _empty_round_violation(trial: StrategyContractTrial) -> str | None:
    """Try rounds without clients, and with one client."""
    if trial.has_fixed_cohort_size or trial.is_over_time():
        return None
    for counts in ([[0, 0], [1, 0], [0, 0]], [[0, 1], [1, 1], [0, 0]]):
        for t, state in enumerate(trial.states_after_rounds(counts, range(len(trial.models)))):
            if not torch.isfinite(state.model).all():
                return (
                    f"{trial.label}: the model is not finite after a round in which {'no' if not t else 'few'} clients "
                    "took part; an empty round changes nothing: use cohort.where_nonempty"
                    + (f" (round {trial.rounds[t]})" if t else "")
                )
    return None


def _check_replicate_independence(trial: StrategyContractTrial) -> str | None:
    """Compare each replicate alone with the same replicate next to one with another number of clients."""
    if len(trial.models) < 2 or trial.simulation.federation.ranks.num_ranks > 1:
        return None
    all_replicates = [MAX_PRESENT_CLIENTS, MAX_PRESENT_CLIENTS]
    for counts in ([[3, 1], [2, 3], [1, 2]], [[1, 3], [0, 2], [3, 0]], [all_replicates]):
        joint_states = trial.states_after_rounds(counts, range(2))
        for r in (1, 0):
            try:
                single_states = trial.states_after_rounds([[row[r]] for row in counts], range(r, r + 1))
            except ConfigError:  # it was set up for all replicates
                return _check_replicates_independent(trial)
            for t, (single_state, joint_state) in enumerate(zip(single_states, joint_states, strict=True)):
                if not is_close(joint_state.model[r], single_state.model[0]):
                    return _mixed_seeds_text(trial, 1 - r, r, f" in round {trial.rounds[t]}" if t else "")
        if trial.is_over_time():
            return None
    return None


def _check_replicates_independent(trial: StrategyContractTrial) -> str | None:
    """Check that the rows of the first replicate's clients, however many, change no other replicate's model."""
    counts = [[3, 1], [2, 3], [1, 2]]
    right = trial.states_after_rounds(counts, range(2))
    for t, (state, changed_state) in enumerate(
        zip(right, trial.states_after_rounds([[1, c[1]] for c in counts], range(2)), strict=True)
    ):
        if not is_close(state.model[1], changed_state.model[1]):
            return _mixed_seeds_text(trial, 0, 1, f" in round {trial.rounds[t]}" if t else "")
    return None


def _mixed_seeds_text(trial: StrategyContractTrial, changed_row: int, affected_row: int, moment: str) -> str:
    seeds = trial.simulation.federation.seeds
    return (
        f"{trial.label} mixes the clients of different seeds: a change in those of seed "
        f"{seeds[changed_row]} changes the "
        f"model of seed {seeds[affected_row]}{moment}; use cohort.mean, sum, median, quantile, trimmed_mean or each, "
        "which work "
        "seed by seed, or derive from PerReplicateStrategy"
    )


def _synthetic_gradients(cohort: Cohort, models: Tensor) -> FullDataGradients:
    """Return synthetic losses and gradients."""
    rows = cohort.broadcast(models)
    return FullDataGradients(1 + rows.square().mean(1), rows)


def _synthetic_losses(cohort: Cohort, rows: Tensor) -> Tensor:
    """Return synthetic losses on validation samples."""
    return 1 + (rows - cohort.client_index[:, None].to(rows.dtype)).square().mean(1)


INVARIANCES = (
    Invariance("a second time, and a resumed run", _check_repeatability, raise_violation),
    Invariance("empty rounds", _empty_round_violation, raise_violation),
    Invariance("other replicates", _check_replicate_independence, raise_violation),
)


def check_strategy_contract(simulation: Setup, memory: Memory) -> None:
    """Try a strategy in its first rounds and in some late ones.

    Raises:
        ConfigError: naming what it did and what it must do.
    """
    trial = StrategyContractTrial(simulation, memory)
    try:
        check_invariances(INVARIANCES, trial)
    finally:
        trial.rewind()


def _synthetic_round_report(
    simulation: Setup, state: State, memory: Memory, cohort: Cohort, carry: NamedTensors, replicates: range, t: int
) -> Report:
    """Return rows that have moved a little, each in its own way: by its replicate, its client and the round."""
    model, rows = state.model, carry["params"]
    n, d = rows.shape
    learning_rates = simulation.trainer.base_learning_rates[replicates.start : replicates.stop]
    phases = (cohort.replicate_index + replicates.start) * 7 + cohort.client_index + 3 * t + 1
    sine_values = torch.sin(phases.to(rows)[:, None] + torch.arange(1.0, d + 1).to(rows))
    steps = int(simulation.trainer.batches.longest[0])
    rate_sums = (learning_rates[cohort.replicate_index] * steps).to(rows)
    loss = 1 + 0.1 * torch.sin(phases.to(rows))
    # what clients send depends on their start
    end_carry = {name: value.clone() for name, value in carry.items()} | {"params": 0.99 * rows + 0.1 * sine_values}
    memory_copy = Memory({name: value.clone() for name, value in memory.clients.items()})
    return Report(
        cohort, rows.clone(), end_carry, loss, learning_rates.clone(), rate_sums, np.full(n, 10), model.clone(),
        torch.isfinite(loss), end_carry["params"].clone(), rate_sums.clone(), memory_copy, model.clone(),
        staleness=_staleness(simulation, cohort, t),
    )  # fmt: skip


def _staleness(run: Setup, cohort: Cohort, t: int) -> np.ndarray | None:
    """Return the number of rounds since each row was started, [n]; None if rows are never late."""
    if not (run.delayed_updates.active or run.round_clock.clock.asynchronous):
        return None
    max_lateness = MAX_STALENESS if run.round_clock.clock.asynchronous else 1
    clients = cohort.host_index.virtual_clients % cohort.federation.clients
    staleness: np.ndarray = np.minimum((clients + t) % (max_lateness + 1), t)
    return staleness


def _next_state(strategy: Any, component_label: str, previous_state: State, report: Report, t: int) -> State:
    """Return the state after the round, computed from copies."""
    state_copy, report_copy = copy_tensors(previous_state), copy_tensors(report)
    counts = report_copy.cohort.host_index.multiplicity.copy()
    with user_code_errors(f"{component_label}: aggregate, in round {t}" if t else component_label, strategy):
        state_after = strategy.aggregate(state_copy, report_copy, t)
    if not np.array_equal(counts, report_copy.cohort.host_index.multiplicity):
        report_copy.cohort.host_index.multiplicity[:] = counts
        raise ConfigError(
            f"{component_label}: aggregate writes into the cohort's counts, which the run counts clients by"
        )
    for report_field in MEASURED_REPORT_FIELDS:
        if not equal_values(getattr(report, report_field), getattr(report_copy, report_field)):
            raise ConfigError(
                f"{component_label}: aggregate writes into report.{report_field}, which the run measures rounds "
                "by; write to a copy"
            )
    if type(state_after) is not type(previous_state):
        raise ConfigError(
            f"{component_label}: aggregate must return a {type(previous_state).__name__}, and returns "
            f"{describe_type(state_after)}"
        )
    for report_field, field_value in fields_of_state(previous_state).items():
        actual_field = fields_of_state(state_after)[report_field]
        if not isinstance(actual_field, Tensor) or (actual_field.shape, actual_field.dtype) != (
            field_value.shape,
            field_value.dtype,
        ):
            hint = " (cohort.scatter writes in place and returns nothing)" if actual_field is None else ""
            raise ConfigError(
                f"{component_label}: {report_field} must stay {describe_type(field_value)} in the next state, "
                f"and becomes {describe_type(actual_field)}{hint}"
            )
        if actual_field.requires_grad:
            raise ConfigError(
                f"{component_label}: {report_field} of the next state requires a gradient; return "
                f"{report_field}.detach()"
            )
    if undeclared_names := undeclared_attributes(state_after):
        raise ConfigError(
            f"{component_label}: {undeclared_names[0]!r} is an attribute of {type(state_after).__name__} and "
            "none of its fields, so no checkpoint "
            "holds it; declare it in a dataclass derived from State"
        )
    _check_no_aliased_fields(component_label, state_after)
    next_state: State = state_after
    return next_state


def equal_values(first_value: Any, second_value: Any) -> bool:
    """Return whether two tensors or arrays hold the same numbers; NaN in tensors counts as 0."""
    if isinstance(first_value, Tensor):
        return torch.equal(first_value.nan_to_num(), second_value.nan_to_num())
    return np.array_equal(first_value, second_value)


def _check_no_aliased_fields(component_label: str, state: State) -> None:
    """Refuse two fields that share memory: a checkpoint cannot hold them, and writing to one writes to both."""
    names_by_address: dict[int, str] = {}
    for field_name, value in fields_of_state(state).items():
        memory_address = value.untyped_storage().data_ptr()
        if value.numel() and memory_address in names_by_address:
            raise ConfigError(
                f"{component_label}: {field_name} and {names_by_address[memory_address]} of the next state "
                f"share memory, so that writing to one writes to both; make it {field_name}.clone()"
            )
        names_by_address[memory_address] = field_name
