"""The contract of user-defined shifts, contaminations and local rules, tried on synthetic batches of three clients.

Clients hold 2 to 7 samples there and take two or three steps, so that batches must be padded where clients go together.
One client at a time, on batches as they are, is what is right; all else is compared with it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core import rng
from fedsim.core.columns import OWN_COLUMNS_ENTRY
from fedsim.core.memory import Memory
from fedsim.core.rewind import Rewind
from fedsim.core.snapshot import enlarged_counter
from fedsim.data.contamination import Contamination
from fedsim.data.samples import Batch
from fedsim.data.samples.client_data import BatchKeys
from fedsim.local.rule import Carry
from fedsim.models.randomness import GlobalDrawDetector
from fedsim.run.contracts import (
    SHARED_OBJECT_TYPES,
    Invariance,
    NamedTensors,
    changed_attribute_paths,
    contains_user_code,
    copy_for_trial,
    first_differing_name,
    increased_attribute_names,
    is_close,
    is_user_defined,
    raise_violation,
    take_snapshot,
    user_code_errors,
)
from fedsim.run.setup import Setup
from fedsim.shift.shift import PER_CLIENT_ENTRIES
from fedsim.strategies import State
from fedsim.trainer.executors import make_executor
from fedsim.trainer.loop_executor import LoopExecutor

log = logging.getLogger(__name__)

TRIAL_BATCH_SIZES = ((7, 2, 5), (2, 7, 3), (3, 2, 0))  # number of samples of every client's batch at each of its steps
SINGLE_SAMPLE_BATCH_SIZES = ((7, 2, 5), (1, 7, 3), (3, 1, 0))  # batches of one sample, if the run has them
MAX_REPETITION_SECONDS = 0.2  # in which steps are repeated where attributes change
TRIAL_STEPS = (3, 3, 2)
TRIAL_CLIENT_ORDERS = [(1, (1,)), (2, (2, 0)), (0, (2, 0, 1)), (5, (0,)), (0, (1, 2, 0))]  # rounds, and clients in each
MAX_OPTIONAL_CHECK_SECONDS = 1.0  # number of seconds after which optional checks of slow models are skipped


class SyntheticChunk:
    """Batches of some of the clients, with the interface of `fedsim.data.samples.Chunk`."""

    def __init__(self, trial: ClientComponentsTrial, rows: list[int], t: int) -> None:
        self._trial, self._rows = trial, rows
        self.steps = np.array([TRIAL_STEPS[row] for row in rows])
        self.sizes = np.array([trial.batch_sizes[row] for row in rows])
        row_selection = torch.tensor(rows, device=trial.device)
        self.rows, self.clients = trial.rows[row_selection], trial.clients[row_selection]
        host = self.rows.cpu().numpy()
        seeds = np.array(trial.simulation.federation.seeds, dtype=np.int64)[host // trial.simulation.federation.clients]
        self.keys = BatchKeys(seeds, host % trial.simulation.federation.clients, trial.device, t)

    def active_row_counts(self) -> list[int]:
        return [int((self.steps > step).sum()) for step in range(int(self.steps.max()))]

    def batch(self, step: int, first_row: int, stop: int, dtype: torch.dtype) -> Batch:
        row_selection = slice(first_row, stop)
        batch_sizes = self.sizes[row_selection, step]
        batch_width = int(batch_sizes.max())
        client_samples = [self._trial.samples(row, step, batch_width) for row in self._rows[row_selection]]
        batch = {name: torch.stack([samples[name] for samples in client_samples]) for name in client_samples[0]}
        batch["client"], batch["row"] = self.clients[row_selection], self.rows[row_selection]
        if self._trial.simulation.trainer.batches.keyed:
            batch["key"] = self.keys.step_keys(rng.Purpose.DROPOUT, step, row_selection)
        if int(batch_sizes.min()) < batch_width:
            slot = torch.arange(batch_width, device=self.rows.device)
            batch["weight"] = (slot < torch.as_tensor(batch_sizes, device=slot.device)[:, None]).to(dtype)
        return batch

    def contaminate(self, batch: Batch, step: int, first_row: int, stop: int) -> Batch:
        contamination = self._trial.contamination.at(int(self.keys.t))
        if not contamination.active:
            return batch
        return contamination(batch, self.keys.step_keys(rng.Purpose.CONTAMINATION, step, slice(first_row, stop)))


class ClientComponentsTrial:
    """Copies of a run's shift, contamination and local rule, and three synthetic clients to try them on.

    Args:
        simulation, state, memory: before the first round.
    """

    def __init__(self, simulation: Setup, state: State, memory: Memory) -> None:
        self.simulation, self.device, self.dtype = simulation, simulation.device, simulation.model.dtype
        self.start_time = time.process_time()
        trainer = simulation.trainer
        run_parts = (trainer.local_rule, trainer.shift, trainer.batches.contamination)
        self.components = copy_for_trial(
            run_parts, simulation.federation, simulation.data, simulation.model, simulation.dataset
        )
        self.local_rule, self.shift, self.contamination = self.components
        self.carry, self.rows, self.deployed_models = self._make_trial_carry(state, memory)
        self.clients = self.rows % simulation.federation.clients
        self.batch_sizes = SINGLE_SAMPLE_BATCH_SIZES if _has_single_sample_steps(simulation) else TRIAL_BATCH_SIZES
        width = simulation.data.width(7)
        fixed_samples = simulation.data.fixed_samples(self.rows, width, self.dtype, rng.Purpose.EVALUATION)
        self._fixed_samples = {name: value for name, value in fixed_samples.items() if name not in ("client", "row")}
        self.uses_global_stream = False
        self.reference_results: list[tuple[NamedTensors, Tensor]] = []  # of every client alone, in round 0
        self.snapshots_before = [take_snapshot(component) for component in self.components]
        self.rewind = Rewind(*self.components, skipped_types=SHARED_OBJECT_TYPES)

    def _make_trial_carry(self, state: State, memory: Memory) -> tuple[Carry, Tensor, Tensor | None]:
        """Return the start rows of three clients, their numbers, and the deployed models that their data react to."""
        simulation = self.simulation
        federation, columns, shift, local_rule = (
            simulation.federation,
            simulation.model.columns,
            self.shift,
            self.local_rule,
        )
        memory = Memory({name: value.clone() for name, value in memory.clients.items()}, {
            name: value.clone() for name, value in memory.server.items()
        })  # fmt: skip
        counts = np.zeros((federation.num_replicates, federation.clients))
        local_counts = counts[:, federation.ranks.client_slice].reshape(-1)
        local_counts[: min(3, len(local_counts))] = 1
        counts[:, federation.ranks.client_slice] = local_counts.reshape(federation.num_replicates, -1)
        cohort = federation.make_cohort(counts, np.ones_like(counts))
        start = (
            simulation.strategy.start(state, cohort)
            if not is_user_defined(simulation.strategy)
            else cohort.broadcast(state.model)
        )
        carry = dict(start) if isinstance(start, dict) else {"params": start}
        carry = (
            columns.expand_carry_columns(carry, cohort, memory) if columns.has_hidden_columns else carry
        ) | memory.gather(cohort)
        carry.pop(OWN_COLUMNS_ENTRY, None)  # it is part of the row
        carry |= local_rule.round_state(carry["params"])
        if local_rule.needs_round or shift.needs_round:
            carry["round"] = torch.zeros(len(cohort), dtype=torch.int64, device=self.device)
        deployed_rows = None
        if shift.active:
            server_model = columns.full_server_rows(state.model, memory, federation)
            deployed_models = shift.deployed(memory.server, server_model, 0)
            deployed_rows = None if deployed_models is None else deployed_models[cohort.replicate_index]
        row_index = torch.arange(3, device=self.device) % len(cohort)
        carry = {name: value[row_index].clone() for name, value in carry.items()}
        # clients at three different models, since a first model may be zero
        trained = carry["params"][:, : simulation.model.trained]
        trained += 0.05 * torch.sin(torch.arange(1.0, trained.numel() + 1)).reshape(trained.shape).to(trained)
        return (
            carry,
            cohort.virtual_client_index[row_index],
            None if deployed_rows is None else deployed_rows[row_index].clone(),
        )

    def samples(self, row: int, step: int, width: int) -> Batch:
        """Return [width, …] samples of a client: its own in turn, and beyond its batch size at this step those of
        others."""
        fixed_samples, batch_sizes = self._fixed_samples, self.batch_sizes[row][step]
        weight = fixed_samples.get("weight")
        sample_indices = (
            torch.arange(len(fixed_samples["x"][row]), device=self.device)
            if weight is None
            else weight[row].nonzero()[:, 0]
        )
        slot = torch.arange(width, device=self.device)
        own_indices = sample_indices[(slot + 2 * step) % len(sample_indices)]
        other_client, any_sample = (row + 1) % 3, (slot + 1) % len(fixed_samples["x"][0])
        real_mask = slot < batch_sizes
        batch = {}
        for name, value in fixed_samples.items():
            if name == "weight":
                continue
            own_values, other_values = value[row][own_indices], value[other_client][any_sample]
            batch[name] = torch.where(real_mask.reshape(-1, *[1] * (own_values.dim() - 1)), own_values, other_values)
        return batch

    def label(self) -> str:
        """The names of the user-defined parts among those that are tried."""
        labelled_parts = zip(("local", "shift", "contamination"), self.components, strict=True)
        return " and ".join(
            f"{kind}={type(component).__name__}" for kind, component in labelled_parts if contains_user_code(component)
        )

    def first_user_component(self) -> Any:
        """One of the user-defined parts, for `user_code_errors`."""
        return next((component for component in self.components if is_user_defined(component)), self)

    def learning_rates(self, rows: list[int]) -> Tensor:
        replicate = self.rows[rows] // self.simulation.federation.clients
        return self.simulation.trainer.base_learning_rates[replicate].expand(max(TRIAL_STEPS), len(rows)).clone()

    def local_steps(
        self, executor: Any, rows: list[int], t: int, uses_shift: bool = False
    ) -> tuple[NamedTensors, Tensor]:
        """Return carries and losses of some of the clients after their steps; `uses_shift`: from other models."""
        carry = {name: value[rows].clone() for name, value in self.carry.items()}
        carry["params"] += 0.5 if uses_shift else 0.0
        if "round" in carry:
            carry["round"] = torch.full_like(carry["round"], t)
        deployed = None if self.deployed_models is None else self.deployed_models[rows].clone()
        result: tuple[NamedTensors, Tensor] = executor.run(
            SyntheticChunk(self, rows, t), carry, self.learning_rates(rows), deployed
        )
        return result

    def loop_executor(self) -> LoopExecutor:
        return LoopExecutor(self.local_rule, self.simulation.model, self.shift, 1, self.contamination.active)

    def is_over_time(self) -> bool:
        return time.process_time() - self.start_time > MAX_OPTIONAL_CHECK_SECONDS


def _has_single_sample_steps(run: Setup) -> bool:
    """Return whether a client of the run takes steps on one sample."""
    sizes, size = run.federation.num_samples, run.trainer.batches.local_work.batch_size
    return size == 1 or bool((sizes == 1).any()) or (size is not None and bool((sizes % size == 1).any()))


def _client_order_violation(trial: ClientComponentsTrial) -> str | None:
    """Compute the same clients in another order, with other rounds in between, which shows what is stored in
    attributes."""
    with torch.no_grad(), user_code_errors(trial.label(), trial.first_user_component()):
        loop_executor = trial.loop_executor()
        with GlobalDrawDetector() as draws:
            trial.reference_results = [trial.local_steps(loop_executor, [row], 0) for row in range(3)]
        trial.uses_global_stream = draws.draws_seen
        if any(
            changed_attribute_paths(component, snapshot_before)
            for component, snapshot_before in zip(trial.components, trial.snapshots_before, strict=True)
        ):
            trial.rewind()
            trial.local_steps(trial.loop_executor(), [0], 0, uses_shift=True)  # what remains of a client's first model
            name = _reference_difference_text(trial, 0, *trial.local_steps(trial.loop_executor(), [0], 0))
            if name is not None:
                return _remembered_state_text(trial, name)
            for row in (2, 1):  # a value computed only once, from the first batch, would depend on the first client
                trial.rewind()
                name = _reference_difference_text(trial, row, *trial.local_steps(trial.loop_executor(), [row], 0))
                if name is not None:
                    return _remembered_state_text(trial, name)
        for t, order in [(0, (2, 0, 1))] if trial.is_over_time() else TRIAL_CLIENT_ORDERS:
            for row in order:
                carry, loss = trial.local_steps(loop_executor, [row], t)
                name = _reference_difference_text(trial, row, carry, loss) if t == 0 else None
                if name is not None:
                    return _remembered_state_text(trial, name)
    return _delayed_state_effect(trial, loop_executor)


def _reference_difference_text(trial: ClientComponentsTrial, row: int, carry: NamedTensors, loss: Tensor) -> str | None:
    """Return the differences from the client's steps in `trial.exact`."""
    right, right_loss = trial.reference_results[row]
    return first_differing_name(right | {"loss": right_loss}, carry | {"loss": loss})


