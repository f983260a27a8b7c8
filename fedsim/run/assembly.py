"""The four steps from a user's choices to a run: population, server, training, measurement."""

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
from fedsim.evaluation.performative.reference_path import reference_point_trajectory
from fedsim.evaluation.performative.references import References, references
from fedsim.evaluation.personal import NewcomerEvaluator, PersonalEvaluator
from fedsim.evaluation.registry import DISTANCE_COLUMNS
from fedsim.models import StatelessModel
from fedsim.models.naming import StateDictLayout
from fedsim.run.delayed_updates import DelayedUpdates
from fedsim.run.measurement import EvaluationComponents
from fedsim.run.model_choice import GivenModel, ModelChoice
from fedsim.run.participation import ParticipationRecorder
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.privacy_claim import privacy_claim
from fedsim.run.round_clock import RoundClock
from fedsim.run.rules import Stop
from fedsim.run.server import Server
from fedsim.run.settings import warn_of_ineffective_settings
from fedsim.run.submodels import SubmodelMasking
from fedsim.run.traffic import Traffic
from fedsim.run.training import ClientTraining
from fedsim.run.wiring import ComputeSettings
from fedsim.shift import Shift
from fedsim.strategies import State, Strategy
from fedsim.strategies.strategy import KeepsClientModels
from fedsim.trainer import Execution, Trainer, TrainerFactory
from fedsim.uplink import Uplink
from fedsim.uplink.accounting import Privacy
from fedsim.uplink.attack import Attack


