"""What a user wrote, tried before a folder is made: whatever breaks its contract is refused in one sentence.

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
from fedsim.core.columns import OWN
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.rewind import Rewind
from fedsim.core.snapshot import Node, enlarged_counter, snapshot_key
from fedsim.data.samples import Stored
from fedsim.models.probe import name_forward_errors, state_outside_refused
from fedsim.models.row_model import is_built_in
from fedsim.run.contracts import (
    RUN_OBJECT_TYPES,
    Invariance,
    NamedTensors,
    changed_paths,
    close_to,
    contains_user_code,
    describe_type,
    is_user_defined,
    moved_counters,
    snapshot_of,
    trial_copy,
    user_code_errors,
)
from fedsim.run.sample_contract import INVARIANCES, THREADS, SampleTrial
from fedsim.run.setup import Setup
from fedsim.run.strategy_contract import check_strategy
from fedsim.run.trial_rounds import check_rounds
from fedsim.run.uplink_contract import check_stages
from fedsim.strategies import State
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.loop_executor import chunk_of, first_row
from fedsim.trainer.objective import PlainObjective, loop_over_rows
from fedsim.trainer.rates import factor_of

log = logging.getLogger(__name__)

TRIAL_CLIENTS = 3  # of every replicate
SECONDS_OF_EVALUATION = 2.0  # up to which the user's metrics are computed twice
MAX_REMEMBERED_OUTCOMES = 256  # outcomes that are remembered
_outcomes: OrderedDict[Hashable, list[tuple[Invariance[SampleTrial], str]]] = OrderedDict()


def dry_run(run: Setup, state: State, memory: Memory) -> None:
    """Try the parts of a run that are somebody's own.

    Raises:
        ConfigError: naming the part, what it did and what it must do.
    """
    _check_availability(run)
    _schedule(run)
    _skew(run)
    _check_batches_and_steps(run, state, memory)
    if is_user_defined(run.strategy) or contains_user_code(run.strategy):
        outcome_key = ("strategy", *_trial_key(run, (run.strategy, run.availability.law)))
        if outcome_key not in _outcomes:
            check_strategy(run, memory)
            _outcomes[outcome_key] = []
    check_stages(run, memory)
    components = tuple(run.components_by_group.values())
    if any(map(contains_user_code, components)):
        outcome_key = ("rounds", *_trial_key(run, components), run.federation.seeds)
        if outcome_key not in _outcomes:
            check_rounds(run)
            _outcomes[outcome_key] = []
    while len(_outcomes) > MAX_REMEMBERED_OUTCOMES:
        _outcomes.popitem(last=False)


def _check_batches_and_steps(run: Setup, state: State, memory: Memory) -> None:
    """Try shift, contamination and local rule, where one of them is somebody's own."""
    steps = (run.shift, run.trainer.batches.contamination, run.trainer.rule)
    if not any(map(contains_user_code, steps)):
        return
    outcome_key = _trial_key(run, steps)
    if outcome_key not in _outcomes:
        counts = np.zeros((run.federation.replicates, run.federation.clients))
        counts[:, :TRIAL_CLIENTS] = 1
        cohort = run.federation.cohort(counts, np.ones_like(counts))
        if not len(cohort):
            return
        rewind = Rewind(*steps, skip=RUN_OBJECT_TYPES)  # the run begins with what was there before it was tried
        try:
            _check_samples(run, state, memory, cohort)
            rewind()
            _check_local_steps(run, state, memory, outcome_key)
        finally:
            rewind()
    if _outcomes[outcome_key]:
        trial = SampleTrial(run, state, memory)
        for invariance, broken in _outcomes[outcome_key]:
            invariance.otherwise(trial, broken)


def try_evaluation(run: Setup, state: State, memory: Memory) -> None:
    """Evaluate the initial model once, so that a module of the user's that cannot be evaluated is refused: on the run's
    own batches it may draw random numbers, or change what lies outside of it, where it did not when it was probed.

    Raises:
        ConfigError: in the words of its forward pass.
    """
    module = run.model.evaluation_module
    if not is_built_in(module):
        models = run.model.initial(run.federation.seeds)  # whose initialisation draws random numbers
        with name_forward_errors(module), state_outside_refused(module), run.model.call.refuse_global_randomness():
            run.evaluator(models)
    if len(run.evaluator.metrics):
        _try_metrics(run)
    rule = run.trainer.rule
    if run.personal is not None and is_user_defined(rule):
        with user_code_errors(f"local={type(rule).__name__}: personal", rule):
            run.personal(state, memory.read_only(), 0, None)


