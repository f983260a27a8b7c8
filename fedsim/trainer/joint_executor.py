"""Computes the local tasks of several runs at once: their rows become one matrix for one trainer.

Runs fit together where a step of the one is a step of the other: the same model, samples, shift, contamination and
local work, and rules that differ in nothing but learning rates, which are a number per step and row anyway. Everything
else is each run's own: who takes part, who holds which samples, what the strategy makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core.structural_equality import structurally_equal
from fedsim.data.samples import ClientData, RoundPlan
from fedsim.models import StatelessModel
from fedsim.trainer.choose import CPU_STACK_BYTES
from fedsim.trainer.local_task import LocalResult, LocalTask
from fedsim.trainer.trainer import Trainer

log = logging.getLogger(__name__)

RATE_ATTRIBUTES = frozenset({"rates", "schedule"})
MAX_JOINT_BYTES = 2**31  # of the rows that are laid side by side on a GPU


class LockstepExecutor:
    """Runs the local tasks of runs in lockstep; compatible ones in one call of a trainer.

    Args:
        most_bytes: of the rows of one call; more are done in several. None: 2 GiB on a GPU; on a CPU, where nothing is
            won by products larger than its cache, `CPU_STACK_BYTES`.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.max_bytes = most_bytes
        self._compatible_pairs: dict[tuple[int, int], bool] = {}
        self._joint_data_by_group: dict[tuple[int, ...], ClientData] = {}
        self._trainers_by_id: dict[int, Trainer] = {}  # as long as there are numbers of them above
        self._has_warned = False

    def __call__(self, local_tasks: Sequence[LocalTask]) -> list[LocalResult | Exception]:
        """Return the rows of each task after its local steps, in the order of the tasks, or the error that it raised.

        Where several rows together fail, each run has its own try, and its own failure.
        """
        task_results: list[LocalResult | Exception | None] = [None] * len(local_tasks)
        for task_indices in self._task_groups(local_tasks):
            local_results: Sequence[LocalResult | Exception]
            try:
                local_results = self._run_jointly([local_tasks[index] for index in task_indices])
            except Exception as error:
                if len(task_indices) > 1:
                    log.info("of %d runs together: %s; each is run separately", len(task_indices), error)
                local_results = (
                    [error]
                    if len(task_indices) == 1
                    else [self._run_alone(local_tasks[index]) for index in task_indices]
                )
            for index, result in zip(task_indices, local_results, strict=True):
                task_results[index] = result
        return [result for result in task_results if result is not None]

    @staticmethod
    def _run_alone(local_task: LocalTask) -> LocalResult | Exception:
        try:
            return local_task.trainer.run_local_steps(local_task)
        except Exception as error:
            return error

    def _task_groups(self, local_tasks: Sequence[LocalTask]) -> list[list[int]]:
        """Return positions of compatible tasks, in groups whose bytes do not exceed the limit."""
        task_groups: list[list[int]] = []
        for index, local_task in enumerate(local_tasks):
            fitting_groups = (group for group in task_groups if self._can_join(local_tasks[group[0]], local_task))
            group = next(fitting_groups, None)
            if group is None:
                task_groups.append([index])
            else:
                group.append(index)
        return [subgroup for group in task_groups for subgroup in self._split_tasks_by_memory(group, local_tasks)]

    def _split_tasks_by_memory(self, task_indices: list[int], local_tasks: Sequence[LocalTask]) -> list[list[int]]:
        subgroups: list[list[int]] = [[]]
        total_bytes, max_bytes = 0, self.max_bytes
        if max_bytes is None:
            max_bytes = (
                CPU_STACK_BYTES if local_tasks[task_indices[0]].learning_rates.device.type == "cpu" else MAX_JOINT_BYTES
            )
        for index in task_indices:
            size = sum(value.numel() * value.element_size() for value in local_tasks[index].carry.values())
            if subgroups[-1] and total_bytes + size > max_bytes:
                subgroups.append([])
                total_bytes = 0
            subgroups[-1].append(index)
            total_bytes += size
        if len(subgroups) > 1 and not self._has_warned:
            rows = len(local_tasks[task_indices[0]])
            bound = f"{max_bytes / 2**20:.3g} MiB"
            log.info(
                "lockstep: %d runs of about %d rows are split into parts of at most %s", len(task_indices), rows, bound
            )
            self._has_warned = True
        return subgroups

    def _can_join(self, first_task: LocalTask, second_task: LocalTask) -> bool:
        if not isinstance(first_task.trainer, Trainer) or not isinstance(second_task.trainer, Trainer):
            return False
        if first_task.batch_plan.t != second_task.batch_plan.t or (first_task.deployed_models is None) != (
            second_task.deployed_models is None
        ):
            return False
        shapes = [
            {name: (value.shape[1:], value.dtype) for name, value in local_task.carry.items()}
            for local_task in (first_task, second_task)
        ]
        if shapes[0] != shapes[1] or not len(first_task) or not len(second_task):
            return False
        trainer_pair = (id(first_task.trainer), id(second_task.trainer))
        if trainer_pair not in self._compatible_pairs:
            self._compatible_pairs[trainer_pair] = are_trainers_compatible(first_task.trainer, second_task.trainer)
            self._trainers_by_id |= {
                id(local_task.trainer): local_task.trainer  # type: ignore[misc]
                for local_task in (first_task, second_task)
            }
        return self._compatible_pairs[trainer_pair]

    def _run_jointly(self, local_tasks: list[LocalTask]) -> list[LocalResult]:
        first_task, trainers = local_tasks[0], [local_task.trainer for local_task in local_tasks]
        if len(local_tasks) == 1:
            return [first_task.trainer.run_local_steps(first_task)]
        leader = trainers[0]
        assert isinstance(leader, Trainer)
        result = leader.run_local_steps(concatenate_tasks(local_tasks, self._joint_client_data(local_tasks)))
        for trainer, local_task in zip(trainers[1:], local_tasks[1:], strict=True):
            assert isinstance(trainer, Trainer)
            trainer.use_executor(leader.executor_choice.executor, local_task.carry)
        return split_joint_result(result, [len(local_task) for local_task in local_tasks])

    def _joint_client_data(self, local_tasks: list[LocalTask]) -> ClientData:
        """Return the combined clients of the tasks, cached as long as the same tasks go together."""
        client_data = [local_task.batch_plan.batches.data for local_task in local_tasks]
        key = tuple(map(id, client_data))
        if key not in self._joint_data_by_group:
            while len(self._joint_data_by_group) > 8:  # groups of runs that have changed
                del self._joint_data_by_group[next(iter(self._joint_data_by_group))]
            self._joint_data_by_group[key] = client_data[0].concatenate(client_data[1:])
        return self._joint_data_by_group[key]


