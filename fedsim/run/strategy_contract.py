"""Somebody's own strategy, tried before a folder is made, on rows that are made up.

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
    RUN_OBJECT_TYPES,
    Invariance,
    NamedTensors,
    changed_paths,
    check_invariances,
    close_to,
    copy_tensors,
    describe_type,
    first_difference,
    is_user_defined,
    moved_counters,
    refuse_part,
    snapshot_of,
    state_fields,
    trial_copy,
    unlisted,
    user_code_errors,
)
from fedsim.run.setup import Setup
from fedsim.strategies import State

OPTIONAL_CHECKS_SECONDS = 0.7  # after which what is tried a second time is left out
LATE_TRIAL_ROUNDS = (3, 10, 100)  # and the last
MOST_PRESENT = 8  # clients of a replicate, where all of a small federation come
REPEATED_SECONDS = 0.2  # in which rounds are repeated where attributes change
STALEST = 3  # rounds by which rows of an event-driven run are late
WATCHED = ("loss", "lr", "lr_sum", "samples", "deployed")  # of a report, what a run measures rounds by
MAX_TRIAL_MEMORY_NUMBERS = 2e7  # of client memory, above which fewer clients are made up


def check_initial_state(run: Setup, state: Any) -> None:
    """The state that somebody's own strategy begins with: tensors that share no memory, and the models [R, d]."""
    if not is_user_defined(run.strategy):
        return
    label = f"strategy={type(run.strategy).__name__}"
    if not isinstance(state, State):
        raise ConfigError(f"{label}: initial must return a State, and returns {describe_type(state)}")
    if extra := unlisted(state):
        raise ConfigError(
            f"{label}: {extra[0]!r} is an attribute of {type(state).__name__} and none of its fields, so no checkpoint "
            "holds it; decorate the class with @dataclass, and declare it there"
        )
    rows = run.federation.replicates
    shape = [rows, len(run.model.columns.shared_part(run.model.initial(run.federation.seeds[:1]))[0])]
    names_by_address: dict[int, str] = {}
    for name, value in state_fields(state).items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{label}: {name} of the state must be a tensor, which a checkpoint can hold, and is "
                f"{describe_type(value)}"
            )
        address = value.untyped_storage().data_ptr()
        if value.numel() and name != "model" and address in names_by_address:
            raise ConfigError(
                f"{label}: {name} and {names_by_address[address]} of the state share memory, so that writing to one "
                f"writes to both; make it {name}.clone()"
            )
        names_by_address[address] = name
    if list(state.model.shape) != shape:
        raise ConfigError(
            f"{label}: the state's model must be {shape}, one row per seed, and is {describe_type(state.model)}"
        )


def rounds_to_try(count: int) -> list[int]:
    """The first three rounds, and later ones, since some strategies change their ways: warm-up, periods, the end."""
    late_rounds = {t for t in (*LATE_TRIAL_ROUNDS, count - 1) if 2 < t < count}
    return [*range(min(3, max(count, 1))), *sorted(late_rounds)]


