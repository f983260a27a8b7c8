"""The learning rates of a round, for each local step and row, and their sums."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.samples import RoundPlan, Workload
from fedsim.local import LocalRule


def learning_rates_of_steps(local_rule: LocalRule, of_rows: Tensor, batch_plan: RoundPlan, t: int) -> Tensor:
    """Return the learning rates of each step and row, [S, n], given those of rows [n] in round t; a row's schedule
    counts the row's own planned steps of the round."""
    if batch_plan.rounds is not None:
        return _learning_rates_of_rounds(local_rule, of_rows, batch_plan, batch_plan.rounds)
    workload = batch_plan.load if batch_plan.planned_work is None else batch_plan.planned_work
    steps, per_pass = workload.steps, workload.per_pass
    step_count = int(batch_plan.load.steps.max(initial=0))
    if local_rule.schedule.steady:
        return of_rows.new_full((step_count, len(of_rows)), schedule_factor(local_rule, t, 0, step_count)) * of_rows
    workload_kinds, kind_indices = np.array([steps, per_pass]).T, np.arange(len(steps))
    if len(steps) and not (np.ptp(steps) or np.ptp(per_pass)):  # all alike
        workload_kinds, kind_indices = workload_kinds[:1], np.zeros(1, dtype=np.int64)
    else:
        workload_kinds, kind_indices = np.unique(workload_kinds, axis=0, return_inverse=True)
    table = [[schedule_factor(local_rule, t, k, int(s), int(p)) for s, p in workload_kinds] for k in range(step_count)]
    factors = np.array(table).reshape(step_count, len(workload_kinds))[:, kind_indices.reshape(-1)]
    column = torch.as_tensor(factors, dtype=of_rows.dtype).to(of_rows.device, non_blocking=True)
    return column * of_rows


def schedule_factor(local_rule: LocalRule, t: int, k: int, steps: int, per_pass: int = 1) -> float:
    """Return the factor of the schedule.

    Raises:
        ConfigError: it is no finite number.
    """
    factor = local_rule.schedule.factor(t, k, steps, per_pass)
    try:
        factor_value = float(factor)
    except (TypeError, ValueError):
        factor_value = math.nan
    if not math.isfinite(factor_value):
        name = type(local_rule.schedule).__name__
        raise ConfigError(f"schedule={name}: factor({t}, {k}, …) must be a finite number, and is {factor!r}")
    return factor_value


def _learning_rates_of_rounds(
    local_rule: LocalRule, of_rows: Tensor, batch_plan: RoundPlan, rounds: np.ndarray
) -> Tensor:
    """Return the learning rates of each step for rows [n] that were started in different rounds."""
    step_count = int(batch_plan.load.steps.max(initial=0))
    learning_rates = of_rows.new_zeros(step_count, len(of_rows))
    for t in np.unique(rounds):
        rows = np.flatnonzero(rounds == t)
        rates_of_round = learning_rates_of_steps(
            local_rule, of_rows[torch.as_tensor(rows).to(of_rows.device)], batch_plan.select_rows(rows), int(t)
        )
        learning_rates[: len(rates_of_round), torch.as_tensor(rows).to(of_rows.device)] = rates_of_round
    return learning_rates


def rate_and_step_totals(
    local_rule: LocalRule, learning_rates: Tensor, load: Workload
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return, for each row [n]: the sum of its rates [S, n], the sum of rates times gradient weights, and the
    number of steps."""
    step_counts = torch.as_tensor(load.steps, dtype=learning_rates.dtype).to(learning_rates.device, non_blocking=True)
    if len(load.steps) and np.ptp(load.steps):
        learning_rates = learning_rates * (
            torch.arange(len(learning_rates), device=learning_rates.device)[:, None] < step_counts
        )
    total, of_steps = learning_rates.sum(0), [local_rule.gradient_weight(k) for k in range(max(len(learning_rates), 1))]
    if all(weight == 1 for weight in of_steps):
        return total, total, step_counts
    weighted_total = (
        None if None in of_steps else learning_rates.new_tensor(of_steps[: len(learning_rates)]) @ learning_rates
    )
    return total, weighted_total, step_counts