def are_trainers_compatible(first_trainer: Trainer, second_trainer: Trainer) -> bool:
    """Return whether a local step of one trainer is a local step of the other, except for its learning rate."""
    first_batches, second_batches = first_trainer.batches, second_trainer.batches
    if first_batches.data.drift.active or second_batches.data.drift.active:
        return False  # a drift looks up clients in the federation of its own run
    if first_batches.federation.ranks.num_ranks > 1 or (first_batches.local_work, first_batches.keyed) != (
        second_batches.local_work,
        second_batches.keyed,
    ):
        return False
    return (
        first_trainer.execution == second_trainer.execution
        and structurally_equal(first_trainer.local_rule, second_trainer.local_rule, RATE_ATTRIBUTES)
        and are_models_compatible(first_trainer.model, second_trainer.model)
        and first_batches.data.same_samples(second_batches.data)
        and structurally_equal(first_trainer.shift, second_trainer.shift)
        and structurally_equal(first_batches.contamination, second_batches.contamination)
    )


def are_models_compatible(first_model: StatelessModel, second_model: StatelessModel) -> bool:
    """Return whether two models have equal rows. Modules may differ in the values of trained tensors."""
    if first_model is second_model:
        return True
    attributes = (
        "shapes",
        "statistics",
        "device",
        "dtype",
        "precision",
        "ridge",
        "private_parameters",
        "traits",
        "call",
        "loss",
    )
    return all(
        structurally_equal(getattr(first_model, attribute), getattr(second_model, attribute))
        for attribute in attributes
    ) and (structurally_equal(first_model.training_module, second_model.training_module))


def concatenate_tasks(local_tasks: Sequence[LocalTask], data: ClientData) -> LocalTask:
    """Concatenate the rows of compatible tasks; `data` holds their clients in the same order."""
    first_task = local_tasks[0]
    carry = {name: torch.cat([local_task.carry[name] for local_task in local_tasks]) for name in first_task.carry}
    step_count = max(len(local_task.learning_rates) for local_task in local_tasks)
    learning_rates = torch.cat(
        [_pad_learning_rates(local_task.learning_rates, step_count) for local_task in local_tasks], dim=1
    )
    row_offset, replicates = 0, []
    for local_task in local_tasks:
        replicates.append(local_task.replicate_index + row_offset)
        row_offset += local_task.batch_plan.batches.federation.num_replicates
    deployed_models = [
        local_task.deployed_models for local_task in local_tasks if local_task.deployed_models is not None
    ]
    deployed = torch.cat(deployed_models) if deployed_models else None
    plan = RoundPlan.concatenate([local_task.batch_plan for local_task in local_tasks], data)
    return LocalTask(first_task.trainer, plan, carry, learning_rates, torch.cat(replicates), deployed)


def _pad_learning_rates(rates: Tensor, steps: int) -> Tensor:
    """Return [steps, n] padded with zeros after a run's last step."""
    return rates if len(rates) == steps else torch.cat([rates, rates.new_zeros(steps - len(rates), rates.shape[1])])


def split_joint_result(joint_result: LocalResult, counts: Sequence[int]) -> list[LocalResult]:
    """Return each task's own rows of the result, copied so that they outlive the joint one."""
    local_results, first_row = [], 0
    for count in counts:
        row_slice = slice(first_row, first_row + count)
        carry = {name: value[row_slice].clone() for name, value in joint_result.carry.items()}
        local_results.append(
            LocalResult(carry, joint_result.loss_sums[row_slice].clone(), joint_result.num_samples[row_slice])
        )
        first_row += count
    return local_results