def _remembered_state_text(trial: ClientComponentsTrial, entry_name: str) -> str:
    labelled_parts = zip(("local", "shift", "contamination"), trial.components, trial.snapshots_before, strict=True)
    for component_kind, component, snapshot_before in labelled_parts:
        paths = changed_attribute_paths(component, snapshot_before)
        if paths and (is_user_defined(component) or contains_user_code(component)):
            remedies = {"local": "return it from `memory`", "shift": "return it from `memory`"}
            return (
                f"{component_kind}={type(component).__name__} remembers in {paths[0]} what it computed before, "
                "which clients share "
                f"and no checkpoint holds; {remedies.get(component_kind, 'draw it from the keys that it is given')}"
            )
    return (
        f"{trial.label()} gives another {entry_name!r} when asked again for the same client, round and batch; "
        "it must be a function of what it is given"
    )


def _delayed_state_effect(trial: ClientComponentsTrial, executor: LoopExecutor) -> str | None:
    """Check state that changed without any effect so far: whether it has one once it has changed a thousand times as
    much."""
    for component_kind, component, snapshot_before in zip(
        ("local", "shift", "contamination"), trial.components, trial.snapshots_before, strict=True
    ):
        for counter_name in increased_attribute_names(component, snapshot_before):
            original_value, enlarged_value = (
                vars(component)[counter_name],
                enlarged_counter(vars(component)[counter_name]),
            )
            if enlarged_value is None or trial.is_over_time():
                continue
            vars(component)[counter_name] = enlarged_value
            with contextlib.suppress(Exception), torch.no_grad():
                carry, loss = trial.local_steps(executor, [0], 0)
                if _reference_difference_text(trial, 0, carry, loss) is not None:
                    return (
                        f"{component_kind}={type(component).__name__} counts in {counter_name} what later steps "
                        "depend on, which clients share and no checkpoint holds; return it from `memory`"
                    )
            vars(component)[counter_name] = original_value
    state_changes = any(
        changed_attribute_paths(component, snapshot_before)
        for component, snapshot_before in zip(trial.components, trial.snapshots_before, strict=True)
    )
    end_time = time.process_time() + MAX_REPETITION_SECONDS
    while state_changes and time.process_time() < end_time:  # a counter may take effect at its hundredth call
        carry, loss = trial.local_steps(executor, [0], 0)
        changed_name = _reference_difference_text(trial, 0, carry, loss)
        if changed_name is not None:
            return _remembered_state_text(trial, changed_name)
    return None


