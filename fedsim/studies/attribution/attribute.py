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
from fedsim.studies.attribution.causes import ChoiceByGroup, DegradationCause, config_without_causes
from fedsim.studies.attribution.shapley import shapley_values
from fedsim.studies.reproduce.recipe import RecipeSetting
from fedsim.studies.reproduce.runner import RecipeJob, config_digest, run_jobs
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.results.reading import read_rows

# the first of these that a run has is compared
DEFAULT_METRIC_ORDER = ("test_accuracy", "distance_to_optimum", "performative_risk", "test_loss", "train_loss")


@dataclass(frozen=True)
class Attribution:
    """The attribution of a run's loss of performance to its causes.

    Attributes:
        metric: the metric that is compared after the last round.
        all_causes: the causes, in the order of the subsets' bits.
        values: [2^k, R] the metric for each subset of removed causes, in the order of `shapley`.
        higher_is_better: whether larger values of the metric are better.
    """

    metric: str
    all_causes: list[DegradationCause]
    values: np.ndarray
    higher_is_better: bool

    @property
    def shares(self) -> np.ndarray:
        """The loss due to each cause [k, R]; negative where the run gains from the cause."""
        return self.metric_sign * shapley_values(self.values)

    @property
    def single_removal_gains(self) -> np.ndarray:
        """The gain when a single cause is removed [k, R]."""
        return self.metric_sign * (self.values[[2**cause for cause in range(len(self.all_causes))]] - self.values[0])

    @property
    def total_effect(self) -> np.ndarray:
        """The gain when all causes are removed [R]."""
        return self.metric_sign * (self.values[-1] - self.values[0])

    @property
    def metric_sign(self) -> float:
        """The factor, 1 or -1, that converts a change of the metric to a gain."""
        return 1.0 if self.higher_is_better else -1.0

    @property
    def cause_order(self) -> np.ndarray:
        """The indices of the causes [k], ordered by mean share, largest first."""
        return np.argsort(-self.shares.mean(1), kind="stable")


def causes_in_subset(causes: list[DegradationCause], subset: int) -> list[DegradationCause]:
    """Return the causes that a subset removes."""
    return [cause for number, cause in enumerate(causes) if subset >> number & 1]


def run_attribution(
    config: DictConfig,
    choice_by_group: ChoiceByGroup,
    causes: list[DegradationCause],
    folder: Path,
    metric: str | None = None,
    at_once: int = 1,
    trusted_packages: tuple[str, ...] = (),
) -> Attribution:
    """Run the configuration with each subset of causes removed, and compare the runs by seed.

    Args:
        config, choice_by_group: the composed configuration and choices of the run.
        causes: up to five causes from `applicable_causes`.
        folder: folder of the runs; finished runs in it are reused.
        metric: a column of metrics.csv; None: see `default_attribution_metric`.
        at_once: number of processes.
        trusted_packages: packages that the user trusts.

    Raises:
        ConfigError: a run failed or has no such metric.
    """
    jobs = [
        _attribution_job(config, choice_by_group, causes, subset, folder, trusted_packages)
        for subset in range(2 ** len(causes))
    ]
    pending_jobs = [job for job in jobs if not job.is_finished]
    for job, outcome in run_jobs(pending_jobs, at_once):
        if outcome.status != "done":
            raise ConfigError(f"the run {job.setting.name} {outcome.status}: {outcome.message}")
    histories = [read_rows(job.folder / "metrics.csv") for job in jobs]
    columns = result_columns([histories[0][-1]])
    name = metric or default_attribution_metric(columns, causes)
    if name is None or name not in columns:
        raise ConfigError(f"--metric {name} is not among those of the run: {', '.join(columns)}")
    values = np.array([[row[name] for row in rows if row["round"] == rows[-1]["round"]] for rows in histories])
    return Attribution(name, causes, values, is_higher_better(name))


def default_attribution_metric(column_names: Collection[str], causes: Sequence[DegradationCause]) -> str | None:
    """The first of `DEFAULT_METRIC_ORDER` that the run has; with a performative shift among the causes the performative
    risk, since test samples do not react to the model, so that test metrics rise when the shift is removed even where
    the shift costs nothing."""
    if "performative_risk" in column_names and any(cause.name == "shift" for cause in causes):
        return "performative_risk"
    return next((column for column in DEFAULT_METRIC_ORDER if column in column_names), None)


def _attribution_job(
    config: DictConfig,
    choices: ChoiceByGroup,
    causes: list[DegradationCause],
    subset: int,
    folder: Path,
    trusted_packages: tuple[str, ...],
) -> RecipeJob:
    removed_causes_of_job = causes_in_subset(causes, subset)
    changed_config, changed_choices = config_without_causes(config, choices, removed_causes_of_job)
    job_name = (
        "without " + ", ".join(cause.label for cause in removed_causes_of_job) if removed_causes_of_job else "as it is"
    )
    job_folder_name = (
        "-".join(["without", *(cause.name for cause in removed_causes_of_job)]) if removed_causes_of_job else "as-it-is"
    )
    return RecipeJob(
        RecipeSetting((("removed", job_name),), ()),
        (),
        folder / f"{job_folder_name}-{config_digest(changed_config)}",
        changed_config,
        changed_choices,
        trusted_packages,
    )


def summary_sentence(attribution: Attribution, scale: float = 1.0, unit_label: str = "") -> str:
    """Return the result as one sentence, largest cause first, with 95 % intervals over seeds."""

    def mean_and_interval_text(values: np.ndarray) -> str:
        low, high = PairedDifference(scale * values).confidence_interval
        spread = "" if math.isnan(low) else f" [{_number_with_minus_sign(low)}, {_number_with_minus_sign(high)}]"
        return f"{_number_with_minus_sign(scale * values.mean())}{spread}"

    share_texts = [
        f"{attribution.all_causes[i].label} {mean_and_interval_text(attribution.shares[i])}"
        for i in attribution.cause_order
    ]
    low, high = PairedDifference(attribution.total_effect).confidence_interval
    doubt = " The interval of the total contains zero: these seeds do not show a loss." if low <= 0 <= high else ""
    return f"Of {mean_and_interval_text(attribution.total_effect)}{unit_label}: {', '.join(share_texts)}.{doubt}"


def _number_with_minus_sign(value: float) -> str:
    """Format a number with a minus sign in place of a hyphen, since intervals follow."""
    return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"
