"""Trials of user-defined parts before the run folder is created; a part that breaks its contract is refused in one
sentence.

A part must return what its contract says, and be invariant (`fedsim.run.contracts.Invariance`) under what must make no
difference: a second call, other rounds and clients in between, padding, other replicates. Where padding makes one,
clients are trained one at a time, on batches as they are; everything else that fails is refused. Parts of this package
are tried only where a user's part is inside them, or with them in a local step. The trials work on copies; what they
found is known for parts that are tried again in the same process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import streams
from fedsim.core.columns import OWN_COLUMNS_ENTRY
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.rewind import Rewind
from fedsim.core.snapshot import SnapshotNode, enlarged_counter, snapshot_key
from fedsim.data.samples import StoredClientData
from fedsim.models.probe import name_forward_errors, refuse_outside_changes
from fedsim.models.row_model import is_built_in
from fedsim.run.contracts import (
    SHARED_OBJECT_TYPES,
    Invariance,
    NamedTensors,
    changed_attribute_paths,
    contains_user_code,
    copy_for_trial,
    describe_type,
    increased_attribute_names,
    is_close,
    is_user_defined,
    take_snapshot,
    user_code_errors,
)
from fedsim.run.sample_contract import INVARIANCES, THREAD_INVARIANCE, ClientComponentsTrial
from fedsim.run.setup import Setup
from fedsim.run.strategy_contract import check_strategy_contract
from fedsim.run.trial_rounds import rehearse_rounds
from fedsim.run.uplink_contract import check_uplink_stages
from fedsim.strategies import State
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.loop_executor import stack_single_row, unstack_first_row
from fedsim.trainer.objective import AutogradObjective, vmap_by_loop
from fedsim.trainer.rates import schedule_factor

log = logging.getLogger(__name__)

TRIAL_CLIENTS = 3  # of every replicate
MAX_EVALUATION_SECONDS = 2.0  # number of seconds up to which the user's metrics are computed twice
MAX_REMEMBERED_OUTCOMES = 256  # number of results that are cached
_outcome_cache: OrderedDict[Hashable, list[tuple[Invariance[ClientComponentsTrial], str]]] = OrderedDict()


def rehearse_run(simulation: Setup, state: State, memory: Memory) -> None:
    """Try the user-defined parts of a run.

    Raises:
        ConfigError: naming the part, what it did and what it must do.
    """
    _check_availability_repeatable(simulation)
    _check_schedule(simulation)
    _check_feature_skew(simulation)
    _try_batches_and_steps(simulation, state, memory)
    if is_user_defined(simulation.strategy) or contains_user_code(simulation.strategy):
        outcome_key = ("strategy", *_trial_key(simulation, (simulation.strategy, simulation.availability.law)))
        if outcome_key not in _outcome_cache:
            check_strategy_contract(simulation, memory)
            _outcome_cache[outcome_key] = []
    check_uplink_stages(simulation, memory)
    components = tuple(simulation.components_by_group.values())
    if any(map(contains_user_code, components)):
        outcome_key = ("rounds", *_trial_key(simulation, components), simulation.federation.seeds)
        if outcome_key not in _outcome_cache:
            rehearse_rounds(simulation)
            _outcome_cache[outcome_key] = []
    while len(_outcome_cache) > MAX_REMEMBERED_OUTCOMES:
        _outcome_cache.popitem(last=False)


def _try_batches_and_steps(simulation: Setup, state: State, memory: Memory) -> None:
    """Try shift, contamination and local rule, if one of them is user-defined."""
    steps = (simulation.shift, simulation.trainer.batches.contamination, simulation.trainer.local_rule)
    if not any(map(contains_user_code, steps)):
        return
    outcome_key = _trial_key(simulation, steps)
    if outcome_key not in _outcome_cache:
        counts = np.zeros((simulation.federation.num_replicates, simulation.federation.clients))
        counts[:, :TRIAL_CLIENTS] = 1
        cohort = simulation.federation.make_cohort(counts, np.ones_like(counts))
        if not len(cohort):
            return
        rewind = Rewind(*steps, skipped_types=SHARED_OBJECT_TYPES)  # the run starts from the state before the rehearsal
        try:
            _check_single_client_step(simulation, state, memory, cohort)
            rewind()
            _check_step_invariances(simulation, state, memory, outcome_key)
        finally:
            rewind()
    if _outcome_cache[outcome_key]:
        trial = ClientComponentsTrial(simulation, state, memory)
        for invariance, violation_text in _outcome_cache[outcome_key]:
            invariance.refuse(trial, violation_text)


def check_evaluation(simulation: Setup, state: State, memory: Memory) -> None:
    """Evaluate the initial model once, so that a user-defined module that cannot be evaluated is refused. On the run's
    own batches it may draw random numbers or change outside objects, although it did not when it was probed.

    Raises:
        ConfigError: in the words of its forward pass.
    """
    module = simulation.model.evaluation_module
    if not is_built_in(module):
        models = simulation.model.initial(simulation.federation.seeds)  # its initialisation draws random numbers
        with (
            name_forward_errors(module),
            refuse_outside_changes(module),
            simulation.model.call.refuse_global_randomness(),
        ):
            simulation.evaluator(models)
    if len(simulation.evaluator.metrics):
        _try_metrics(simulation)
    rule = simulation.trainer.local_rule
    if simulation.personal is not None and is_user_defined(rule):
        with user_code_errors(f"local={type(rule).__name__}: personal", rule):
            simulation.personal(state, memory.read_only_copy(), 0, None)


def _try_metrics(simulation: Setup) -> None:
    """Compute the metrics of the initial model twice; they must not depend on the global random streams."""
    models, start_time = simulation.model.initial(simulation.federation.seeds), time.perf_counter()
    with streams.suppress_trial_effects():
        rng_state_before = streams.global_rng_state()
        metrics = simulation.evaluator(models).metrics
        if not streams.rng_states_equal(rng_state_before, streams.global_rng_state()):
            raise ConfigError(
                f"metrics: one of {', '.join(simulation.evaluator.metrics.names)} draws from a global random stream "
                "when it is computed; a metric must be a function of outputs and targets"
            )
        if time.perf_counter() - start_time > MAX_EVALUATION_SECONDS:
            return
        repeated_metrics = simulation.evaluator(models).metrics
    for name in simulation.evaluator.metrics.columns(simulation.dataset.test_x is not None):
        if not np.array_equal(metrics[name], repeated_metrics[name], equal_nan=True):
            raise ConfigError(
                f"metrics: {name} of one model is {metrics[name][0]:g} and then {repeated_metrics[name][0]:g}; a "
                "metric must be a function of outputs and targets, and `reset` must forget what was accumulated"
            )


def _trial_key(simulation: Setup, components: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Return the key by which the result of a trial is cached: the part and all parts that it is tried with."""
    model, federation, dataset = simulation.model, simulation.federation, simulation.dataset
    other_parts = (
        repr(model.training_module),
        model.dimension,
        model.dtype,
        str(model.device),
        snapshot_key(take_snapshot(model.loss)),
    )
    of_data = (
        dataset.name,
        dataset.shape,
        dataset.classes,
        federation.num_replicates,
        federation.clients,
        simulation.rounds,
    )
    algorithms = (simulation.execution.executor, type(simulation.trainer.local_rule), type(simulation.strategy))
    return (*other_parts, *of_data, *algorithms, *(snapshot_key(take_snapshot(component)) for component in components))