def _check_shift_padding(trial: ClientComponentsTrial) -> str | None:
    """Apply a shift to batches of 2 and of 7 samples: alone, padded, and of several clients at once."""
    shift = trial.shift
    if not shift.active or not contains_user_code(shift):
        return None
    component_label = f"shift={type(shift).__name__}"
    theta = trial.carry["params"] if trial.deployed_models is None else shift.newest_deployment(trial.deployed_models)
    chunk = SyntheticChunk(trial, [0, 1, 2], 0)
    for step in range(2):
        joint_batch = chunk.batch(step, 0, 3, trial.dtype)
        for shift_function in (shift, shift.respond_differentiably):
            with user_code_errors(component_label, shift), torch.no_grad():
                single_results = [
                    shift_function(
                        {k: v[0] for k, v in chunk.batch(step, row, row + 1, trial.dtype).items()}, theta[row]
                    )
                    for row in range(3)
                ]
            try:
                with torch.no_grad():
                    joint_result: NamedTensors = vmap(shift_function)(joint_batch, theta)
            except Exception as error:
                return f"{component_label} cannot be vmapped ({_error_text(error)})"
            if any(
                _batches_differ(single_result, {k: v[row] for k, v in joint_result.items()})
                for row, single_result in enumerate(single_results)
            ):
                return f"{component_label} gives other samples where a batch is padded or clients go together"
    return None


