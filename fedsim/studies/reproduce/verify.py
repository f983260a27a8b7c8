"""Stored results, verified: runs drawn at random are repeated, and their numbers compared with the stored ones."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.errors import ConfigError
from fedsim.core.files import write_json
from fedsim.studies.plots.cells import Cell
from fedsim.studies.reproduce import report
from fedsim.studies.reproduce.number import Number
from fedsim.studies.reproduce.provenance import TRACED, VERIFIED, provenance, source_hash
from fedsim.studies.reproduce.recipe import Recipe, Setting, load
from fedsim.studies.reproduce.runner import carry_out_all, plan
from fedsim.studies.reproduce.stored import Result, position
from fedsim.studies.results.runs import load as load_run

ABSOLUTE, RELATIVE, SPREADS = 1e-9, 1e-3, 0.5  # tolerances; SPREADS is in standard deviations over seeds


@dataclass(frozen=True)
class Candidate:
    """A run of a stored result that can be repeated by itself.

    Attributes:
        result: it belongs to.
        setting: its place in the recipe, and the overrides that made it.
        seconds: that it took; None where that was not recorded.
    """

    result: Result
    setting: Setting
    seconds: float | None


@dataclass(frozen=True)
class Repetition:
    """A run that was repeated.

    Attributes:
        candidate: which.
        differences: a sentence for every number that differs.
        num_compared: how many numbers were compared.
        seconds: it took.
    """

    candidate: Candidate
    differences: list[str]
    num_compared: int
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether at least one number was compared and none differs."""
        return self.num_compared > 0 and not self.differences


def candidates(results: Iterable[Result], max_seconds: float | None = None) -> list[Candidate]:
    """Return the trained runs of stored results that their recipes still have.

    With `max_seconds` only runs are included whose recorded time is at most that.
    """
    runs = []
    for result in results:
        recipe = load(result.recipe)
        if not recipe.train:
            continue
        settings = {setting.name: setting for setting in recipe.settings(result.scale)}
        for name, overrides in result.content["overrides"].items():
            seconds = result.content.get("seconds", {}).get(name)
            if name not in settings or (max_seconds is not None and (seconds is None or seconds > max_seconds)):
                continue
            setting = Setting(settings[name].labels, tuple(overrides))
            if stored_numbers(result, recipe, setting):
                runs.append(Candidate(result, setting, seconds))
    return runs


def stored_numbers(result: Result, recipe: Recipe, setting: Setting) -> dict[str, Number]:
    """Return measure → the stored number of a run, for measures that need no other runs."""
    labels = position(recipe, setting)
    positions = [position(recipe, other_setting) for other_setting in recipe.settings(result.scale)]
    return {
        name: number
        for name, numbers in result.numbers(recipe).items()
        for number in numbers
        if number.at == labels
        and not any(recipe.measures[name].compares(rival, labels) for rival in positions if rival != labels)
    }


def repeat(candidate: Candidate, folder: Path) -> Repetition:
    """Repeat a run in this folder and compare its numbers with the stored ones."""
    recipe = load(candidate.result.recipe)
    (job,) = plan([candidate.setting], folder, ())
    ((_, outcome),) = carry_out_all([job], 1)
    if outcome.status != "done":
        return Repetition(candidate, [f"{outcome.status}: {outcome.message}"], 1, math.nan)
    cell = Cell(position(recipe, candidate.setting), load_run(job.folder))
    report.measure(recipe, [cell])
    expected = {  # a measure that was one number then, and is one per seed now, is another measure
        name: number
        for name, number in stored_numbers(candidate.result, recipe, candidate.setting).items()
        if len(number.values) == len(cell.numbers[name])
    }
    repeated = {name: Number(cell.at, cell.numbers[name]) for name in expected}
    differences = [
        f"{name}: {repeated[name].mean:.7g} instead of {number.mean:.7g}"
        for name, number in expected.items()
        if not same(repeated[name], number)
    ]
    seconds = json.loads((job.folder / "summary.json").read_text())["seconds"]
    return Repetition(candidate, differences, len(expected), float(seconds))


def same(repeated: Number, stored: Number) -> bool:
    """Return whether the means differ by at most 10⁻⁹, a thousandth or half a standard deviation over seeds.

    Other machines and versions add floating-point numbers in another order.
    """
    if math.isnan(stored.mean) or math.isnan(repeated.mean):
        return math.isnan(stored.mean) and math.isnan(repeated.mean)
    if math.isinf(stored.mean) or math.isinf(repeated.mean):
        return stored.mean == repeated.mean
    tolerance = max(ABSOLUTE, RELATIVE * abs(stored.mean), SPREADS * stored.std)
    return abs(repeated.mean - stored.mean) <= tolerance


def record(repetition: Repetition, is_repeated: bool) -> None:
    """Record a repetition that agreed, its sources and time in the report of a result that is not traced.

    Args:
        repetition: of a run.
        is_repeated: also where a run of that result was verified before.
    """
    result, name = repetition.candidate.result, repetition.candidate.setting.name
    state = provenance(result.content)
    if not repetition.agrees or state == TRACED or (state == VERIFIED and not is_repeated):
        return
    result.content["verified"] = {**result.content.get("verified", {}), name: source_hash()}
    result.content["seconds"] = {**result.content.get("seconds", {}), name: round(repetition.seconds, 2)}
    write_json(result.folder / "report.json", result.content)


def verify(results: list[Result], num_runs: int, max_seconds: float | None = None) -> bool:
    """Repeat `num_runs` runs, drawn at random, print the outcomes, and return whether all agree.

    Raises:
        ConfigError: there are fewer runs.
    """
    runs = candidates(results, max_seconds)
    if len(runs) < num_runs:
        limit = f" that are recorded to take at most {max_seconds:g} s" if max_seconds is not None else ""
        raise ConfigError(f"--verify {num_runs}: there are {len(runs)} runs of stored results{limit}")
    agree = True
    for number, candidate in enumerate(random.SystemRandom().sample(runs, num_runs), 1):
        with tempfile.TemporaryDirectory() as folder:
            repetition = repeat(candidate, Path(folder))
        record(repetition, is_repeated=max_seconds is None)
        outcome = "; ".join(repetition.differences) or f"{repetition.num_compared} numbers as stored"
        run_text = f"{candidate.result.recipe}, {candidate.result.scale}, {candidate.setting.name or 'its only run'}"
        print(f"[{number}/{num_runs}] {run_text}: {outcome} ({repetition.seconds:.0f} s)")
        agree &= repetition.agrees
    return agree
