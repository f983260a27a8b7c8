"""Options of evaluation: interval, models, and samples per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsim.core import checks
from fedsim.core.constraints import Count, Validated
from fedsim.core.errors import ConfigError
from fedsim.evaluation import diagnostics
from fedsim.evaluation.columns import EVALUATED_MODEL_DESCRIPTIONS
from fedsim.evaluation.metrics.entries import parse_metrics


@dataclass(frozen=True)
class EvaluationOptions(Validated):
    """Attributes:

    every: rounds between evaluations; the initial and the last model are always evaluated.
    of: 'global' evaluates the server's model x^t; 'client_mean' the mean over clients of the models they have (see
        `EvaluatedModels`); 'calibrated' the server's model with a last layer trained again on Gaussian features (CCVR,
        see `fedsim.evaluation.calibration`). With a list, the first model has the plain columns, and further ones have
        columns with their name as prefix, such as client_mean_test_accuracy.
    metrics: metrics in addition to losses and accuracies: names of torchmetrics' functional metrics, alone or as
        {name: …} with arguments; and callables (output, target) → one number for the whole set, or one per sample
        [B], alone or as {_target_: package.function} with arguments; outputs and targets are those of the loss.
        `column` sets the name of a metric's columns, `better` ('higher' or 'lower') its direction, if the metric
        does not define one.
    client_samples: samples of its own training data on which each client is evaluated.
    diagnostics: additional metrics of clients, see `fedsim.evaluation.diagnostics`: 'fairness', 'worst5' or
        'best20' (a percentage of the clients), 'absent', 'drift', 'staleness', 'utility'; for data that react to
        the model 'power', 'stability'.
    """

    every: Count = 10
    of: str | list[str] = "global"
    metrics: Any = ()
    client_samples: Count = 20
    diagnostics: Any = ()

    def __post_init__(self) -> None:
        if not self.models or len(set(self.models)) < len(self.models):
            *first_names, last_name = EVALUATED_MODEL_DESCRIPTIONS
            raise ConfigError(
                f"{{of}}={self.of!r} must be {', '.join(first_names)} or {last_name}, or a list with each at most once",
                mentions=("of",),
            )
        for name in self.models:
            checks.check_choice("of", name, EVALUATED_MODEL_DESCRIPTIONS)
        parse_metrics(self.metrics)
        diagnostics.check_diagnostics(self.diagnostics)

    @property
    def models(self) -> list[str]:
        """Names of the evaluated models."""
        return [self.of] if isinstance(self.of, str) else self.of