class StrategyTrial:
    """A copy of a run's strategy, tried on made-up reports in federations of one or two of the run's seeds.

    Args:
        run, memory: before the first round.
    """

    def __init__(self, run: Setup, memory: Memory) -> None:
        self.run, self.memory = run, memory
        self.label = f"strategy={type(run.strategy).__name__}"
        federation = run.federation
        self.rounds = rounds_to_try(run.rounds)
        self.models = run.model.columns.shared_part(run.model.initial(federation.seeds[:2]))
        # replicates at different models, as they are after a round
        wave = torch.sin(torch.arange(1.0, self.models.numel() + 1)).reshape(self.models.shape)
        self.models = self.models + 0.05 * wave.to(self.models)
        self.snapshot_before = snapshot_of(run.strategy)
        self.rewind = Rewind(run.strategy, skip=RUN_OBJECT_TYPES)  # what copies share, such as a module's globals
        self.counters: dict[str, Any] = {}  # attributes that a copy begins with
        self.last, self.initial_snapshot = run.strategy, self.snapshot_before  # the copy that played, and how it began
        self.start_time = time.process_time()
        # a process that always sends as many clients may be all that a strategy is for
        self.has_fixed_cohort_size = run.availability.law in ("full", "uniform_k")
        self.present = (
            int(min(run.availability.counts(0).sum(1).max(), run.federation.clients))
            if self.has_fixed_cohort_size
            else 0
        )
        self.constant = False
        if self.has_fixed_cohort_size:
            self.constant = self._refuse_constant(constant=False) and not self._refuse_constant(constant=True)

    def _refuse_constant(self, constant: bool) -> bool:
        self.constant = constant
        try:
            self.states_after_rounds([[3, 1], [1, 2], [2, 3]], range(len(self.models)))
        except ConfigError:
            return True
        return False

    def is_slow(self) -> bool:
        return time.process_time() - self.start_time > OPTIONAL_CHECKS_SECONDS

    def strategy(self, replicates: range) -> Any:
        """A copy for some of the replicates; what is given per seed is theirs."""
        self.rewind()
        strategy_copy = trial_copy(self.run.strategy, self.run.federation, self.run.data, self.run.model)
        for name, value in list(getattr(strategy_copy, "__dict__", {}).items()):
            if isinstance(value, PerSeed) and strategy_copy is not self.run.strategy:
                setattr(strategy_copy, name, PerSeed(value.values[replicates.start : replicates.stop]))
        return strategy_copy

    def _federation(self, replicates: range) -> Federation:
        """These replicates alone."""
        federation, pick = self.run.federation, slice(replicates.start, replicates.stop)
        m = federation.clients
        if federation.ranks.count == 1 and federation.replicates * m * self.models.shape[1] > MAX_TRIAL_MEMORY_NUMBERS:
            m = min(m, 8)  # memory of all clients would take longer than what is tried
        sizes = federation.sizes.reshape(federation.replicates, federation.clients)[pick, :m].reshape(-1)
        trial_federation = dataclasses.replace(
            federation, seeds=federation.seeds[pick], clients=m, sizes=sizes, members=None,
            class_fractions=None if federation.class_fractions is None else federation.class_fractions[pick, :m],
            shares=None if federation.shares is None else federation.shares[:m],
            names=None if federation.names is None else federation.names[:m],
        )  # fmt: skip
        trial_federation.full_data_oracle = None if federation.full_data_oracle is None else _made_up_gradients
        return trial_federation

    def states_after_rounds(
        self,
        counts: Sequence[Sequence[int]],
        replicates: range,
        use_new_copies: bool = False,
        with_other_calls: bool = False,
        rewound: bool = True,
    ) -> list[State]:
        """The states after rounds in which so many clients of every replicate come, counts [T][R] in turn.

        `use_new_copies`: every round is played by another copy, as after a resumed run. `with_other_calls`: before
        each round the one before it is played with other numbers. Not `rewound`: the copy that played last plays on.
        """
        federation = self._federation(replicates)
        strategy, label = (self.strategy(replicates) if rewound else self.last), self.label
        self.last = strategy
        models = self.models[replicates.start : replicates.stop]
        with user_code_errors(f"{label}: initial", strategy):
            state = strategy.initial(models.clone(), federation)
        if not use_new_copies and rewound:
            self.initial_snapshot = snapshot_of(strategy)
        vars(strategy).update(self.counters)
        states: list[State] = []
        earlier: tuple[State, Report] | None = None
        for round_number, t in enumerate(self.rounds):
            if use_new_copies:
                strategy = self.strategy(replicates)
                with user_code_errors(f"{label}: initial", strategy):
                    strategy.initial(models.clone(), federation)
            client_counts = np.zeros((len(replicates), federation.clients))
            for r in range(len(replicates)):
                num_clients = counts[round_number % len(counts)][r]
                count = (
                    self.present
                    if self.constant
                    else max(num_clients, 1)
                    if self.has_fixed_cohort_size
                    else num_clients
                )
                positions = np.arange(min(count, federation.clients))
                client_counts[r, (positions + t + replicates.start + r) % federation.clients] = 1
            active = federation.cohort(client_counts, np.full_like(client_counts, 1.0 if self.constant else 0.5), t)
            state_copy = copy_tensors(state)
            cohort, carry = self._start(strategy, state_copy, active, t)
            report = _synthetic_report(self.run, state, self._memory(replicates), cohort, carry, replicates, t)
            if with_other_calls and earlier is not None:
                with contextlib.suppress(ConfigError):
                    _next_state(
                        strategy,
                        label,
                        _changed_copy(earlier[0]),
                        _changed_copy(earlier[1]),
                        self.rounds[round_number - 1],
                    )
            earlier = copy_tensors(state), copy_tensors(report)
            next_state = _next_state(strategy, label, state_copy, report, t)
            if not use_new_copies and t == self.rounds[0]:
                repeated_state = _next_state(strategy, label, copy_tensors(state), report, t)
                name = first_difference(state_fields(next_state), state_fields(repeated_state))
                if name is not None:
                    raise ConfigError(self.remembers(name, strategy))
            state = next_state
            states.append(state)
        return states

    def _start(self, strategy: Any, state: State, active: Cohort, t: int) -> tuple[Cohort, NamedTensors]:
        """Who computes, and what they start from."""
        label = self.label
        with user_code_errors(f"{label}: cohort, in round {t}", strategy):
            cohort = strategy.cohort(state, active)
        if not isinstance(cohort, Cohort):
            raise ConfigError(f"{label}: cohort must return a Cohort, and returns {describe_type(cohort)}")
        if (np.diff(cohort.host.virtual) <= 0).any():
            raise ConfigError(
                f"{label}: cohort, in round {t}, returns clients that are not in ascending order, each once; give "
                "Cohort.subset sorted positions without repetition"
            )
        with user_code_errors(f"{label}: start, in round {t}", strategy):
            start = strategy.start(state, cohort)
        carry = start if isinstance(start, dict) else {"params": start}
        shape = [len(cohort), state.model.shape[1]]
        params = carry.get("params")
        if not isinstance(params, Tensor) or list(params.shape) != shape or params.dtype != state.model.dtype:
            raise ConfigError(
                f"{label}: start must return rows {shape} {str(state.model.dtype).removeprefix('torch.')}, one per "
                f"client, and returns {describe_type(start if params is None else params)}"
            )
        for name, value in carry.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (len(cohort),):
                raise ConfigError(
                    f"{label}: start must return {name!r} with one entry for each of {len(cohort)} clients, and "
                    f"returns {describe_type(value)}"
                )
        return cohort, carry

    def _memory(self, replicates: range) -> Memory:
        federation, client_count = self.run.federation, len(self._federation(replicates).local_clients)
        rows_by_replicate = {
            name: value.unflatten(0, (federation.replicates, -1)) for name, value in self.memory.clients.items()
        }
        pick = slice(replicates.start, replicates.stop)
        return Memory(
            {name: value[pick, :client_count].flatten(0, 1).clone() for name, value in rows_by_replicate.items()}
        )

    def remembers(self, name: str, strategy: Any) -> str:
        """How another `name` than before came about."""
        paths = changed_paths(strategy, self.snapshot_before) or changed_paths(self.run.strategy, self.snapshot_before)
        location = f" ({paths[0]})" if paths else ""
        return (
            f"{self.label}: the same state and report give another {name} the second time; what it keeps in attributes "
            f"of its own{location} is in no checkpoint, so make it a field of its State"
        )


