"""Somebody's own strategy, tried before a folder is made, on rows that are made up.

Its state must be tensors of the right shapes; the same state and report must give the same next state, since what it
keeps elsewhere is in no checkpoint; and what one replicate's clients bring must not reach another's model.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.report import Report
from fedsim.run.contracts import Named, copied, fields, foreign, kind, within
from fedsim.run.setup import Setup
from fedsim.strategies import State


def check_state(run: Setup, state: Any) -> None:
    """The state that somebody's own strategy begins with: tensors that share no memory, and the models [R, d]."""
    if not foreign(run.strategy):
        return
    what = f"strategy={type(run.strategy).__name__}"
    if not isinstance(state, State):
        raise ConfigError(f"{what}: initial must return a State, and returns {kind(state)}")
    rows = run.federation.replicates
    shape = [rows, len(run.model.columns.seen(run.model.initial(run.federation.seeds[:1]))[0])]
    places: dict[int, str] = {}
    for name, value in fields(state).items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{what}: {name} of the state must be a tensor, which a checkpoint can hold, and is {kind(value)}"
            )
        place = value.untyped_storage().data_ptr()
        if value.numel() and name != "model" and place in places:
            raise ConfigError(
                f"{what}: {name} and {places[place]} of the state share memory, so that writing to one writes to both; "
                f"make it {name}.clone()"
            )
        places[place] = name
    if list(state.model.shape) != shape:
        raise ConfigError(f"{what}: the state's model must be {shape}, one row per seed, and is {kind(state.model)}")


def check_strategy(run: Setup, state: State, memory: Memory, cohort: Cohort) -> None:
    strategy, what = run.strategy, f"strategy={type(run.strategy).__name__}"
    with contextlib.suppress(Exception):  # what cannot be copied is asked itself
        strategy = copy.deepcopy(strategy)
    with within(what, strategy):
        computing = strategy.cohort(copied(state), cohort)
    if not isinstance(computing, Cohort):
        raise ConfigError(f"{what}: cohort must return a Cohort, and returns {kind(computing)}")
    with within(what, strategy):
        start = strategy.start(copied(state), computing)
    carry = start if isinstance(start, dict) else {"params": start}
    shape = [len(computing), state.model.shape[1]]
    if not isinstance(carry.get("params"), Tensor) or list(carry["params"].shape) != shape:
        raise ConfigError(f"{what}: start must return rows {shape}, one per client, and returns {kind(start)}")
    report = _report(run, state, memory, computing, carry, torch.zeros(len(computing)))
    one, other = (_next(strategy, what, state, report) for _ in range(2))
    for name, value in fields(one).items():
        if not torch.equal(value, fields(other)[name]):
            raise ConfigError(
                f"{what}: the same state and report give another {name} the second time; what it keeps in attributes "
                "of its own is in no checkpoint, so make it a field of its State"
            )
    if run.federation.replicates > 1 and run.federation.ranks.count == 1:
        _apart(run, strategy, what, state, memory, computing, carry, one)


def _apart(
    run: Setup, strategy: Any, what: str, state: State, memory: Memory, cohort: Cohort, carry: Named, right: State
) -> None:
    """What the first replicate's clients bring, however odd, must change no other replicate's model."""
    odd = (cohort.replicate == 0).to("cpu")
    for off in (torch.nan, 1e3):
        shifted = torch.where(odd, off, 0.0)
        try:
            found = _next(strategy, what, state, _report(run, state, memory, cohort, carry, shifted))
        except ConfigError:
            if off == 1e3:
                raise
            continue  # it may refuse what is not finite
        if not torch.equal(found.model[1:], right.model[1:]):
            raise ConfigError(
                f"{what} mixes the clients of different seeds: a change in those of seed {run.federation.seeds[0]} "
                f"changes the model of seed {run.federation.seeds[1]}; use cohort.mean, sum, median, quantile, "
                "trimmed_mean or each, which work seed by seed, or derive from PerReplicate"
            )


def _report(run: Setup, state: State, memory: Memory, cohort: Cohort, carry: Named, shifted: Tensor) -> Report:
    """Rows that have moved a little, each in its own way, and by `shifted` [n] more."""
    model, rows = state.model, carry["params"]
    rates, n = run.trainer.rates, len(cohort)
    wave = torch.sin(torch.arange(1.0, rows.numel() + 1)).reshape(rows.shape)
    moved = (0.1 * wave + shifted[:, None]).to(rows)
    steps = int(run.trainer.batches.longest[0])
    sums = (rates[cohort.replicate] * steps).to(rows)
    loss = (1 + 0.1 * torch.sin(torch.arange(1.0, n + 1)) + shifted).to(rows)
    ended = {name: value.clone() for name, value in carry.items()} | {"params": rows + moved}
    known = Memory({name: value.clone() for name, value in memory.clients.items()})
    return Report(
        cohort, rows.clone(), ended, loss, rates.clone(), sums, np.full(n, 10), model.clone(),
        torch.isfinite(loss), ended["params"].clone(), sums.clone(), known, model.clone(),
    )  # fmt: skip


def _next(strategy: Any, what: str, state: State, report: Report) -> State:
    """The state after the round, from copies of its own."""
    given = copied(state)
    with within(what, strategy):
        after = strategy.aggregate(given, copied(report), 0)
    if type(after) is not type(state):
        raise ConfigError(f"{what}: aggregate must return a {type(state).__name__}, and returns {kind(after)}")
    for name, value in fields(state).items():
        got = fields(after)[name]
        if not isinstance(got, Tensor) or (got.shape, got.dtype) != (value.shape, value.dtype):
            raise ConfigError(f"{what}: {name} must stay {kind(value)} in the next state, and becomes {kind(got)}")
    found: State = after
    return found