def _try_metrics(run: Setup) -> None:
    """The metrics of the initial model twice: the same numbers, whatever the global streams are."""
    models, began = run.model.initial(run.federation.seeds), time.perf_counter()
    with streams.quiet_trial():
        before = streams.rng_state()
        metrics = run.evaluator(models).metrics
        if not streams.states_equal(before, streams.rng_state()):
            raise ConfigError(
                f"metrics: one of {', '.join(run.evaluator.metrics.names)} draws from a global random stream "
                "when it is computed; a metric must be a function of outputs and targets"
            )
        if time.perf_counter() - began > SECONDS_OF_EVALUATION:
            return
        repeated_metrics = run.evaluator(models).metrics
    for name in run.evaluator.metrics.columns(run.dataset.test_x is not None):
        if not np.array_equal(metrics[name], repeated_metrics[name], equal_nan=True):
            raise ConfigError(
                f"metrics: {name} of one model is {metrics[name][0]:g} and then {repeated_metrics[name][0]:g}; a "
                "metric must be a function of outputs and targets, and `reset` must forget what was accumulated"
            )


def _trial_key(run: Setup, components: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """By what a part that is tried again is known: itself, and all that it is tried with."""
    model, federation, dataset = run.model, run.federation, run.dataset
    other_parts = (
        repr(model.training_module),
        model.dimension,
        model.dtype,
        str(model.device),
        snapshot_key(snapshot_of(model.loss)),
    )
    of_data = (dataset.name, dataset.shape, dataset.classes, federation.replicates, federation.clients, run.rounds)
    algorithms = (run.execution.executor, type(run.trainer.rule), type(run.strategy))
    return (*other_parts, *of_data, *algorithms, *(snapshot_key(snapshot_of(component)) for component in components))


def _check_local_steps(run: Setup, state: State, memory: Memory, trial_key: Hashable) -> None:
    trial, violations = SampleTrial(run, state, memory), []
    for invariance in INVARIANCES:
        violation = invariance.violation(trial)
        if violation is not None:
            invariance.otherwise(trial, violation)
            violations.append((invariance, violation))
            restriction = "one at a time" if invariance is THREADS else "one at a time, on batches without padding"
            log.info("%s: clients are trained %s", violation, restriction)
    _outcomes[trial_key] = violations


def _check_availability(run: Setup) -> None:
    """Rounds in another order, twice, and for other seeds in between: the same answers."""
    process = run.availability
    if not contains_user_code(process):
        return
    rounds = [t for t in (0, 1, 2, 7) if t < max(run.rounds, 1)]
    tried_copy = trial_copy(process, run.federation)
    snapshot_before, rewind = snapshot_of(tried_copy), Rewind(process, tried_copy, skip=RUN_OBJECT_TYPES)
    try:
        first = {t: _sampled_round(tried_copy, t, process) for t in rounds}
        for t in rounds:  # each as the first that is asked for, as in a resumed run
            rewind()
            _check_same_answers(tried_copy, process, t, first[t], snapshot_before)
        _check_asked_again(tried_copy, process, first, snapshot_before)
        for name in moved_counters(tried_copy, snapshot_before):
            _check_counter(name, tried_copy, process, first)
    finally:
        rewind()


def _schedule(run: Setup) -> None:
    """A schedule of somebody's own: numbers that are functions of round and step, the same in a round if it says so."""
    schedule, rule = run.trainer.rule.schedule, run.trainer.rule
    if not contains_user_code(schedule):
        return
    label, steps = f"schedule={type(schedule).__name__}", int(run.trainer.batches.longest[0])
    rounds = [t for t in (*range(10), 100, run.rounds - 1) if 0 <= t < max(run.rounds, 1)]
    round_steps = [(t, k) for t in rounds for k in sorted({0, min(1, steps - 1), steps - 1})]
    rewind = Rewind(schedule)
    with user_code_errors(label, schedule):
        factors = {(t, k): factor_of(rule, t, k, steps) for t, k in round_steps}
        for _ in range(2):
            for t, k in reversed(round_steps):
                if factor_of(rule, t, k, steps) != factors[t, k]:
                    raise ConfigError(
                        f"{label}: factor({t}, {k}) is not the same when asked twice; it must be a function of "
                        "round and step, since a resumed run asks anew"
                    )
    if schedule.steady and any(factors[t, k] != factors[t, 0] for t, k in round_steps):
        raise ConfigError(f"{label} says by steady=True that its factor is constant in a round, and it is not")
    rewind()


def _skew(run: Setup) -> None:
    """A feature skew of somebody's own partition: what becomes of a sample depends on it and its client alone."""
    partition, data = run.components.partition, run.data
    if not isinstance(data, Stored) or data.skew is None or not contains_user_code(partition):
        return
    rows = torch.arange(min(3, run.federation.rows), device=run.device)
    numbers, _ = data.numbers(rows, 4)
    clients = rows % run.federation.clients
    x = run.dataset.prepare(data.gather(numbers, run.model.dtype)["x"], run.model.dtype)
    label = f"partition={type(partition).__name__}: its skew"
    with user_code_errors(label, partition):
        joint_features = data.skewed(x.clone(), clients, numbers)
        columns = range(numbers.shape[1])
        single_features = [
            data.skewed(x[:, k : k + 1][r : r + 1].clone(), clients[r : r + 1], numbers[r : r + 1, k : k + 1])
            for r in range(len(rows))
            for k in columns
        ]
    if joint_features.shape != x.shape or not close_to(torch.cat(single_features).reshape(x.shape), joint_features):
        raise ConfigError(
            f"{label} gives a sample other features when other samples are with it; it must be a function of the "
            "sample, its client and its number"
        )


def _process_label(process: Availability) -> str:
    return f"availability={type(process).__name__}"


def _sampled_round(tried_copy: Availability, t: int, process: Availability) -> dict[str, np.ndarray]:
    """What a copy of the user's process says of round t; its errors are the user's, and name the user's class."""
    sampled = {}
    for name, call in (("probabilities", tried_copy.probabilities), ("counts", tried_copy.counts)):
        with user_code_errors(f"{_process_label(process)}: {name}", process):
            sampled[name] = call(t)
        tried_copy.check_numbers(t, name, sampled[name])
        sampled[name] = sampled[name].copy()  # a process may hand out the same array in every round
    return sampled


def _check_asked_again(
    tried_copy: Availability, process: Availability, first: dict[int, dict[str, np.ndarray]], before: Node
) -> None:
    """Refuse a process whose answers depend on what it was asked before."""
    rounds = list(first)
    for repetition in range(2):
        if repetition:
            _ask_for_other_seeds(tried_copy, rounds)
        for t in (*rounds, *reversed(rounds)):
            _check_same_answers(tried_copy, process, t, first[t], before)


def _check_same_answers(
    tried_copy: Availability, process: Availability, t: int, first: dict[str, np.ndarray], before: Node
) -> None:
    for name, values in _sampled_round(tried_copy, t, process).items():
        if not np.array_equal(first[name], values):
            paths = changed_paths(tried_copy, before)
            detail = f" ({paths[0]} has changed)" if paths else ""
            raise ConfigError(
                f"{_process_label(process)}: {name}({t}) is not the same when asked twice{detail}; draw by "
                "fedsim.core.rng.generator, a function of seed, purpose and round"
            )


def _check_counter(
    name: str, tried_copy: Availability, process: Availability, first: dict[int, dict[str, np.ndarray]]
) -> None:
    """Refuse a process whose answers follow an attribute that counts how often it was asked. Four rounds may be too few
    for that to show, as in a process that changes at the hundredth call; the count is set far ahead instead."""
    present_value = vars(tried_copy)[name]
    if not isinstance(present_value, (int, float)):
        return  # an array may be remembered by its round
    far_ahead = enlarged_counter(present_value)
    if far_ahead is None:  # True and False count nothing
        return
    later_answers: list[tuple[int, dict[str, np.ndarray]]] = []
    with contextlib.suppress(ConfigError):  # a count that no run reaches may be refused by the process itself
        for t in first:
            vars(tried_copy)[name] = far_ahead
            later_answers.append((t, _sampled_round(tried_copy, t, process)))
    vars(tried_copy)[name] = present_value
    if any(
        not np.array_equal(first[t][quantity], values[quantity]) for t, values in later_answers for quantity in values
    ):
        raise ConfigError(
            f"{_process_label(process)}: its answers depend on {name}, which changes when it is asked; draw by "
            "fedsim.core.rng.generator, a function of seed, purpose and round"
        )


def _ask_for_other_seeds(process: Availability, rounds: Iterable[int]) -> None:
    """What another simulation does with a copy."""
    population = process.population
    with contextlib.suppress(Exception), streams.restore_states():
        reseeded_copy = trial_copy(process)
        reseeded_copy.setup(dataclasses.replace(population, seeds=tuple(seed + 1 for seed in population.seeds)))
        for t in rounds:
            reseeded_copy.probabilities(t), reseeded_copy.counts(t)


def _check_samples(run: Setup, state: State, memory: Memory, cohort: Cohort) -> None:
    """One step of one client, as a loop takes it: shift, contamination, local rule."""
    rule, shift, batches = run.trainer.rule, run.shift, run.trainer.batches
    start = run.strategy.start(state, cohort) if not is_user_defined(run.strategy) else cohort.broadcast(state.model)
    carry = dict(start) if isinstance(start, dict) else {"params": start}
    columns = run.model.columns
    carry = (columns.expand(carry, cohort, memory) if columns.is_divided else carry) | memory.gather(cohort)
    carry.pop(OWN, None)  # it is part of the row
    carry |= rule.round_state(carry["params"])
    if rule.knows_round or shift.knows_round:
        carry["round"] = torch.zeros(len(cohort), dtype=torch.int64, device=carry["params"].device)
    client_carry = {name: value[0].clone() for name, value in carry.items()}
    plan = batches.plan(cohort, 0)
    chunk = plan.chunk(np.arange(1))
    if not chunk.steps[0]:
        return
    batch = first_row(chunk.batch(0, 0, 1, run.model.dtype))
    if shift.active:
        theta = client_carry["params"] + 0.1 * torch.sin(torch.arange(1.0, run.model.dimension + 1)).to(
            client_carry["params"]
        )
        deployed = theta.clone()
        shifted_batch = _changed_batch(
            f"shift={type(shift).__name__}", shift, lambda samples: shift(samples, theta), batch
        )
        if not torch.equal(deployed, theta):
            raise ConfigError(f"shift={type(shift).__name__} writes into the parameters that it is given; use a copy")
        batch = shifted_batch | ({"deployed": theta} if rule.knows_deployed else {})
    contamination = batches.contamination
    if contamination.active:
        batch = _changed_batch(
            f"contamination={type(contamination).__name__}", contamination,
            lambda samples: first_row(chunk.contaminate(chunk_of(samples), 0, 0, 1)), batch,
        )  # fmt: skip
    if is_user_defined(rule):
        _check_step(run, client_carry, batch)


def _changed_batch(label: str, component: Any, change_batch: Any, batch: NamedTensors) -> NamedTensors:
    """The batch that shift or contamination make of one, which must be whole."""
    if not is_user_defined(component):
        output_batch: NamedTensors = change_batch(batch)
        return output_batch
    input_batch = {name: value.clone() for name, value in batch.items()}
    with user_code_errors(label, component):
        output_batch = change_batch(dict(input_batch))
    if not isinstance(output_batch, dict):
        raise ConfigError(
            f"{label} must return a batch, a dictionary of tensors, and returns {describe_type(output_batch)}"
        )
    for name, value in batch.items():
        if not torch.equal(input_batch[name], value):
            raise ConfigError(
                f"{label} writes into the batch that it is given ({name}); return batch | {{{name!r}: …}}"
            )
        if name not in output_batch:
            raise ConfigError(f"{label} loses {name!r} of the batch; return batch | {{…}} with what it changes")
        if name in ("x", "y") and (output_batch[name].shape, output_batch[name].dtype) != (value.shape, value.dtype):
            raise ConfigError(
                f"{label} must return {name} {describe_type(value)}, as it was, and returns "
                f"{describe_type(output_batch[name])}"
            )
    return output_batch


def _check_step(run: Setup, carry: NamedTensors, batch: NamedTensors) -> None:
    rule = run.trainer.rule
    label = f"local={type(rule).__name__}"
    objective = BufferRecordingObjective(PlainObjective(run.model), loop_over_rows if rule.batched else None)
    lr = run.trainer.rates[0]
    before, batch_before = ({name: value.clone() for name, value in named.items()} for named in (carry, batch))
    lr_before = lr.clone()
    with user_code_errors(label, rule):
        if rule.batched:
            outcome: Any = objective.step(rule, chunk_of(carry), chunk_of(batch), lr[None])
        else:
            outcome = objective.step(rule, carry, batch, lr)
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[0], dict)):
        raise ConfigError(f"{label}: step must return the new carry and the loss, and returns {describe_type(outcome)}")
    after, loss = outcome
    after, loss = (first_row(after), loss[0]) if rule.batched else (after, loss)
    if not isinstance(loss, Tensor) or loss.shape:
        raise ConfigError(f"{label}: the loss must be one number per client, a tensor [], and is {describe_type(loss)}")
    if after.keys() != before.keys():
        changed_key = sorted(after.keys() ^ before.keys())[0]
        verb = "adds" if changed_key in after else "loses"
        raise ConfigError(
            f"{label}: step {verb} {changed_key!r}; a carry keeps its names, and `memory` says what is remembered"
        )
    for name, value in before.items():
        if not torch.equal(carry[name], value):
            raise ConfigError(f"{label}: step writes into {name!r} that it is given; return a new tensor")
        if (after[name].shape, after[name].dtype) != (value.shape, value.dtype):
            raise ConfigError(
                f"{label}: step must return {name!r} {describe_type(value)}, and returns {describe_type(after[name])}"
            )
    changed = batch.keys() != batch_before.keys() or any(
        not torch.equal(batch[name], value) for name, value in batch_before.items()
    )
    if changed:
        raise ConfigError(f"{label}: step writes into the batch that it is given; use batch | {{…}}")
    if not torch.equal(lr, lr_before):
        raise ConfigError(f"{label}: step writes into the learning rate that it is given; use lr * …")
