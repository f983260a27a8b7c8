"""The parts of a run, built from what a user chose, wired up and checked."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fedsim.attack import Attack
from fedsim.availability import Availability, UniformK
from fedsim.clock import AllWork, Clock, DeadlineFilter, Delay, NoClock, NoDelay, Work
from fedsim.contamination import Contamination, NoContamination
from fedsim.core import checks
from fedsim.core.effects import Declarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.ranks import Ranks
from fedsim.datasets import Dataset
from fedsim.datasets.checked import check_samples
from fedsim.datasets.pooled import PooledData
from fedsim.evaluation import EvaluatedModels, Evaluation, Evaluator
from fedsim.evaluation.columns import COLUMNS, MODELS, PLACE, TIME, WORK, also
from fedsim.evaluation.diagnostics import spreads
from fedsim.evaluation.metrics import Metrics
from fedsim.local import SGD, LocalRule
from fedsim.models.losses import Loss
from fedsim.models.naming import Naming
from fedsim.models.selectors import Selector
from fedsim.partition import Partition, Table
from fedsim.performative.answer import Answer
from fedsim.performative.references import References, references
from fedsim.personal import Newcomers, Personal, PersonalEvaluator
from fedsim.personal.models import OwnModels
from fedsim.run import determinism
from fedsim.run.delayed_updates import DelayedUpdates
from fedsim.run.divergence import ON_NONFINITE
from fedsim.run.ownership import PartCopies
from fedsim.run.participation import Participation
from fedsim.run.round_clock import RoundClock
from fedsim.run.rules import Stop
from fedsim.run.settings import report_settings
from fedsim.run.traffic import Traffic
from fedsim.run.wiring import (
    among_members,
    as_uplink,
    bound,
    check_kinds,
    check_seeds,
    client_data,
    clients_of,
    owners_are_clients,
    per_seed_of,
    resolve_device,
    resolve_dtype,
    row_model,
    scores_of,
    split,
    uplink_of,
    validation_of,
)
from fedsim.samples import ClientData
from fedsim.shift import NoShift, Shift
from fedsim.shift.pooled import PooledShift
from fedsim.strategies import FedAvg, Strategy
from fedsim.strategies.base import KeepsClientModels
from fedsim.trainer import Execution, FullDataQuery, Trainers
from fedsim.uplink import Uplink
from fedsim.uplink.accounting import Privacy, privacy

log = logging.getLogger(__name__)

STARTS = ("random", "ps", "erm")
KINDS = {
    "dataset": Dataset, "partition": Partition, "availability": Availability, "strategy": Strategy, "local": LocalRule,
    "shift": Shift, "contamination": Contamination, "columns": Selector, "personal": Personal,
    "evaluation": Evaluation, "execution": Execution, "stop": Stop, "attack": Attack, "clock": Clock, "work": Work,
    "delay": Delay, "ranks": Ranks,
}  # fmt: skip


class Setup:
    """A federation, wired up and checked. The arguments are the groups of a configuration, and its few plain keys.

    Parts are copied before they are set up (`fedsim.run.ownership`), so that the same objects may be given to several
    simulations.

    Args:
        dataset: what samples exist.
        model: builds a fresh `nn.Module`; called with `shape` and `classes` if it takes them (see `RowModel`).
        clients: m, or 'all' that come with the data. Of more than m that do, partition=natural draws m.
        partition: who holds which; the natural one where the data set has owners, else iid.
        availability: who can take part.
        strategy: the aggregation algorithm.
        local: the local rule.
        shift, contamination: how data answer the model, and which are rotten.
        rounds: T.
        seeds: one replicate each, simulated together.
        loss, ridge: per-sample loss (the data set's by default) and penalty.
        output: which of the things that the module returns, where it is not a tensor: a name, or a number.
        start: 'random': the model's own initialisation; 'ps': the performatively stable point (p-fedavg Fig. 11);
            'erm': the best model on data that have not answered yet (the program of p-fedavg's authors).
        on_nonfinite: 'stop', 'drop_client' or 'drop_replicate', see `fedsim.run.divergence`.
        columns: which parts of the model stay with the client; everything travels unless given.
        personal: whose own models are scored too, and who joins when training is over.
        evaluation: when which model is evaluated.
        stop: when the run ends before its last round.
        uplink: what happens to rows between local work and aggregation.
        attack: who lies, and how: before the uplink.
        clock: how long clients take in virtual seconds, and who is late.
        work: how much of a round's local steps each does.
        delay: how many rounds later rows arrive.
        execution: where and how all is computed.
        ranks: the processes that share the run (`Ranks.join()` under torchrun); a lone one unless given.
    """

    effective_if: Declarations = (
        EffectiveIf(
            "uplink",
            lambda own, run: run.clients_send or not own.parts.uplink.stages,
            "a strategy whose clients send something",
            attribute="parts.uplink",
        ),
        EffectiveIf(
            "attack",
            lambda own, run: run.clients_send or not own.parts.attack.active,
            "a strategy whose clients send something",
            attribute="parts.attack",
        ),
    )

    def __init__(
        self,
        dataset: Dataset,
        model: Callable[..., nn.Module] | nn.Module,
        clients: int | str = 100,
        partition: Partition | None = None,
        availability: Availability | None = None,
        strategy: Strategy[Any] | None = None,
        local: LocalRule | None = None,
        shift: Shift | None = None,
        contamination: Contamination | None = None,
        rounds: int = 100,
        seeds: Sequence[int] = (0,),
        loss: str | Loss | None = None,
        ridge: float = 0.0,
        output: str | int | None = None,
        start: str = "random",
        on_nonfinite: str = "stop",
        columns: Selector | None = None,
        personal: Personal | None = None,
        evaluation: Evaluation | None = None,
        execution: Execution | None = None,
        stop: Stop | None = None,
        uplink: Uplink | None = None,
        attack: Attack | None = None,
        clock: Clock | None = None,
        work: Work | None = None,
        delay: Delay | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        check_kinds(KINDS, locals())
        self.rounds = checks.whole("rounds", rounds)
        self.start = checks.choice("start", start, STARTS)
        self.on_nonfinite = checks.choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
        copies = PartCopies()
        self.evaluation, self.execution, self.stop = (
            copies(evaluation or Evaluation()),
            execution or Execution(),
            stop or Stop(),
        )
        uplink = uplink if uplink is None else copies(as_uplink(uplink))
        partition, availability, strategy, local = (
            copies(partition),
            copies(availability),
            copies(strategy),
            copies(local),
        )
        shift, contamination, attack, columns = copies(shift), copies(contamination), copies(attack), copies(columns)
        clock, work, delay = copies(clock), copies(work), copies(delay)
        self.parts = SimpleNamespace(
            dataset=dataset, partition=partition, availability=availability, shift=shift, contamination=contamination,
            local=local, strategy=strategy, uplink=uplink, attack=attack, clock=clock, work=work, delay=delay,
            columns=columns, personal=personal, stop=stop, trainer=execution, evaluation=evaluation,
        )  # fmt: skip
        self.deterministic = determinism.prepared(self.execution.deterministic)
        ranks, seeds = ranks or Ranks(), check_seeds(seeds)
        self.device, dtype = resolve_device(ranks.device(self.execution.device)), resolve_dtype(self.execution.dtype)
        rule, personal, contamination = local or SGD(), personal or Personal(), contamination or NoContamination()
        self.strategy, self.shift = strategy or FedAvg(), shift or NoShift()
        self.per_seed = per_seed_of(self.strategy, rule, seeds)
        check_samples(dataset, loss)
        self.dataset, clients = clients_of(copies(dataset.to(self.device)), partition, clients)
        if rule.pooled:
            self._pool(clients, rule)
            clients, partition, availability = 1, None, None
        self.tables = split(self.dataset, partition, clients, seeds)  # newcomers' shares among them
        personal.check(clients, not self.tables or self.tables[0].validation is not None)
        members = clients - personal.newcomers
        tables = [table.first(members) for table in self.tables]
        data_options = (self.device, dtype, ranks, self.execution.memory, self.strategy.weighting)
        self.data = client_data(seeds, members, self.dataset, tables, *data_options, late=personal.newcomers)
        self.federation = self.data.federation
        self.model = row_model(model, self.data, loss, ridge, self.execution.precision, output)
        if columns is not None:
            self.model.divide(columns)
        self._check_columns()
        with among_members(members, personal.newcomers):
            self.availability = bound(availability, self.federation, rounds, tables)
            self.strategy.check(DeadlineFilter.unless_all_count(self.availability, clock))
        self.strategy.check_local(rule)
        self.uplink = uplink_of(self.strategy, uplink, attack)
        self.uplink.setup(self.federation, self.availability)
        everybody = (
            client_data(seeds, clients, self.dataset, self.tables, *data_options, members)
            if personal.newcomers
            else self.data
        )
        for stage in self.uplink.stages:
            contamination = stage.of_samples(contamination) if isinstance(stage, Attack) else contamination
        contamination.setup(everybody.federation, self.dataset)
        # of newcomers, set up for everybody
        newcomer_shift = copy.deepcopy(self.shift) if personal.newcomers else self.shift
        trainers = self._train(rule, contamination)
        self.pace = RoundClock(clock or NoClock(), work or AllWork(), self.trainer, self.traffic)
        self.delivery = DelayedUpdates(delay or NoDelay(), self.pace, self.strategy, self.trainer)
        self._build_evaluation(personal, trainers, tables)
        self.newcomers = (
            self._build_newcomers(personal, everybody, newcomer_shift, rule, contamination)
            if personal.newcomers
            else None
        )
        report_settings(self)

    def _pool(self, clients: int, rule: LocalRule) -> None:
        """One client holds all data, and the shift answers it as it answers the clients they come from."""
        log.info("one client holds the data of all %d; partition and availability do not apply", clients)
        self.shift = PooledShift(self.shift, self.dataset, clients)
        self.dataset = PooledData(self.dataset, clients, rule.one_at_a_time)

    def _train(self, rule: LocalRule, contamination: Contamination) -> Trainers:
        """What trains the clients, and what they send for it."""
        trainers = Trainers(self.data, self.shift, self.model, contamination, self.execution)
        self.all_trainers, self.all_shifts = [trainers], [self.shift]
        self.trainer, self.settled = trainers(rule), trainers.settled
        if self.strategy.needs_full_gradients:
            self.federation.ask = FullDataQuery(trainers, self.trainer)
        self.traffic = Traffic.of(self.strategy, self.trainer.rule, self.model, self.uplink)
        return trainers

    def _build_evaluation(self, personal: Personal, trainers: Trainers, tables: list[Table]) -> None:
        """What judges the models: the federation's, and where it is asked for clients' own."""
        self._metrics = Metrics(self.evaluation.metrics, self.model, self.data)
        diagnostics = list(self.evaluation.diagnostics)  # else all models are scored on validation samples there
        validation_data = validation_of(self.data, tables) if personal.over == "none" or diagnostics else None
        self.evaluator = self._evaluator(self.data, self.shift, validation_data)
        self.evaluator.further = Answer(diagnostics, self.model, self.shift, self.data)
        self.models = EvaluatedModels(self.evaluation.models, self.strategy, self.federation, self.model.columns)
        owners_match = owners_are_clients(self.data, tables)
        self.participation = Participation(
            diagnostics, self.federation, self.availability, self.evaluator, owners_match
        )
        self.personal: PersonalEvaluator | None = None
        if personal.over != "none":
            own_models = OwnModels(self.trainer, self.strategy, trainers, personal.localize)
            scores = scores_of(self.evaluator, personal, tables)
            self.personal = PersonalEvaluator(personal, self.federation, self.strategy, own_models, scores)

    def _build_newcomers(
        self, personal: Personal, everybody: ClientData, shift: Shift, rule: LocalRule, contamination: Contamination
    ) -> Newcomers:
        """Who joins when training is over; `everybody` has their data too, and their shift is another one."""
        trainers = Trainers(everybody, shift, self.model, contamination, self.execution, self.settled)
        self.all_trainers.append(trainers)
        self.all_shifts.append(shift)
        scores = scores_of(self._evaluator(everybody, shift), personal, self.tables)
        return Newcomers(personal, self.federation, self.strategy, trainers, rule, scores)

    def _evaluator(self, data: ClientData, shift: Shift, validation: ClientData | None = None) -> Evaluator:
        """What scores models on these clients' samples."""
        return Evaluator(
            self.model, data, shift, client_samples=self.evaluation.client_samples,
            loop=self.execution.executor == "loop", metrics=self._metrics, validation=validation,
            spreads=spreads(self.evaluation.diagnostics),
        )  # fmt: skip

    def _check_columns(self) -> None:
        """Refuse what shift and strategy could not make sense of in inputs and rows."""
        if self.shift.active and self.dataset.tokens:
            raise ConfigError(
                f"shift={type(self.shift).__name__} moves numbers, but dataset={self.dataset.name} has tokens"
            )
        if self.shift.active and self.tables and self.tables[0].skew is not None:
            raise ConfigError(
                f"shift={type(self.shift).__name__} knows the data as they are stored, and the partition gives clients "
                "others; use another partition, or shift=none"
            )
        keeps = isinstance(self.strategy, KeepsClientModels) or self.strategy.clustered
        if len(self.model.columns.averaged) and keeps:
            raise ConfigError(
                f"strategy={type(self.strategy).__name__} lets clients keep models of their own, and statistics "
                f"({next(iter(self.model.statistics))}, …) that the server averages would reach them without a link; "
                "keep them with the client by columns=fedbn, or columns=by_name"
            )

    def privacy(self, rounds: int) -> Privacy | None:
        """What may be claimed of the clients' privacy after so many rounds; None where rows have no noise."""
        strategy = self.strategy
        uniform = getattr(strategy, "weighting", "uniform") == "uniform"
        server_sees = strategy.server_sees if uniform else "rows"
        leaks = {
            "the strategy asks clients for losses and gradients": strategy.needs_full_gradients,
            "further vectors go up": strategy.vectors_up > 1,
            strategy.beside: bool(strategy.beside),
            "the local rule sends estimates": self.trainer.rule.traffic(self.model.dimension)[1] > 0,
            "some clients send what follows from others' rows": any(isinstance(s, Attack) for s in self.uplink.stages),
            "how late clients are shows how much data they have": self.pace.clock.cuts or self.delivery.active,
            "statistics of the model are averaged": len(self.model.columns.averaged) > 0,
        }
        active_leaks = [leak for leak, applies in leaks.items() if applies]
        remember = isinstance(self.availability, UniformK) and bool(self.uplink.stages) and self._clients_remember()
        return privacy(self.uplink.stages, self.availability, server_sees, active_leaks, rounds, remember)

    def _clients_remember(self) -> bool:
        """Does local work depend on the earlier rounds in which a client took part?"""
        if self.model.columns.divided or self.trainer.rule.own_models:
            return True
        model = torch.zeros(self.federation.replicates, self.model.dimension)
        shift = self.shift.active and bool(self.shift.memory(self.federation, model.to(self.device)))
        return shift or bool(self.trainer.rule.memory(self.federation, 1))

    @functools.cached_property
    def naming(self) -> Naming:
        """What the module calls the parts of a row."""
        return self.model.naming

    def model_metadata(self) -> dict[str, Any]:
        """What a checkpoint tells of the models in it: names, and whether clients keep some."""
        keeps_models = isinstance(self.strategy, KeepsClientModels)
        metadata = {
            "own": list(self.trainer.rule.own_models),
            "kept": keeps_models,
            "clustered": self.strategy.clustered,
        }
        return {"naming": self.naming.as_json(), "clients": self.federation.clients} | metadata

    @property
    def column_descriptions(self) -> dict[str, str]:
        """Columns of this run → what they are: those of COLUMNS in its order, a user's metrics, clients' own models."""
        measured, added = self.evaluator.columns, self.evaluator.added()
        for model in self.evaluation.models[1:]:
            measured |= set(also(model, self.evaluator.columns).values())
            model_descriptions = self.evaluator.added(f", of {MODELS[model]}")
            added |= {name: model_descriptions[of] for of, name in also(model, model_descriptions).items()}
        descriptions = {
            name: description for name, description in COLUMNS.items() if name in {*PLACE, *measured, *WORK}
        }
        descriptions |= TIME if self.pace.clock.active else {}
        return descriptions | added | (self.personal.columns if self.personal else {}) | self.participation.columns

    @functools.cached_property
    def references(self) -> References:
        """θ^PS and θ^PO, those there are and are wanted."""
        if not self.shift.active:
            return References()
        reference_points = references(self.model, self.shift, self.data, self.model.initial(self.federation.seeds))
        # their clocks differ, and a search may be ended by one
        return self.federation.ranks.broadcast_object(reference_points)
