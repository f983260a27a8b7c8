"""Warnings about settings before the first round: those without effect, and those that prevent training."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.effects import no_training_sentences, sentences_without_effect
from fedsim.evaluation.performative.references import too_expensive_reason
from fedsim.local.schedules import Constant

log = logging.getLogger(__name__)

MAX_ROUNDS_CHECKED = 1000  # number of rounds that are searched for an available client


class RunFacts:
    """Facts about a run that declarations of `fedsim.core.effects` may ask for.

    Attributes:
        components: what the run was given, an attribute for each group; None where nothing was.
        rounds: T.
        federation, dataset, availability, strategy, local_rule: of the run, set up.
        simulation: the `Simulation` itself.
    """

    def __init__(self, run: Any) -> None:
        self.components, self.rounds = run.components, run.rounds
        self.federation, self.dataset, self.availability = run.federation, run.dataset, run.availability
        self.strategy, self.local_rule, self.simulation = run.strategy, run.trainer.local_rule, run

    @functools.cached_property
    def may_clients_be_absent(self) -> bool:
        """Whether a client may be absent in some round; True as well if probabilities are unknown."""
        return bool(self.simulation.round_clock.clock.may_drop_clients) or self.any_probability(lambda p: p < 1)

    def any_probability(self, condition: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Return whether a condition holds for the probability of some client in some round."""
        if self.availability.unknown_reason:
            return True
        return any(
            condition(self.availability.probabilities(t)).any() for t in range(min(self.rounds, MAX_ROUNDS_CHECKED))
        )

    @property
    def max_total_local_steps(self) -> float:
        """The maximal number of local steps that a client takes in the whole run."""
        steps = self.local_rule.work.steps
        return math.inf if steps is None else self.rounds * steps

    @property
    def num_evaluations(self) -> int:
        """The number of evaluations, that of the initial models included."""
        rounds, every = int(self.rounds), int(self.components.evaluation.every)
        return 1 + math.ceil(rounds / every)

    @property
    def has_incomplete_batches(self) -> bool:
        """Whether a client takes, within a round, the last batch of a pass, and it has fewer samples than
        `batch_size`."""
        local_work, sizes = self.local_rule.work, np.asarray(self.federation.num_samples)
        if self.dataset.stream or local_work.batch_size is None or local_work.sampling != "pass":
            return False
        ends_short = (sizes > local_work.batch_size) & (sizes % local_work.batch_size > 0)
        return bool((ends_short & ((local_work.steps or math.inf) > sizes // local_work.batch_size)).any())

    @property
    def has_personal_evaluation(self) -> bool:
        """Whether clients' own models are evaluated."""
        personal = self.components.personal
        return personal is not None and personal.active

    @property
    def computes_shift_references(self) -> bool:
        """Whether θ^PS and θ^PO are computed."""
        shift = self.simulation.shift
        if not shift.active or shift.references == "none":
            return False
        return shift.references == "always" or not too_expensive_reason(self.simulation.model, self.simulation.data)

    @property
    def computes_drift_references(self) -> bool:
        """Whether the path of the minimiser is computed for data that drift."""
        drift = self.simulation.data.drift
        if self.simulation.shift.active or not drift.active or drift.references == "none":
            return False
        return drift.references == "always" or not too_expensive_reason(self.simulation.model, self.simulation.data)

    @property
    def has_learning_rate_schedule(self) -> bool:
        """Whether the local learning rate changes from round to round."""
        return self.rounds > 1 and not isinstance(self.local_rule.schedule, Constant)

    @property
    def has_delayed_updates(self) -> bool:
        """Whether a row may arrive in a later round than that in which it was started."""
        return bool(self.simulation.delayed_updates.active)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server updates its model after a number of arrivals."""
        return bool(self.simulation.round_clock.clock.asynchronous)

    @property
    def has_client_uploads(self) -> bool:
        """Whether clients send rows to the server."""
        return bool(self.strategy.vectors_up)

    @functools.cached_property
    def has_equal_data_fractions(self) -> bool:
        """Whether clients hold equal shares of their replicate's data."""
        shares = self.federation.data_fractions.reshape(self.federation.num_replicates, -1)
        return bool(np.allclose(shares, shares[:, :1], rtol=1e-12, atol=0))


def warn_of_ineffective_settings(simulation: Any) -> None:
    """Log a warning for each setting of this run that has no effect, and for settings that keep its models from moving.

    Args:
        simulation: the `Simulation`, wired up.
    """
    if not simulation.federation.ranks.is_main_rank:
        return
    facts = RunFacts(simulation)
    for sentence in (*_ineffective_setting_sentences(facts), *_settings_stopping_training(facts)):
        log.warning("%s", sentence)


def report_standstill(simulation: Any, models_before: Tensor, models_after: Tensor, rounds: int) -> None:
    """Log a warning if no round of a run moved the server's model.

    Args:
        simulation: the `Simulation`.
        models_before, models_after: [R, d] the server's models.
        rounds: how many lie between them.
    """
    if (
        not rounds
        or not models_before.numel()
        or not simulation.strategy.vectors_up
        or not torch.equal(models_before, models_after)
    ):
        return
    if simulation.federation.ranks.is_main_rank:
        log.warning(
            "the server's model did not change in %d rounds: no client took part or arrived in time, or all steps were "
            "0; look at availability, clock, delay, rates, and the strategy's settings",
            rounds,
        )


def _ineffective_setting_sentences(run: RunFacts) -> Iterator[str]:
    for group, component in (("", run.simulation), *vars(run.components).items()):
        yield from sentences_without_effect(group, component, run)


def _settings_stopping_training(simulation: RunFacts) -> Iterator[str]:
    for group, component in vars(simulation.components).items():
        yield from no_training_sentences(group, component, simulation)
    process = simulation.availability
    rounds = range(min(simulation.rounds, MAX_ROUNDS_CHECKED))
    if not process.unknown_reason and not any((process.probabilities(t) > 0).any() for t in rounds):
        period = "in any round" if len(rounds) == simulation.rounds else f"in the first {len(rounds)} rounds"
        yield (
            f"availability={type(process).__name__} trains nothing: no client can take part {period}, since all "
            "probabilities are 0; raise them, such as availability.base.p"
        )