def _batches_differ(unpadded_batch: NamedTensors, padded_batch: NamedTensors) -> bool:
    """Return how a batch differs from another one, except for padding, which must keep the weight 0."""
    batch_length = len(unpadded_batch["x"])
    for name, value in unpadded_batch.items():
        if name in PER_CLIENT_ENTRIES or name == "weight" or name not in padded_batch:
            continue
        padded_value = (
            padded_batch[name][:batch_length] if value.dim() and len(value) == batch_length else padded_batch[name]
        )
        if not is_close(padded_value, value):
            return True
    weight = padded_batch.get("weight", torch.ones(1))
    expected_weight = unpadded_batch.get("weight", torch.ones_like(weight[:batch_length]))
    return not is_close(weight[:batch_length] if len(weight) > 1 else expected_weight, expected_weight) or bool(
        (weight[batch_length:] != 0).any()
    )


def _check_padded_contamination(trial: ClientComponentsTrial) -> str | None:
    """Apply a contamination to several clients at once, padded, and to each alone."""
    contamination: Contamination = trial.contamination
    if not contamination.active or not contains_user_code(contamination):
        return None
    component_label = f"contamination={type(contamination).__name__}"
    chunk = SyntheticChunk(trial, [0, 1, 2], 0)
    for step in range(2):
        with user_code_errors(component_label, contamination), torch.no_grad():
            single_results = [
                chunk.contaminate(chunk.batch(step, row, row + 1, trial.dtype), step, row, row + 1) for row in range(3)
            ]
        try:
            with torch.no_grad():
                joint_result = chunk.contaminate(chunk.batch(step, 0, 3, trial.dtype), step, 0, 3)
        except Exception as error:
            return f"{component_label} takes batches of one client alone ({_error_text(error)})"
        for row, single_result in enumerate(single_results):
            if _batches_differ(
                {k: v[0] for k, v in single_result.items()}, {k: v[row] for k, v in joint_result.items()}
            ):
                return f"{component_label} gives other samples where a batch is padded or clients go together"
    return None


