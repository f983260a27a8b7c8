"""Fourth step of a setup: what is measured of the models, at every evaluation and in the end."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.evaluation import EvaluatedModels, Evaluation, Evaluator
from fedsim.evaluation.columns import COLUMNS, MODELS, PLACE, TIME, WORK, also
from fedsim.evaluation.diagnostics import spreads
from fedsim.evaluation.metrics import Metrics
from fedsim.performative.answer import Answer
from fedsim.personal import Newcomers, PersonalEvaluator
from fedsim.personal.models import OwnModels
from fedsim.run.participation import Participation
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.server import Server
from fedsim.run.training import Training
from fedsim.run.wiring import owners_are_clients, scores_of, validation_of
from fedsim.samples import ClientData
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

    evaluation: Evaluation
    evaluator: Evaluator
    models: EvaluatedModels
    participation: Participation
    personal: PersonalEvaluator | None
    newcomers: Newcomers | None
    newcomer_trainers: Trainers | None

    @classmethod
    def build(cls, parts: Parts, population: Population, server: Server, training: Training) -> Measurement:
        """Build what the user's evaluation, and what is asked about clients' own models, need.

        Raises:
            ConfigError: what is to be measured has no meaning for this run.
        """
        evaluation, options, model, data = parts.evaluation, parts.personal, server.model, population.data
        tables, federation, shift = population.member_tables, population.federation, training.trainers.shift
        metrics, diagnostics = Metrics(evaluation.metrics, model, data), list(evaluation.diagnostics)

        def evaluator_of(data: ClientData, shift: Shift, validation: ClientData | None = None) -> Evaluator:
            return Evaluator(
                model, data, shift, client_samples=evaluation.client_samples, loop=parts.trainer.executor == "loop",
                metrics=metrics, validation=validation, spreads=spreads(diagnostics),
            )  # fmt: skip

        # without `personal.over`, all models are scored on validation samples there
        validated = options.over == "none" or diagnostics
        evaluator = evaluator_of(data, shift, validation_of(data, tables) if validated else None)
        evaluator.further = Answer(diagnostics, model, shift, data)
        models = EvaluatedModels(evaluation.models, server.strategy, federation, model.columns)
        owners_match = owners_are_clients(data, tables)
        participation = Participation(diagnostics, federation, server.availability, evaluator, owners_match)
        personal, newcomers, newcomer_trainers = None, None, None
        if options.over != "none":
            own_models = OwnModels(training.trainer, server.strategy, training.trainers, options.localize)
            scores = scores_of(evaluator, options, tables)
            personal = PersonalEvaluator(options, federation, server.strategy, own_models, scores)
        if training.newcomer_shift is not None:
            newcomer_trainers = trainers_of_newcomers(parts, population, server, training, training.newcomer_shift)
            scores = scores_of(evaluator_of(population.everybody, training.newcomer_shift), options, population.tables)
            newcomers = Newcomers(options, federation, server.strategy, newcomer_trainers, parts.local, scores)
            if server.strategy.needs_full_gradients:
                everybody = population.everybody.federation
                everybody.ask = FullDataQuery.of(newcomer_trainers, newcomers.trainer)
        return cls(evaluation, evaluator, models, participation, personal, newcomers, newcomer_trainers)

    def columns(self, timed: bool) -> dict[str, str]:
        """Columns of metrics.csv → what they are: those of COLUMNS in its order, a user's metrics, clients' own models.

        Args:
            timed: whether a clock keeps virtual time.
        """
        measured, added = self.evaluator.columns, self.evaluator.added()
        for model in self.evaluation.models[1:]:
            measured |= set(also(model, self.evaluator.columns).values())
            model_descriptions = self.evaluator.added(f", of {MODELS[model]}")
            added |= {name: model_descriptions[of] for of, name in also(model, model_descriptions).items()}
        descriptions = {
            name: description for name, description in COLUMNS.items() if name in {*PLACE, *measured, *WORK}
        }
        descriptions |= TIME if timed else {}
        return descriptions | added | (self.personal.columns if self.personal else {}) | self.participation.columns


def trainers_of_newcomers(
    parts: Parts, population: Population, server: Server, training: Training, shift: Shift
) -> Trainers:
    """Trainers of everybody's data, for those who join when training is over; `shift` is theirs, and is set up here."""
    settled = training.trainers.settled
    trainers = Trainers(population.everybody, shift, server.model, training.contamination, parts.trainer, settled)
    trainers.setup_shift()
    return trainers
