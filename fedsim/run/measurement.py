"""Fourth step of a setup: the evaluation of models during the run and at its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.availability.clock import Clock
from fedsim.core.errors import ConfigError
from fedsim.data.partition import Table
from fedsim.data.samples import ClientData
from fedsim.evaluation import EvaluatedModels, EvaluationOptions, Evaluator
from fedsim.evaluation.calibration import CALIBRATED, ClassifierCalibration
from fedsim.evaluation.columns import (
    COLUMN_DESCRIPTIONS,
    EVALUATED_MODEL_DESCRIPTIONS,
    RUN_POSITION_COLUMNS,
    TIME_COLUMNS,
    WORK_COLUMNS,
    columns_of_other_model,
)
from fedsim.evaluation.diagnostics import spread_diagnostic_names
from fedsim.evaluation.drifting_test_set import DriftingTestSet
from fedsim.evaluation.metrics import UserMetrics
from fedsim.evaluation.performative.answer import PerformativeDiagnostics
from fedsim.evaluation.personal import NewcomerEvaluator, PersonalEvaluator
from fedsim.evaluation.personal.personal_models import PersonalModelComputer
from fedsim.evaluation.personal.validation_query import ValidationQuery
from fedsim.evaluation.registry import ENERGY_COLUMN, REGRET, STALENESS_COLUMN
from fedsim.run.participation import ParticipationRecorder
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.server import Server
from fedsim.run.training import ClientTraining
from fedsim.run.wiring import build_client_scores, owners_are_clients, validation_of
from fedsim.shift import Shift
from fedsim.trainer import FullDataQuery, TrainerFactory
from fedsim.uplink import Uplink
from fedsim.uplink.attack import Attack


@dataclass(frozen=True, eq=False)
class EvaluationComponents:
    """The objects that evaluate a run.

    Attributes:
        evaluation: what the user asked for.
        evaluator: scores models of the server's on test samples and the clients' own.
        models: makes the models that are evaluated.
        participation: follows who takes part, for the diagnostics that ask for it.
        personal: scores clients' own models; None where nobody asked for it.
        newcomers: trains and scores who joins when training is over; None where there is nobody.
        newcomer_trainers: makes their trainers, and holds their shift.
    """

    evaluation: EvaluationOptions
    evaluator: Evaluator
    models: EvaluatedModels
    participation: ParticipationRecorder
    personal: PersonalEvaluator | None
    newcomers: NewcomerEvaluator | None
    newcomer_trainers: TrainerFactory | None

    @classmethod
    def build(
        cls, components: Parts, population: Population, server: Server, training: ClientTraining
    ) -> EvaluationComponents:
        """Build the evaluation that the user chose, that of the clients' own models included.

        Raises:
            ConfigError: what is to be measured has no meaning for this run.
        """
        evaluation, strategy, federation = components.evaluation, server.strategy, population.federation
        data, shift, tables = population.data, training.trainer_factory.shift, population.member_tables
        metrics, diagnostics = UserMetrics(evaluation.metrics, server.model, data), list(evaluation.diagnostics)
        # without `personal.over`, all models are scored on validation samples there
        validated = components.personal.over == "none" or diagnostics
        validation = validation_of(data, tables) if validated else None
        owners_match = owners_are_clients(data, tables)
        evaluator = evaluator_of(components, server, metrics, data, shift, validation)
        evaluator.test_set = DriftingTestSet(data, owners_match)
        evaluator.extra_metrics = PerformativeDiagnostics(diagnostics, server.model, shift, data)
        calibration = make_classifier_calibration(components, server, training, data)
        models = EvaluatedModels(evaluation.models, strategy, federation, server.model.columns, calibration)
        participation_tracker = ParticipationRecorder(
            diagnostics, federation, server.availability, evaluator, owners_match
        )
        personal = None
        if components.personal.over != "none":
            own_models = PersonalModelComputer(
                training.trainer, strategy, training.trainer_factory, components.personal.localize
            )
            scores = build_client_scores(evaluator, components.personal, tables)
            byzantine = byzantine_clients_of(server.uplink)
            personal = PersonalEvaluator(components.personal, federation, strategy, own_models, scores, byzantine)
        if strategy.needs_validation_losses:
            federation.validation_oracle = build_validation_query(components, server, training, evaluator, tables)
        trainers, newcomers = build_newcomers(components, population, server, training, metrics)
        return cls(evaluation, evaluator, models, participation_tracker, personal, newcomers, trainers)

    def columns(self, clock: Clock, include_regret: bool = False) -> dict[str, str]:
        """Return the columns of metrics.csv and their descriptions: first those of COLUMNS in its order, then
        user-defined metrics and those of the clients' own models.

        Args:
            clock: of the run.
            include_regret: whether the lowest risk of each round is known.
        """
        measured_columns, added_columns = self.evaluator.columns, self.evaluator.user_metric_columns()
        for model in self.evaluation.models[1:]:
            measured_columns |= set(columns_of_other_model(model, self.evaluator.columns).values())
            model_descriptions = self.evaluator.user_metric_columns(f", of {EVALUATED_MODEL_DESCRIPTIONS[model]}")
            added_columns |= {
                name: model_descriptions[measure_name]
                for measure_name, name in columns_of_other_model(model, model_descriptions).items()
            }
        column_descriptions = {
            name: description
            for name, description in COLUMN_DESCRIPTIONS.items()
            if name in {*RUN_POSITION_COLUMNS, *measured_columns, *([REGRET] if include_regret else []), *WORK_COLUMNS}
        }
        absent_columns = {STALENESS_COLUMN: not clock.asynchronous, ENERGY_COLUMN: not clock.knows_energy_needs}
        column_descriptions |= {
            name: TIME_COLUMNS[name] for name in TIME_COLUMNS if clock.active and not absent_columns.get(name, False)
        }
        return (
            column_descriptions
            | added_columns
            | (self.personal.columns if self.personal else {})
            | self.participation.columns
        )


def evaluator_of(
    components: Parts,
    server: Server,
    metrics: UserMetrics,
    data: ClientData,
    shift: Shift,
    validation: ClientData | None = None,
) -> Evaluator:
    """Return the evaluator of models on these clients' samples."""
    return Evaluator(
        server.model, data, shift, client_samples=components.evaluation.client_samples,
        loop=components.trainer.executor == "loop", metrics=metrics, validation=validation,
        spreads=spread_diagnostic_names(components.evaluation.diagnostics),
    )  # fmt: skip


