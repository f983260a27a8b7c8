"""The works of several runs in one: their rows become one matrix for one trainer.

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
from fedsim.data.samples import ClientData, Plan
from fedsim.models import RowModel
from fedsim.trainer.choose import CPU_STACK_BYTES
from fedsim.trainer.local_task import LocalResult, LocalTask
from fedsim.trainer.trainer import Trainer

log = logging.getLogger(__name__)

RATE_ATTRIBUTES = frozenset({"rates", "schedule"})
MAX_JOINT_BYTES = 2**31  # of the rows that are laid side by side on a GPU


class JointExecutor:
    """Does the works of runs that go together, those that fit in one call of a trainer.

    Args:
        most_bytes: of the rows of one call; more are done in several. None: 2 GiB on a GPU; on a CPU, where nothing is
            won by products larger than its cache, `CPU_STACK_BYTES`.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._compatible_pairs: dict[tuple[int, int], bool] = {}
        self._joint: dict[tuple[int, ...], ClientData] = {}
        self._trainers_by_id: dict[int, Trainer] = {}  # as long as there are numbers of them above
        self._warned = False

    def __call__(self, works: Sequence[LocalTask]) -> list[LocalResult | Exception]:
        """Each one's rows after their local steps, in the order of the works; or why there are none.

        Where several rows together fail, each run has its own try, and its own failure.
        """
        out: list[LocalResult | Exception | None] = [None] * len(works)
        for group in self._groups(works):
            results: Sequence[LocalResult | Exception]
            try:
                results = self._run_jointly([works[index] for index in group])
            except Exception as error:
                if len(group) > 1:
                    log.info("of %d runs together: %s; each is run separately", len(group), error)
                results = [error] if len(group) == 1 else [self._run_alone(works[index]) for index in group]
            for index, result in zip(group, results, strict=True):
                out[index] = result
        return [result for result in out if result is not None]

    @staticmethod
    def _run_alone(work: LocalTask) -> LocalResult | Exception:
        try:
            return work.trainer.run_local_steps(work)
        except Exception as error:
            return error

    def _groups(self, works: Sequence[LocalTask]) -> list[list[int]]:
        """Places of those that fit together, none with more bytes than are allowed."""
        groups: list[list[int]] = []
        for index, work in enumerate(works):
            fitting_groups = (group for group in groups if self._fits(works[group[0]], work))
            group = next(fitting_groups, None)
            if group is None:
                groups.append([index])
            else:
                group.append(index)
        return [subgroup for group in groups for subgroup in self._bounded(group, works)]

    def _bounded(self, group: list[int], works: Sequence[LocalTask]) -> list[list[int]]:
        subgroups: list[list[int]] = [[]]
        total, limit = 0, self.most_bytes
        if limit is None:
            limit = CPU_STACK_BYTES if works[group[0]].rates.device.type == "cpu" else MAX_JOINT_BYTES
        for index in group:
            size = sum(value.numel() * value.element_size() for value in works[index].carry.values())
            if subgroups[-1] and total + size > limit:
                subgroups.append([])
                total = 0
            subgroups[-1].append(index)
            total += size
        if len(subgroups) > 1 and not self._warned:
            rows = len(works[group[0]])
            bound = f"{limit / 2**20:.3g} MiB"
            log.info("lockstep: %d runs of some %d rows go in parts of at most %s", len(group), rows, bound)
            self._warned = True
        return subgroups

    def _fits(self, first: LocalTask, second: LocalTask) -> bool:
        if not isinstance(first.trainer, Trainer) or not isinstance(second.trainer, Trainer):
            return False
        if first.plan.t != second.plan.t or (first.deployed is None) != (second.deployed is None):
            return False
        shapes = [
            {name: (value.shape[1:], value.dtype) for name, value in work.carry.items()} for work in (first, second)
        ]
        if shapes[0] != shapes[1] or not len(first) or not len(second):
            return False
        pair = (id(first.trainer), id(second.trainer))
        if pair not in self._compatible_pairs:
            self._compatible_pairs[pair] = compatible(first.trainer, second.trainer)
            self._trainers_by_id |= {id(work.trainer): work.trainer for work in (first, second)}  # type: ignore[misc]
        return self._compatible_pairs[pair]

    def _run_jointly(self, works: list[LocalTask]) -> list[LocalResult]:
        first, trainers = works[0], [work.trainer for work in works]
        if len(works) == 1:
            return [first.trainer.run_local_steps(first)]
        leader = trainers[0]
        assert isinstance(leader, Trainer)
        result = leader.run_local_steps(concatenate(works, self._data(works)))
        for trainer, work in zip(trainers[1:], works[1:], strict=True):
            assert isinstance(trainer, Trainer)
            trainer.use_executor(leader.choice.executor, work.carry)
        return split_results(result, [len(work) for work in works])

    def _data(self, works: list[LocalTask]) -> ClientData:
        """The clients of them all, kept for as long as the same go together."""
        client_data = [work.plan.batches.data for work in works]
        key = tuple(map(id, client_data))
        if key not in self._joint:
            while len(self._joint) > 8:  # companies that have changed
                del self._joint[next(iter(self._joint))]
            self._joint[key] = client_data[0].concatenate(client_data[1:])
        return self._joint[key]