def _check_step_invariances(run: Setup, state: State, memory: Memory, trial_key: Hashable) -> None:
    trial, violations = ClientComponentsTrial(run, state, memory), []
    for invariance in INVARIANCES:
        violation = invariance.violation(trial)
        if violation is not None:
            invariance.refuse(trial, violation)
            violations.append((invariance, violation))
            restriction = (
                "one at a time" if invariance is THREAD_INVARIANCE else "one at a time, on batches without padding"
            )
            log.info("%s: clients are trained %s", violation, restriction)
    _outcome_cache[trial_key] = violations


def _check_availability_repeatable(simulation: Setup) -> None:
    """Query the rounds in another order, twice, and for other seeds in between; the answers must be the same."""
    availability_process = simulation.availability
    if not contains_user_code(availability_process):
        return
    rounds = [t for t in (0, 1, 2, 7) if t < max(simulation.rounds, 1)]
    tried_copy = copy_for_trial(availability_process, simulation.federation)
    snapshot_before, rewind = (
        take_snapshot(tried_copy),
        Rewind(availability_process, tried_copy, skipped_types=SHARED_OBJECT_TYPES),
    )
    try:
        first_answers = {t: _query_availability(tried_copy, t, availability_process) for t in rounds}
        for t in rounds:  # each as the first call, as in a resumed run
            rewind()
            _check_repeatable_answers(tried_copy, availability_process, t, first_answers[t], snapshot_before)
        _check_repeated_calls(tried_copy, availability_process, first_answers, snapshot_before)
        for name in increased_attribute_names(tried_copy, snapshot_before):
            _check_query_counter(name, tried_copy, availability_process, first_answers)
    finally:
        rewind()


