"""`fedsim tune`: the values of some settings that a run performs best with."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core.errors import ConfigError
from fedsim.core.files import nan_to_none, replacement_file
from fedsim.studies.plots.trials import trials_figure
from fedsim.studies.tuning.choice import PREFERENCES, SelectionRule
from fedsim.studies.tuning.outcome_report import (
    curves_of_trials,
    outcome_json,
    outcome_sentence,
    trials_csv,
    trials_table,
)
from fedsim.studies.tuning.schedule import SuccessiveHalving
from fedsim.studies.tuning.tune import MAX_GRID_EXTENSIONS, TuningOutcome, tune

OVERRIDES_SYNTAX = (
    "KEY=VALUE holds for all trials; a tuned key (knob) is KEY=A,B,C, KEY=log(LOW,HIGH,COUNT), KEY=range(…) "
    "or KEY=log(LOW,HIGH)"
)

OPTION_NAMES = {  # parameters of the library call → options
    name: f"--{name.replace('_', '-')}"
    for name in ("seeds", "metric", "trials", "eta", "rungs", "finalists", "smaller_rates", "prefer", "out")
} | {"extensions": "--extend", "federation_size": "--together"}


def main(arguments: list[str]) -> None:
    """Tune settings of the run that overrides describe."""
    parser = argparse.ArgumentParser("fedsim tune", description=f"Compute {COMMAND_DESCRIPTIONS['tune']}.")
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help=OVERRIDES_SYNTAX)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of each trial (%(default)s)")
    parser.add_argument(
        "--metric", help="column of metrics.csv that is optimised (default: validation accuracy or loss, if measured)"
    )
    parser.add_argument("--trials", type=int, help="number of trials, if a knob is an interval")
    parser.add_argument(
        "--eta",
        type=int,
        default=SuccessiveHalving.eta,
        help="at each comparison one trial in ETA continues (%(default)s); 1: all",
    )
    parser.add_argument(
        "--rungs", type=int, default=SuccessiveHalving.rungs, help="maximal number of comparisons (%(default)s)"
    )
    parser.add_argument(
        "--finalists",
        type=int,
        default=SuccessiveHalving.finalists,
        help="minimal number of trials that continue (%(default)s)",
    )
    parser.add_argument(
        "--smaller-rates", type=float, default=SuccessiveHalving.smaller_rates, metavar="SHARE",
        help="share of the continuing trials that is chosen for learning rates below the best one's (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prefer",
        default="smallest",
        help=f"preferred value among indistinguishable trials: {', '.join(PREFERENCES)} (%(default)s)",
    )
    parser.add_argument(
        "--extend", type=int, default=MAX_GRID_EXTENSIONS, help="maximal number of extensions of a grid (%(default)s)"
    )
    parser.add_argument("--together", type=int, help="maximal number of trials in one federation (default: all)")
    parser.add_argument("--out", default="tune", help="folder for runs, picture, table and outcome (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if invalid_overrides := [text for text in options.overrides if "=" not in text]:
        raise ConfigError(f"{invalid_overrides[0]} is not an override KEY=VALUE")
    try:
        outcome = tune_with_options(options.overrides, options, Path(options.out))
    except ConfigError as error:
        raise error.with_renamed_keys(OPTION_NAMES) from None
    print_and_write(outcome, Path(options.out))


def tune_with_options(overrides: Sequence[str], options: Any, folder: Path) -> TuningOutcome:
    """Tune with options that have the names of the command's, and log what tuning says alone."""
    seeds = options.seeds if isinstance(options.seeds, int) else list(options.seeds)
    halving = SuccessiveHalving(options.eta, options.rungs, options.finalists, options.together, options.smaller_rates)
    rule = SelectionRule(options.prefer)
    with log_only_tuning():
        return tune(overrides, seeds, options.metric, halving, options.trials, rule, options.extend, folder)


def print_and_write(outcome: TuningOutcome, folder: Path, further_files: Sequence[Path] = ()) -> None:
    """Print the table of trials and the choice, write the files of `write`, and log the names of all files."""
    print("\n".join([*trials_table(outcome), "", outcome_sentence(outcome)]))
    files = [*write(outcome, folder), *further_files]
    print(f"\n{', '.join(map(str, files))}", file=sys.stderr)


@contextlib.contextmanager
def log_only_tuning() -> Iterator[None]:
    """Within the block runs log warnings alone: each rung starts its federations anew, and would say so."""
    levels = {"fedsim": logging.WARNING, "fedsim.studies.tuning": logging.INFO}
    level_by_logger = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in level_by_logger.items():
            logging.getLogger(name).setLevel(level)


def write(outcome: TuningOutcome, folder: Path) -> list[Path]:
    """Write the picture, the table and the outcome into a folder."""
    picture, rows, tune_json = folder / "tune.png", folder / "trials.csv", folder / "tune.json"
    trial_curves, knob, labels = curves_of_trials(outcome)
    trials_figure(trial_curves, outcome.tuning.metric, knob, labels).savefig(picture)
    for path, text in (
        (rows, trials_csv(outcome)),
        (tune_json, json.dumps(nan_to_none(outcome_json(outcome)), indent=2) + "\n"),
    ):
        with replacement_file(path) as file:
            file.write(text)
    return [picture, rows, tune_json]