def compatible(first: Trainer, second: Trainer) -> bool:
    """Is a local step of the one a local step of the other, but for its learning rate?"""
    first_batches, second_batches = first.batches, second.batches
    if first_batches.federation.ranks.count > 1 or (first_batches.work, first_batches.keyed) != (
        second_batches.work,
        second_batches.keyed,
    ):
        return False
    return (
        first.execution == second.execution
        and structurally_equal(first.rule, second.rule, RATE_ATTRIBUTES)
        and same_model(first.model, second.model)
        and first_batches.data.same_samples(second_batches.data)
        and structurally_equal(first.shift, second.shift)
        and structurally_equal(first_batches.contamination, second_batches.contamination)
    )


def same_model(first: RowModel, second: RowModel) -> bool:
    """Is a row of the one a row of the other? Modules may differ in the values of what they train."""
    if first is second:
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
        structurally_equal(getattr(first, attribute), getattr(second, attribute)) for attribute in attributes
    ) and (structurally_equal(first.training_module, second.training_module))


def concatenate(works: Sequence[LocalTask], data: ClientData) -> LocalTask:
    """The rows of works that fit, one after another; `data` holds their clients likewise."""
    first = works[0]
    carry = {name: torch.cat([work.carry[name] for work in works]) for name in first.carry}
    step_count = max(len(work.rates) for work in works)
    rates = torch.cat([_pad_steps(work.rates, step_count) for work in works], dim=1)
    row_offset, replicates = 0, []
    for work in works:
        replicates.append(work.replicate + row_offset)
        row_offset += work.plan.batches.federation.replicates
    deployed_models = [work.deployed for work in works if work.deployed is not None]
    deployed = torch.cat(deployed_models) if deployed_models else None
    plan = Plan.concatenate([work.plan for work in works], data)
    return LocalTask(first.trainer, plan, carry, rates, torch.cat(replicates), deployed)


def _pad_steps(rates: Tensor, steps: int) -> Tensor:
    """[steps, n] with nothing behind a run's last step."""
    return rates if len(rates) == steps else torch.cat([rates, rates.new_zeros(steps - len(rates), rates.shape[1])])


def split_results(result: LocalResult, counts: Sequence[int]) -> list[LocalResult]:
    """What each of the works gets of it; rows of its own, which outlive the company's."""
    results, first = [], 0
    for count in counts:
        row_slice = slice(first, first + count)
        carry = {name: value[row_slice].clone() for name, value in result.carry.items()}
        results.append(LocalResult(carry, result.loss[row_slice].clone(), result.samples[row_slice]))
        first += count
    return results