def _check_schedule(simulation: Setup) -> None:
    """Check a user-defined schedule: its numbers are functions of round and step, and constant within a round if it
    says so."""
    schedule, local_rule = simulation.trainer.local_rule.schedule, simulation.trainer.local_rule
    if not contains_user_code(schedule):
        return
    component_label, steps = f"schedule={type(schedule).__name__}", int(simulation.trainer.batches.longest[0])
    rounds = [t for t in (*range(10), 100, simulation.rounds - 1) if 0 <= t < max(simulation.rounds, 1)]
    round_steps = [(t, k) for t in rounds for k in sorted({0, min(1, steps - 1), steps - 1})]
    rewind = Rewind(schedule)
    with user_code_errors(component_label, schedule):
        factor_by_step = {(t, k): schedule_factor(local_rule, t, k, steps) for t, k in round_steps}
        for _ in range(2):
            for t, k in reversed(round_steps):
                if schedule_factor(local_rule, t, k, steps) != factor_by_step[t, k]:
                    raise ConfigError(
                        f"{component_label}: factor({t}, {k}) is not the same when called twice; it must be a "
                        "function of round and step, since a resumed run asks again"
                    )
    if schedule.steady and any(factor_by_step[t, k] != factor_by_step[t, 0] for t, k in round_steps):
        raise ConfigError(
            f"{component_label} says by steady=True that its factor is constant in a round, and it is not"
        )
    rewind()


def _check_feature_skew(simulation: Setup) -> None:
    """Check the feature skew of a user-defined partition: the result for a sample depends only on the sample and its
    client."""
    partition, data = simulation.components.partition, simulation.data
    if not isinstance(data, StoredClientData) or data.skew is None or not contains_user_code(partition):
        return
    rows = torch.arange(min(3, simulation.federation.num_memory_rows), device=simulation.device)
    sampled_numbers, _ = data.numbers(rows, 4)
    clients = rows % simulation.federation.clients
    x = simulation.dataset.prepare(data.gather(sampled_numbers, simulation.model.dtype)["x"], simulation.model.dtype)
    component_label = f"partition={type(partition).__name__}: its skew"
    with user_code_errors(component_label, partition):
        joint_features = data.apply_feature_skew(x.clone(), clients, sampled_numbers)
        columns = range(sampled_numbers.shape[1])
        single_features = [
            data.apply_feature_skew(
                x[:, k : k + 1][r : r + 1].clone(), clients[r : r + 1], sampled_numbers[r : r + 1, k : k + 1]
            )
            for r in range(len(rows))
            for k in columns
        ]
    if joint_features.shape != x.shape or not is_close(torch.cat(single_features).reshape(x.shape), joint_features):
        raise ConfigError(
            f"{component_label} gives a sample other features when other samples are with it; it must be a "
            "function of the sample, its client and its number"
        )


def _availability_label(process: Availability) -> str:
    return f"availability={type(process).__name__}"


def _query_availability(tried_copy: Availability, t: int, process: Availability) -> dict[str, np.ndarray]:
    """Return the answer of a copy of a user-defined process for round t; its errors name the user's class."""
    sampled_arrays = {}
    for name, call in (("probabilities", tried_copy.probabilities), ("counts", tried_copy.counts)):
        with user_code_errors(f"{_availability_label(process)}: {name}", process):
            sampled_arrays[name] = call(t)
        tried_copy.check_numbers(t, name, sampled_arrays[name])
        sampled_arrays[name] = sampled_arrays[name].copy()  # a process may return the same array in every round
    return sampled_arrays


def _check_repeated_calls(
    tried_copy: Availability,
    availability_process: Availability,
    first_answers: dict[int, dict[str, np.ndarray]],
    snapshot_before: SnapshotNode,
) -> None:
    """Refuse a process whose answers depend on earlier queries."""
    rounds = list(first_answers)
    for repetition in range(2):
        if repetition:
            _query_other_seeds(tried_copy, rounds)
        for t in (*rounds, *reversed(rounds)):
            _check_repeatable_answers(tried_copy, availability_process, t, first_answers[t], snapshot_before)