def _check_repetition(trial: StrategyTrial) -> str | None:
    """The same rounds again: by another copy for every round, then by one copy for all, with another global seed."""
    all_replicates = range(len(trial.models))
    counts = [[3, 3], [0, 2], [2, 1]]
    right = trial.states_after_rounds(counts, all_replicates)
    with streams.restore_states():
        streams.reseed(1)
        return _compared(trial, counts, right)


def _compared(trial: StrategyTrial, counts: Sequence[Sequence[int]], right: list[State]) -> str | None:
    all_replicates = range(len(trial.models))
    for fresh in (True,) if trial.is_slow() else (True, False):
        for expected_state, repeated_state in zip(
            right, trial.states_after_rounds(counts, all_replicates, fresh), strict=True
        ):
            name = first_difference(state_fields(expected_state), state_fields(repeated_state))
            if name is not None:
                return trial.remembers(name, trial.strategy(all_replicates))
    return None if trial.is_slow() else _check_other_calls(trial, counts, right)


def _check_other_calls(trial: StrategyTrial, counts: Sequence[Sequence[int]], right: list[State]) -> str | None:
    """The same rounds with others in between, and by a copy that has counted a thousand times as long."""
    all_replicates, tried = range(len(trial.models)), dict[str, Any]()
    trial.states_after_rounds(counts, all_replicates)
    for counter in moved_counters(trial.last, trial.initial_snapshot):
        original_value = vars(trial.last)[counter]
        value = (
            enlarged_counter(original_value) if isinstance(original_value, (int, float)) else None
        )  # an array may be remembered by its round
        tried |= {} if value is None else {counter: value}
    for between, trial.counters in ((True, {}), *((False, {counter: value}) for counter, value in tried.items())):
        try:
            for expected_state, other_state in zip(
                right, trial.states_after_rounds(counts, all_replicates, with_other_calls=between), strict=True
            ):
                name = first_difference(state_fields(expected_state), state_fields(other_state))
                if name is not None:
                    return trial.remembers(name, trial.last)
        finally:
            trial.counters = {}
    until = time.process_time() + REPEATED_SECONDS
    trial.states_after_rounds(counts, all_replicates)
    changing = bool(
        changed_paths(trial.last, trial.initial_snapshot) or changed_paths(trial.run.strategy, trial.snapshot_before)
    )
    while changing and time.process_time() < until:  # a count may matter at its hundredth
        for expected_state, later_state in zip(
            right, trial.states_after_rounds(counts, all_replicates, rewound=False), strict=True
        ):
            name = first_difference(state_fields(expected_state), state_fields(later_state))
            if name is not None:
                return trial.remembers(name, trial.last)
    return None


