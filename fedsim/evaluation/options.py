"""When a run is evaluated, which of its models, and on how many samples of each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsim.core import checks
from fedsim.core.constraints import Count, Validated
from fedsim.core.errors import ConfigError
from fedsim.evaluation import diagnostics
from fedsim.evaluation.columns import MODELS
from fedsim.evaluation.metrics.entries import parse_metrics


@dataclass(frozen=True)
class EvaluationOptions(Validated):
    """Attributes:

    every: rounds between evaluations; the initial and the last model are always evaluated.
    of: 'global' evaluates the server's model x^t; 'client_mean' the mean over clients of the models they have (see
        `EvaluatedModels`). Of a list the first gives the plain columns, any further one columns with its name before
        theirs, such as client_mean_test_accuracy.
    metrics: what is measured beside losses and accuracies: names of torchmetrics' functional metrics, alone or as
        {name: …} with arguments; and callables (output, target) → a number of the whole set, or one per sample [B],
        alone or as {_target_: package.function} with arguments; outputs and targets are what the loss sees. `column`
        names a metric's columns, `better` ('higher' or 'lower') says what it does not say itself.
    client_samples: samples of its own training data on which each client is evaluated.
    diagnostics: what else is told of the clients, see `fedsim.evaluation.diagnostics`: 'fairness', 'worst5' or 'best20'
        (a share of them, in per cent), 'absent', 'drift', 'staleness', 'utility'; of data that answer
        models 'power', 'stability'.
    """

    every: Count = 10
    of: str | list[str] = "global"
    metrics: Any = ()
    client_samples: Count = 20
    diagnostics: Any = ()

    def __post_init__(self) -> None:
        if not self.models or len(set(self.models)) < len(self.models):
            raise ConfigError(
                f"{{of}}={self.of!r} must name {' or '.join(MODELS)}, or each of them once", mentions=("of",)
            )
        for name in self.models:
            checks.choice("of", name, MODELS)
        parse_metrics(self.metrics)
        diagnostics.check(self.diagnostics)

    @property
    def models(self) -> list[str]:
        """Names of the models that are evaluated."""
        return [self.of] if isinstance(self.of, str) else self.of
