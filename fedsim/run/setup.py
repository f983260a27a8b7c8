"""A run, built from what a user chose in four steps: population, server, training, measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from torch import nn

from fedsim.availability import Availability
from fedsim.availability.clock import Clock, Delay, Work
from fedsim.core.constraints import Count, NonNegative, OneOf, validated
from fedsim.core.effects import Declarations, EffectiveIf
from fedsim.core.federation import Federation
from fedsim.core.ranks import Ranks
from fedsim.data.contamination import Contamination
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.checked import check_samples
from fedsim.data.partition import Partition, Table
from fedsim.data.samples import ClientData
from fedsim.evaluation import EvaluatedModels, EvaluationOptions, Evaluator
from fedsim.evaluation.performative.references import References, references
from fedsim.evaluation.personal import Newcomers, Personal, PersonalEvaluator
from fedsim.local import LocalRule
from fedsim.models import RowModel
from fedsim.models.losses import Loss
from fedsim.models.naming import Naming
from fedsim.models.selectors import Selector
from fedsim.run import determinism
from fedsim.run.delayed_updates import DelayedUpdates
from fedsim.run.divergence import ON_NONFINITE
from fedsim.run.measurement import Measurement
from fedsim.run.model_choice import ModelChoice
from fedsim.run.ownership import PartCopies
from fedsim.run.participation import Participation
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.privacy_claim import privacy_claim
from fedsim.run.round_clock import RoundClock
from fedsim.run.rules import Stop
from fedsim.run.server import Server
from fedsim.run.settings import report_settings
from fedsim.run.traffic import Traffic
from fedsim.run.training import Training
from fedsim.run.wiring import Compute, check_kinds, check_seeds, per_seed_of
from fedsim.shift import Shift
from fedsim.strategies import Strategy
from fedsim.strategies.strategy import KeepsClientModels
from fedsim.trainer import Execution, Trainer, Trainers
from fedsim.uplink import Uplink
from fedsim.uplink.accounting import Privacy
from fedsim.uplink.attack import Attack

STARTS = ("random", "ps", "erm")
KINDS = {
    "dataset": Dataset, "partition": Partition, "availability": Availability, "strategy": Strategy, "local": LocalRule,
    "shift": Shift, "contamination": Contamination, "columns": Selector, "personal": Personal,
    "evaluation": EvaluationOptions, "execution": Execution, "stop": Stop, "attack": Attack, "clock": Clock,
    "work": Work, "delay": Delay, "ranks": Ranks,
}  # fmt: skip


@validated
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

    Attributes:
        components: the run's own copies of what was given.
        population: the clients, and the samples that each of them holds.
        server: the model, who is available, the strategy, the uplink.
        training: how clients train, and when what they send arrives.
        measurement: what is measured of the models.
        per_seed: settings that were given one number per seed.
        device, deterministic: of the execution, resolved.
    """

    effective_if: Declarations = (
        EffectiveIf(
            "uplink",
            lambda component, run: run.clients_send or not component.components.uplink.stages,
            "a strategy whose clients send something",
            attribute="components.uplink",
        ),
        EffectiveIf(
            "attack",
            lambda component, run: run.clients_send or not component.components.attack.active,
            "a strategy whose clients send something",
            attribute="components.attack",
        ),
    )

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
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
        rounds: Count = 100,
        seeds: Sequence[int] = (0,),
        loss: str | Loss | None = None,
        ridge: NonNegative = 0.0,
        output: str | int | None = None,
        start: Annotated[str, OneOf(*STARTS)] = "random",
        on_nonfinite: Annotated[str, OneOf(*ON_NONFINITE)] = "stop",
        columns: Selector | None = None,
        personal: Personal | None = None,
        evaluation: EvaluationOptions | None = None,
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
        self.rounds = rounds
        self.start = start
        self.on_nonfinite = on_nonfinite
        copies = PartCopies()
        self.components = Parts.copied(
            copies, dataset, evaluation=evaluation, uplink=uplink, partition=partition, availability=availability,
            strategy=strategy, local=local, shift=shift, contamination=contamination, attack=attack, columns=columns,
            clock=clock, work=work, delay=delay, personal=personal, stop=stop, trainer=execution,
        )  # fmt: skip
        self.deterministic = determinism.prepare_cublas(self.execution.deterministic)
        seeds = check_seeds(seeds)
        compute = Compute.of(self.execution, ranks or Ranks())
        self.device = compute.device
        self.per_seed = per_seed_of(self.components.strategy, self.components.local, seeds)
        check_samples(dataset, loss)
        dataset = copies(dataset.to(self.device))
        choice = ModelChoice(model, loss, ridge, output, self.execution.precision)
        self.population = Population.build(self.components, dataset, clients, seeds, compute)
        self.server = Server.build(self.components, self.population, choice, self.rounds)
        self.training = Training.build(self.components, self.population, self.server)
        self.measurement = Measurement.build(self.components, self.population, self.server, self.training)
        self.delivery.check_dropping(on_nonfinite)
        report_settings(self)

    @property
    def execution(self) -> Execution:
        """Where and how everything is computed."""
        return self.components.trainer

    @property
    def evaluation(self) -> EvaluationOptions:
        """When which model is evaluated."""
        return self.components.evaluation

    @property
    def stop(self) -> Stop:
        """When the run ends before its last round."""
        return self.components.stop

    @property
    def strategy(self) -> Strategy[Any]:
        """The run's own copy."""
        return self.server.strategy

    @property
    def dataset(self) -> Dataset:
        """The run's own copy, on its device: of the clients that there are."""
        return self.population.dataset

    @property
    def tables(self) -> list[Table]:
        """Which samples belong to whom, for each replicate; newcomers included. None for a stream."""
        return self.population.tables

    @property
    def data(self) -> ClientData:
        """The samples of the clients that train."""
        return self.population.data

    @property
    def federation(self) -> Federation:
        """The clients that train."""
        return self.population.federation

    @property
    def model(self) -> RowModel:
        """That rows parameterise."""
        return self.server.model

    @property
    def availability(self) -> Availability:
        """Who can take part in which round."""
        return self.server.availability

    @property
    def uplink(self) -> Uplink:
        """What happens to rows between clients and server."""
        return self.server.uplink

    @property
    def shift(self) -> Shift:
        """How the samples of the clients that train react to the deployed model."""
        return self.training.trainers.shift

    @property
    def trainer(self) -> Trainer:
        """Runs the local rule on rows."""
        return self.training.trainer

    @property
    def all_trainers(self) -> list[Trainers]:
        """What makes trainers: of the clients that train, and of newcomers where there are some."""
        of_newcomers = self.measurement.newcomer_trainers
        return [self.training.trainers, *([] if of_newcomers is None else [of_newcomers])]

    @property
    def traffic(self) -> Traffic:
        """Bytes that a client receives and sends in a round."""
        return self.training.traffic

    @property
    def pace(self) -> RoundClock:
        """Which clients are in time; keeps virtual time."""
        return self.training.pace

    @property
    def delivery(self) -> DelayedUpdates:
        """In which later round rows arrive."""
        return self.training.delivery

    @property
    def evaluator(self) -> Evaluator:
        """Scores models of the server's."""
        return self.measurement.evaluator

    @property
    def models(self) -> EvaluatedModels:
        """Makes the models that are evaluated."""
        return self.measurement.models

    @property
    def participation(self) -> Participation:
        """Follows who takes part."""
        return self.measurement.participation

    @property
    def personal(self) -> PersonalEvaluator | None:
        """Scores clients' own models; None where nobody asked for it."""
        return self.measurement.personal

    @property
    def newcomers(self) -> Newcomers | None:
        """Trains and scores who joins when training is over; None where there is nobody."""
        return self.measurement.newcomers

    def privacy(self, rounds: int) -> Privacy | None:
        """What may be claimed of the clients' privacy after so many rounds; None where rows have no noise."""
        return privacy_claim(self.server, self.training, rounds)

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
        """Columns of this run → what they are."""
        clock = self.pace.clock
        return self.measurement.columns(clock.active, clock.asynchronous)

    @functools.cached_property
    def references(self) -> References:
        """θ^PS and θ^PO, those there are and are wanted."""
        if not self.shift.active:
            return References()
        reference_points = references(self.model, self.shift, self.data, self.model.initial(self.federation.seeds))
        # their clocks differ, and a search may be ended by one
        return self.federation.ranks.broadcast_object(reference_points)
