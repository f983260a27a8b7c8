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
from fedsim.studies.reproduce.runner import compose_config, trusted_packages
from fedsim.studies.tuning.choice import SelectionRule, TrialChoice, choose_trial
from fedsim.studies.tuning.federations import (
    TrialFederation,
    federation_of_active_trials,
    group_into_federations,
    plan_digest,
    read_values_by_trial,
    run_to_rung,
)
from fedsim.studies.tuning.proposals import TrialProposals
from fedsim.studies.tuning.schedule import SuccessiveHalving, continuing_candidates
from fedsim.studies.tuning.space import (
    GridKnob,
    IntervalKnob,
    Knob,
    Trial,
    format_override,
    grid_trials,
    learning_rate_products,
    parse_knobs,
)

log = logging.getLogger(__name__)

METRICS_WITHOUT_VALIDATION = ("performative_risk", "distance_to_optimum", "train_loss")  # the first that a run has
MAX_GRID_EXTENSIONS = 3  # how often a grid is extended


@dataclass
class TuningState:
    """What was run so far.

    Attributes:
        knobs: what is tuned; grids grow as they are extended.
        seeds: of each trial.
        metric: by which trials are compared.
        higher_is_better: of the metric.
        rung_rounds: completed rounds at each rung.
        values_by_trial: trial → at each rung that it reached, the metric of each seed, in each cell where there are
            several.
        federations: of the trials.
        extension_texts: values by which grids were extended, as overrides.
        refusal_messages: why a grid could not be extended.
    """

    knobs: list[Knob]
    seeds: list[int]
    metric: str
    higher_is_better: bool
    rung_rounds: list[int]
    values_by_trial: dict[Trial, list[np.ndarray]] = field(default_factory=dict)
    federations: list[TrialFederation] = field(default_factory=list)
    extension_texts: list[str] = field(default_factory=list)
    refusal_messages: list[str] = field(default_factory=list)

    @property
    def finalists(self) -> dict[Trial, np.ndarray]:
        """Trials that reached the last rung, with the metric of each seed."""
        return {
            trial: values[-1] for trial, values in self.values_by_trial.items() if len(values) == len(self.rung_rounds)
        }

    @property
    def metric_sign(self) -> float:
        """Turns the metric into a score, of which larger ones are better."""
        return 1.0 if self.higher_is_better else -1.0

    def score(self, values: np.ndarray) -> float:
        """Larger is better; −∞ if a seed diverged."""
        return self.metric_sign * float(values.mean()) if np.isfinite(values).all() else -np.inf

    def rounds_of(self, trial: Trial) -> int:
        """Rounds that a trial was run."""
        return self.rung_rounds[len(self.values_by_trial[trial]) - 1]

    @property
    def relative_cost(self) -> float:
        """Rounds of all trials, as a share of those of the full grid."""
        return sum(map(self.rounds_of, self.values_by_trial)) / (len(self.values_by_trial) * self.rung_rounds[-1])


@dataclass
class TuningOutcome:
    """What tuning gave.

    Attributes:
        tuning: everything that was run.
        choice: the chosen trial.
    """

    tuning: TuningState
    choice: TrialChoice

    @property
    def overrides(self) -> list[str]:
        """The chosen settings."""
        return [format_override(key, value) for key, value in self.choice.trial]

    @property
    def edge_knobs(self) -> list[str]:
        """The chosen settings that are at an edge of what was tried."""
        settings = dict(self.choice.trial)
        return [
            format_override(knob.key, settings[knob.key]) for knob in self.tuning.knobs if _is_at_edge(knob, settings)
        ]


def _is_at_edge(knob: Knob, settings: dict[str, Any]) -> bool:
    value = settings[knob.key]
    return (
        isinstance(knob, GridKnob)
        and knob.geometric_ratio is not None
        and value in (min(knob.values), max(knob.values))
    )


