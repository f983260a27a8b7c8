"""Takes all active rows through a round's local steps, chunk by chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedsim.core import checks, streams
from fedsim.core.columns import OWN_COLUMNS_ENTRY
from fedsim.core.errors import ConfigError, DivergenceError, RunError, first_message_line
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.numerical import is_numerical_error
from fedsim.core.report import Report
from fedsim.data.samples import Batches, Chunk
from fedsim.local import LocalRule
from fedsim.local.rule import Carry
from fedsim.models import StatelessModel
from fedsim.models.precision import tf32_products
from fedsim.models.row_model import is_built_in
from fedsim.shift import Shift
from fedsim.trainer.agreement import cached_agreement
from fedsim.trainer.batch_sizes import check_batch_memory
from fedsim.trainer.bfloat16 import warn_if_precision_slower
from fedsim.trainer.choose import ExecutorChoice, candidate_executors
from fedsim.trainer.device_memory import is_out_of_memory, single_client_memory_error
from fedsim.trainer.execution import Execution
from fedsim.trainer.executors import Executor, make_executor
from fedsim.trainer.failing_rows import fill_failed_rows_with_nan, run_without_failing_rows
from fedsim.trainer.fused_executor import FUSED_EXECUTORS, FusedExecutor
from fedsim.trainer.local_task import LocalResult, LocalTask, TaskGenerator, is_row_finite, run_to_completion
from fedsim.trainer.objective import check_per_sample_gradients
from fedsim.trainer.rates import learning_rates_of_steps, rate_and_step_totals
from fedsim.trainer.trial import TimingRows, fastest_executor

log = logging.getLogger(__name__)

AcceptRows = Callable[[int, Cohort, Tensor], "np.ndarray | None"]


class Trainer:
    """Runs the rule on the rows of a cohort. Results do not depend on executor, chunk or workers (to rounding).

    Args:
        local_rule: the local rule.
        model: the model its rows parameterise.
        shift: how data react to the deployed model.
        batches: where samples come from.
        execution: how it is computed, see `fedsim.trainer.choose`.
        executor_cache: executors that were found the quickest, by the rule's name; what this trainer finds goes there.
    """

    def __init__(
        self,
        local_rule: LocalRule,
        model: StatelessModel,
        shift: Shift,
        batches: Batches,
        execution: Execution | None = None,
        executor_cache: dict[str, str] | None = None,
    ) -> None:
        self.local_rule, self.model, self.shift, self.batches = local_rule, model, shift, batches
        self.execution = execution or Execution()
        replicates = batches.federation.num_replicates
        if local_rule.per_sample:
            check_per_sample_gradients(model)
        if len(local_rule.rates) not in (1, replicates):
            raise ConfigError(
                f"lr has {len(local_rule.rates)} entries, but there are {replicates} seeds; give one per seed"
            )
        rates = local_rule.rates * (replicates if len(local_rule.rates) == 1 else 1)
        self.base_learning_rates = torch.tensor(rates, dtype=model.dtype, device=model.device)
        max_batch_size = local_rule.work.batch_size or int(np.max(batches.federation.num_samples, initial=1))
        sample = int(np.prod(batches.dataset.shape)) + (model.dimension if local_rule.per_sample else 0)
        check_batch_memory(batches, model, sample)
        ranks = batches.federation.ranks.num_ranks
        self._resolve_choices = functools.partial(
            candidate_executors, model=model, local_rule=local_rule, shift=shift, batch_size=max_batch_size,
            sample_size=sample, ranks=ranks, agreement=cached_agreement(model, batches, self._trial_executor),
        )  # fmt: skip
        self.candidate_choices = self._resolve_choices(self.execution)
        self.executor_cache = {} if executor_cache is None else executor_cache
        self.executor_choice = self.candidate_choices[0]
        self.executor = self._make_executor(self.executor_choice)
        self._general_executor: Executor | None = None
        self._executor_chosen = self._is_halving_logged = self._is_refusal_logged = False
        self.last_initial_memory: Memory | None = None  # the last `memory` that it created, which is the run's

    def restrict_to_loop(self, reason: str) -> None:
        """Train one client at a time, on unpadded batches; `reason` is for the log.

        Raises:
            ConfigError: another executor was asked for.
        """
        executor_name = self.execution.executor
        if executor_name not in ("auto", "loop"):
            raise ConfigError(
                f"trainer.executor={executor_name} cannot be used here: {reason}; use trainer.executor=auto, or loop"
            )
        (loop,) = self._resolve_choices(dataclasses.replace(self.execution, executor="loop"))
        self.candidate_choices = [dataclasses.replace(loop, reason=reason)]
        self.executor_choice = self.candidate_choices[0]
        self.executor, self._general_executor = self._make_executor(self.executor_choice), None

    def restrict_to_one_thread(self) -> None:
        """Take local steps in one thread only, since a part temporarily uses PyTorch's global stream."""
        self.candidate_choices = [dataclasses.replace(choice, workers=1) for choice in self.candidate_choices]
        self.executor_choice = dataclasses.replace(self.executor_choice, workers=1)
        self.executor, self._general_executor = self._make_executor(self.executor_choice), None

    def _trial_executor(self, name: str, model: StatelessModel, rule: LocalRule, shift: Shift) -> Executor:
        """Return the executor of this name for another rule and a model in another precision."""
        execution = dataclasses.replace(
            self.execution, executor=name, chunk=64, workers=1, compile="never", trial=False
        )
        return make_executor(candidate_executors(execution, model, rule, shift, 1, 1)[0], rule, model, shift, False)

    def _make_executor(self, choice: ExecutorChoice) -> Executor:
        return make_executor(choice, self.local_rule, self.model, self.shift, self.batches.contamination.active)

    def _executor_for(self, carry: Carry) -> Executor:
        """Return the executor for such rows: some carries need more than the fused one can do."""
        if not needs_general_executor(carry) or not isinstance(self.executor, FusedExecutor):
            return self.executor
        if self._general_executor is None:
            executor_name = "vmap" if self.model.no_vmap_reason is None else "loop"
            self._general_executor = self._make_executor(
                dataclasses.replace(self.executor_choice, executor=executor_name, workers=1)
            )
        return self._general_executor

    @property
    def executor_choice_key(self) -> str:
        """The name under which the choice of its executor is stored."""
        return type(self.local_rule).__name__

    def choose_executor(self, local_task: LocalTask) -> None:
        """Choose among the candidates, once: a stored choice, or the one that is fastest on this round's rows."""
        carry, deployed = local_task.carry, local_task.deployed_models
        names = [choice.executor for choice in self._runnable_executor_choices(carry)]
        timing_key = (self.model.timing_key(), type(self.local_rule), type(self.shift))
        if self.executor_cache.get(self.executor_choice_key) not in names:
            rows = TimingRows(
                carry, local_task.learning_rates, None if deployed is None else deployed[local_task.replicate_index]
            )
            with tf32_products(self.model.precision == "tf32"):
                fastest_name = self.executor_cache[self.executor_choice_key] = fastest_executor(
                    self._runnable_executor_choices(carry), self._make_executor, local_task.batch_plan, rows, timing_key
                )
            if self.model.precision == "bf16" and self.execution.trial and not needs_general_executor(carry):
                warn_if_precision_slower(
                    self._executor_choice(fastest_name, carry),
                    self.local_rule,
                    self.model,
                    self.shift,
                    local_task.batch_plan,
                    rows,
                )
        self.use_executor(self.executor_cache[self.executor_choice_key], carry)
        log.info("trainer: %s", self.executor_choice.describe())

    def use_executor(self, name: str, carry: Carry) -> None:
        """Use this executor from now on, if it can run the rows."""
        self.executor_cache[self.executor_choice_key], self._executor_chosen = name, True
        if name != self.executor_choice.executor:
            self.executor_choice = self._executor_choice(name, carry)
            self.executor = self._make_executor(self.executor_choice)

    def _executor_choice(self, name: str, carry: Carry) -> ExecutorChoice:
        return next(choice for choice in self._runnable_executor_choices(carry) if choice.executor == name)

    def _runnable_executor_choices(self, carry: Carry) -> list[ExecutorChoice]:
        """Return the candidates that can run such rows; all of them if none can without changes."""
        able_choices = [
            choice
            for choice in self.candidate_choices
            if choice.executor not in FUSED_EXECUTORS or not needs_general_executor(carry)
        ]
        return able_choices or self.candidate_choices

    def initial_memory(self, model: Tensor) -> Memory:
        """Return what rule and shift store before round 0, given the initial models [R, d]."""
        rule, shift, federation = self.local_rule, self.shift, self.batches.federation
        of_rule = unshared_tensors(f"local={type(rule).__name__}", rule.memory(federation, self.model.dimension))
        of_shift = unshared_tensors(f"shift={type(shift).__name__}", shift.memory(federation, model))
        for entry_name in sorted({*of_rule, *rule.own_models} & of_shift.keys()):
            raise ConfigError(
                f"local={type(rule).__name__} and shift={type(shift).__name__} both remember {entry_name!r}; rename one"
            )
        clients = of_rule | of_shift
        for entry_name, value in clients.items():
            if len(value) != federation.num_memory_rows:
                raise ConfigError(
                    f"client memory {entry_name!r} has {len(value)} rows; it needs one for each of the "
                    f"{federation.num_memory_rows} virtual clients"
                )
        memory, columns = Memory(clients), self.model.columns
        if columns.has_hidden_columns:
            initial = self.model.initial(federation.seeds)
            columns.add_hidden_columns(initial, memory, federation)
            model = columns.merge_parts(model, initial[:, columns.private], initial[:, columns.averaged])
        for entry_name in rule.own_models:
            clients[entry_name] = federation.broadcast(model)
        memory.server |= shift.initial_server_memory(federation, model)
        self.last_initial_memory = memory
        return memory

    def run(
        self,
        start: Tensor | dict[str, Tensor],
        cohort: Cohort,
        t: int,
        deployed_models: Tensor,
        memory: Memory | None = None,
        accept_rows: AcceptRows | None = None,
    ) -> Report:
        """Do a round's local work; the arguments are those of `generate_round_tasks`."""
        return run_to_completion(self.generate_round_tasks(start, cohort, t, deployed_models, memory, accept_rows))

    @torch.no_grad()
    def generate_round_tasks(
        self,
        start: Tensor | dict[str, Tensor],
        cohort: Cohort,
        t: int,
        deployed: Tensor,
        memory: Memory | None = None,
        accept_rows: AcceptRows | None = None,
        rounds: np.ndarray | None = None,
    ) -> TaskGenerator[Report]:
        """Yield a round's local task, and receive its result.

        Args:
            start: [n, d] start rows, or a carry whose 'params' are the start rows.
            cohort: who computes.
            t: round.
            deployed: [R, d] the server's model, which moves the data where `shift.deploy` is 'round'.
            memory: of rule and shift, updated in place; None: that before round 0, and nothing is kept.
            accept_rows: says, from round, cohort and which rows are finite [n], at which positions rows are taken; the
                others are as if they had not computed. None, here or as its answer: all are.
            rounds: [n] that in which each row began, by which its samples are drawn and its rate is scheduled; None: t.
        """
        memory = self.initial_memory(deployed) if memory is None else memory
        start_carry = dict(start) if isinstance(start, dict) else {"params": start}
        start, columns = start_carry["params"], self.model.columns
        carry, round_names = self._initial_carry(start_carry, cohort, t, memory, rounds)
        batch_plan = self.batches.plan(cohort, t, rounds)
        learning_rates = learning_rates_of_steps(
            self.local_rule, self.base_learning_rates[cohort.replicate_index], batch_plan, t
        )
        server_model = columns.full_server_rows(deployed, memory, cohort.federation) if self.shift.active else deployed
        deployed_rows = self.shift.deployed(memory.server, server_model, t) if self.shift.active else None
        result = yield LocalTask(self, batch_plan, carry, learning_rates, cohort.replicate_index, deployed_rows)
        end_carry, loss = result.carry, result.loss_sums
        samples = self.local_rule.samples_used(result.num_samples, carry, end_carry)
        label = f"local={type(self.local_rule).__name__}: samples_used"
        checks.check_number_per_client(label, samples, len(cohort), whole_numbers=True)
        learning_rates, weight, steps = rate_and_step_totals(self.local_rule, learning_rates, batch_plan.load)
        is_finite_row = is_row_finite(loss, end_carry)
        accepted_rows = None if accept_rows is None else accept_rows(t, cohort, is_finite_row)
        if accepted_rows is not None:
            row_selection = torch.as_tensor(accepted_rows, device=loss.device)
            cohort, samples = cohort.subset(accepted_rows), samples[accepted_rows]
            start_carry = {name: value[row_selection] for name, value in start_carry.items()}
            start, loss, learning_rates, steps, is_finite_row = (
                value[row_selection] for value in (start, loss, learning_rates, steps, is_finite_row)
            )
            weight = None if weight is None else weight[row_selection]
            end_carry = {name: value[row_selection] for name, value in end_carry.items()}
        rows = end_carry["params"]
        end_carry = self._store_client_memory(end_carry, start_carry, cohort, memory, round_names)
        deployed_model = server_model if deployed_rows is None else self.shift.newest_deployment(deployed_rows)
        return Report(
            cohort, start, end_carry, loss / steps, self.learning_rate(t), learning_rates, samples, deployed_model,
            is_finite_row, rows, weight, memory, deployed,
        )  # fmt: skip

    def _initial_carry(
        self, start_carry: Carry, cohort: Cohort, t: int, memory: Memory, rounds: np.ndarray | None
    ) -> tuple[Carry, tuple[str, ...]]:
        """Return the carry of the first step: start rows, memory and state of the round; and the names of its
        entries that belong to the round."""
        columns = self.model.columns
        carry = columns.expand_carry_columns(start_carry, cohort, memory) if columns.has_hidden_columns else start_carry
        carry = carry | memory.gather(cohort)
        carry.pop(OWN_COLUMNS_ENTRY, None)  # it is part of the row
        round_state = self.local_rule.round_state(carry["params"])
        carry |= round_state
        if self.local_rule.needs_round or self.shift.needs_round:
            start_rounds = np.full(len(cohort), t) if rounds is None else rounds
            device = start_carry["params"].device
            carry["round"] = torch.as_tensor(start_rounds, dtype=torch.int64).to(device)
        return carry, ("round", *round_state)

    def _store_client_memory(
        self, end_carry: Carry, start_carry: Carry, cohort: Cohort, memory: Memory, round_names: tuple[str, ...]
    ) -> Carry:
        """Write what clients store after the last step into the memory; return the carry that a strategy sees."""
        columns, rows = self.model.columns, end_carry["params"]
        memory.scatter(cohort, end_carry)
        if columns.has_hidden_columns:
            columns.store_unshared_columns(rows, cohort, memory)
            end_carry = columns.shared_carry(end_carry, start_carry)
        if memory.writable:
            self.local_rule.after_round(memory.clients, cohort)
        for name in round_names:
            end_carry.pop(name, None)
        return end_carry

    def learning_rate(self, t: int) -> Tensor:
        """Return the learning rates [R] of the first local step of round t."""
        return self.base_learning_rates * self.local_rule.schedule.factor(t, 0, *self.batches.longest)

    @torch.no_grad()
    def run_local_steps(self, local_task: LocalTask) -> LocalResult:
        """Take all rows through their local steps, by the executor that was chosen in the first round."""
        with self._name_round_of_user_errors(local_task):
            if not self._executor_chosen and len(local_task):
                self.choose_executor(local_task)
            with tf32_products(self.model.precision == "tf32"):
                return self._local_steps(local_task)

    @contextlib.contextmanager
    def _name_round_of_user_errors(self, local_task: LocalTask) -> Iterator[None]:
        """Within the block errors of a user's module, loss or rule name the round in which they happened. A user's
        shift, contamination or rule may not draw from a global stream."""
        user_components = [
            component
            for component in (self.local_rule, self.shift, self.batches.contamination)
            if not is_built_in(component)
        ]
        rng_state_before = streams.global_rng_state() if user_components else None
        try:
            yield
        except (ConfigError, RunError, DivergenceError, MemoryError):
            raise
        except Exception as error:
            users = [
                component
                for component in (self.model.training_module, self.local_rule, self.shift)
                if not is_built_in(component)
            ]
            if not users:
                raise
            message = first_message_line(error)[:300]
            names = ", ".join(type(component).__name__ for component in users)
            raise RunError(
                f"local training ended in round {local_task.batch_plan.t}: {names} raised {type(error).__name__}: "
                f"{message}"
            ) from error
        if rng_state_before is not None and not streams.rng_states_equal(rng_state_before, streams.global_rng_state()):
            names = " or ".join(type(component).__name__ for component in user_components)
            raise RunError(
                f"local training ended in round {local_task.batch_plan.t}: {names} drew from a global random "
                "stream, which depends "
                "on all that was drawn before; use fedsim.core.rng, whose numbers are functions of seed, round and "
                "client"
            )

    def _local_steps(self, local_task: LocalTask) -> LocalResult:
        """Run the local steps chunk by chunk. Nothing that outlives the round is written here, so that a chunk that
        does not fit into memory can be repeated in halves."""
        batch_plan, carry, row_order = local_task.batch_plan, local_task.carry, local_task.batch_plan.load.order
        row_positions = np.arange(len(local_task)) if row_order is None else row_order
        end_carry = {name: torch.empty_like(value) for name, value in carry.items()}
        loss = torch.zeros(len(local_task), dtype=self.model.dtype, device=self.model.device)
        samples = np.zeros(len(local_task), dtype=np.int64)
        first_row, num_rows = 0, len(batch_plan.batches.federation.num_samples)
        while first_row < len(local_task):
            chunks = -(-len(local_task) // self.executor_choice.chunk)
            size = -(-len(local_task) // chunks)  # chunks of equal size, as a small last one would waste the device
            row_count = len(rows := row_positions[first_row : first_row + size])
            if row_count != num_rows:  # cohorts of varying size are padded; with several runs all are
                rows = np.append(
                    rows, np.repeat(rows[-1:], self._executor_for(carry).padded_size(row_count) - row_count)
                )
            destination_rows = (
                slice(first_row, first_row + row_count)
                if row_order is None
                else torch.as_tensor(rows[:row_count], device=loss.device)
            )
            try:
                chunk = batch_plan.chunk(rows)
                chunk_carry, total = self._run_rows(local_task, rows, chunk)
            except Exception as error:
                if is_numerical_error(error):
                    chunk_carry, total = self._run_without_failing_rows(local_task, rows, error)
                elif not isinstance(error, RuntimeError) or not is_out_of_memory(error):
                    raise
                elif row_count == 1:
                    raise single_client_memory_error(self.model.device) from error
                else:
                    total = None
            if total is None:  # only here are the frames released that held the attempt's tensors
                self._halve_chunk(row_count)
                continue
            chunk_carry, total = {name: value[:row_count] for name, value in chunk_carry.items()}, total[:row_count]
            if row_count == len(local_task) and row_order is None:
                end_carry, loss = chunk_carry, total
            else:
                for name, value in chunk_carry.items():
                    end_carry[name][destination_rows] = value
                loss[destination_rows] = total
            samples[rows[:row_count]] = chunk.sizes[:row_count].sum(1)
            first_row += row_count
        return LocalResult(end_carry, loss, samples)

    def _run_rows(self, local_task: LocalTask, rows: np.ndarray, chunk: Chunk | None = None) -> tuple[Carry, Tensor]:
        """Run the local steps of the rows at these positions, which may repeat, with this chunk size."""
        neighbours = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
        row_selection = (
            slice(rows[0], rows[0] + len(rows)) if neighbours else torch.as_tensor(rows, device=self.model.device)
        )
        theta = (
            None
            if local_task.deployed_models is None
            else local_task.deployed_models[local_task.replicate_index[row_selection]]
        )
        chunk_carry = {name: value[row_selection] for name, value in local_task.carry.items()}
        chunk = local_task.batch_plan.chunk(rows) if chunk is None else chunk
        return self._executor_for(chunk_carry).run(
            chunk, chunk_carry, local_task.learning_rates[:, row_selection], theta
        )

    def _run_without_failing_rows(
        self, local_task: LocalTask, rows: np.ndarray, error: Exception
    ) -> tuple[Carry, Tensor]:
        """Run the local steps if a numerical routine refuses rows: these end as NaN, which counts as divergence."""
        if not self._is_refusal_logged:
            reason = " ".join(str(error).split())
            log.warning("a local step of some clients failed (%s); their rows are treated as non-finite", reason)
        self._is_refusal_logged = True
        row_selection = torch.as_tensor(rows, device=self.model.device)
        start = {name: value[row_selection] for name, value in local_task.carry.items()}
        diverged_mask = ~torch.isfinite(start["params"].sum(1)).cpu().numpy()
        result = run_without_failing_rows(functools.partial(self._run_rows, local_task), rows, diverged_mask)
        if result is not None:
            return result
        all_finite = torch.ones(len(rows), dtype=torch.bool, device=self.model.device)
        loss = torch.full((len(rows),), math.nan, dtype=self.model.dtype, device=self.model.device)
        return {name: fill_failed_rows_with_nan(all_finite, value) for name, value in start.items()}, loss

    def _halve_chunk(self, rows: int) -> None:
        """Halve the chunk size from now on; logged once."""
        if (device := self.model.device).type == "cuda":
            torch.cuda.empty_cache()
        self.executor_choice = dataclasses.replace(self.executor_choice, chunk=rows // 2)
        if self.executor_choice.compile == "graph":  # recorded graphs hold memory
            self.executor = self._make_executor(self.executor_choice)
        if not self._is_halving_logged:
            log.warning(
                "out of memory on %s: chunks of %d rows become %d, or fewer; the results are the same, and "
                "set trainer.chunk=%d to avoid the failed attempt",
                *(device, rows, rows // 2, rows // 2),
            )
        self._is_halving_logged = True


def unshared_tensors(label: str, memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a rule or shift stores per client, with copies of entries that share memory.

    Raises:
        ConfigError: it is no dictionary of tensors.
    """
    if not isinstance(memory, dict):
        raise ConfigError(f"{label}: memory must return a dictionary of tensors, and returns {type(memory).__name__}")
    memory_addresses, copied_tensors = set[int](), dict[str, Tensor]()
    for entry_name, value in memory.items():
        if not isinstance(value, Tensor) or not value.dim():
            raise ConfigError(
                f"{label}: memory must give {entry_name!r} as a tensor with one row per client, and gives "
                f"{type(value).__name__}"
            )
        address = value.untyped_storage().data_ptr()
        shares_memory = value.numel() and (address in memory_addresses or 0 in value.stride())
        copied_tensors[entry_name] = value.clone(memory_format=torch.contiguous_format) if shares_memory else value
        memory_addresses.add(address)
    return copied_tensors


def needs_general_executor(carry: Carry) -> bool:
    """Return whether the strategy needs what the fused executor lacks: a proximal term for some columns only,
    scaled steps, the last gradient."""
    return bool({"scale", "gradient"} & carry.keys()) or ("proximal" in carry and carry["proximal"].dim() == 2)
