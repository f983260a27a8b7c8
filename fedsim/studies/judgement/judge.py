"""Judges a strategy beside references: all are tuned alike, then compared on cells and seeds that no tuning saw."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fedsim
from fedsim.app.config import groups
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_fraction, is_higher_better
from fedsim.evaluation.registry import describe_metric
from fedsim.studies.judgement.contender import Contender, make_contender
from fedsim.studies.judgement.environments import DIGITS_ENVIRONMENTS, QUADRATICS_ENVIRONMENTS, BenchmarkEnvironments
from fedsim.studies.judgement.tries import attempt_number, record_attempt
from fedsim.studies.judgement.verdict import (
    MECHANISM_VERDICT,
    NOT_SHOWN_VERDICT,
    SEED_VERDICT,
    TUNING_VERDICT,
    Evidence,
    confidence_of_attempt,
    judge_evidence,
    strongest_verdict,
)
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.choice import SelectionRule
from fedsim.studies.tuning.federations import group_into_federations, read_values_by_trial, run_to_rung
from fedsim.studies.tuning.schedule import SuccessiveHalving
from fedsim.studies.tuning.space import GridKnob, Knob, Trial, trial_overrides
from fedsim.studies.tuning.tune import TuningOutcome, tune

TUNING_SEEDS = (0, 1, 2, 3)
HELD_OUT_SEEDS = tuple(range(100, 148))
REFERENCE_KNOBS = ("local.clip=null,1.0,3.0", "local.weight_decay=0.0,0.001,0.01")  # if the challenger has more knobs
NUM_FINALISTS = 6
GRID_REFINEMENTS = (2, 4)  # a reference's grid is refined on the held-out runs: by half a step, then by a quarter
CANDIDATE_ROUNDS = (30, 60, 100, 150, 200)  # the numbers of rounds among which a budget chooses


@dataclass(frozen=True)
class Contest:
    """How strategies are compared.

    Attributes:
        environments: of one kind or more; an advantage in one kind is enough, with intervals corrected for their
            number.
        tuning_seeds, held_out_seeds: replicates.
        rounds: of each run.
        knobs: further knobs of the challenger, as for `fedsim tune`, at most two; each reference gets as many of
            `REFERENCE_KNOBS`.
    """

    environments: tuple[BenchmarkEnvironments, ...] = (DIGITS_ENVIRONMENTS, QUADRATICS_ENVIRONMENTS)
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    held_out_seeds: tuple[int, ...] = HELD_OUT_SEEDS
    rounds: int = 100
    knobs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.environments:
            raise ConfigError("a judgement needs environments; give at least one kind")
        if set(self.tuning_seeds) & set(self.held_out_seeds):
            raise ConfigError("tuning and held-out seeds must differ")
        if len(self.knobs) > len(REFERENCE_KNOBS):
            raise ConfigError(f"{len(self.knobs)} knobs beside the rates; give at most {len(REFERENCE_KNOBS)}")
        checks.check_whole_number("rounds", self.rounds)


@dataclass
class Judgement:
    """What was found.

    Attributes:
        challenger: its name.
        verdict: 'mechanism', 'tuning', 'seed' or 'not shown'.
        verdict_by_environment: kind of environments → the verdict of these alone, at the same confidence.
        sentence: the verdict in words, with intervals.
        attempt_number: of this try in the ledger.
        evidence_by_environment: kind of environments → reference → differences.
        chosen_overrides: kind of environments → contender → overrides that tuning chose.
        contest: how it was compared.
        seconds: that it took, without what earlier judgements had left.
        intervals: kind of environments → reference → of each kind of differences the mean and its interval.
    """

    challenger: str
    verdict: str
    verdict_by_environment: dict[str, str]
    sentence: str
    attempt_number: int
    evidence_by_environment: dict[str, dict[str, Evidence]]
    chosen_overrides: dict[str, dict[str, str]]
    contest: Contest
    seconds: float = 0.0
    intervals: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    @property
    def confidence(self) -> float:
        """Of the intervals."""
        return confidence_of_attempt(self.attempt_number, len(self.contest.environments))

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "challenger": self.challenger, "verdict": self.verdict, "sentence": self.sentence,
            "try": self.attempt_number,
            "verdicts": self.verdict_by_environment, "confidence": self.confidence, "chosen": self.chosen_overrides,
            "intervals": self.intervals,
            "differences": {
                kind: {
                    name: {key: values.tolist() for key, values in vars(differences).items()}
                    for name, differences in evidence.items()
                }
                for kind, evidence in self.evidence_by_environment.items()
            },
            "contest": asdict(self.contest), "seconds": round(self.seconds, 1), "fedsim": fedsim.__version__,
        }  # fmt: skip


def judge(
    challenger: str, against: Sequence[str] = ("fedavg",), contest: Contest | None = None, out: str | Path = "judge",
    ledger: str | Path | None = None,
) -> Judgement:  # fmt: skip
    """Judge a strategy.

    Args:
        challenger: a choice of the group strategy, or the dotted path of a class.
        against: references, likewise.
        contest: how they are compared; None: the default.
        out: folder of the runs; what is finished there is not run again.
        ledger: file that counts the tries; None: ledger.jsonl in `out`.

    Raises:
        ConfigError: a strategy does not exist or cannot be run.
    """
    start_time, contest, folder = time.monotonic(), contest or Contest(), Path(out)
    checks.check_choice(
        "against",
        against[0] if against else "",
        [*groups()["strategy"], *(n for n in against if "." in n)],
    )
    contenders_by_kind = {
        environment_kind.name: _make_contenders(challenger, against, environment_kind, contest)
        for environment_kind in contest.environments
    }
    first = contenders_by_kind[contest.environments[0].name][0]
    path = folder / "ledger.jsonl" if ledger is None else Path(ledger)
    attempt_key = hashlib.sha256(
        json.dumps([challenger, first.source_digest, first.knob_overrides]).encode()
    ).hexdigest()[:16]
    attempt = attempt_number(path, attempt_key)
    confidence = confidence_of_attempt(attempt, len(contest.environments))
    evidence_by_kind: dict[str, dict[str, Evidence]] = {}
    chosen_settings: dict[str, dict[str, str]] = {}
    for environment_kind in contest.environments:
        kind_contenders = contenders_by_kind[environment_kind.name]
        held_out_results = [
            _ContenderResult.run_contender(
                candidate,
                contest,
                environment_kind,
                folder / environment_kind.name,
                candidate is not kind_contenders[0],
            )
            for candidate in kind_contenders
        ]
        evidence_by_kind[environment_kind.name] = {
            name: held_out_results[0].evidence_of_gain_over(baseline)
            for name, baseline in zip(against, held_out_results[1:], strict=True)
        }
        chosen_settings[environment_kind.name] = {
            candidate.name: trial_overrides(baseline.tuning_outcome.choice.trial)
            for candidate, baseline in zip(kind_contenders, held_out_results, strict=True)
        }
    verdict_by_kind = {
        environment_kind.name: judge_evidence(
            list(evidence_by_kind[environment_kind.name].values()), environment_kind.margin, confidence
        )
        for environment_kind in contest.environments
    }
    decided_verdict = strongest_verdict(list(verdict_by_kind.values()))
    seconds = time.monotonic() - start_time
    judgement = Judgement(
        challenger, decided_verdict, verdict_by_kind, "", attempt, evidence_by_kind, chosen_settings, contest, seconds
    )
    judgement.intervals = {
        kind_name: {
            name: {
                k: [float(v.mean()), *PairedDifference(v, confidence).confidence_interval]
                for k, v in vars(baseline).items()
            }
            for name, baseline in evidence_by_reference.items()
        }
        for kind_name, evidence_by_reference in evidence_by_kind.items()
    }
    judgement.sentence = judgement_sentence(judgement)
    record_attempt(path, {"key": attempt_key, "challenger": challenger, "verdict": decided_verdict, "try": attempt})
    return judgement


def _make_contenders(
    challenger: str, against: Sequence[str], kind: BenchmarkEnvironments, contest: Contest
) -> list[Contender]:
    reference_knobs = REFERENCE_KNOBS[: len(contest.knobs)]
    return [
        make_contender(challenger, kind, contest.knobs),
        *(make_contender(name, kind, reference_knobs) for name in against),
    ]


@dataclass
class _ContenderResult:
    """What was measured of one contender in environments of one kind, scaled as it is subtracted.

    Attributes:
        tuning_outcome: of its tuning.
        held_out_values: trial → [R] means over the held-out cells; of a reference, that of all finalists and of the
            trials around the best of them.
        default_held_out_values: of a reference with default settings: [R] held out.
        tuned_values, default_tuning_values: [n] on the cells of tuning, of the chosen trial and of default settings.
        metric_sign: turns a difference into an advantage.
    """

    tuning_outcome: TuningOutcome
    held_out_values: Mapping[Trial, np.ndarray]
    default_held_out_values: np.ndarray
    tuned_values: np.ndarray
    default_tuning_values: np.ndarray
    metric_sign: float

    @classmethod
    def run_contender(
        cls, candidate: Contender, contest: Contest, environments: BenchmarkEnvironments, folder: Path, reference: bool
    ) -> _ContenderResult:
        fixed_overrides = (*environments.setting, *candidate.overrides, f"rounds={contest.rounds}")
        tuning_metric, comparison_metric = environments.metrics
        halving = SuccessiveHalving(finalists=NUM_FINALISTS)
        # the source is part of the folder's name: a class that was edited is run again
        runs = folder / f"{candidate.name}-{candidate.source_digest}"
        outcome = tune(
            (*fixed_overrides, *candidate.knob_overrides), contest.tuning_seeds, tuning_metric, halving,
            rule=SelectionRule("best"), out=runs, extensions=2, cells=environments.tuning_cells,
        )  # fmt: skip
        final_round_overrides = (*fixed_overrides, f"eval_every={contest.rounds}")
        metric_sign = 1.0 if is_higher_better(comparison_metric) else -1.0

        def final_values_by_trial(
            trials: Sequence[Trial], cells: Any, seeds: Sequence[int], metric: str
        ) -> dict[Trial, np.ndarray]:
            values = final_values(trials, final_round_overrides, cells, seeds, metric, runs / "compared")
            return {trial: environments.comparison_scale_values(numbers) for trial, numbers in values.items()}

        def held_out_values(trials: Sequence[Trial]) -> dict[Trial, np.ndarray]:
            cells = environments.held_out_cells
            values = final_values_by_trial(trials, cells, contest.held_out_seeds, comparison_metric)
            return {t: v.reshape(len(cells), -1).mean(0) for t, v in values.items()}

        chosen_trial = outcome.choice.trial
        tuned_values = environments.comparison_scale_values(outcome.choice.values)
        if not reference:
            return cls(outcome, held_out_values([chosen_trial]), np.zeros(0), tuned_values, np.zeros(0), metric_sign)
        default_outcome = _with_chosen_values(candidate.default_trial, outcome)
        finalists = list(dict.fromkeys([chosen_trial, *outcome.tuning.finalists]))
        held_out_by_trial = held_out_values(list(dict.fromkeys([*finalists, default_outcome])))
        tried_values = {trial: held_out_by_trial[trial] for trial in finalists}
        for refinement in GRID_REFINEMENTS:
            best = best_trial(tried_values, metric_sign)
            tried_values |= held_out_values(trials_around(best, outcome.tuning.knobs, refinement))
        default_values = final_values_by_trial(
            [default_outcome], environments.tuning_cells, contest.tuning_seeds, tuning_metric
        )
        return cls(
            outcome,
            tried_values,
            held_out_by_trial[default_outcome],
            tuned_values,
            default_values[default_outcome],
            metric_sign,
        )

    def evidence_of_gain_over(self, reference: _ContenderResult) -> Evidence:
        """Differences by seed, positive where this one is better."""
        chosen_values = self.held_out_values[self.tuning_outcome.choice.trial]
        best = best_trial(reference.held_out_values, self.metric_sign)
        return Evidence(
            self.metric_sign * (chosen_values - reference.held_out_values[best]),
            self.metric_sign * (chosen_values - reference.held_out_values[reference.tuning_outcome.choice.trial]),
            self.metric_sign * (chosen_values - reference.default_held_out_values),
            self.metric_sign * (self.tuned_values - reference.tuned_values),
            self.metric_sign * (self.tuned_values - reference.default_tuning_values),
        )


def best_trial(values_by_trial: Mapping[Trial, np.ndarray], metric_sign: float) -> Trial:
    """The trial of the best mean, among those whose values are finite.

    Raises:
        ConfigError: no trial has finite values.
    """
    finite = {trial: numbers for trial, numbers in values_by_trial.items() if np.isfinite(numbers).all()}
    if not finite:
        raise ConfigError("each finalist of a reference diverges on a held-out seed; lower the rates")
    return max(finite, key=lambda trial: metric_sign * float(finite[trial].mean()))


def trials_around(trial: Trial, knobs: Sequence[Knob], refinement_factor: int) -> list[Trial]:
    """The trials that differ in one knob with a geometric grid, by a fraction 1 / `refinement_factor` of its step."""
    neighbouring_trials = []
    for knob_position, (knob, (knob_key, knob_value)) in enumerate(zip(knobs, trial, strict=True)):
        ratio = knob.geometric_ratio if isinstance(knob, GridKnob) else None
        if ratio is None:
            continue
        for factor in (ratio ** (1 / refinement_factor), ratio ** (-1 / refinement_factor)):
            neighbouring_trials.append(
                (*trial[:knob_position], (knob_key, float(f"{knob_value * factor:.3g}")), *trial[knob_position + 1 :])
            )
    return neighbouring_trials


def _with_chosen_values(default: Trial, outcome: TuningOutcome) -> Trial:
    """Default settings, with the chosen values of knobs that have none."""
    settings = dict(default)
    return tuple((key, settings.get(key, value)) for key, value in outcome.choice.trial)


def final_values(
    trials: Sequence[Trial], overrides: Sequence[str], cells: Sequence[Sequence[str]], seeds: Sequence[int],
    metric: str, folder: Path,
) -> dict[Trial, np.ndarray]:  # fmt: skip
    """Trial → [cells · R] a metric after the last round."""
    by_cell = [group_into_federations(trials, (*overrides, *cell), seeds, folder) for cell in cells]
    federations = [federation for federations in by_cell for federation in federations]
    rounds = int(federations[0].config.rounds)
    run_to_rung(federations, rounds, (), True)
    of_cells = [read_values_by_trial(group, metric, rounds) for group in by_cell]
    return {trial: np.concatenate([numbers[trial] for numbers in of_cells]) for trial in trials}


def rounds_within_budget(seconds: float, challenger: str, against: Sequence[str], contest: Contest) -> int:
    """The most rounds, among `ROUNDS`, with which judging takes about so many seconds, estimated from runs of tuning
    federations of the challenger with few rounds."""
    costs = [_startup_and_round_seconds(challenger, against, kind, contest) for kind in contest.environments]
    start, seconds_per_round = sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)
    affordable_rounds = [rounds for rounds in CANDIDATE_ROUNDS if start + rounds * seconds_per_round <= seconds]
    return max(affordable_rounds, default=CANDIDATE_ROUNDS[0])


def _startup_and_round_seconds(
    challenger: str, baseline_names: Sequence[str], environment_kind: BenchmarkEnvironments, contest: Contest
) -> tuple[float, float]:
    """Seconds that environments of one kind take to start, and for each round."""
    candidate = make_contender(challenger, environment_kind, contest.knobs)
    measured_times = []
    for rounds in (3, 9):
        start_time = time.monotonic()
        short_run_overrides = (f"rounds={rounds}", f"eval_every={rounds}", "trainer.trial=false")
        overrides = (*environment_kind.setting, *candidate.overrides, *short_run_overrides)
        with tempfile.TemporaryDirectory() as folder:
            final_values(
                [candidate.default_trial],
                overrides,
                environment_kind.tuning_cells[:1],
                range(60),
                environment_kind.metrics[0],
                Path(folder),
            )
        measured_times.append(time.monotonic() - start_time)
    per_replicate = max(measured_times[1] - measured_times[0], 1e-3) / 6 / 60
    trials = 15 * math.prod(max(1, text.count(",") + 1) for text in contest.knobs)
    num_halving_runs = trials * len(environment_kind.tuning_cells) * len(contest.tuning_seeds) * 0.5
    num_refining_trials = len(GRID_REFINEMENTS) * 2 * (2 + len(contest.knobs))
    num_held_out_trials = 1 + len(baseline_names) * (NUM_FINALISTS + 1 + num_refining_trials)
    num_held_out_runs = num_held_out_trials * len(environment_kind.held_out_cells) * len(contest.held_out_seeds)
    replicates = (1 + len(baseline_names)) * num_halving_runs + num_held_out_runs
    start = (
        4.0 * (1 + len(baseline_names)) * (len(environment_kind.tuning_cells) + len(environment_kind.held_out_cells))
    )
    return start, replicates * per_replicate


def judgement_sentence(judgement: Judgement) -> str:
    """The verdict in one sentence, with the intervals that it rests on."""
    meaning_by_verdict = {
        MECHANISM_VERDICT: "is better than the best tuned setting of each reference",
        TUNING_VERDICT: "is better than references with default or chosen settings, but not than their best trials",
        SEED_VERDICT: "is better on the cells and seeds of tuning, but not on held-out ones",
        NOT_SHOWN_VERDICT: "has no advantage that is shown",
    }
    deciding_kinds = [
        kind for kind, judge_evidence in judgement.verdict_by_environment.items() if judge_evidence == judgement.verdict
    ]
    kinds_phrase = (
        f" on {' and on '.join(deciding_kinds)}" if len(deciding_kinds) < len(judgement.verdict_by_environment) else ""
    )
    differences = "; ".join(_differences_text(judgement, kind) for kind in judgement.contest.environments)
    return (
        f"{judgement.verdict}: {judgement.challenger} {meaning_by_verdict[judgement.verdict]}{kinds_phrase}; "
        f"held out, {differences} "
        f"({100 * judgement.confidence:.5g} % intervals, strategy {judgement.attempt_number} of the ledger)."
    )


def _differences_text(judgement: Judgement, environment_kind: BenchmarkEnvironments) -> str:
    """The intervals of one kind of environments in words."""
    uses_chosen = judgement.verdict_by_environment[environment_kind.name] == SEED_VERDICT
    metric_label = describe_metric(environment_kind.metrics[1]).label
    compared_text = "chosen settings" if uses_chosen else "best trials"
    percent = is_fraction(environment_kind.metrics[1])
    words = []
    for baseline_name, intervals in judgement.intervals[environment_kind.name].items():
        interval_bounds = np.array(intervals["held_out_chosen" if uses_chosen else "held_out_best"])
        if environment_kind.of_ratios:
            sign = 1.0 if is_higher_better(environment_kind.metrics[1]) else -1.0
            mean, *ends = np.exp(sign * interval_bounds)
            words.append(f"{baseline_name} {mean:.3g} [{min(ends):.3g}, {max(ends):.3g}]")
        else:
            mean, low, high = interval_bounds * (100.0 if percent else 1.0)
            words.append(f"{baseline_name} {mean:+.2f} [{low:.2f}, {high:.2f}]")
    if environment_kind.of_ratios:
        return (
            f"ratio of its {metric_label} on {environment_kind.name} to that of the {compared_text}: {', '.join(words)}"
        )
    unit = " percentage points" if percent else ""
    return f"advantage in {metric_label} on {environment_kind.name} over the {compared_text}: {', '.join(words)}{unit}"
