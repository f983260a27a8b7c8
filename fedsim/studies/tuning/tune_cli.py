"""`fedsim tune`: the values of some settings that a run performs best with."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file, without_nan
from fedsim.studies.plots.trials import trials_picture
from fedsim.studies.tuning.choice import PREFERENCES, ChoiceRule
from fedsim.studies.tuning.outcome_report import as_csv, as_json, curves, sentence, table
from fedsim.studies.tuning.schedule import Halving
from fedsim.studies.tuning.tune import EXTENSIONS, Outcome, tune

SYNTAX = "KEY=VALUE for all trials; a knob is KEY=A,B,C, KEY=log(LOW,HIGH,COUNT), KEY=range(…) or KEY=log(LOW,HIGH)"


def main(arguments: list[str]) -> None:
    """Tune settings of the run that overrides describe."""
    parser = argparse.ArgumentParser("fedsim tune", description=f"Compute {COMMAND_DESCRIPTIONS['tune']}.")
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help=SYNTAX)
    parser.add_argument("--seeds", type=int, default=5, help="of each trial (%(default)s)")
    parser.add_argument("--metric", help="a column of metrics.csv (validation accuracy or loss, if there is one)")
    parser.add_argument("--trials", type=int, help="how many, if a knob is an interval")
    parser.add_argument("--eta", type=int, default=Halving.eta, help="one in ETA continues (%(default)s); 1: all")
    parser.add_argument("--rungs", type=int, default=Halving.rungs, help="the most comparisons (%(default)s)")
    parser.add_argument("--finalists", type=int, default=Halving.finalists, help="never dropped (%(default)s)")
    parser.add_argument("--prefer", default="smallest", help=f"{', '.join(PREFERENCES)} (%(default)s)")
    parser.add_argument("--extend", type=int, default=EXTENSIONS, help="most extensions of a grid (%(default)s)")
    parser.add_argument("--together", type=int, help="most trials in one federation (all)")
    parser.add_argument("--out", default="tune", help="folder of runs, picture, table and outcome (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if stray := [text for text in options.overrides if "=" not in text]:
        raise ConfigError(f"{stray[0]} is not an override KEY=VALUE")
    halving = Halving(options.eta, options.rungs, options.finalists, options.together)
    with only_tuning_logged():
        outcome = tune(
            options.overrides, options.seeds, options.metric, halving, options.trials, ChoiceRule(options.prefer),
            options.extend, options.out,
        )  # fmt: skip
    print("\n".join([*table(outcome), "", sentence(outcome)]))
    files = write(outcome, Path(options.out))
    print(f"\n{', '.join(map(str, files))}", file=sys.stderr)


@contextlib.contextmanager
def only_tuning_logged() -> Iterator[None]:
    """Within the block runs log warnings alone: each rung starts its federations anew, and would say so."""
    levels = {"fedsim": logging.WARNING, "fedsim.studies.tuning": logging.INFO}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the picture, the table and the outcome into a folder."""
    picture, rows, everything = folder / "tune.png", folder / "trials.csv", folder / "tune.json"
    drawn, knob, labels = curves(outcome)
    trials_picture(drawn, outcome.tuning.metric, knob, labels).savefig(picture)
    for path, text in (
        (rows, as_csv(outcome)),
        (everything, json.dumps(without_nan(as_json(outcome)), indent=2) + "\n"),
    ):
        with replacement_file(path) as file:
            file.write(text)
    return [picture, rows, everything]
