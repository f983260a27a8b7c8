"""Tunes settings: successive halving of trials that are replicates, and a choice that accounts for noise.

>>> from fedsim.studies.tuning.tune import tune
>>> outcome = tune(
...     ["clients=10", "rounds=9", "local_steps=2", "partition.validation=0.2", "device=cpu", "lr=log(0.01,1,3)"],
...     seeds=2, extensions=0, out=None,
... )
>>> outcome.choice.trial[0][0]
'lr'
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fedsim
from fedsim.app.build import build
from fedsim.app.composition import hydra_context
from fedsim.app.folders import override_key
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_higher_better, validation_metric
from fedsim.run.tracking.result import result_columns
from fedsim.studies.reproduce.runner import compose, trusted_by
from fedsim.studies.tuning.choice import Choice, ChoiceRule, choose
from fedsim.studies.tuning.federations import (
    TrialFederation,
    advance,
    federations_of,
    measured,
    plan_digest,
    without_dropped,
)
from fedsim.studies.tuning.proposals import Proposals
from fedsim.studies.tuning.schedule import Halving, promoted
from fedsim.studies.tuning.space import Grid, Interval, Knob, Trial, as_override, parse, product

log = logging.getLogger(__name__)

WITHOUT_VALIDATION = ("performative_risk", "distance_to_optimum", "train_loss")  # the first that a run has
EXTENSIONS = 3  # how often a grid is extended


@dataclass
class Tuning:
    """What was run so far.

    Attributes:
        knobs: what is tuned; grids grow as they are extended.
        seeds: of each trial.
        metric: by which trials are compared.
        higher_is_better: of the metric.
        rungs: completed rounds at each rung.
        values: trial → at each rung that it reached, the metric of each seed, in each cell where there are several.
        federations: of the trials.
        extended: values by which grids were extended, as overrides.
        refusals: why a grid could not be extended.
    """

    knobs: list[Knob]
    seeds: list[int]
    metric: str
    higher_is_better: bool
    rungs: list[int]
    values: dict[Trial, list[np.ndarray]] = field(default_factory=dict)
    federations: list[TrialFederation] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def finalists(self) -> dict[Trial, np.ndarray]:
        """Trials that reached the last rung, with the metric of each seed."""
        return {trial: values[-1] for trial, values in self.values.items() if len(values) == len(self.rungs)}

    @property
    def sign(self) -> float:
        """Turns the metric into a score, of which larger ones are better."""
        return 1.0 if self.higher_is_better else -1.0

    def score(self, values: np.ndarray) -> float:
        """Larger is better; −∞ if a seed diverged."""
        return self.sign * float(values.mean()) if np.isfinite(values).all() else -np.inf

    def rounds_of(self, trial: Trial) -> int:
        """Rounds that a trial was run."""
        return self.rungs[len(self.values[trial]) - 1]

    @property
    def relative_cost(self) -> float:
        """Rounds of all trials, as a share of those of the full grid."""
        return sum(map(self.rounds_of, self.values)) / (len(self.values) * self.rungs[-1])


@dataclass
class Outcome:
    """What tuning gave.

    Attributes:
        tuning: everything that was run.
        choice: the chosen trial.
    """

    tuning: Tuning
    choice: Choice

    @property
    def overrides(self) -> list[str]:
        """The chosen settings."""
        return [as_override(key, value) for key, value in self.choice.trial]

    @property
    def edges(self) -> list[str]:
        """The chosen settings that are at an edge of what was tried."""
        settings = dict(self.choice.trial)
        return [as_override(knob.key, settings[knob.key]) for knob in self.tuning.knobs if _at_edge(knob, settings)]


def _at_edge(knob: Knob, settings: dict[str, Any]) -> bool:
    value = settings[knob.key]
    return isinstance(knob, Grid) and knob.ratio is not None and value in (min(knob.values), max(knob.values))


def tune(
    words: Sequence[str],
    seeds: int | Sequence[int] = 5,
    metric: str | None = None,
    halving: Halving | None = None,
    trials: int | None = None,
    rule: ChoiceRule | None = None,
    extensions: int = EXTENSIONS,
    out: str | Path | None = "tune",
    cells: Sequence[Sequence[str]] = ((),),
) -> Outcome:
    """Tune settings of a run.

    Args:
        words: overrides KEY=VALUE; those with several values, or an interval, are the knobs (see
            `fedsim.studies.tuning.space`).
        seeds: how many, or which; each trial is run on all of them.
        metric: a column of metrics.csv; None: validation accuracy or loss if there are validation samples.
        halving: when trials are dropped; None: the default schedule.
        trials: how many, if a knob is an interval.
        rule: which of the trials not distinguishable from the best one is chosen; None: the smallest.
        extensions: how often the grid is extended if the choice, or the best trial, is at an edge of it.
        out: folder of the runs; a repeated call continues there. None: a temporary folder.
        cells: environments, as overrides; each trial is run in all of them, and a pair of trials is compared cell by
            cell and seed by seed.

    Raises:
        ConfigError: a configuration cannot be run, or no trial ends with finite values.
    """
    seed_list = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if len(set(seed_list)) < 2 or len(set(seed_list)) < len(seed_list):
        raise ConfigError(f"seeds={seed_list} must be at least two different ones, since noise is estimated from them")
    checks.whole_number("extensions", extensions, minimum=0)
    fixed, knobs = parse(words)
    if reserved := {"seeds", "out", "resume"} & set(map(override_key, fixed)):
        raise ConfigError(f"{', '.join(sorted(reserved))} cannot be set here; use the option --seeds or --out")
    with _folder(out) as folder:
        tuner = _Tuner(fixed, knobs, seed_list, metric, halving or Halving(), trials, folder, cells)
        return tuner.run(rule or ChoiceRule(), extensions)


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class _Tuner:
    def __init__(
        self,
        fixed: tuple[str, ...],
        knobs: list[Knob],
        seeds: list[int],
        metric: str | None,
        halving: Halving,
        trials: int | None,
        folder: Path,
        cells: Sequence[Sequence[str]],
    ) -> None:
        self.cells = [tuple(cell) for cell in cells]
        self.halving, self.trusted = halving, trusted_by(fixed)
        rounds, columns = self._facts((*fixed, *self.cells[0]), knobs, seeds)
        chosen_metric = _metric(metric, columns)
        higher = is_higher_better(chosen_metric, columns)
        self.proposals = Proposals(knobs, trials, higher)
        count = sum(self.proposals.sizes)
        evaluations = [text.partition("=")[2] for text in fixed if override_key(text) == "eval_every"]
        if evaluations:
            self.overrides = fixed
            eval_every = int(compose_one((*fixed, *_first(knobs))).eval_every)
        else:
            eval_every = halving.first_rung(rounds, count)
            self.overrides = (*fixed, f"eval_every={eval_every}")
        rungs = halving.completed_rounds(rounds, eval_every, count)
        self.tuning = Tuning(list(knobs), seeds, chosen_metric, higher, rungs)
        plan = [fedsim.__version__, self.overrides, knobs, seeds, chosen_metric, halving, trials, self.cells]
        self.folder = folder / "runs" / plan_digest({"plan": [str(entry) for entry in plan]})

    def _facts(self, fixed: Sequence[str], knobs: list[Knob], seeds: list[int]) -> tuple[int, dict[str, str]]:
        """Rounds, and columns of metrics.csv, of a run with the first values of all knobs; a mistake is refused now."""
        config = compose_one((*fixed, *_first(knobs), f"seeds=[{seeds[0]}]"))
        simulation, _, _ = build(config, trusted=self.trusted)
        return int(config.rounds), dict(simulation.column_descriptions)

    def run(self, rule: ChoiceRule, extensions: int) -> Outcome:
        """All generations, then extensions of the grid until the choice is inside."""
        tuning = self.tuning
        for size in self.proposals.sizes:
            bracket = self.proposals.generation(size)
            self._run_bracket(bracket)
            means = {
                trial: [
                    (completed, float(of.mean()))
                    for completed, of in zip(tuning.rungs, tuning.values[trial], strict=False)
                ]
                for trial in bracket
            }
            self.proposals.tell(means, tuning.rungs[-1])
        choice = choose(tuning.finalists, tuning.higher_is_better, rule)
        for _ in range(extensions):
            extension = self._extension(choice)
            if extension is None:
                break
            position, value = extension
            grid = tuning.knobs[position]
            try:
                self._run_bracket(_with_value(tuning.knobs, position, value))
            except ConfigError as error:
                tuning.refusals.append(f"{as_override(grid.key, value)}: {error}")
                break
            assert isinstance(grid, Grid)
            tuning.knobs[position] = Grid(grid.key, tuple(sorted((*grid.values, value))))
            tuning.extended.append(as_override(grid.key, value))
            log.info("the grid of %s is extended by %s", grid.key, value)
            choice = choose(tuning.finalists, tuning.higher_is_better, rule)
        return Outcome(tuning, choice)

    def _extension(self, choice: Choice) -> tuple[int, Any] | None:
        """The knob whose grid ends at the choice or at the best trial, and its next value."""
        if self.proposals.has_intervals:
            return None
        for trial in (choice.trial, choice.best):
            for position, (knob, (_, value)) in enumerate(zip(self.tuning.knobs, trial, strict=True)):
                following = knob.beyond(value) if isinstance(knob, Grid) else None
                if following is not None:
                    return position, following
        return None

    def _run_bracket(self, trials: list[Trial]) -> None:
        """Run trials rung by rung, dropping those that are not among the best of all that reached the rung."""
        tuning = self.tuning
        by_cell = [
            federations_of(
                trials, (*self.overrides, *cell), tuning.seeds, self.folder, self.trusted, self.halving.federation_size
            )
            for cell in self.cells
        ]
        if {int(of.config.rounds) for federations in by_cell for of in federations} != {tuning.rungs[-1]}:
            raise ConfigError("trials have different numbers of rounds; tune with the same for all")
        values: dict[Trial, list[np.ndarray]] = {trial: [] for trial in trials}
        everything = [of for federations in by_cell for of in federations]
        active = list(trials)
        for number, completed in enumerate(tuning.rungs):
            last = completed == tuning.rungs[-1]
            running = [of for federations in by_cell for of in federations]
            advance(running, completed, [trial for trial in trials if trial not in active], last)
            of_cells = [measured(federations, tuning.metric, completed) for federations in by_cell]
            for trial in active:
                values[trial].append(np.concatenate([numbers[trial] for numbers in of_cells]))
            active = self._continuing(number, values, active)
            if last or not active:
                break
            log.info("after round %d: %d of %d trials continue", completed, len(active), len(trials))
            by_cell = [
                [without_dropped(of, active, completed) for of in federations if of.holds(active)]
                for federations in by_cell
            ]
            everything += [of for federations in by_cell for of in federations if of not in running]
        tuning.values |= values
        tuning.federations += everything

    def _continuing(self, rung: int, values: dict[Trial, list[np.ndarray]], active: list[Trial]) -> list[Trial]:
        before = [of[rung] for of in self.tuning.values.values() if len(of) > rung]
        scores = [self.tuning.score(numbers) for numbers in (*before, *(values[trial][rung] for trial in active))]
        candidates = list(range(len(before), len(scores)))
        return [active[position - len(before)] for position in promoted(scores, candidates, self.halving)]


def compose_one(overrides: Sequence[str]) -> Any:
    """The configuration of one run."""
    with hydra_context():
        return compose((*overrides, "out=unused"))[0]


def _first(knobs: Sequence[Knob]) -> list[str]:
    """Overrides with the first value of all knobs."""
    return [as_override(knob.key, knob.low if isinstance(knob, Interval) else knob.values[0]) for knob in knobs]


def _with_value(knobs: Sequence[Knob], position: int, value: Any) -> list[Trial]:
    """All combinations in which one knob has this value."""
    grids = [knob for knob in knobs if isinstance(knob, Grid)]
    grids[position] = Grid(grids[position].key, (value,))
    return product(grids)


def _metric(name: str | None, columns: dict[str, str]) -> str:
    """The metric that is asked for, or the default of a run with these columns."""
    measured = result_columns([dict.fromkeys(columns)])
    if name is not None:
        if name not in measured:
            raise ConfigError(f"--metric {name} is not among those of the run: {', '.join(measured)}")
        return name
    default = validation_metric(measured) or next((column for column in WITHOUT_VALIDATION if column in measured), None)
    if default is None:
        raise ConfigError(f"give --metric, one of {', '.join(measured)}")
    if not default.endswith(("accuracy", "validation_loss")) and "validation" not in default:
        log.info(
            "trials are compared by %s; add partition.validation=0.2 to compare them on validation samples", default
        )
    return default
