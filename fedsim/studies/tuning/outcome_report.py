"""What tuning says: a table, one sentence, and everything that was measured as JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np

from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import describe
from fedsim.studies.plots.trials import TrialCurve
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.space import Trial, is_number, overrides_of
from fedsim.studies.tuning.tune import Outcome

CHOSEN, NEAR, WORSE, DROPPED, FAILED = "chosen", "not distinguishable", "worse", "dropped", "diverged"


def status(outcome: Outcome, trial: Trial) -> str:
    """How a trial ended."""
    tuning, choice = outcome.tuning, outcome.choice
    if trial == choice.trial:
        return CHOSEN
    if not np.isfinite(tuning.values[trial][-1]).all():
        return FAILED
    if trial not in tuning.finalists:
        return DROPPED
    return NEAR if trial in choice.near else WORSE


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """One row per trial, those that got furthest first, and the better ones first among them."""
    tuning, rows = outcome.tuning, []
    for trial, values in tuning.values.items():
        difference = outcome.tuning.sign * (tuning.finalists[outcome.choice.best] - values[-1])
        finalist = trial in tuning.finalists and trial != outcome.choice.best
        error = PairedDifference(difference).error if finalist else np.nan
        rows.append(
            dict(trial)
            | {"status": status(outcome, trial), "rounds": tuning.rounds_of(trial), "mean": float(values[-1].mean())}
            | {"standard_error": PairedDifference(values[-1]).error}
            | {"behind_best": float(difference.mean()) if finalist else np.nan, "its_error": error}
        )
    return sorted(
        rows, key=lambda row: (-row["rounds"], -tuning.sign * np.nan_to_num(row["mean"], nan=-np.inf * tuning.sign))
    )


def as_csv(outcome: Outcome) -> str:
    """The rows as text."""
    rows, file = records(outcome), io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def table(outcome: Outcome, limit: int = 20) -> list[str]:
    """The lines that are printed, of the first trials."""
    rows, scale = records(outcome), _scale(outcome)
    keys = [knob.key for knob in outcome.tuning.knobs]
    heading = [*keys, "result", "rounds", "mean", "error", "behind the best"]
    lines = [heading]
    for row in rows[:limit]:
        behind = (
            "" if np.isnan(row["its_error"]) else f"{scale * row['behind_best']:.3g} ± {scale * row['its_error']:.2g}"
        )
        numbers = [f"{scale * row['mean']:.4g}", f"{scale * row['standard_error']:.2g}"]
        lines.append([*(str(row[key]) for key in keys), row["status"], str(row["rounds"]), *numbers, behind])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    num_hidden = len(rows) - limit
    return [*texts, *([f"… and {num_hidden} more in trials.csv"] if num_hidden > 0 else [])]


def _scale(outcome: Outcome) -> float:
    return 100.0 if is_fraction(outcome.tuning.metric) else 1.0


def sentence(outcome: Outcome) -> str:
    """The choice, and why, in one sentence."""
    tuning, choice, scale = outcome.tuning, outcome.choice, _scale(outcome)
    unit = " %" if scale > 1 else ""
    label, num_others = describe(tuning.metric).label, len(choice.near) - 1
    chosen, best_trial = overrides_of(choice.trial), overrides_of(choice.best)
    text = (
        f"{chosen}: {label} {scale * choice.mean:.4g} ± {scale * choice.error:.2g}{unit} (mean ± standard "
        f"error of {len(choice.values)} replicates)"
    )
    if choice.trial == choice.best:
        text += f", the best of {len(tuning.values)} trials"
    else:
        best = scale * tuning.finalists[choice.best].mean()
        text += f", not distinguishable from the best of {len(tuning.values)} trials, {best_trial} ({best:.4g})"
    if num_others:
        text += f"; {num_others} more finalist{'s are' if num_others > 1 else ' is'} not distinguishable from the best"
    if outcome.edges:
        text += f"; at the edge of the grid: {', '.join(outcome.edges)}"
    share = tuning.relative_cost
    return f"{text}; {share:.0%} of the rounds of all trials were run."


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything that was measured."""
    tuning, choice = outcome.tuning, outcome.choice
    return {
        "chosen": dict(choice.trial),
        "overrides": outcome.overrides,
        "mean": choice.mean,
        "standard_error": choice.error,
        "best": dict(choice.best),
        "not_distinguishable": [dict(trial) for trial in choice.near],
        "behind_best": choice.loss.values.tolist(),
        "metric": tuning.metric,
        "higher_is_better": tuning.higher_is_better,
        "seeds": tuning.seeds,
        "rungs": tuning.rungs,
        "relative_cost": tuning.relative_cost,
        "extended": tuning.extended,
        "not_extended": tuning.refusals,
        "edges": outcome.edges,
        "trials": [
            {"settings": dict(trial), "status": status(outcome, trial), "rounds": tuning.rounds_of(trial)}
            | {"values": [numbers.tolist() for numbers in values]}
            for trial, values in tuning.values.items()
        ],
        "sentence": sentence(outcome),
    }


def curves(outcome: Outcome) -> tuple[list[TrialCurve], str, list[str] | None]:
    """What the picture shows: the trials over the first knob with numbers, its key, and labels of values that are not
    numbers."""
    tuning = outcome.tuning
    numeric = [key for key, value in outcome.choice.trial if is_number(value)]
    key = numeric[0] if numeric else outcome.choice.trial[0][0]
    values = list(dict.fromkeys(dict(trial)[key] for trial in tuning.values))
    labels = None if all(map(is_number, values)) else [str(value) for value in values]
    histories = {trial: history for of in tuning.federations for trial, history in of.curves(tuning.metric).items()}
    drawn = []
    for trial, (rounds, numbers) in histories.items():
        value, until = dict(trial)[key], rounds <= tuning.rounds_of(trial)
        position = float(value) if labels is None else float(values.index(value))
        chosen, finalist = trial == outcome.choice.trial, trial in tuning.finalists
        drawn.append(TrialCurve(position, rounds[until].tolist(), numbers[until], finalist, chosen))
    return drawn, key, labels
