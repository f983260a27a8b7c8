"""`fedsim judge`: whether a strategy's advantage is due to its mechanism, to tuning, or to the seeds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file, without_nan
from fedsim.studies.judgement.judge import MARGIN, Contest, judge, rounds_within
from fedsim.studies.tuning.tune_cli import only_tuning_logged

BUDGET = re.compile(r"(\d+(?:\.\d+)?)([smh])")
SECONDS = {"s": 1, "m": 60, "h": 3600}


def main(arguments: list[str]) -> None:
    """Judge a strategy beside references."""
    parser = argparse.ArgumentParser("fedsim judge", description=f"Find out {COMMAND_DESCRIPTIONS['judge']}.")
    parser.add_argument("challenger", help="a class PACKAGE.MODULE.CLASS, or a choice of the group strategy")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="of all runs, behind those of the default setting"
    )
    parser.add_argument("--against", default="fedavg", help="references, separated by commas (%(default)s)")
    parser.add_argument(
        "--budget", default="5m", help="of time, such as 90s, 5m or 1h; decides the rounds (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="of each run, instead of a budget")
    parser.add_argument("--knob", action="append", default=[], help="of the challenger beside its rates: KEY=A,B,C")
    parser.add_argument(
        "--margin", type=float, default=MARGIN, help="the smallest difference that matters (%(default)s)"
    )
    parser.add_argument("--ledger", help="file that counts tries (ledger.jsonl in the folder)")
    parser.add_argument("--out", default="judge", help="folder of runs and judgements (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if stray := [text for text in options.overrides if "=" not in text]:
        raise ConfigError(f"{stray[0]} is not an override KEY=VALUE")
    against = options.against.split(",")
    contest = Contest(knobs=tuple(options.knob), margin=options.margin)
    contest = dataclasses.replace(contest, setting=(*contest.setting, *options.overrides))
    with only_tuning_logged():
        rounds = options.rounds
        if rounds is None:
            rounds = rounds_within(seconds_of(options.budget), options.challenger, against, contest)
            print(f"{rounds} rounds in each run", file=sys.stderr)
        judgement = judge(
            options.challenger, against, dataclasses.replace(contest, rounds=rounds), options.out, options.ledger
        )
    path = Path(options.out) / f"{options.challenger}.json"
    with replacement_file(path) as file:
        file.write(json.dumps(without_nan(judgement.as_json()), indent=2) + "\n")
    print(judgement.sentence)
    print(f"\n{path}", file=sys.stderr)


def seconds_of(budget: str) -> float:
    """Of '5m'."""
    match = BUDGET.fullmatch(budget)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--budget {budget} must be a time such as 90s, 5m or 1h")
    return float(match[1]) * SECONDS[match[2]]