def _check_repeatable_answers(
    tried_copy: Availability,
    availability_process: Availability,
    t: int,
    first_answers: dict[str, np.ndarray],
    snapshot_before: SnapshotNode,
) -> None:
    for name, values in _query_availability(tried_copy, t, availability_process).items():
        if not np.array_equal(first_answers[name], values):
            paths = changed_attribute_paths(tried_copy, snapshot_before)
            detail = f" ({paths[0]} has changed)" if paths else ""
            raise ConfigError(
                f"{_availability_label(availability_process)}: {name}({t}) is not the same when called twice{detail}; "
                "draw by fedsim.core.rng.generator, a function of seed, purpose and round"
            )


def _check_query_counter(
    counter_name: str,
    tried_copy: Availability,
    availability_process: Availability,
    first_answers: dict[int, dict[str, np.ndarray]],
) -> None:
    """Refuse a process whose answers depend on an attribute that counts its queries. Four rounds may be too few to show
    it, as for a process that changes at the hundredth call; therefore the counter is also set to a large value."""
    present_value = vars(tried_copy)[counter_name]
    if not isinstance(present_value, (int, float)):
        return  # a process may cache an array by its round
    far_ahead = enlarged_counter(present_value)
    if far_ahead is None:  # booleans are not counters
        return
    later_answers: list[tuple[int, dict[str, np.ndarray]]] = []
    with contextlib.suppress(ConfigError):  # the process itself may refuse a count that no run reaches
        for t in first_answers:
            vars(tried_copy)[counter_name] = far_ahead
            later_answers.append((t, _query_availability(tried_copy, t, availability_process)))
    vars(tried_copy)[counter_name] = present_value
    if any(
        not np.array_equal(first_answers[t][quantity], values[quantity])
        for t, values in later_answers
        for quantity in values
    ):
        raise ConfigError(
            f"{_availability_label(availability_process)}: its results depend on {counter_name}, which changes when "
            "it is asked; draw by fedsim.core.rng.generator, a function of seed, purpose and round"
        )


def _query_other_seeds(process: Availability, rounds: Iterable[int]) -> None:
    """Query a copy as another simulation would."""
    population = process.population
    with contextlib.suppress(Exception), streams.preserve_rng_states():
        reseeded_copy = copy_for_trial(process)
        reseeded_copy.setup(dataclasses.replace(population, seeds=tuple(seed + 1 for seed in population.seeds)))
        for t in rounds:
            reseeded_copy.probabilities(t), reseeded_copy.counts(t)


def _check_single_client_step(simulation: Setup, state: State, memory: Memory, cohort: Cohort) -> None:
    """Take one step of one client as a plain loop does: shift, contamination, local rule."""
    local_rule, shift, batches = simulation.trainer.local_rule, simulation.shift, simulation.trainer.batches
    start = (
        simulation.strategy.start(state, cohort)
        if not is_user_defined(simulation.strategy)
        else cohort.broadcast(state.model)
    )
    carry = dict(start) if isinstance(start, dict) else {"params": start}
    columns = simulation.model.columns
    carry = (
        columns.expand_carry_columns(carry, cohort, memory) if columns.has_hidden_columns else carry
    ) | memory.gather(cohort)
    carry.pop(OWN_COLUMNS_ENTRY, None)  # it is part of the row
    carry |= local_rule.round_state(carry["params"])
    if local_rule.needs_round or shift.needs_round:
        carry["round"] = torch.zeros(len(cohort), dtype=torch.int64, device=carry["params"].device)
    client_carry = {name: value[0].clone() for name, value in carry.items()}
    plan = batches.plan(cohort, 0)
    chunk = plan.chunk(np.arange(1))
    if not chunk.steps[0]:
        return
    batch = unstack_first_row(chunk.batch(0, 0, 1, simulation.model.dtype))
    if shift.active:
        theta = client_carry["params"] + 0.1 * torch.sin(torch.arange(1.0, simulation.model.dimension + 1)).to(
            client_carry["params"]
        )
        deployed = theta.clone()
        shifted_batch = _transformed_batch(
            f"shift={type(shift).__name__}", shift, lambda samples: shift(samples, theta), batch
        )
        if not torch.equal(deployed, theta):
            raise ConfigError(f"shift={type(shift).__name__} writes into the parameters that it is given; use a copy")
        batch = shifted_batch | ({"deployed": theta} if local_rule.knows_deployed else {})
    contamination = batches.contamination
    if contamination.active:
        batch = _transformed_batch(
            f"contamination={type(contamination).__name__}", contamination,
            lambda samples: unstack_first_row(chunk.contaminate(stack_single_row(samples), 0, 0, 1)), batch,
        )  # fmt: skip
    if is_user_defined(local_rule):
        _check_step(simulation, client_carry, batch)