def tune(
    override_texts: Sequence[str],
    seeds: int | Sequence[int] = 5,
    metric: str | None = None,
    halving: SuccessiveHalving | None = None,
    trials: int | None = None,
    rule: SelectionRule | None = None,
    extensions: int = MAX_GRID_EXTENSIONS,
    out: str | Path | None = "tune",
    cells: Sequence[Sequence[str]] = ((),),
) -> TuningOutcome:
    """Tune settings of a run.

    Args:
        override_texts: overrides KEY=VALUE; those with several values, or an interval, are the knobs (see
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
        raise ConfigError(
            key="seeds",
            value=seed_list,
            needs="must be at least two different ones, since noise is estimated from them",
        )
    checks.check_whole_number("extensions", extensions, minimum=0)
    fixed_overrides, knobs = parse_knobs(override_texts)
    if reserved_keys := {"seeds", "out", "resume"} & set(map(override_key, fixed_overrides)):
        raise ConfigError(
            f"{', '.join(sorted(reserved_keys))} cannot be set here; use {{seeds}} or {{out}}",
            mentions=("seeds", "out"),
        )
    with _runs_folder(out) as folder:
        tuner = _Tuner(fixed_overrides, knobs, seed_list, metric, halving or SuccessiveHalving(), trials, folder, cells)
        return tuner.run(rule or SelectionRule(), extensions)


@contextmanager
def _runs_folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class _Tuner:
    def __init__(
        self,
        fixed_overrides: tuple[str, ...],
        knobs: list[Knob],
        seeds: list[int],
        metric: str | None,
        halving: SuccessiveHalving,
        trials: int | None,
        folder: Path,
        cells: Sequence[Sequence[str]],
    ) -> None:
        self.cells = [tuple(cell) for cell in cells]
        self.halving, self.trusted = halving, trusted_packages(fixed_overrides)
        rounds, columns = self._num_rounds_and_columns((*fixed_overrides, *self.cells[0]), knobs, seeds)
        chosen_metric = _resolve_metric(metric, columns)
        higher_is_better = is_higher_better(chosen_metric, columns)
        self.proposals = TrialProposals(knobs, trials, higher_is_better)
        count = sum(self.proposals.generation_sizes)
        evaluations = [text.partition("=")[2] for text in fixed_overrides if override_key(text) == "eval_every"]
        if evaluations:
            self.overrides = fixed_overrides
            eval_every = int(compose_single_config((*fixed_overrides, *_first_trial_overrides(knobs))).eval_every)
        else:
            eval_every = halving.first_rung_rounds(rounds, count)
            self.overrides = (*fixed_overrides, f"eval_every={eval_every}")
        rungs = halving.rung_rounds(rounds, eval_every, count)
        self.tuning = TuningState(list(knobs), seeds, chosen_metric, higher_is_better, rungs)
        plan = [fedsim.__version__, self.overrides, knobs, seeds, chosen_metric, halving, trials, self.cells]
        self.folder = folder / "runs" / plan_digest({"plan": [str(entry) for entry in plan]})

    def _num_rounds_and_columns(
        self, fixed_overrides: Sequence[str], knobs: list[Knob], seeds: list[int]
    ) -> tuple[int, dict[str, str]]:
        """Rounds, and columns of metrics.csv, of a run with the first values of all knobs; a mistake is refused now."""
        config = compose_single_config((*fixed_overrides, *_first_trial_overrides(knobs), f"seeds=[{seeds[0]}]"))
        simulation, _, _ = build(config, trusted=self.trusted)
        return int(config.rounds), dict(simulation.column_descriptions)

    def run(self, rule: SelectionRule, extensions: int) -> TuningOutcome:
        """All generations, then extensions of the grid until the choice is inside."""
        tuning = self.tuning
        for size in self.proposals.generation_sizes:
            bracket = self.proposals.propose_generation(size)
            self._run_bracket(bracket)
            means = {
                trial: [
                    (completed_rounds, float(rung_values.mean()))
                    for completed_rounds, rung_values in zip(
                        tuning.rung_rounds, tuning.values_by_trial[trial], strict=False
                    )
                ]
                for trial in bracket
            }
            self.proposals.report_to_study(means, tuning.rung_rounds[-1])
        choice = choose_trial(tuning.finalists, tuning.higher_is_better, rule)
        for _ in range(extensions):
            extension = self._grid_extension(choice)
            if extension is None:
                break
            position, value = extension
            grid = tuning.knobs[position]
            try:
                self._run_bracket(_trials_with_knob_value(tuning.knobs, position, value))
            except ConfigError as error:
                tuning.refusal_messages.append(f"{format_override(grid.key, value)}: {error}")
                break
            assert isinstance(grid, GridKnob)
            tuning.knobs[position] = GridKnob(grid.key, tuple(sorted((*grid.values, value))))
            tuning.extension_texts.append(format_override(grid.key, value))
            log.info("the grid of %s is extended by %s", grid.key, value)
            choice = choose_trial(tuning.finalists, tuning.higher_is_better, rule)
        return TuningOutcome(tuning, choice)

    def _grid_extension(self, choice: TrialChoice) -> tuple[int, Any] | None:
        """The knob whose grid ends at the choice or at the best trial, and its next value."""
        if self.proposals.has_interval_knobs:
            return None
        for trial in (choice.trial, choice.best_trial):
            for position, (knob, (_, value)) in enumerate(zip(self.tuning.knobs, trial, strict=True)):
                next_value = knob.next_value_beyond_edge(value) if isinstance(knob, GridKnob) else None
                if next_value is not None:
                    return position, next_value
        return None

    def _run_bracket(self, trials: list[Trial]) -> None:
        """Run trials rung by rung, dropping those that are not among the best of all that reached the rung."""
        tuning = self.tuning
        by_cell = [
            group_into_federations(
                trials, (*self.overrides, *cell), tuning.seeds, self.folder, self.trusted, self.halving.federation_size
            )
            for cell in self.cells
        ]
        if {int(federation.config.rounds) for federations in by_cell for federation in federations} != {
            tuning.rung_rounds[-1]
        }:
            raise ConfigError("trials have different numbers of rounds; tune with the same for all")
        values: dict[Trial, list[np.ndarray]] = {trial: [] for trial in trials}
        all_federations = [federation for federations in by_cell for federation in federations]
        active = list(trials)
        for number, completed_rounds in enumerate(tuning.rung_rounds):
            is_last_rung = completed_rounds == tuning.rung_rounds[-1]
            running = [federation for federations in by_cell for federation in federations]
            run_to_rung(running, completed_rounds, [trial for trial in trials if trial not in active], is_last_rung)
            of_cells = [read_values_by_trial(federations, tuning.metric, completed_rounds) for federations in by_cell]
            for trial in active:
                values[trial].append(np.concatenate([numbers[trial] for numbers in of_cells]))
            active = self._continuing_trials(number, values, active)
            if is_last_rung or not active:
                break
            log.info("after round %d: %d of %d trials continue", completed_rounds, len(active), len(trials))
            by_cell = [
                [
                    federation_of_active_trials(federation, active, completed_rounds)
                    for federation in federations
                    if federation.has_trial_of(active)
                ]
                for federations in by_cell
            ]
            all_federations += [
                federation for federations in by_cell for federation in federations if federation not in running
            ]
        tuning.values_by_trial |= values
        tuning.federations += all_federations

    def _continuing_trials(self, rung: int, values: dict[Trial, list[np.ndarray]], active: list[Trial]) -> list[Trial]:
        earlier_trials = [
            trial for trial, values_by_rung in self.tuning.values_by_trial.items() if len(values_by_rung) > rung
        ]
        compared = [*earlier_trials, *active]
        values_by_trial = self.tuning.values_by_trial | values
        scores = [self.tuning.score(values_by_trial[trial][rung]) for trial in compared]
        candidates = list(range(len(earlier_trials), len(scores)))
        progress = self.tuning.rung_rounds[rung] / self.tuning.rung_rounds[-1]
        continuing = continuing_candidates(scores, candidates, self.halving, learning_rate_products(compared), progress)
        return [compared[position] for position in continuing]


def compose_single_config(overrides: Sequence[str]) -> Any:
    """The configuration of one run."""
    with hydra_context():
        return compose_config((*overrides, "out=unused"))[0]


def _first_trial_overrides(knobs: Sequence[Knob]) -> list[str]:
    """Overrides with the first value of all knobs."""
    return [
        format_override(knob.key, knob.lower_bound if isinstance(knob, IntervalKnob) else knob.values[0])
        for knob in knobs
    ]


def _trials_with_knob_value(knobs: Sequence[Knob], position: int, value: Any) -> list[Trial]:
    """All combinations in which one knob has this value."""
    grids = [knob for knob in knobs if isinstance(knob, GridKnob)]
    grids[position] = GridKnob(grids[position].key, (value,))
    return grid_trials(grids)


def _resolve_metric(name: str | None, columns: dict[str, str]) -> str:
    """The metric that is asked for, or the default of a run with these columns."""
    measured = result_columns([dict.fromkeys(columns)])
    if name is not None:
        if name not in measured:
            raise ConfigError(key="metric", value=name, needs=f"is not among those of the run: {', '.join(measured)}")
        return name
    default = validation_metric(measured) or next(
        (column for column in METRICS_WITHOUT_VALIDATION if column in measured), None
    )
    if default is None:
        raise ConfigError(f"give {{metric}}, one of {', '.join(measured)}", mentions=("metric",))
    if default == "train_loss":
        log.info(
            "trials are compared by %s; add partition.validation=0.2 to compare them on validation samples", default
        )
    elif default in METRICS_WITHOUT_VALIDATION:
        log.info("trials are compared by %s, since no metric is named", default)
    return default
