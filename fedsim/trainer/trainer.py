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
from fedsim.core.columns import OWN
from fedsim.core.errors import ConfigError, DivergenceError, RunError, first_line
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.numerical import is_numerical
from fedsim.core.report import Report
from fedsim.data.samples import Batches, Chunk
from fedsim.local import LocalRule
from fedsim.local.rule import Carry
from fedsim.models import RowModel
from fedsim.models.precision import tensor_cores
from fedsim.models.row_model import is_built_in
from fedsim.shift import Shift
from fedsim.trainer.agreement import agreement_of
from fedsim.trainer.batch_sizes import check_batches
from fedsim.trainer.bfloat16 import warn_if_slower
from fedsim.trainer.choose import ExecutorChoice, candidates
from fedsim.trainer.device_memory import out_of_memory, single_row_memory_error
from fedsim.trainer.execution import Execution
from fedsim.trainer.executors import Executor, executor
from fedsim.trainer.failing_rows import nan_where, run_without_failing
from fedsim.trainer.fused_executor import FusedExecutor
from fedsim.trainer.local_task import LocalResult, LocalTask, TaskGenerator, finite_rows, run_to_completion
from fedsim.trainer.objective import refuse_whole_batches
from fedsim.trainer.rates import rate_sums, rates_of_steps
from fedsim.trainer.trial import TimedRows, fastest_executor

log = logging.getLogger(__name__)

AcceptRows = Callable[[int, Cohort, Tensor], "np.ndarray | None"]


