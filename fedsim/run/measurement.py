"""Fourth step of a setup: what is measured of the models, at every evaluation and in the end."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.data.samples import ClientData
from fedsim.evaluation import EvaluatedModels, EvaluationOptions, Evaluator
from fedsim.evaluation.columns import (
    COLUMN_DESCRIPTIONS,
    EVALUATED_MODEL_DESCRIPTIONS,
    PLACE,
    TIME,
    WORK,
    columns_of_other_model,
)
from fedsim.evaluation.diagnostics import spread_diagnostics
from fedsim.evaluation.metrics import Metrics
from fedsim.evaluation.performative.answer import PerformativeDiagnostics
from fedsim.evaluation.personal import Newcomers, PersonalEvaluator
from fedsim.evaluation.personal.personal_models import PersonalModelComputer
from fedsim.evaluation.registry import STALENESS_COLUMN
from fedsim.run.participation import Participation
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.server import Server
from fedsim.run.training import Training
from fedsim.run.wiring import owners_are_clients, personal_scores_of, validation_of
from fedsim.shift import Shift
from fedsim.trainer import FullDataQuery, Trainers


@dataclass(frozen=True, eq=False)
class Measurement:
    """What measures a run.

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
    participation: Participation
    personal: PersonalEvaluator | None
    newcomers: Newcomers | None
    newcomer_trainers: Trainers | None

    @classmethod
    def build(cls, components: Parts, population: Population, server: Server, training: Training) -> Measurement:
        """Build what the user's evaluation, and what is asked about clients' own models, need.

        Raises:
            ConfigError: what is to be measured has no meaning for this run.
        """
        evaluation, strategy, federation = components.evaluation, server.strategy, population.federation
        data, shift, tables = population.data, training.trainers.shift, population.member_tables
        metrics, diagnostics = Metrics(evaluation.metrics, server.model, data), list(evaluation.diagnostics)
        # without `personal.over`, all models are scored on validation samples there
        validated = components.personal.over == "none" or diagnostics
        validation = validation_of(data, tables) if validated else None
        evaluator = evaluator_of(components, server, metrics, data, shift, validation)
        evaluator.extra_metrics = PerformativeDiagnostics(diagnostics, server.model, shift, data)
        models = EvaluatedModels(evaluation.models, strategy, federation, server.model.columns)
        owners_match = owners_are_clients(data, tables)
        participation = Participation(diagnostics, federation, server.availability, evaluator, owners_match)
        personal = None
        if components.personal.over != "none":
            own_models = PersonalModelComputer(
                training.trainer, strategy, training.trainers, components.personal.localize
            )
            scores = personal_scores_of(evaluator, components.personal, tables)
            personal = PersonalEvaluator(components.personal, federation, strategy, own_models, scores)
        trainers, newcomers = newcomers_of(components, population, server, training, metrics)
        return cls(evaluation, evaluator, models, participation, personal, newcomers, trainers)

    def columns(self, timed: bool, asynchronous: bool = False) -> dict[str, str]:
        """Columns of metrics.csv → what they are: those of COLUMNS in its order, a user's metrics, clients' own models.

        Args:
            timed: whether a clock keeps virtual time.
            asynchronous: whether its server steps after a number of arrivals.
        """
        measured, added = self.evaluator.columns, self.evaluator.added_columns()
        for model in self.evaluation.models[1:]:
            measured |= set(columns_of_other_model(model, self.evaluator.columns).values())
            model_descriptions = self.evaluator.added_columns(f", of {EVALUATED_MODEL_DESCRIPTIONS[model]}")
            added |= {
                name: model_descriptions[of] for of, name in columns_of_other_model(model, model_descriptions).items()
            }
        descriptions = {
            name: description for name, description in COLUMN_DESCRIPTIONS.items() if name in {*PLACE, *measured, *WORK}
        }
        descriptions |= {name: TIME[name] for name in TIME if timed and (asynchronous or name != STALENESS_COLUMN)}
        return descriptions | added | (self.personal.columns if self.personal else {}) | self.participation.columns


def evaluator_of(
    components: Parts,
    server: Server,
    metrics: Metrics,
    data: ClientData,
    shift: Shift,
    validation: ClientData | None = None,
) -> Evaluator:
    """What scores models on these clients' samples."""
    return Evaluator(
        server.model, data, shift, client_samples=components.evaluation.client_samples,
        loop=components.trainer.executor == "loop", metrics=metrics, validation=validation,
        spreads=spread_diagnostics(components.evaluation.diagnostics),
    )  # fmt: skip


def newcomers_of(
    components: Parts, population: Population, server: Server, training: Training, metrics: Metrics
) -> tuple[Trainers, Newcomers] | tuple[None, None]:
    """Who joins when training is over, with their trainers: of everybody's data, and under a shift of their own, which
    is set up here."""
    shift, everybody, strategy = training.newcomer_shift, population.everybody, server.strategy
    if shift is None:
        return None, None
    contamination, executor_cache = training.contamination, training.trainers.executor_cache
    trainers = Trainers(everybody, shift, server.model, contamination, components.trainer, executor_cache)
    trainers.setup_shift()
    evaluator = evaluator_of(components, server, metrics, everybody, shift)
    scores = personal_scores_of(evaluator, components.personal, population.tables)
    newcomers = Newcomers(components.personal, population.federation, strategy, trainers, components.local, scores)
    if strategy.needs_full_gradients:
        everybody.federation.full_data_oracle = FullDataQuery.of(trainers, newcomers.trainer)
    return trainers, newcomers
