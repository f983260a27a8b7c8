"""MIFA: the server steps along the mean of all clients' last innovations (Gu et al., NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero, NonNegative, OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients

REMEMBERED_QUANTITIES = ("innovation", "gradient")
DIVISOR_CHOICES = ("all", "seen")


@dataclass
class MIFAState(RememberedUpdates):
    """Adds met [R·m] bool: has the client taken part yet?"""

    met: Tensor


@dataclass
class AgedMIFAState(MIFAState):
    """Adds last_seen [R·m] int64: the last round in which the client took part; −1 before its first."""

    last_seen: Tensor


class MIFA(RemembersClients[MIFAState]):
    """x ← x − η_g Σ_i w_i ψ(age_i) Ĝ_i, Ĝ_i the last innovation of client i (zero before its first participation), ψ =
    1.

    The server also steps in an empty round. Memory: one row per client. Age weights ψ(a) = (1 + a)^{−power} for a ≤
    max_age, 0 beyond, with a = t − τ_i and τ_i the last round of client i, are not part of the paper; with them a round
    reads all stored rows.

    Args:
        server_lr: η_g, or a list of one per seed.
        memory: 'innovation' stores G_i; 'gradient' stores G_i / η_t and rescales by the current η_t, as in the paper.
        wait_for_all: whether the model stays constant until every client has participated once (the paper's
            assumption).
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
        divide_by: 'all', or 'seen': the w_i are normalised over the clients that have participated so far, so that the
            first steps are not too small. Once all clients have participated, the two are identical.
        age_power: power of ψ; 0: no discount.
        max_age: maximal age in ψ; null: no limit.
    """

    effective_if = (
        EffectiveIf(
            "memory", lambda component, run: run.has_learning_rate_schedule, "a local/schedule that moves the rate"
        ),
        EffectiveIf(
            "wait_for_all",
            lambda component, run: run.availability.law != "full",
            "an availability process other than full",
        ),
        EffectiveIf(
            "divide_by",
            lambda component, run: run.availability.law != "full",
            "an availability process other than full",
        ),
        EffectiveIf("age_power", lambda component, run: run.may_clients_be_absent, "clients that miss rounds"),
        EffectiveIf("max_age", lambda component, run: run.may_clients_be_absent, "clients that miss rounds"),
        EffectiveIf(
            "max_age", lambda component, run: component.max_age < run.rounds - 1, "more rounds than {at}.max_age"
        ),
    )

    supports_stale = True

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        memory: Annotated[str, OneOf(*REMEMBERED_QUANTITIES)] = "innovation",
        wait_for_all: bool = False,
        memory_dtype: MemoryDtype = "same",
        weighting: Weighting = "uniform",
        divide_by: Annotated[str, OneOf(*DIVISOR_CHOICES)] = "all",
        age_power: NonNegative = 0.0,
        max_age: CountOrZero | None = None,
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.memory = memory
        self.wait_for_all = wait_for_all
        self.divide_by = divide_by
        self.age_power = age_power
        self.max_age = max_age

    @property
    def discounts_age(self) -> bool:
        """Do old innovations count less?"""
        return self.age_power > 0 or self.max_age is not None

    def initial(self, model: Tensor, federation: Federation) -> MIFAState:
        has_participated = torch.zeros(federation.num_memory_rows, dtype=torch.bool, device=model.device)
        if not self.discounts_age:
            return MIFAState(model, *self.empty(model, federation), has_participated)
        minus_ones = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        return AgedMIFAState(model, *self.empty(model, federation), has_participated, minus_ones)

    def aggregate(self, state: MIFAState, report: Report, t: int) -> MIFAState:
        cohort, federation = report.cohort, report.cohort.federation
        rate_factor = report.lr[:, None] if self.memory == "gradient" else torch.ones_like(report.lr)[:, None]
        mean_update = step = self.store_client_values(state, cohort, report.innovation / cohort.broadcast(rate_factor))
        state.met[cohort.rows] = True
        if isinstance(state, AgedMIFAState):
            state.last_seen[cohort.rows] = t
            weights = self.discount((t - state.last_seen).to(mean_update.dtype)) * federation.weights(self.weighting)
            step = federation.sum_over_clients(state.memory, weights)
        has_participated = state.met.to(step.dtype)
        if self.divide_by == "seen":
            seen_share = federation.mean_over_clients(has_participated, self.weighting)[:, None]
            step = step / torch.where(seen_share > 0, seen_share, 1.0)
        model = state.model - self.server_lr * rate_factor * step
        if self.wait_for_all:
            all_seen_mask = federation.mean_over_clients(has_participated) > 1 - 0.5 / federation.clients
            model = torch.where(all_seen_mask[:, None], model, state.model)
        return replace(state, model=model, mean=mean_update)

    def discount(self, age: Tensor) -> Tensor:
        """[R·m] ψ of whole numbers of rounds."""
        recent_mask = torch.ones_like(age) if self.max_age is None else age <= self.max_age
        return recent_mask / (1 + age) ** self.age_power
