"""Run a configuration with each subset of its causes removed, and divide the difference among the causes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_higher_better
from fedsim.run.tracking.result import result_columns
from fedsim.studies.attribution.causes import Cause, ChoiceByGroup, without_causes
from fedsim.studies.attribution.shapley import shapley
from fedsim.studies.reproduce.recipe import Setting
from fedsim.studies.reproduce.runner import Job, carry_out_all, digest
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.results.reading import read_rows

# the first of these that a run has is compared
DEFAULT_METRIC_ORDER = ("test_accuracy", "distance_to_optimum", "performative_risk", "test_loss", "train_loss")


@dataclass(frozen=True)
class Attribution:
    """The attribution of a run's loss of performance to its causes.

    Attributes:
        metric: the metric that is compared after the last round.
        causes: the causes, in the order of the subsets' bits.
        values: [2^k, R] the metric for each subset of removed causes, in the order of `shapley`.
        higher_is_better: whether larger values of the metric are better.
    """

    metric: str
    causes: list[Cause]
    values: np.ndarray
    higher_is_better: bool

    @property
    def shares(self) -> np.ndarray:
        """The loss due to each cause [k, R]; negative where the run gains from the cause."""
        return self.sign * shapley(self.values)

    @property
    def alone(self) -> np.ndarray:
        """The gain when a single cause is removed [k, R]."""
        return self.sign * (self.values[[2**cause for cause in range(len(self.causes))]] - self.values[0])

    @property
    def total(self) -> np.ndarray:
        """The gain when all causes are removed [R]."""
        return self.sign * (self.values[-1] - self.values[0])

    @property
    def sign(self) -> float:
        """The factor, 1 or -1, that converts a change of the metric to a gain."""
        return 1.0 if self.higher_is_better else -1.0

    @property
    def largest_first(self) -> np.ndarray:
        """The indices of the causes [k], ordered by mean share, largest first."""
        return np.argsort(-self.shares.mean(1), kind="stable")


def removed_causes(causes: list[Cause], subset: int) -> list[Cause]:
    """Return the causes that a subset removes."""
    return [cause for number, cause in enumerate(causes) if subset >> number & 1]


def attribute(
    config: DictConfig,
    choices: ChoiceByGroup,
    causes: list[Cause],
    folder: Path,
    metric: str | None = None,
    at_once: int = 1,
    trusted: tuple[str, ...] = (),
) -> Attribution:
    """Run the configuration with each subset of causes removed, and compare the runs by seed.

    Args:
        config, choices: the composed configuration and choices of the run.
        causes: up to five causes from `causes_of`.
        folder: folder of the runs; finished runs in it are reused.
        metric: a column of metrics.csv; None: see `default_metric`.
        at_once: number of processes.
        trusted: packages that the user trusts.

    Raises:
        ConfigError: a run failed or has no such metric.
    """
    jobs = [_job(config, choices, causes, subset, folder, trusted) for subset in range(2 ** len(causes))]
    waiting = [job for job in jobs if not job.finished]
    for job, outcome in carry_out_all(waiting, at_once):
        if outcome.status != "done":
            raise ConfigError(f"the run {job.setting.name} {outcome.status}: {outcome.message}")
    histories = [read_rows(job.folder / "metrics.csv") for job in jobs]
    columns = result_columns([histories[0][-1]])
    name = metric or default_metric(columns, causes)
    if name is None or name not in columns:
        raise ConfigError(f"--metric {name} is not among those of the run: {', '.join(columns)}")
    values = np.array([[row[name] for row in rows if row["round"] == rows[-1]["round"]] for rows in histories])
    return Attribution(name, causes, values, is_higher_better(name))


def default_metric(columns: Collection[str], causes: Sequence[Cause]) -> str | None:
    """The first of `DEFAULT_METRIC_ORDER` that the run has; with a performative shift among the causes the performative
    risk, since test samples do not react to the model, so that test metrics rise when the shift is removed even where
    the shift costs nothing."""
    if "performative_risk" in columns and any(cause.name == "shift" for cause in causes):
        return "performative_risk"
    return next((column for column in DEFAULT_METRIC_ORDER if column in columns), None)


def _job(
    config: DictConfig, choices: ChoiceByGroup, causes: list[Cause], subset: int, folder: Path, trusted: tuple[str, ...]
) -> Job:
    removed = removed_causes(causes, subset)
    changed, changed_choices = without_causes(config, choices, removed)
    name = "without " + ", ".join(cause.label for cause in removed) if removed else "as it is"
    slug = "-".join(["without", *(cause.name for cause in removed)]) if removed else "as-it-is"
    return Job(
        Setting((("removed", name),), ()), (), folder / f"{slug}-{digest(changed)}", changed, changed_choices, trusted
    )


def summary_sentence(attribution: Attribution, scale: float = 1.0, unit: str = "") -> str:
    """Return the result as one sentence, largest cause first, with 95 % intervals over seeds."""

    def amount(values: np.ndarray) -> str:
        low, high = PairedDifference(scale * values).interval
        spread = "" if math.isnan(low) else f" [{_signed_number_text(low)}, {_signed_number_text(high)}]"
        return f"{_signed_number_text(scale * values.mean())}{spread}"

    amounts = [f"{attribution.causes[i].label} {amount(attribution.shares[i])}" for i in attribution.largest_first]
    return f"Of {amount(attribution.total)}{unit}: {', '.join(amounts)}."


def _signed_number_text(value: float) -> str:
    """Format a number with a minus sign in place of a hyphen, since intervals follow."""
    return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"