def _check_executors(trial: ClientComponentsTrial) -> str | None:
    """Take local steps of all three clients together, by the executors that the run may use."""
    trainer = trial.simulation.trainer
    for choice in trainer.candidate_choices:
        if choice.executor == "loop":
            continue
        candidate_executor = make_executor(
            choice, trial.local_rule, trial.simulation.model, trial.shift, trial.contamination.active
        )
        try:
            with torch.no_grad():
                carry, loss = trial.local_steps(candidate_executor, [0, 1, 2], 0)
        except Exception as error:
            return f"{trial.label()} cannot be run for several clients at once ({_error_text(error)})"
        for row, (right, right_loss) in enumerate(trial.reference_results):
            start = {name: value[row] for name, value in trial.carry.items()}
            for name, value in right.items():
                step = float((value[0] - start[name]).abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0
                if not is_close(carry[name][row], value[0], step if value.is_floating_point() else None):
                    return f"{trial.label()} gives another {name!r} where a batch is padded or clients go together"
            if not is_close(loss[row], right_loss[0]):
                return f"{trial.label()} gives another loss where a batch is padded or clients go together"
    return None


def _error_text(error: Exception) -> str:
    """Return the first sentence of an error of PyTorch."""
    return " ".join((str(error) or type(error).__name__).split()).partition(". ")[0].rstrip(".")[:120]


def _require_loop_executor(trial: ClientComponentsTrial, reason: str) -> None:
    """Choose the execution that holds where padding does not: one client after another, on unpadded batches."""
    for trainers in trial.simulation.trainer_factories:
        trainers.restrict_to_loop(reason)


def _use_unpadded_shift(trial: ClientComponentsTrial, reason: str) -> None:
    _require_loop_executor(trial, reason)
    for trainers in trial.simulation.trainer_factories:
        trainers.shift.runs_unpadded = True


def _global_stream_violation(trial: ClientComponentsTrial) -> str | None:
    """Compute two clients in two threads, which shows a part that seeds and restores the global random stream."""
    return f"{trial.label()} uses PyTorch's global random stream for a while" if trial.uses_global_stream else None


def _restrict_to_one_worker(trial: ClientComponentsTrial, reason: str) -> None:
    for trainers in trial.simulation.trainer_factories:
        trainers.restrict_to_one_thread()


ORDER_INVARIANCE = Invariance("the order of clients and rounds", _client_order_violation, raise_violation)
SHIFT_PADDING_INVARIANCE = Invariance("padding and other clients of a shift", _check_shift_padding, _use_unpadded_shift)
CONTAMINATION_PADDING_INVARIANCE = Invariance(
    "padding and other clients of a contamination", _check_padded_contamination, _require_loop_executor
)
EXECUTOR_INVARIANCE = Invariance("padding and other clients of local steps", _check_executors, _require_loop_executor)
THREAD_INVARIANCE = Invariance(
    "two threads", _global_stream_violation, _restrict_to_one_worker
)  # last: restricting the executor to the loop creates new executors
INVARIANCES = (
    ORDER_INVARIANCE,
    SHIFT_PADDING_INVARIANCE,
    CONTAMINATION_PADDING_INVARIANCE,
    EXECUTOR_INVARIANCE,
    THREAD_INVARIANCE,
)