def _changed_copy(tensors_or_object: Any) -> Any:
    """A state or a report with other numbers."""
    moved_tensors = {
        name: value + 0.1 * torch.cos(torch.arange(value.numel())).reshape(value.shape).to(value)
        for name, value in state_fields(tensors_or_object).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    }
    return dataclasses.replace(copy_tensors(tensors_or_object), **moved_tensors)


def _check_empty_rounds(trial: StrategyTrial) -> str | None:
    """Rounds in which nobody comes, and in which one client does."""
    if trial.has_fixed_cohort_size or trial.is_slow():
        return None
    for counts in ([[0, 0], [1, 0], [0, 0]], [[0, 1], [1, 1], [0, 0]]):
        for t, state in enumerate(trial.states_after_rounds(counts, range(len(trial.models)))):
            if not torch.isfinite(state.model).all():
                return (
                    f"{trial.label}: the model is not finite after a round in which {'nobody' if not t else 'few'} "
                    "took "
                    "part; an empty round changes nothing: use cohort.unless_empty"
                    + (f" (round {trial.rounds[t]})" if t else "")
                )
    return None


def _check_replicates(trial: StrategyTrial) -> str | None:
    """Each replicate alone, and beside one with another number of clients."""
    if len(trial.models) < 2 or trial.run.federation.ranks.count > 1:
        return None
    all_replicates = [MOST_PRESENT, MOST_PRESENT]
    for counts in ([[3, 1], [2, 3], [1, 2]], [[1, 3], [0, 2], [3, 0]], [all_replicates]):
        joint_states = trial.states_after_rounds(counts, range(2))
        for r in (1, 0):
            try:
                single_states = trial.states_after_rounds([[row[r]] for row in counts], range(r, r + 1))
            except ConfigError:  # it was set up for all replicates
                return _check_replicates_differ(trial)
            for t, (single_state, joint_state) in enumerate(zip(single_states, joint_states, strict=True)):
                if not close_to(joint_state.model[r], single_state.model[0]):
                    return _mixing_text(trial, 1 - r, r, f" in round {trial.rounds[t]}" if t else "")
        if trial.is_slow():
            return None
    return None


def _check_replicates_differ(trial: StrategyTrial) -> str | None:
    """What the first replicate's clients bring, however many they are, must change no other replicate's model."""
    counts = [[3, 1], [2, 3], [1, 2]]
    right = trial.states_after_rounds(counts, range(2))
    for t, (state, changed_state) in enumerate(
        zip(right, trial.states_after_rounds([[1, c[1]] for c in counts], range(2)), strict=True)
    ):
        if not close_to(state.model[1], changed_state.model[1]):
            return _mixing_text(trial, 0, 1, f" in round {trial.rounds[t]}" if t else "")
    return None


def _mixing_text(trial: StrategyTrial, changed: int, affected: int, moment: str) -> str:
    seeds = trial.run.federation.seeds
    return (
        f"{trial.label} mixes the clients of different seeds: a change in those of seed {seeds[changed]} changes the "
        f"model of seed {seeds[affected]}{moment}; use cohort.mean, sum, median, quantile, trimmed_mean or each, "
        "which work "
        "seed by seed, or derive from PerReplicate"
    )


def _made_up_gradients(cohort: Cohort, models: Tensor) -> FullDataGradients:
    """Losses and gradients of nobody's data."""
    rows = cohort.broadcast(models)
    return FullDataGradients(1 + rows.square().mean(1), rows)


INVARIANCES = (
    Invariance("a second time, and a resumed run", _check_repetition, refuse_part),
    Invariance("empty rounds", _check_empty_rounds, refuse_part),
    Invariance("other replicates", _check_replicates, refuse_part),
)


def check_strategy(run: Setup, memory: Memory) -> None:
    """Try a strategy in its first rounds, and in some that come late.

    Raises:
        ConfigError: naming what it did and what it must do.
    """
    trial = StrategyTrial(run, memory)
    try:
        check_invariances(INVARIANCES, trial)
    finally:
        trial.rewind()


