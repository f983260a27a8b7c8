"""The learning rates of a round: of every local step and row, and what they add up to."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.samples import Plan, Workload
from fedsim.local import LocalRule


def rates_of_steps(rule: LocalRule, of_rows: Tensor, plan: Plan, t: int) -> Tensor:
    """[S, n] the learning rate of every step and row, from that of each row [n] in round t; a row's schedule counts its
    own steps, all of those that a round asks."""
    if plan.rounds is not None:
        return _rates_of_rounds(rule, of_rows, plan, plan.rounds)
    workload = plan.load if plan.planned_work is None else plan.planned_work
    steps, per_pass = workload.steps, workload.per_pass
    step_count = int(plan.load.steps.max(initial=0))
    if rule.schedule.steady:
        return of_rows.new_full((step_count, len(of_rows)), factor_of(rule, t, 0, step_count)) * of_rows
    kinds, kind = np.array([steps, per_pass]).T, np.arange(len(steps))
    if len(steps) and not (np.ptp(steps) or np.ptp(per_pass)):  # all alike
        kinds, kind = kinds[:1], np.zeros(1, dtype=np.int64)
    else:
        kinds, kind = np.unique(kinds, axis=0, return_inverse=True)
    table = [[factor_of(rule, t, k, int(s), int(p)) for s, p in kinds] for k in range(step_count)]
    factors = np.array(table).reshape(step_count, len(kinds))[:, kind.reshape(-1)]
    column = torch.as_tensor(factors, dtype=of_rows.dtype).to(of_rows.device, non_blocking=True)
    return column * of_rows


def factor_of(rule: LocalRule, t: int, k: int, steps: int, per_pass: int = 1) -> float:
    """The schedule's factor.

    Raises:
        ConfigError: it is no finite number.
    """
    factor = rule.schedule.factor(t, k, steps, per_pass)
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        name = type(rule.schedule).__name__
        raise ConfigError(f"schedule={name}: factor({t}, {k}, …) must be a finite number, and is {factor!r}")
    return number


def _rates_of_rounds(rule: LocalRule, of_rows: Tensor, plan: Plan, rounds: np.ndarray) -> Tensor:
    """The same where rows [n] began in different rounds."""
    step_count = int(plan.load.steps.max(initial=0))
    rates = of_rows.new_zeros(step_count, len(of_rows))
    for t in np.unique(rounds):
        rows = np.flatnonzero(rounds == t)
        rates_of_round = rates_of_steps(rule, of_rows[torch.as_tensor(rows).to(of_rows.device)], plan.of(rows), int(t))
        rates[: len(rates_of_round), torch.as_tensor(rows).to(of_rows.device)] = rates_of_round
    return rates


def rate_sums(rule: LocalRule, rates: Tensor, load: Workload) -> tuple[Tensor, Tensor | None, Tensor]:
    """[n] the sum of every row's rates [S, n], that with what steps weigh gradients, and how many there are."""
    step_counts = torch.as_tensor(load.steps, dtype=rates.dtype).to(rates.device, non_blocking=True)
    if len(load.steps) and np.ptp(load.steps):
        rates = rates * (torch.arange(len(rates), device=rates.device)[:, None] < step_counts)
    total, of_steps = rates.sum(0), [rule.gradient_weight(k) for k in range(max(len(rates), 1))]
    if all(weight == 1 for weight in of_steps):
        return total, total, step_counts
    weighted_total = None if None in of_steps else rates.new_tensor(of_steps[: len(rates)]) @ rates
    return total, weighted_total, step_counts
