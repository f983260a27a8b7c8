"""When a run is evaluated, which of its models, and on how many samples of each client."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import MODELS


@dataclass(frozen=True)
class Evaluation:
    """Attributes:

    every: rounds between evaluations; the initial and the last model are always evaluated.
    of: 'global' evaluates the server's model x^t; 'client_mean' the mean over clients of the models they have (see
        `EvaluatedModels`). Of a list the first gives the plain columns, any further one columns with its name before
        theirs, such as client_mean_test_accuracy.
    client_samples: samples of its own data on which each client is evaluated.
    """

    every: int = 10
    of: str | list[str] = "global"
    client_samples: int = 20

    def __post_init__(self) -> None:
        checks.whole("eval_every", self.every)
        if not self.models or len(set(self.models)) < len(self.models):
            raise ConfigError(f"evaluate={self.of!r} must name {' or '.join(MODELS)}, or each of them once")
        for name in self.models:
            checks.choice("evaluate", name, MODELS)
        checks.whole("tracking.client_samples", self.client_samples)

    @property
    def models(self) -> list[str]:
        """Names of the models that are evaluated."""
        return [self.of] if isinstance(self.of, str) else self.of