def byzantine_clients_of(uplink: Uplink) -> np.ndarray | None:
    """Return which clients an attack makes Byzantine, [R · m]; None without an attack."""
    masks = [stage.byzantine_mask.cpu().numpy() for stage in uplink.stages if isinstance(stage, Attack)]
    return np.logical_or.reduce(masks) if masks else None


def make_classifier_calibration(
    components: Parts, server: Server, training: ClientTraining, data: ClientData
) -> ClassifierCalibration | None:
    """Return the object that makes the calibrated model, if it is evaluated.

    Raises:
        ConfigError: it cannot be made of this model and these data.
    """
    if CALIBRATED not in components.evaluation.models:
        return None
    if training.trainer_factory.shift.active or training.contamination.active:
        raise ConfigError(
            f"evaluate={CALIBRATED} computes features of the clients' samples as they are stored, and a shift, a "
            "contamination or an attack on labels changes them; use evaluate=global"
        )
    return ClassifierCalibration(server.model, data)


def build_validation_query(
    components: Parts, server: Server, training: ClientTraining, evaluator: Evaluator, tables: list[Table]
) -> ValidationQuery:
    """Return the object with which a strategy queries the losses of models on clients' validation samples.

    Raises:
        ConfigError: the partition splits none off.
    """
    if tables and tables[0].validation is None:
        raise ConfigError(
            f"strategy={type(server.strategy).__name__} compares models on the clients' validation samples, and the "
            "partition splits none off; set partition.validation=0.2"
        )
    return ValidationQuery(training.trainer, build_client_scores(evaluator, components.personal, tables))


def build_newcomers(
    components: Parts, population: Population, server: Server, training: ClientTraining, metrics: UserMetrics
) -> tuple[TrainerFactory, NewcomerEvaluator] | tuple[None, None]:
    """Return the clients that join after training, with their trainers. They have the data of all clients; under a
    shift they have their own copy of it, which is set up here."""
    shift, all_clients, strategy = training.newcomer_shift, population.data_with_newcomers, server.strategy
    if shift is None:
        return None, None
    contamination, executor_cache = training.contamination, training.trainer_factory.executor_cache
    trainers = TrainerFactory(all_clients, shift, server.model, contamination, components.trainer, executor_cache)
    trainers.setup_shift()
    evaluator = evaluator_of(components, server, metrics, all_clients, shift)
    scores = build_client_scores(evaluator, components.personal, population.tables)
    newcomers = NewcomerEvaluator(
        components.personal, population.federation, strategy, trainers, components.local, scores
    )
    if strategy.needs_validation_losses:
        all_clients.federation.validation_oracle = ValidationQuery(newcomers.trainer, scores)
    if strategy.needs_full_gradients:
        all_clients.federation.full_data_oracle = FullDataQuery.from_trainer(trainers, newcomers.trainer)
    return trainers, newcomers