class Trainer:
    """Runs the rule on the rows of a cohort. Results do not depend on executor, chunk or workers (to rounding).

    Args:
        rule: the local rule.
        model: the model its rows parameterise.
        shift: how data answer the deployed model.
        batches: where samples come from.
        execution: how it is computed, see `fedsim.trainer.choose`.
        executor_cache: executors that were found the quickest, by the rule's name; what this trainer finds goes there.
    """

    def __init__(
        self,
        rule: LocalRule,
        model: RowModel,
        shift: Shift,
        batches: Batches,
        execution: Execution | None = None,
        executor_cache: dict[str, str] | None = None,
    ) -> None:
        self.rule, self.model, self.shift, self.batches = rule, model, shift, batches
        self.execution = execution or Execution()
        replicates = batches.federation.replicates
        if rule.per_sample:
            refuse_whole_batches(model)
        if len(rule.rates) not in (1, replicates):
            raise ConfigError(f"lr has {len(rule.rates)} entries, but there are {replicates} seeds; give one per seed")
        rates = rule.rates * (replicates if len(rule.rates) == 1 else 1)
        self.rates = torch.tensor(rates, dtype=model.dtype, device=model.device)
        largest = rule.work.batch_size or int(np.max(batches.federation.sizes, initial=1))
        sample = int(np.prod(batches.dataset.shape)) + (model.dimension if rule.per_sample else 0)
        check_batches(batches, model, sample)
        ranks = batches.federation.ranks.count
        self._resolve = functools.partial(
            candidates, model=model, rule=rule, shift=shift, batch_size=largest, sample_size=sample, ranks=ranks,
            agreement=agreement_of(model, batches, self._for_trial),
        )  # fmt: skip
        self.candidates = self._resolve(self.execution)
        self.executor_cache = {} if executor_cache is None else executor_cache
        self.choice = self.candidates[0]
        self.executor = self._make_executor(self.choice)
        self._general_executor: Executor | None = None
        self._executor_chosen = self._is_halving_logged = self._is_refusal_logged = False
        self.remembered: Memory | None = None  # the last `memory` it made, that of the run

    def restrict_to_loop(self, reason: str) -> None:
        """Train one client at a time, on batches that are never padded; `reason` says why, for the log.

        Raises:
            ConfigError: another executor was asked for.
        """
        executor_name = self.execution.executor
        if executor_name not in ("auto", "loop"):
            raise ConfigError(
                f"trainer.executor={executor_name} cannot be used here: {reason}; use trainer.executor=auto, or loop"
            )
        (loop,) = self._resolve(dataclasses.replace(self.execution, executor="loop"))
        self.candidates = [dataclasses.replace(loop, reason=reason)]
        self.choice = self.candidates[0]
        self.executor, self._general_executor = self._make_executor(self.choice), None

    def restrict_to_one_worker(self) -> None:
        """Let no two threads take local steps at once, since a part uses PyTorch's global stream for a while."""
        self.candidates = [dataclasses.replace(choice, workers=1) for choice in self.candidates]
        self.choice = dataclasses.replace(self.choice, workers=1)
        self.executor, self._general_executor = self._make_executor(self.choice), None

    def _for_trial(self, name: str, model: RowModel, rule: LocalRule, shift: Shift) -> Executor:
        """The executor of this name for another rule and a model in another precision."""
        execution = dataclasses.replace(
            self.execution, executor=name, chunk=64, workers=1, compile="never", trial=False
        )
        return executor(candidates(execution, model, rule, shift, 1, 1)[0], rule, model, shift, False)

    def _make_executor(self, choice: ExecutorChoice) -> Executor:
        return executor(choice, self.rule, self.model, self.shift, self.batches.contamination.active)

    def _executor_for(self, carry: Carry) -> Executor:
        """The executor of such rows: some carries ask for more than the fused one can."""
        if not needs_general_executor(carry) or not isinstance(self.executor, FusedExecutor):
            return self.executor
        if self._general_executor is None:
            executor_name = "vmap" if self.model.no_vmap_reason is None else "loop"
            self._general_executor = self._make_executor(
                dataclasses.replace(self.choice, executor=executor_name, workers=1)
            )
        return self._general_executor

    @property
    def label(self) -> str:
        """Under which name the choice of its executor is kept."""
        return type(self.rule).__name__

    def choose_executor(self, work: LocalTask) -> None:
        """Choose among the candidates, once: as it was before, or the one that is quickest on this round's rows."""
        carry, deployed = work.carry, work.deployed
        names = [choice.executor for choice in self._able_candidates(carry)]
        like = (self.model.timing_key(), type(self.rule), type(self.shift))
        if self.executor_cache.get(self.label) not in names:
            rows = TimedRows(carry, work.rates, None if deployed is None else deployed[work.replicate])
            with tensor_cores(self.model.precision):
                fastest_name = self.executor_cache[self.label] = fastest_executor(
                    self._able_candidates(carry), self._make_executor, work.plan, rows, like
                )
            if self.model.precision == "bf16" and self.execution.trial and not needs_general_executor(carry):
                warn_if_slower(self._candidate(fastest_name, carry), self.rule, self.model, self.shift, work.plan, rows)
        self.use_executor(self.executor_cache[self.label], carry)
        log.info("trainer: %s", self.choice.describe())

    def use_executor(self, name: str, carry: Carry) -> None:
        """From now on that executor, of those which can run such rows."""
        self.executor_cache[self.label], self._executor_chosen = name, True
        if name != self.choice.executor:
            self.choice = self._candidate(name, carry)
            self.executor = self._make_executor(self.choice)

    def _candidate(self, name: str, carry: Carry) -> ExecutorChoice:
        return next(choice for choice in self._able_candidates(carry) if choice.executor == name)

    def _able_candidates(self, carry: Carry) -> list[ExecutorChoice]:
        """The candidates that can run such rows; all of them, where none of them can as it is."""
        able_choices = [
            choice for choice in self.candidates if choice.executor != "fused" or not needs_general_executor(carry)
        ]
        return able_choices or self.candidates

    def memory(self, model: Tensor) -> Memory:
        """What rule and shift remember before round 0, from the initial models [R, d]."""
        rule, shift, federation = self.rule, self.shift, self.batches.federation
        of_rule = own_tensors(f"local={type(rule).__name__}", rule.memory(federation, self.model.dimension))
        of_shift = own_tensors(f"shift={type(shift).__name__}", shift.memory(federation, model))
        for name in sorted({*of_rule, *rule.own_models} & of_shift.keys()):
            raise ConfigError(
                f"local={type(rule).__name__} and shift={type(shift).__name__} both remember {name!r}; rename one"
            )
        clients = of_rule | of_shift
        for name, value in clients.items():
            if len(value) != federation.rows:
                raise ConfigError(
                    f"client memory {name!r} has {len(value)} rows; it needs one for each of the "
                    f"{federation.rows} virtual clients"
                )
        memory, columns = Memory(clients), self.model.columns
        if columns.is_divided:
            initial = self.model.initial(federation.seeds)
            columns.memory(initial, memory, federation)
            model = columns.join(model, initial[:, columns.private], initial[:, columns.averaged])
        for name in rule.own_models:
            clients[name] = federation.broadcast(model)
        memory.server |= shift.initial_server_memory(federation, model)
        self.remembered = memory
        return memory

    def run(
        self,
        start: Tensor | dict[str, Tensor],
        cohort: Cohort,
        t: int,
        deployed: Tensor,
        memory: Memory | None = None,
        accept: AcceptRows | None = None,
    ) -> Report:
        """A round's local work, done here; the arguments are those of `steps`."""
        return run_to_completion(self.steps(start, cohort, t, deployed, memory, accept))

    @torch.no_grad()
    def steps(
        self,
        start: Tensor | dict[str, Tensor],
        cohort: Cohort,
        t: int,
        deployed: Tensor,
        memory: Memory | None = None,
        accept: AcceptRows | None = None,
        rounds: np.ndarray | None = None,
    ) -> TaskGenerator[Report]:
        """A round's local work: what is to be done is handed out, and what was done taken in.

        Args:
            start: [n, d] start rows, or a carry whose 'params' are the start rows.
            cohort: who computes.
            t: round.
            deployed: [R, d] the server's model, which moves the data where `shift.deploy` is 'round'.
            memory: of rule and shift, updated in place; None: that before round 0, and nothing is kept.
            accept: says, from round, cohort and which rows are finite [n], at which positions rows are taken; the
                others are as if they had not computed. None, here or as its answer: all are.
            rounds: [n] that in which each row began, by which its samples are drawn and its rate is scheduled; None: t.
        """
        memory = self.memory(deployed) if memory is None else memory
        start_carry = dict(start) if isinstance(start, dict) else {"params": start}
        start, columns = start_carry["params"], self.model.columns
        carry = (columns.expand(start_carry, cohort, memory) if columns.is_divided else start_carry) | memory.gather(
            cohort
        )
        carry.pop(OWN, None)  # it is part of the row
        of_round = self.rule.round_state(carry["params"])
        carry |= of_round
        if self.rule.knows_round or self.shift.knows_round:
            start_rounds = np.full(len(cohort), t) if rounds is None else rounds
            carry["round"] = torch.as_tensor(start_rounds, dtype=torch.int64).to(start.device)
        plan = self.batches.plan(cohort, t, rounds)
        rates = rates_of_steps(self.rule, self.rates[cohort.replicate], plan, t)
        server_model = columns.server_rows(deployed, memory, cohort.federation) if self.shift.active else deployed
        deployed_rows = self.shift.deployed(memory.server, server_model, t) if self.shift.active else None
        result = yield LocalTask(self, plan, carry, rates, cohort.replicate, deployed_rows)
        end, loss = result.carry, result.loss
        samples = self.rule.samples_used(result.samples, carry, end)
        label = f"local={type(self.rule).__name__}: samples_used"
        checks.number_per_client(label, samples, len(cohort), whole=True)
        rates, weight, steps = rate_sums(self.rule, rates, plan.load)
        finite = finite_rows(loss, end)
        accepted_rows = None if accept is None else accept(t, cohort, finite)
        if accepted_rows is not None:
            pick = torch.as_tensor(accepted_rows, device=loss.device)
            cohort, samples = cohort.subset(accepted_rows), samples[accepted_rows]
            start_carry = {name: value[pick] for name, value in start_carry.items()}
            start, loss, rates, steps, finite = (value[pick] for value in (start, loss, rates, steps, finite))
            weight = None if weight is None else weight[pick]
            end = {name: value[pick] for name, value in end.items()}
        memory.scatter(cohort, end)
        rows = end["params"]
        if columns.is_divided:
            columns.keep(rows, cohort, memory)
            end = columns.restrict(end, start_carry)
        if memory.writable:
            self.rule.after_round(memory.clients, cohort)
        for name in ("round", *of_round):
            end.pop(name, None)
        deployed_model, loss = (
            server_model if deployed_rows is None else self.shift.newest_deployment(deployed_rows),
            loss / steps,
        )
        return Report(
            cohort,
            start,
            end,
            loss,
            self.rate(t),
            rates,
            samples,
            deployed_model,
            finite,
            rows,
            weight,
            memory,
            deployed,
        )

    def rate(self, t: int) -> Tensor:
        """[R] learning rate of the first local step of round t."""
        return self.rates * self.rule.schedule.factor(t, 0, *self.batches.longest)

    @torch.no_grad()
    def run_local_steps(self, work: LocalTask) -> LocalResult:
        """All rows through their local steps, by the executor that was chosen in the first round."""
        with self._errors_in_a_sentence(work):
            if not self._executor_chosen and len(work):
                self.choose_executor(work)
            with tensor_cores(self.model.precision):
                return self._local_steps(work)

    @contextlib.contextmanager
    def _errors_in_a_sentence(self, work: LocalTask) -> Iterator[None]:
        """What a user's module, loss or rule raises in the middle of a run, with the round it happened in. A user's
        shift, contamination or rule may not draw from a global stream either."""
        own_parts = [part for part in (self.rule, self.shift, self.batches.contamination) if not is_built_in(part)]
        before = streams.rng_state() if own_parts else None
        try:
            yield
        except (ConfigError, RunError, DivergenceError, MemoryError):
            raise
        except Exception as error:
            users = [part for part in (self.model.training_module, self.rule, self.shift) if not is_built_in(part)]
            if not users:
                raise
            message = first_line(error)[:300]
            names = ", ".join(type(part).__name__ for part in users)
            raise RunError(
                f"local training ended in round {work.plan.t}: {names} raised {type(error).__name__}: {message}"
            ) from error
        if before is not None and not streams.states_equal(before, streams.rng_state()):
            names = " or ".join(type(part).__name__ for part in own_parts)
            raise RunError(
                f"local training ended in round {work.plan.t}: {names} drew from a global random stream, which depends "
                "on all that was drawn before; use fedsim.core.rng, whose numbers are functions of seed, round and "
                "client"
            )

    def _local_steps(self, work: LocalTask) -> LocalResult:
        """Chunk by chunk. Nothing that outlives the round is written here: a chunk that the device has no room for runs
        again in halves."""
        plan, carry, order = work.plan, work.carry, work.plan.load.order
        positions = np.arange(len(work)) if order is None else order
        end = {name: torch.empty_like(value) for name, value in carry.items()}
        loss = torch.zeros(len(work), dtype=self.model.dtype, device=self.model.device)
        samples = np.zeros(len(work), dtype=np.int64)
        first, num_rows = 0, len(plan.batches.federation.sizes)
        while first < len(work):
            chunks = -(-len(work) // self.choice.chunk)
            size = -(-len(work) // chunks)  # chunks of equal size: a small last one wastes the device
            count = len(rows := positions[first : first + size])
            if count != num_rows:  # who come in ever other numbers are filled up; of several runs all
                rows = np.append(rows, np.repeat(rows[-1:], self._executor_for(carry).padded_size(count) - count))
            to = slice(first, first + count) if order is None else torch.as_tensor(rows[:count], device=loss.device)
            try:
                chunk = plan.chunk(rows)
                chunk_carry, total = self._run(work, rows, chunk)
            except Exception as error:
                if is_numerical(error):
                    chunk_carry, total = self._run_without_failing(work, rows, error)
                elif not isinstance(error, RuntimeError) or not out_of_memory(error):
                    raise
                elif count == 1:
                    raise single_row_memory_error(self.model.device) from error
                else:
                    total = None
            if total is None:  # only here are the frames gone that held what the attempt had made
                self._halve_chunk(count)
                continue
            chunk_carry, total = {name: value[:count] for name, value in chunk_carry.items()}, total[:count]
            if count == len(work) and order is None:
                end, loss = chunk_carry, total
            else:
                for name, value in chunk_carry.items():
                    end[name][to] = value
                loss[to] = total
            samples[rows[:count]] = chunk.sizes[:count].sum(1)
            first += count
        return LocalResult(end, loss, samples)

    def _run(self, work: LocalTask, rows: np.ndarray, chunk: Chunk | None = None) -> tuple[Carry, Tensor]:
        """The rows at these positions, which may repeat, through their local steps; `chunk` is theirs."""
        neighbours = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
        pick = slice(rows[0], rows[0] + len(rows)) if neighbours else torch.as_tensor(rows, device=self.model.device)
        theta = None if work.deployed is None else work.deployed[work.replicate[pick]]
        chunk_carry = {name: value[pick] for name, value in work.carry.items()}
        chunk = work.plan.chunk(rows) if chunk is None else chunk
        return self._executor_for(chunk_carry).run(chunk, chunk_carry, work.rates[:, pick], theta)

    def _run_without_failing(self, work: LocalTask, rows: np.ndarray, error: Exception) -> tuple[Carry, Tensor]:
        """The same where a numerical routine refuses rows: those end as NaN, which is their divergence."""
        if not self._is_refusal_logged:
            reason = " ".join(str(error).split())
            log.warning("a local step of some clients failed (%s); their rows are treated as non-finite", reason)
        self._is_refusal_logged = True
        pick = torch.as_tensor(rows, device=self.model.device)
        start = {name: value[pick] for name, value in work.carry.items()}
        diverged = ~torch.isfinite(start["params"].sum(1)).cpu().numpy()
        result = run_without_failing(functools.partial(self._run, work), rows, diverged)
        if result is not None:
            return result
        all_finite = torch.ones(len(rows), dtype=torch.bool, device=self.model.device)
        loss = torch.full((len(rows),), math.nan, dtype=self.model.dtype, device=self.model.device)
        return {name: nan_where(all_finite, value) for name, value in start.items()}, loss

    def _halve_chunk(self, rows: int) -> None:
        """Chunks of half so many rows from now on; it is said once."""
        if (device := self.model.device).type == "cuda":
            torch.cuda.empty_cache()
        self.choice = dataclasses.replace(self.choice, chunk=rows // 2)
        if self.choice.compile == "graph":  # what was captured holds memory
            self.executor = self._make_executor(self.choice)
        if not self._is_halving_logged:
            log.warning(
                "out of memory on %s: chunks of %d rows become %d, or fewer; the results are the same, and "
                "set trainer.chunk=%d to avoid the failed attempt",
                *(device, rows, rows // 2, rows // 2),
            )
        self._is_halving_logged = True


def own_tensors(label: str, memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rule or shift remembers of clients, each in memory of its own: entries that share some are copied.

    Raises:
        ConfigError: it is no dictionary of tensors.
    """
    if not isinstance(memory, dict):
        raise ConfigError(f"{label}: memory must return a dictionary of tensors, and returns {type(memory).__name__}")
    addresses, copies = set[int](), dict[str, Tensor]()
    for name, value in memory.items():
        if not isinstance(value, Tensor) or not value.dim():
            raise ConfigError(
                f"{label}: memory must give {name!r} as a tensor with one row per client, and gives "
                f"{type(value).__name__}"
            )
        address = value.untyped_storage().data_ptr()
        shared = value.numel() and (address in addresses or 0 in value.stride())
        copies[name] = value.clone(memory_format=torch.contiguous_format) if shared else value
        addresses.add(address)
    return copies


def needs_general_executor(carry: Carry) -> bool:
    """Does the strategy ask for what the fused executor does not know: a proximal term for some columns only, scaled
    steps, the last gradient?"""
    return bool({"scale", "gradient"} & carry.keys()) or ("proximal" in carry and carry["proximal"].dim() == 2)