def _transformed_batch(component_label: str, component: Any, change_batch: Any, batch: NamedTensors) -> NamedTensors:
    """Return the batch that shift or contamination make of a batch, after checking that it is complete."""
    if not is_user_defined(component):
        output_batch: NamedTensors = change_batch(batch)
        return output_batch
    input_batch = {entry_name: entry_value.clone() for entry_name, entry_value in batch.items()}
    with user_code_errors(component_label, component):
        output_batch = change_batch(dict(input_batch))
    if not isinstance(output_batch, dict):
        raise ConfigError(
            f"{component_label} must return a batch, a dictionary of tensors, and returns {describe_type(output_batch)}"
        )
    for entry_name, entry_value in batch.items():
        if not torch.equal(input_batch[entry_name], entry_value):
            raise ConfigError(
                f"{component_label} writes into the batch that it is given ({entry_name}); return batch | "
                f"{{{entry_name!r}: …}}"
            )
        if entry_name not in output_batch:
            raise ConfigError(
                f"{component_label} loses {entry_name!r} of the batch; return batch | {{…}} with what it changes"
            )
        if entry_name in ("x", "y") and (output_batch[entry_name].shape, output_batch[entry_name].dtype) != (
            entry_value.shape,
            entry_value.dtype,
        ):
            raise ConfigError(
                f"{component_label} must return {entry_name} {describe_type(entry_value)}, as it was, and returns "
                f"{describe_type(output_batch[entry_name])}"
            )
    return output_batch


def _check_step(run: Setup, carry: NamedTensors, batch: NamedTensors) -> None:
    local_rule = run.trainer.local_rule
    component_label = f"local={type(local_rule).__name__}"
    objective = BufferRecordingObjective(AutogradObjective(run.model), vmap_by_loop if local_rule.batched else None)
    lr = run.trainer.base_learning_rates[0]
    carry_before, batch_before = (
        {entry_name: entry_value.clone() for entry_name, entry_value in named.items()} for named in (carry, batch)
    )
    lr_before = lr.clone()
    with user_code_errors(component_label, local_rule):
        if local_rule.batched:
            outcome: Any = objective.step(local_rule, stack_single_row(carry), stack_single_row(batch), lr[None])
        else:
            outcome = objective.step(local_rule, carry, batch, lr)
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[0], dict)):
        raise ConfigError(
            f"{component_label}: step must return the new carry and the loss, and returns {describe_type(outcome)}"
        )
    carry_after, loss = outcome
    carry_after, loss = (unstack_first_row(carry_after), loss[0]) if local_rule.batched else (carry_after, loss)
    if not isinstance(loss, Tensor) or loss.shape:
        raise ConfigError(
            f"{component_label}: the loss must be one number per client, a tensor [], and is {describe_type(loss)}"
        )
    if carry_after.keys() != carry_before.keys():
        changed_key = sorted(carry_after.keys() ^ carry_before.keys())[0]
        change_verb = "adds" if changed_key in carry_after else "loses"
        raise ConfigError(
            f"{component_label}: step {change_verb} {changed_key!r}; a carry keeps its names, and `memory` says "
            "what is remembered"
        )
    for entry_name, entry_value in carry_before.items():
        if not torch.equal(carry[entry_name], entry_value):
            raise ConfigError(
                f"{component_label}: step writes into {entry_name!r} that it is given; return a new tensor"
            )
        if (carry_after[entry_name].shape, carry_after[entry_name].dtype) != (entry_value.shape, entry_value.dtype):
            raise ConfigError(
                f"{component_label}: step must return {entry_name!r} {describe_type(entry_value)}, and returns "
                f"{describe_type(carry_after[entry_name])}"
            )
    batch_changed = batch.keys() != batch_before.keys() or any(
        not torch.equal(batch[entry_name], entry_value) for entry_name, entry_value in batch_before.items()
    )
    if batch_changed:
        raise ConfigError(f"{component_label}: step writes into the batch that it is given; use batch | {{…}}")
    if not torch.equal(lr, lr_before):
        raise ConfigError(f"{component_label}: step writes into the learning rate that it is given; use lr * …")