class Assembly:
    """A run that is set up and checked in four steps, each of which uses the results of the steps before it.

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
        compute: ComputeSettings,
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
        self.training = ClientTraining.build(components, self.population, self.server)
        self.submodels = SubmodelMasking.build(components, self.population, self.server, self.training)
        self.measurement = EvaluationComponents.build(components, self.population, self.server, self.training)
        self.delayed_updates.check_nonfinite_handling(on_nonfinite)
        warn_of_ineffective_settings(self)

    @property
    def device(self) -> torch.device:
        """The device that holds the models."""
        return self.compute.device

    @property
    def deterministic(self) -> bool:
        """Whether only deterministic algorithms of PyTorch are used."""
        return self.compute.deterministic

    @property
    def settings_per_seed(self) -> dict[str, Sequence[float]]:
        """Settings that were given one number per seed."""
        return self.population.values_per_seed

    @property
    def execution(self) -> Execution:
        """The execution options: device, executor, precision, chunk size."""
        return self.components.trainer

    @property
    def evaluation(self) -> EvaluationOptions:
        """The evaluation options: which models are evaluated, and when."""
        return self.components.evaluation

    @property
    def stop(self) -> Stop:
        """The criteria that end the run before its last round."""
        return self.components.stop

    @property
    def strategy(self) -> Strategy[Any]:
        """The run's own copy of the strategy."""
        return self.server.strategy

    @property
    def dataset(self) -> Dataset:
        """The run's own copy of the data set, on its device, restricted to the run's clients."""
        return self.population.dataset

    @property
    def partition_tables(self) -> list[Table]:
        """The samples of each client, for each replicate, newcomers included; None for a stream."""
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
    def model(self) -> StatelessModel:
        """The model whose parameters are the rows."""
        return self.server.model

    @property
    def availability(self) -> Availability:
        """The availability process: which clients can take part in each round."""
        return self.server.availability

    @property
    def uplink(self) -> Uplink:
        """The uplink: how rows are compressed, clipped or perturbed between clients and server."""
        return self.server.uplink

    @property
    def shift(self) -> Shift:
        """The shift: how the samples of the training clients react to the deployed model."""
        return self.training.trainer_factory.shift

    @property
    def trainer(self) -> Trainer:
        """The trainer, which runs the local rule on rows."""
        return self.training.trainer

    @property
    def trainer_factories(self) -> list[TrainerFactory]:
        """The factories of trainers: of the training clients, and of newcomers if there are any."""
        of_newcomers = self.measurement.newcomer_trainers
        return [self.training.trainer_factory, *([] if of_newcomers is None else [of_newcomers])]

    @property
    def traffic(self) -> Traffic:
        """The bytes that a client receives and sends in a round."""
        return self.training.traffic

    @property
    def round_clock(self) -> RoundClock:
        """The round clock, which decides which clients are in time and keeps virtual time."""
        return self.training.round_clock

    @property
    def delayed_updates(self) -> DelayedUpdates:
        """The delayed updates: rows that arrive in a later round than that in which they were started."""
        return self.training.delayed_updates

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of the server's models."""
        return self.measurement.evaluator

    @property
    def evaluated_models(self) -> EvaluatedModels:
        """The models that are evaluated, computed from the strategy's state."""
        return self.measurement.models

    @property
    def participation(self) -> ParticipationRecorder:
        """The record of which clients took part in which rounds."""
        return self.measurement.participation

    @property
    def personal(self) -> PersonalEvaluator | None:
        """The evaluation of the clients' own models; None unless it is asked for."""
        return self.measurement.personal

    @property
    def newcomers(self) -> NewcomerEvaluator | None:
        """The evaluation of clients that join after training; None if there are none."""
        return self.measurement.newcomers

    def initial_memory(self, state: State) -> Memory:
        """Return what clients, evaluation and uplink store before round 0, given the strategy's state."""
        memory = self.trainer.initial_memory(state.model)
        memory.evaluated = self.evaluated_models.memory(state.model) | self.participation.memory()
        self.uplink.add_stage_memory(memory, self.federation, state.model)
        return memory

    @property
    def components_by_group(self) -> dict[str, Any]:
        """The parts that are used in rounds, after their setup, by group."""
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
        """Return the privacy claim after `rounds` rounds; None if rows have no noise."""
        return privacy_claim(self.server, self.training, rounds)

    @functools.cached_property
    def parameter_naming(self) -> StateDictLayout:
        """The names of the module's parameters and buffers in a row."""
        return self.model.naming

    def model_metadata(self) -> dict[str, Any]:
        """Return the metadata of models for checkpoints: names of parameters, and whether clients keep some of them."""
        keeps_models = isinstance(self.strategy, KeepsClientModels)
        metadata = {
            "own": list(self.trainer.local_rule.own_models),
            "kept": keeps_models,
            "clustered": self.strategy.clustered,
        }
        return {"naming": self.parameter_naming.as_json(), "clients": self.federation.clients} | metadata

    @property
    def column_descriptions(self) -> dict[str, str]:
        """The columns of this run's metrics, and their descriptions."""
        clock = self.round_clock.clock
        return self.measurement.columns(clock, self.references.has_regret)

    @property
    def possible_columns(self) -> set[str]:
        """The columns that this run may measure. Columns of reference points are included if the points are searched
        for, which happens when the run begins."""
        clock, sought = self.round_clock.clock, self.shift.active or self.data.drift.active
        columns = self.measurement.columns(clock, sought)
        return {*columns, *(DISTANCE_COLUMNS if sought else ())}

    @functools.cached_property
    def references(self) -> References:
        """The reference points θ^PS and θ^PO that exist and are asked for; for data that drift, their paths."""
        if self.data.drift.active:
            every = self.evaluation.every
            return reference_point_trajectory(
                self.model, self.shift, self.data, self.model.initial(self.federation.seeds),
                sorted({*range(0, self.rounds, every), self.rounds}), self.federation.ranks.broadcast_object,
            )  # fmt: skip
        if not self.shift.active:
            return References()
        reference_points = references(self.model, self.shift, self.data, self.model.initial(self.federation.seeds))
        # clocks of ranks differ, and a time limit may end the search on one of them only
        return self.federation.ranks.broadcast_object(reference_points)
