"""Stored results, verified: runs drawn at random are repeated, and their numbers compared with the stored ones."""

from __future__ import annotations

import contextlib
import json
import math
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.errors import ConfigError
from fedsim.core.files import write_json
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.reproduce import report
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.provenance import TRACED_STATUS, VERIFIED_STATUS, provenance_status, source_hash
from fedsim.studies.reproduce.recipe import Recipe, RecipeSetting, load_recipe
from fedsim.studies.reproduce.runner import plan_jobs, run_jobs
from fedsim.studies.reproduce.stored import StoredRecipeResult, labels_in_report
from fedsim.studies.results.runs import load as load_run
from fedsim.trainer.workers import intra_op_threads

ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-9, 1e-3
SPREAD_TOLERANCE = 0.5  # in standard deviations over seeds


@dataclass(frozen=True)
class VerificationCandidate:
    """A run of a stored result that can be repeated by itself.

    Attributes:
        result: it belongs to.
        setting: its place in the recipe, and the overrides that made it.
        seconds: that it took; None where that was not recorded.
    """

    result: StoredRecipeResult
    setting: RecipeSetting
    seconds: float | None


@dataclass(frozen=True)
class RerunComparison:
    """A run that was repeated.

    Attributes:
        candidate: which.
        differences: a sentence for every number that differs.
        num_compared: how many numbers were compared.
        seconds: it took.
    """

    candidate: VerificationCandidate
    differences: list[str]
    num_compared: int
    seconds: float

    @property
    def matches_stored_result(self) -> bool:
        """Whether at least one number was compared and none differs."""
        return self.num_compared > 0 and not self.differences


def verification_candidates(
    results: Iterable[StoredRecipeResult], max_seconds: float | None = None
) -> list[VerificationCandidate]:
    """Return the trained runs of stored results that their recipes still have.

    With `max_seconds` only runs are included whose recorded time is at most that.
    """
    runs = []
    for result in results:
        recipe = load_recipe(result.recipe)
        if not recipe.train:
            continue
        settings = {setting.name: setting for setting in recipe.settings(result.scale)}
        for name, overrides in result.report_content["overrides"].items():
            seconds = result.report_content.get("seconds", {}).get(name)
            if name not in settings or (max_seconds is not None and (seconds is None or seconds > max_seconds)):
                continue
            setting = RecipeSetting(settings[name].labels, tuple(overrides))
            if stored_numbers(result, recipe, setting):
                runs.append(VerificationCandidate(result, setting, seconds))
    return runs


def stored_numbers(result: StoredRecipeResult, recipe: Recipe, setting: RecipeSetting) -> dict[str, MeasuredNumber]:
    """Return measure → the stored number of a run, for measures that need no other runs."""
    labels = labels_in_report(recipe, setting)
    positions = [labels_in_report(recipe, other_setting) for other_setting in recipe.settings(result.scale)]
    return {
        name: number
        for name, numbers in result.numbers(recipe).items()
        for number in numbers
        if number.axis_labels == labels
        and not any(
            recipe.measures[name].is_needed_for(rival_labels, labels)
            for rival_labels in positions
            if rival_labels != labels
        )
    }


def verify_stored_run(candidate: VerificationCandidate, folder: Path) -> RerunComparison:
    """Repeat a run in this folder and compare its numbers with the stored ones."""
    recipe = load_recipe(candidate.result.recipe)
    (job,) = plan_jobs([candidate.setting], folder, ())
    with _use_recorded_threads(candidate.result):
        ((_, outcome),) = run_jobs([job], 1)
    if outcome.status != "done":
        return RerunComparison(candidate, [f"{outcome.status}: {outcome.message}"], 1, math.nan)
    cell = ResultCell(labels_in_report(recipe, candidate.setting), load_run(job.folder))
    report.compute_cell_measures(recipe, [cell])
    expected = {  # a measure that was one number then, and is one per seed now, is another measure
        name: number
        for name, number in stored_numbers(candidate.result, recipe, candidate.setting).items()
        if len(number.values) == len(cell.values_by_measure[name])
    }
    repeated_numbers = {name: MeasuredNumber(cell.axis_labels, cell.values_by_measure[name]) for name in expected}
    differences = [
        f"{name}: {repeated_numbers[name].mean:.7g} instead of {number.mean:.7g}"
        for name, number in expected.items()
        if not numbers_agree(repeated_numbers[name], number)
    ]
    seconds = json.loads((job.folder / "summary.json").read_text())["seconds"]
    return RerunComparison(candidate, differences, len(expected), float(seconds))


def _use_recorded_threads(result: StoredRecipeResult) -> contextlib.AbstractContextManager[None]:
    """PyTorch's number of threads as the stored result records it, since a run that diverges amplifies the rounding of
    sums; where it records none, that of this process."""
    threads = result.report_content.get("threads")
    return intra_op_threads(threads) if isinstance(threads, int) and threads > 0 else contextlib.nullcontext()


def numbers_agree(repeated_numbers: MeasuredNumber, stored: MeasuredNumber) -> bool:
    """Return whether the means differ by at most 10⁻⁹, a thousandth or half a standard deviation over seeds.

    Other machines and versions add floating-point numbers in another order.
    """
    if math.isnan(stored.mean) or math.isnan(repeated_numbers.mean):
        return math.isnan(stored.mean) and math.isnan(repeated_numbers.mean)
    if math.isinf(stored.mean) or math.isinf(repeated_numbers.mean):
        return stored.mean == repeated_numbers.mean
    tolerance = max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * abs(stored.mean), SPREAD_TOLERANCE * stored.std)
    return abs(repeated_numbers.mean - stored.mean) <= tolerance


def record_verification(repetition: RerunComparison, is_repeated: bool) -> None:
    """Record a repetition that agreed, its sources and time in the report of a result that is not traced.

    Args:
        repetition: of a run.
        is_repeated: also where a run of that result was verified before.
    """
    result, name = repetition.candidate.result, repetition.candidate.setting.name
    state = provenance_status(result.report_content)
    if not repetition.matches_stored_result or state == TRACED_STATUS or (state == VERIFIED_STATUS and not is_repeated):
        return
    result.report_content["verified"] = {**result.report_content.get("verified", {}), name: source_hash()}
    result.report_content["seconds"] = {**result.report_content.get("seconds", {}), name: round(repetition.seconds, 2)}
    write_json(result.folder / "report.json", result.report_content)


def verify_by_rerunning(results: list[StoredRecipeResult], num_runs: int, max_seconds: float | None = None) -> bool:
    """Repeat `num_runs` runs, drawn at random, print the outcomes, and return whether all agree.

    Raises:
        ConfigError: there are fewer runs.
    """
    runs = verification_candidates(results, max_seconds)
    if len(runs) < num_runs:
        limit = f" that are recorded to take at most {max_seconds:g} s" if max_seconds is not None else ""
        raise ConfigError(f"--verify {num_runs}: there are {len(runs)} runs of stored results{limit}")
    all_agree = True
    for number, candidate in enumerate(random.SystemRandom().sample(runs, num_runs), 1):
        with tempfile.TemporaryDirectory() as folder:
            repetition = verify_stored_run(candidate, Path(folder))
        record_verification(repetition, is_repeated=max_seconds is None)
        outcome = "; ".join(repetition.differences) or f"{repetition.num_compared} numbers as stored"
        run_text = f"{candidate.result.recipe}, {candidate.result.scale}, {candidate.setting.name or 'its only run'}"
        print(f"[{number}/{num_runs}] {run_text}: {outcome} ({repetition.seconds:.0f} s)")
        all_agree &= repetition.matches_stored_result
    return all_agree
