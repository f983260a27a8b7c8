"""Detects rows and models that become non-finite, without synchronising the device in every round."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError, DivergenceError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.numerical import is_numerical_error
from fedsim.core.per_seed import largest_value
from fedsim.core.report import Report
from fedsim.evaluation import EvaluationResult
from fedsim.local import LocalRule
from fedsim.models import StatelessModel
from fedsim.strategies import State, Strategy

log = logging.getLogger(__name__)

ON_NONFINITE_CHOICES = ("stop", "drop_client", "drop_replicate")
_NEVER_NONFINITE = torch.iinfo(torch.int64).max
_MAX_CLIENTS_IN_MESSAGE = 10  # largest number of clients in a message
NONFINITE_BEFORE_TRAINING = "the loss was not finite before training: check the data and the model's outputs for them"


def error_summary(error: Exception) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def divergence_remedy(rule: LocalRule, strategy: Strategy[Any]) -> str:
    """Return a suggestion of settings that may keep models of this rule finite."""
    rates = ["lr", *(f"local.{name}" for name in ("inner_lr",) if hasattr(rule, name))]
    rates += ["local.personal_lr"] if getattr(rule, "ratio", None) not in (None, 1.0) else []
    rates += ["strategy.server_lr"] if largest_value(getattr(strategy, "server_lr", 1.0)) > 1 else []
    clip = ", or clip gradients with local.clip" if getattr(rule, "clip", 0.0) is None else ""
    return f"lower {', '.join(rates[:-1])}{' and ' if rates[1:] else ''}{rates[-1]}{clip}"


def check_initial_models(model: StatelessModel, rows: Tensor) -> None:
    """Refuse initial models [R, d] that are not finite.

    Raises:
        ConfigError: naming the part that is not.
    """
    if bool(torch.isfinite(rows.sum())) or bool(torch.isfinite(rows).all()):
        return
    column_ends = np.cumsum([shape.numel() for shape in (model.shapes | model.statistics).values()])
    first_column = int((~torch.isfinite(rows)).any(0).nonzero()[0])
    name = [*model.shapes, *model.statistics][int(np.searchsorted(column_ends, first_column, side="right"))]
    raise ConfigError(
        f"model: {type(model.training_module).__name__} is initialised with non-finite values (in {name}); correct its "
        "initialisation"
    )


class DivergenceGuard:
    """Stores on the device in which round each row first became non-finite; `handle_nonfinite` acts on it.

    A row is a client's parameters and whatever else it brings home: its personal model and its rule's memory.

    Args:
        federation: who exists.
        strategy: its name, for messages.
        on_nonfinite: what follows.
            'stop': the run ends with an error that names strategy, round, replicates and clients.
            'drop_client': a client whose row is non-finite counts as absent in that round: the server does not get it,
            and what it remembers is what it was before. This costs one transfer of n booleans a round.
            'drop_replicate': its replicate is given up. Its metrics are NaN from that round on, and no client of it
            computes from the next evaluation on; the other replicates do not notice. The last one is not given up: then
            the run ends as with 'stop'.
        eval_every: rounds between evaluations.
        dropped: those dropped so far, in the order of their dropping; new ones are appended. Per client 'replicate',
            'seed', 'client', its first 'round' and how many 'times'; or per replicate 'replicate', 'seed', 'round' and
            its 'clients' that were non-finite then; of one that an observer gave up none, and its 'reason'.
        remedy: what a run that ends by it should try.

    Attributes:
        nonfinite_replicates: replicates whose loss was no number before any training; to them no learning rate is a
            remedy.
    """

    def __init__(
        self,
        federation: Federation,
        strategy: str,
        on_nonfinite: str = "stop",
        eval_every: int = 1,
        dropped: list[dict[str, Any]] | None = None,
        remedy: str = "lower lr",
    ) -> None:
        self.federation, self.strategy, self.eval_every = federation, strategy, eval_every
        self.on_nonfinite = on_nonfinite
        self.dropped_records = [] if dropped is None else dropped
        self.remedy, self.nonfinite_replicates = remedy, set[int]()
        self.first_nonfinite_round_of_rows = torch.full(
            (federation.num_memory_rows,), _NEVER_NONFINITE, device=federation.device
        )
        self.first_nonfinite_round_of_models = torch.full(
            (federation.num_replicates,), _NEVER_NONFINITE, device=federation.device
        )

    @property
    def round_by_dropped_replicate(self) -> dict[int, int]:
        """The replicates that were dropped, and the round in which each became non-finite."""
        return {entry["replicate"]: entry["round"] for entry in self.dropped_records if "clients" in entry}

    def without_dropped_replicates(self, cohort: Cohort, t: int) -> Cohort:
        """Return the cohort without dropped replicates. A replicate is dropped at the evaluation after it diverged,
        which synchronises the device anyway, so that the round of the drop depends only on the round of divergence."""
        return self.exclude_replicates(self.excluded_replicates(t), cohort)

    def excluded_replicates(self, t: int) -> list[int]:
        """Return the replicates that are dropped in round t."""
        return [
            r
            for r, divergence_round in self.round_by_dropped_replicate.items()
            if t >= (divergence_round // self.eval_every + 1) * self.eval_every
        ]

    def drop_replicate(self, replicate: int, completed_rounds: int, drop_reason: str) -> None:
        """Drop a replicate after an evaluation.

        Raises:
            ConfigError: there is no such replicate.
        """
        if not 0 <= replicate < self.federation.num_replicates:
            raise ConfigError(
                f"an observer drops replicate {replicate}, but there are {self.federation.num_replicates}"
            )
        if replicate not in self.round_by_dropped_replicate:
            seed, divergence_round = self.federation.seeds[replicate], max(completed_rounds - 1, 0)
            self.dropped_records.append(
                {"replicate": replicate, "seed": seed, "round": divergence_round, "clients": [], "reason": drop_reason}
            )

    def exclude_replicates(self, replicates: list[int], cohort: Cohort) -> Cohort:
        """Return the rows of all replicates but these."""
        if not replicates:
            return cohort
        return cohort.subset(
            np.flatnonzero(~np.isin(cohort.host_index.virtual_clients // self.federation.clients, replicates))
        )

    def accepted_rows(self, t: int, cohort: Cohort, is_finite_row: Tensor) -> np.ndarray | None:
        """Return the positions of the rows that are accepted and stored, given which of them are finite [n]; None if
        all are.

        Every rank comes here in every round, and notes the rows of all.
        """
        if self.on_nonfinite != "drop_client":
            return None
        finite_mask = is_finite_row.cpu().numpy()
        nonfinite_rows = self.federation.ranks.all_gather_objects(cohort.host_index.virtual_clients[~finite_mask])
        dropped_entries = {(entry["replicate"], entry["client"]): entry for entry in self.dropped_records}
        new_clients: dict[int, list[int]] = {}
        for row in np.sort(np.concatenate(nonfinite_rows)):
            replicate, client = divmod(int(row), self.federation.clients)
            if (replicate, client) in dropped_entries:
                dropped_entries[replicate, client]["times"] += 1
                continue
            new_clients.setdefault(replicate, []).append(client)
            seed = self.federation.seeds[replicate]
            self.dropped_records.append(
                {"replicate": replicate, "seed": seed, "client": client, "round": t, "times": 1}
            )
        if new_clients:
            log.warning("%s; such clients are treated as absent", self._divergence_description(t, new_clients))
        return None if finite_mask.all() else np.flatnonzero(finite_mask)

    def record_nonfinite(self, t: int, state: State, report: Report) -> None:
        """Record which rows and server models became non-finite in round t, without a transfer from the device."""
        if report.finite is not None:
            rows = report.cohort.rows
            self.first_nonfinite_round_of_rows[rows] = torch.minimum(
                self.first_nonfinite_round_of_rows[rows], torch.where(report.finite, _NEVER_NONFINITE, t)
            )
        finite = torch.isfinite(state.model.sum(1))  # the quickest look
        torch.minimum(
            self.first_nonfinite_round_of_models,
            torch.where(finite, _NEVER_NONFINITE, t),
            out=self.first_nonfinite_round_of_models,
        )

    @contextlib.contextmanager
    def raise_as_divergence(self, t: int, state: State, report: Report) -> Iterator[None]:
        """Within the block, errors of numerical routines in the aggregation of round t are treated as divergence."""
        try:
            yield
        except Exception as error:
            if not is_numerical_error(error):
                raise
            raise self.divergence_error(t, state, report, error) from error

    def divergence_error(self, t: int, state: State, report: Report, error: Exception) -> DivergenceError:
        """Return the error to raise if the aggregation of round t raised `error`, which is of a numerical routine."""
        self.record_nonfinite(t, state, report)
        self.on_nonfinite = "stop"  # the state may be half a round ahead, so no replicate can continue with it
        try:
            self.handle_nonfinite()
        except DivergenceError as divergence:
            return DivergenceError(f"{divergence} ({error_summary(error)})")
        return DivergenceError(f"round {t} of {self.strategy}: {error_summary(error)}; {self.remedy}")

    def evaluate(
        self, evaluator: Callable[[Tensor], EvaluationResult], models: Tensor, completed_rounds: int
    ) -> EvaluationResult:
        """Return the measurements of models [R, d] by `evaluator`. A model that a numerical routine refuses because it
        is not finite is replaced by that of another replicate for the evaluation; it was dropped, and its metrics are
        NaN in any case.

        Raises:
            DivergenceError: a finite model is refused.
        """
        try:
            return evaluator(models)
        except Exception as error:
            if not is_numerical_error(error):
                raise
            finite = torch.isfinite(models).all(1)
            try:
                if bool(finite.all()) or not bool(finite.any()):
                    raise
                return evaluator(torch.where(finite[:, None], models, models[finite][:1]))
            except Exception as retry_error:
                if not is_numerical_error(retry_error):
                    raise
                raise DivergenceError(
                    f"models of {self.strategy} cannot be evaluated after round {completed_rounds}: "
                    f"{error_summary(retry_error)}; {self.remedy}"
                ) from retry_error

    def handle_nonfinite(self) -> None:
        """Act on recorded divergence; costs one transfer from the device, and an exchange between ranks.

        Raises:
            DivergenceError: if the run cannot go on.
        """
        federation, lost_replicates = self.federation, self.round_by_dropped_replicate
        rows, models = (
            first_rounds.cpu().numpy()
            for first_rounds in (self.first_nonfinite_round_of_rows, self.first_nonfinite_round_of_models)
        )
        rows = rows.reshape(federation.num_replicates, -1)
        first_bad_rounds = federation.ranks.all_reduce_min(np.minimum(rows.min(1), models))
        divergence_rounds = {
            r: int(t) for r, t in enumerate(first_bad_rounds) if t != _NEVER_NONFINITE and r not in lost_replicates
        }
        if not divergence_rounds:
            return
        diverged_mask = federation.all_gather_clients((rows == first_bad_rounds[:, None]).reshape(-1)).reshape(
            federation.num_replicates, -1
        )
        clients = {r: np.flatnonzero(diverged_mask[r]).tolist() for r in divergence_rounds}
        remaining_count = self.federation.num_replicates - len(lost_replicates) - len(divergence_rounds)
        if self.on_nonfinite != "drop_replicate" or not remaining_count:
            divergence_round = (
                min(divergence_rounds.values())
                if remaining_count or self.on_nonfinite != "drop_replicate"
                else max(divergence_rounds.values())
            )
            description = self._divergence_description(
                divergence_round, {r: clients[r] for r, t in divergence_rounds.items() if t == divergence_round}
            )
            nonfinite_now = self.nonfinite_replicates & {
                r for r, t in divergence_rounds.items() if t == divergence_round
            }
            raise DivergenceError(f"{description}; {NONFINITE_BEFORE_TRAINING if nonfinite_now else self.remedy}")
        for replicate, t in sorted(divergence_rounds.items(), key=lambda item: item[1]):
            log.warning(
                "%s; this replicate is dropped", self._divergence_description(t, {replicate: clients[replicate]})
            )
            seed = self.federation.seeds[replicate]
            self.dropped_records.append(
                {"replicate": replicate, "seed": seed, "round": t, "clients": clients[replicate]}
            )

    def _divergence_description(self, t: int, clients: dict[int, list[int]]) -> str:
        """Describe a divergence: strategy, round, replicates and clients; the aggregated model if no client caused
        it."""
        replicate_descriptions = []
        for replicate, client_numbers in sorted(clients.items()):
            names = self.federation.client_names or range(self.federation.clients)
            client_names = ", ".join(str(names[client]) for client in client_numbers[:_MAX_CLIENTS_IN_MESSAGE]) + (
                f" and {len(client_numbers) - _MAX_CLIENTS_IN_MESSAGE} more"
                if client_numbers[_MAX_CLIENTS_IN_MESSAGE:]
                else ""
            )
            seed = self.federation.seeds[replicate]
            replicate_label = f"seed {seed}" + (
                f" (replicate {replicate})" if self.federation.seeds.count(seed) > 1 else ""
            )
            replicate_descriptions.append(
                f"{replicate_label}: " + (f"clients {client_names}" if client_numbers else "the aggregated model")
            )
        return f"non-finite values in round {t} of {self.strategy}, {'; '.join(replicate_descriptions)}"