def _synthetic_report(
    run: Setup, state: State, memory: Memory, cohort: Cohort, carry: NamedTensors, replicates: range, t: int
) -> Report:
    """Rows that have moved a little, each in its own way: by its replicate, its client and the round."""
    model, rows = state.model, carry["params"]
    n, d = rows.shape
    rates = run.trainer.rates[replicates.start : replicates.stop]
    phases = (cohort.replicate + replicates.start) * 7 + cohort.client + 3 * t + 1
    wave = torch.sin(phases.to(rows)[:, None] + torch.arange(1.0, d + 1).to(rows))
    steps = int(run.trainer.batches.longest[0])
    sums = (rates[cohort.replicate] * steps).to(rows)
    loss = 1 + 0.1 * torch.sin(phases.to(rows))
    # what clients send depends on where they start
    end_carry = {name: value.clone() for name, value in carry.items()} | {"params": 0.99 * rows + 0.1 * wave}
    memory_copy = Memory({name: value.clone() for name, value in memory.clients.items()})
    return Report(
        cohort, rows.clone(), end_carry, loss, rates.clone(), sums, np.full(n, 10), model.clone(),
        torch.isfinite(loss), end_carry["params"].clone(), sums.clone(), memory_copy, model.clone(),
        staleness=_staleness(run, cohort, t),
    )  # fmt: skip


def _staleness(run: Setup, cohort: Cohort, t: int) -> np.ndarray | None:
    """[n] rounds since each row began; None where rows are never late."""
    if not (run.delivery.active or run.pace.clock.asynchronous):
        return None
    latest = STALEST if run.pace.clock.asynchronous else 1
    clients = cohort.host.virtual % cohort.federation.clients
    staleness: np.ndarray = np.minimum((clients + t) % (latest + 1), t)
    return staleness


def _next_state(strategy: Any, label: str, state: State, report: Report, t: int) -> State:
    """The state after the round, from copies of its own."""
    state_copy, report_copy = copy_tensors(state), copy_tensors(report)
    counts = report_copy.cohort.host.count.copy()
    with user_code_errors(f"{label}: aggregate, in round {t}" if t else label, strategy):
        after = strategy.aggregate(state_copy, report_copy, t)
    if not np.array_equal(counts, report_copy.cohort.host.count):
        report_copy.cohort.host.count[:] = counts
        raise ConfigError(f"{label}: aggregate writes into the cohort's counts, which the run counts clients by")
    for name in WATCHED:
        if not equal_values(getattr(report, name), getattr(report_copy, name)):
            raise ConfigError(
                f"{label}: aggregate writes into report.{name}, which the run measures rounds by; write to a copy"
            )
    if type(after) is not type(state):
        raise ConfigError(
            f"{label}: aggregate must return a {type(state).__name__}, and returns {describe_type(after)}"
        )
    for name, value in state_fields(state).items():
        actual_field = state_fields(after)[name]
        if not isinstance(actual_field, Tensor) or (actual_field.shape, actual_field.dtype) != (
            value.shape,
            value.dtype,
        ):
            hint = " (cohort.scatter writes in place and returns nothing)" if actual_field is None else ""
            raise ConfigError(
                f"{label}: {name} must stay {describe_type(value)} in the next state, and becomes "
                f"{describe_type(actual_field)}{hint}"
            )
        if actual_field.requires_grad:
            raise ConfigError(f"{label}: {name} of the next state requires a gradient; return {name}.detach()")
    if extra := unlisted(after):
        raise ConfigError(
            f"{label}: {extra[0]!r} is an attribute of {type(after).__name__} and none of its fields, so no checkpoint "
            "holds it; declare it in a dataclass derived from State"
        )
    _check_shared_memory(label, after)
    next_state: State = after
    return next_state


def equal_values(first: Any, second: Any) -> bool:
    """Do two tensors or arrays hold the same numbers, where they are numbers?"""
    if isinstance(first, Tensor):
        return torch.equal(first.nan_to_num(), second.nan_to_num())
    return np.array_equal(first, second)


def _check_shared_memory(label: str, state: State) -> None:
    """Refuse two fields in the same memory: a checkpoint cannot hold them, and writing to one writes to both."""
    names_by_address: dict[int, str] = {}
    for name, value in state_fields(state).items():
        address = value.untyped_storage().data_ptr()
        if value.numel() and address in names_by_address:
            raise ConfigError(
                f"{label}: {name} and {names_by_address[address]} of the next state share memory, so that writing to "
                f"one writes to both; make it {name}.clone()"
            )
        names_by_address[address] = name
