"""The environments in which strategies are judged: classification of digits, and quadratics with a known optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError

SMALLEST_DISTANCE = 1e-12  # distances below it count as this one


@dataclass(frozen=True)
class BenchmarkEnvironments:
    """Environments of one kind, in which strategies are compared by one metric.

    Attributes:
        name: of the kind.
        setting: overrides of all runs.
        tuning_cells, held_out_cells: environments, as overrides.
        metrics: by which trials are chosen, and by which strategies are compared.
        margin: the smallest difference that matters; of ratios, of their logarithm.
        of_ratios: whether differences are those of logarithms.
        rates, server_rates: the grids of `lr` and `strategy.server_lr`.
        rates_alone: of `lr`, as many as there are pairs of rates, for a strategy without `server_lr`.
    """

    name: str
    setting: tuple[str, ...]
    tuning_cells: tuple[tuple[str, ...], ...]
    held_out_cells: tuple[tuple[str, ...], ...]
    metrics: tuple[str, str]
    margin: float
    of_ratios: bool = False
    rates: str = "0.1,0.3,1.0,3.0,10.0"
    server_rates: str = "0.3,1.0,3.0"
    rates_alone: str = "log(0.03,30,15)"

    def __post_init__(self) -> None:
        if shared := set(self.tuning_cells) & set(self.held_out_cells):
            raise ConfigError(f"{' '.join(next(iter(shared)))} is a cell of tuning and a held-out one")
        checks.check_not_negative("margin", self.margin)

    def comparison_scale_values(self, values: np.ndarray) -> np.ndarray:
        """Values of the metric as they are subtracted."""
        return np.log(np.maximum(values, SMALLEST_DISTANCE)) if self.of_ratios else values


DIGITS_ENVIRONMENTS = BenchmarkEnvironments(
    "digits",
    (
        "dataset=digits", "model=linear", "clients=20", "local_steps=5", "batch_size=10", "partition.alpha=0.3",
        "partition.validation=0.2", "availability/base=class_correlated", "availability.base.high=0.8",
        "availability.base.low=0.1", "device=cpu",
    ),
    (("availability=stationary",), ("availability=sine",)),
    (
        ("availability=markov",),
        ("availability=sine", "partition.alpha=0.1"),
        ("availability=stationary", "local_steps=10"),
    ),
    ("validation_accuracy", "test_accuracy"),
    0.005,  # half a percentage point
)  # fmt: skip
QUADRATICS_ENVIRONMENTS = BenchmarkEnvironments(
    "quadratics",
    (
        "dataset=quadratics", "dataset.slope=0.01", "model=mean", "partition=natural", "clients=20", "local_steps=5",
        "batch_size=null", "availability/base=groups", "device=cpu",
    ),
    (("availability=stationary",), ("availability=sine",)),
    (
        ("availability=markov", "dataset.seed=1"),
        ("availability=sine", "dataset.seed=2"),
        ("availability=stationary", "local_steps=10", "dataset.seed=3"),
    ),
    ("distance_to_optimum", "distance_to_optimum"),
    0.05,  # a distance that is 5 % smaller
    of_ratios=True,
    rates="0.003,0.01,0.03,0.1,0.3",
    rates_alone="log(0.001,1,15)",
)  # fmt: skip
ENVIRONMENTS_BY_NAME = {kind.name: kind for kind in (DIGITS_ENVIRONMENTS, QUADRATICS_ENVIRONMENTS)}
