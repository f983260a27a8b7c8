"""What tuning says: a table, one sentence, and everything that was measured as JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np

from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import describe_metric
from fedsim.studies.plots.trials import TrialCurve
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.space import Trial, is_number, trial_overrides
from fedsim.studies.tuning.tune import TuningOutcome

CHOSEN_STATUS, NEAR_STATUS, WORSE_STATUS, DROPPED_STATUS, FAILED_STATUS = (
    "chosen",
    "not distinguishable",
    "worse",
    "dropped",
    "diverged",
)


def trial_status(outcome: TuningOutcome, trial: Trial) -> str:
    """How a trial ended."""
    tuning, choice = outcome.tuning, outcome.choice
    if trial == choice.trial:
        return CHOSEN_STATUS
    if not np.isfinite(tuning.values_by_trial[trial][-1]).all():
        return FAILED_STATUS
    if trial not in tuning.finalists:
        return DROPPED_STATUS
    return NEAR_STATUS if trial in choice.indistinguishable_trials else WORSE_STATUS


def trial_records(outcome: TuningOutcome) -> list[dict[str, Any]]:
    """One row per trial, those that got furthest first, and the better ones first among them."""
    tuning, rows = outcome.tuning, []
    for trial, values in tuning.values_by_trial.items():
        difference = outcome.tuning.metric_sign * (tuning.finalists[outcome.choice.best_trial] - values[-1])
        finalist = trial in tuning.finalists and trial != outcome.choice.best_trial
        error = PairedDifference(difference).standard_error if finalist else np.nan
        rows.append(
            dict(trial)
            | {
                "status": trial_status(outcome, trial),
                "rounds": tuning.rounds_of(trial),
                "mean": float(values[-1].mean()),
            }
            | {"standard_error": PairedDifference(values[-1]).standard_error}
            | {"behind_best": float(difference.mean()) if finalist else np.nan, "its_error": error}
        )
    return sorted(
        rows,
        key=lambda row: (
            -row["rounds"],
            -tuning.metric_sign * np.nan_to_num(row["mean"], nan=-np.inf * tuning.metric_sign),
        ),
    )


def trials_csv(outcome: TuningOutcome) -> str:
    """The rows as text."""
    rows, file = trial_records(outcome), io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def trials_table(outcome: TuningOutcome, limit: int = 20) -> list[str]:
    """The lines that are printed, of the first trials."""
    rows, scale = trial_records(outcome), _display_factor(outcome)
    keys = [knob.key for knob in outcome.tuning.knobs]
    heading = [*keys, "result", "rounds", "mean", "error", "behind the best"]
    lines = [heading]
    for row in rows[:limit]:
        loss_to_best = (
            "" if np.isnan(row["its_error"]) else f"{scale * row['behind_best']:.3g} ± {scale * row['its_error']:.2g}"
        )
        numbers = [f"{scale * row['mean']:.4g}", f"{scale * row['standard_error']:.2g}"]
        lines.append([*(str(row[key]) for key in keys), row["status"], str(row["rounds"]), *numbers, loss_to_best])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    num_hidden = len(rows) - limit
    return [*texts, *([f"… and {num_hidden} more in trials.csv"] if num_hidden > 0 else [])]


def _display_factor(outcome: TuningOutcome) -> float:
    return 100.0 if is_fraction(outcome.tuning.metric) else 1.0


def outcome_sentence(outcome: TuningOutcome) -> str:
    """The choice, and why, in one sentence."""
    tuning, choice, scale = outcome.tuning, outcome.choice, _display_factor(outcome)
    unit = " %" if scale > 1 else ""
    label = describe_metric(tuning.metric).label
    num_others = sum(trial not in (choice.trial, choice.best_trial) for trial in choice.indistinguishable_trials)
    chosen_overrides, best_trial = trial_overrides(choice.trial), trial_overrides(choice.best_trial)
    text = (
        f"{chosen_overrides}: {label} {scale * choice.mean:.4g} ± {scale * choice.error:.2g}{unit} (mean ± standard "
        f"error of {len(choice.values)} replicates)"
    )
    if choice.trial == choice.best_trial:
        text += f", the best of {len(tuning.values_by_trial)} trials"
    else:
        best = scale * tuning.finalists[choice.best_trial].mean()
        text += (
            f", not distinguishable from the best of {len(tuning.values_by_trial)} trials, {best_trial} ({best:.4g})"
        )
    if num_others:
        text += f"; {num_others} more finalist{'s are' if num_others > 1 else ' is'} not distinguishable from the best"
    if outcome.edge_knobs:
        text += f"; at the edge of the grid: {', '.join(outcome.edge_knobs)}"
    share = tuning.relative_cost
    return f"{text}; {share:.0%} of the rounds of all trials were run."


def outcome_json(outcome: TuningOutcome) -> dict[str, Any]:
    """Everything that was measured."""
    tuning, choice = outcome.tuning, outcome.choice
    return {
        "chosen": dict(choice.trial),
        "overrides": outcome.overrides,
        "mean": choice.mean,
        "standard_error": choice.error,
        "best": dict(choice.best_trial),
        "not_distinguishable": [dict(trial) for trial in choice.indistinguishable_trials],
        "behind_best": choice.loss_against_best.values.tolist(),
        "metric": tuning.metric,
        "higher_is_better": tuning.higher_is_better,
        "seeds": tuning.seeds,
        "rungs": tuning.rung_rounds,
        "relative_cost": tuning.relative_cost,
        "extended": tuning.extension_texts,
        "not_extended": tuning.refusal_messages,
        "edges": outcome.edge_knobs,
        "trials": [
            {"settings": dict(trial), "status": trial_status(outcome, trial), "rounds": tuning.rounds_of(trial)}
            | {"values": [numbers.tolist() for numbers in values]}
            for trial, values in tuning.values_by_trial.items()
        ],
        "sentence": outcome_sentence(outcome),
    }


def curves_of_trials(outcome: TuningOutcome) -> tuple[list[TrialCurve], str, list[str] | None]:
    """What the picture shows: the trials over the first knob with numbers, its key, and labels of values that are not
    numbers."""
    tuning = outcome.tuning
    numeric = [key for key, value in outcome.choice.trial if is_number(value)]
    key = numeric[0] if numeric else outcome.choice.trial[0][0]
    values = list(dict.fromkeys(dict(trial)[key] for trial in tuning.values_by_trial))
    labels = None if all(map(is_number, values)) else [str(value) for value in values]
    histories = {
        trial: history
        for federation in tuning.federations
        for trial, history in federation.curves(tuning.metric).items()
    }
    trial_curves = []
    for trial, (rounds, numbers) in histories.items():
        value, is_within_rungs = dict(trial)[key], rounds <= tuning.rounds_of(trial)
        position = float(value) if labels is None else float(values.index(value))
        is_chosen, finalist = trial == outcome.choice.trial, trial in tuning.finalists
        trial_curves.append(
            TrialCurve(position, rounds[is_within_rungs].tolist(), numbers[is_within_rungs], finalist, is_chosen)
        )
    return trial_curves, key, labels
