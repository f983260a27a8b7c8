"""The four steps from what a user chose to a run: population, server, training, measurement."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fedsim.availability import Availability
from fedsim.core.federation import Federation
from fedsim.core.memory import Memory
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Table
from fedsim.data.samples import ClientData
from fedsim.evaluation import EvaluatedModels, EvaluationOptions, Evaluator
from fedsim.evaluation.performative.reference_path import reference_path
from fedsim.evaluation.performative.references import References, references
from fedsim.evaluation.personal import Newcomers, PersonalEvaluator
from fedsim.evaluation.registry import DISTANCE_COLUMNS
from fedsim.models import RowModel
from fedsim.models.naming import Naming
from fedsim.run.delayed_updates import DelayedUpdates
from fedsim.run.measurement import Measurement
from fedsim.run.model_choice import GivenModel, ModelChoice
from fedsim.run.participation import Participation
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.privacy_claim import privacy_claim
from fedsim.run.round_clock import RoundClock
from fedsim.run.rules import Stop
from fedsim.run.server import Server
from fedsim.run.settings import report_settings
from fedsim.run.submodels import Submodels
from fedsim.run.traffic import Traffic
from fedsim.run.training import Training
from fedsim.run.wiring import Compute
from fedsim.shift import Shift
from fedsim.strategies import State, Strategy
from fedsim.strategies.strategy import KeepsClientModels
from fedsim.trainer import Execution, Trainer, TrainerFactory
from fedsim.uplink import Uplink
from fedsim.uplink.accounting import Privacy
from fedsim.uplink.attack import Attack


class Assembly:
    """A run, wired up and checked in four steps. Each takes what the steps before it have built.

    Args:
        components: the run's own copies of its parts.
        choice: the model that the user chose.
        compute: where everything is computed.
        clients: m, or 'all' that come with the data.
        seeds: of the replicates.
        rounds: T.
        start: the model of round 0, see `Setup`.
        on_nonfinite: what happens to rows that become non-finite, see `Setup`.

    Attributes:
        population: the clients, and the samples that each of them holds.
        server: the model, who is available, the strategy, the uplink.
        training: how clients train, and when what they send arrives.
        submodels: which columns each client holds.
        measurement: what is measured of the models.
    """

    def __init__(
        self,
        components: Parts,
        choice: ModelChoice | GivenModel,
        compute: Compute,
        clients: int | str,
        seeds: tuple[int, ...],
        rounds: int,
        start: str,
        on_nonfinite: str,
    ) -> None:
        self.components, self.compute = components, compute
        self.rounds, self.start, self.on_nonfinite = rounds, start, on_nonfinite
        self.population = Population.build(components, clients, seeds, compute)
        self.server = Server.build(components, self.population, choice, rounds)
        self.training = Training.build(components, self.population, self.server)
        self.submodels = Submodels.build(components, self.population, self.server, self.training)
        self.measurement = Measurement.build(components, self.population, self.server, self.training)
        self.delayed_updates.check_nonfinite_handling(on_nonfinite)
        report_settings(self)

    @property
    def device(self) -> torch.device:
        """That the models are on."""
        return self.compute.device

    @property
    def deterministic(self) -> bool:
        """Whether PyTorch uses deterministic algorithms alone."""
        return self.compute.deterministic

    @property
    def values_per_seed(self) -> dict[str, Sequence[float]]:
        """Settings that were given one number per seed."""
        return self.population.values_per_seed

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
    def client_tables(self) -> list[Table]:
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
        return self.training.trainer_factory.shift

    @property
    def trainer(self) -> Trainer:
        """Runs the local rule on rows."""
        return self.training.trainer

    @property
    def trainer_factories(self) -> list[TrainerFactory]:
        """What makes trainers: of the clients that train, and of newcomers where there are some."""
        of_newcomers = self.measurement.newcomer_trainers
        return [self.training.trainer_factory, *([] if of_newcomers is None else [of_newcomers])]

    @property
    def traffic(self) -> Traffic:
        """Bytes that a client receives and sends in a round."""
        return self.training.traffic

    @property
    def round_clock(self) -> RoundClock:
        """Which clients are in time; keeps virtual time."""
        return self.training.round_clock

    @property
    def delayed_updates(self) -> DelayedUpdates:
        """In which later round rows arrive."""
        return self.training.delayed_updates

    @property
    def evaluator(self) -> Evaluator:
        """Scores models of the server's."""
        return self.measurement.evaluator

    @property
    def evaluated_models(self) -> EvaluatedModels:
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

    def initial_memory(self, state: State) -> Memory:
        """What clients, evaluation and uplink remember before round 0, given the strategy's state."""
        memory = self.trainer.initial_memory(state.model)
        memory.evaluated = self.evaluated_models.memory(state.model) | self.participation.memory()
        self.uplink.remember(memory, self.federation, state.model)
        return memory

    @property
    def components_by_group(self) -> dict[str, Any]:
        """The parts that rounds are made of, as they were set up, by group."""
        components, trainers = self.components, self.training.trainer_factory
        stages = {
            f"{'attack' if isinstance(stage, Attack) else 'uplink'}.{number}": stage
            for number, stage in enumerate(self.uplink.stages)
        }
        return stages | {
            "availability": self.availability, "strategy": self.strategy, "local": self.trainer.local_rule,
            "shift": trainers.shift, "contamination": self.training.contamination, "clock": self.round_clock.clock,
            "work": self.round_clock.work_model, "delay": self.delayed_updates.delay, "capacity": components.capacity,
            "partition": components.partition,
        }  # fmt: skip

    def privacy(self, rounds: int) -> Privacy | None:
        """What may be claimed of the clients' privacy after so many rounds; None where rows have no noise."""
        return privacy_claim(self.server, self.training, rounds)

    @functools.cached_property
    def parameter_naming(self) -> Naming:
        """What the module calls the parts of a row."""
        return self.model.naming

    def model_metadata(self) -> dict[str, Any]:
        """What a checkpoint tells of the models in it: names, and whether clients keep some."""
        keeps_models = isinstance(self.strategy, KeepsClientModels)
        metadata = {
            "own": list(self.trainer.local_rule.own_models),
            "kept": keeps_models,
            "clustered": self.strategy.clustered,
        }
        return {"naming": self.parameter_naming.as_json(), "clients": self.federation.clients} | metadata

    @property
    def column_descriptions(self) -> dict[str, str]:
        """Columns of this run → what they are."""
        clock = self.round_clock.clock
        return self.measurement.columns(clock, self.references.has_regret)

    @property
    def possible_columns(self) -> set[str]:
        """The columns that this run may measure; those of reference points count where some are sought, since they are
        searched for when the run begins."""
        clock, sought = self.round_clock.clock, self.shift.active or self.data.drift.active
        columns = self.measurement.columns(clock, sought)
        return {*columns, *(DISTANCE_COLUMNS if sought else ())}

    @functools.cached_property
    def references(self) -> References:
        """θ^PS and θ^PO, those there are and are wanted; of data that drift, their paths."""
        if self.data.drift.active:
            every = self.evaluation.every
            return reference_path(
                self.model, self.shift, self.data, self.model.initial(self.federation.seeds),
                sorted({*range(0, self.rounds, every), self.rounds}), self.federation.ranks.broadcast_object,
            )  # fmt: skip
        if not self.shift.active:
            return References()
        reference_points = references(self.model, self.shift, self.data, self.model.initial(self.federation.seeds))
        # their clocks differ, and a search may be ended by one
        return self.federation.ranks.broadcast_object(reference_points)
