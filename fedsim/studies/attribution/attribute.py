"""Runs a configuration with each subset of its causes removed, and divides the difference among the causes."""

from __future__ import annotations

import math
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

# the first that a run has
DEFAULT_METRIC_ORDER = ("test_accuracy", "distance_to_optimum", "performative_risk", "test_loss", "train_loss")


@dataclass(frozen=True)
class Attribution:
    """How the distance from the best run is divided.

    Attributes:
        metric: that is compared, after the last round.
        causes: in their order.
        values: [2^k, R], of each subset of removed causes; `fedsim.studies.attribution.shapley` has the order.
        higher_is_better: of the metric.
    """

    metric: str
    causes: list[Cause]
    values: np.ndarray
    higher_is_better: bool

    @property
    def shares(self) -> np.ndarray:
        """[k, R] what each cause takes from the best run, negative where the run gains from it."""
        return self.sign * shapley(self.values)

    @property
    def alone(self) -> np.ndarray:
        """[k, R] the gain when one cause alone is removed."""
        return self.sign * (self.values[[2**cause for cause in range(len(self.causes))]] - self.values[0])

    @property
    def total(self) -> np.ndarray:
        """[R] the distance between the run and the same run without all causes."""
        return self.sign * (self.values[-1] - self.values[0])

    @property
    def sign(self) -> float:
        """Turns a change of the metric into a gain."""
        return 1.0 if self.higher_is_better else -1.0

    @property
    def largest_first(self) -> np.ndarray:
        """[k] the causes' positions, by their mean shares."""
        return np.argsort(-self.shares.mean(1), kind="stable")


def removed_causes(causes: list[Cause], subset: int) -> list[Cause]:
    """The causes that a subset removes."""
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
    """Run all subsets and compare them, paired by seed.

    Args:
        config, choices: of the run, as composed.
        causes: up to five, from `causes_of`.
        folder: of the runs; those that are finished there are not run again.
        metric: a column of metrics.csv; None: the first of `DEFAULT_METRIC_ORDER` that the run has.
        at_once: processes.
        trusted: packages that the user named.

    Raises:
        ConfigError: a run failed, or has no such metric.
    """
    jobs = [_job(config, choices, causes, subset, folder, trusted) for subset in range(2 ** len(causes))]
    waiting = [job for job in jobs if not job.finished]
    for job, outcome in carry_out_all(waiting, at_once):
        if outcome.status != "done":
            raise ConfigError(f"the run {job.setting.name} {outcome.status}: {outcome.message}")
    histories = [read_rows(job.folder / "metrics.csv") for job in jobs]
    columns = result_columns([histories[0][-1]])
    name = metric or next((column for column in DEFAULT_METRIC_ORDER if column in columns), None)
    if name is None or name not in columns:
        raise ConfigError(f"--metric {name} is not among those of the run: {', '.join(columns)}")
    values = np.array([[row[name] for row in rows if row["round"] == rows[-1]["round"]] for rows in histories])
    return Attribution(name, causes, values, is_higher_better(name))


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
    """The result in one sentence, largest cause first, with 95 % intervals over seeds."""

    def amount(values: np.ndarray) -> str:
        low, high = PairedDifference(scale * values).interval
        spread = "" if math.isnan(low) else f" [{_signed_number_text(low)}, {_signed_number_text(high)}]"
        return f"{_signed_number_text(scale * values.mean())}{spread}"

    amounts = [f"{attribution.causes[i].label} {amount(attribution.shares[i])}" for i in attribution.largest_first]
    return f"Of {amount(attribution.total)}{unit}: {', '.join(amounts)}."


def _signed_number_text(value: float) -> str:
    """With a minus sign in place of a hyphen, since intervals follow."""
    return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"
