"""`fedsim judge`: whether a strategy's advantage is due to its mechanism, to tuning, or to the seeds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import nan_to_none, replacement_file
from fedsim.studies.judgement.environments import ENVIRONMENTS_BY_NAME
from fedsim.studies.judgement.judge import Contest, judge, rounds_within_budget
from fedsim.studies.tuning.tune_cli import log_only_tuning

BUDGET_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([smh])")
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


def main(arguments: list[str]) -> None:
    """Judge a strategy beside references."""
    parser = argparse.ArgumentParser("fedsim judge", description=f"Find out {COMMAND_DESCRIPTIONS['judge']}.")
    parser.add_argument(
        "challenger", help="the new strategy: a class PACKAGE.MODULE.CLASS, or a choice of the group strategy"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="settings of the runs on digits, which replace those of the default environments",
    )
    parser.add_argument("--against", default="fedavg", help="reference strategies, separated by commas (%(default)s)")
    parser.add_argument(
        "--budget",
        default="5m",
        help="approximate computing time, such as 90s, 5m or 1h; determines the rounds (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, help="rounds of each run, instead of a budget")
    parser.add_argument(
        "--knob", action="append", default=[], help="a further tuned setting of the challenger: KEY=A,B,C"
    )
    parser.add_argument(
        "--environments",
        default=",".join(ENVIRONMENTS_BY_NAME),
        help="kinds of environments, separated by commas (%(default)s)",
    )
    parser.add_argument(
        "--margin", type=float, default=ENVIRONMENTS_BY_NAME["digits"].margin,
        help="the smallest difference of accuracies on digits that matters (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--ledger", help="file that counts the judged strategies (ledger.jsonl in the folder)")
    parser.add_argument("--out", default="judge", help="folder for runs and judgements (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if invalid_overrides := [text for text in options.overrides if "=" not in text]:
        raise ConfigError(f"{invalid_overrides[0]} is not an override KEY=VALUE")
    baseline_names = options.against.split(",")
    digits = dataclasses.replace(
        ENVIRONMENTS_BY_NAME["digits"],
        margin=options.margin,
        setting=(*ENVIRONMENTS_BY_NAME["digits"].setting, *options.overrides),
    )
    names = list(dict.fromkeys(options.environments.split(",")))
    for name in names:
        checks.check_choice("--environments", name, list(ENVIRONMENTS_BY_NAME))
    if options.overrides and "digits" not in names:
        raise ConfigError(f"{options.overrides[0]} changes the runs on digits, and --environments leaves them out")
    kinds = tuple(digits if name == "digits" else ENVIRONMENTS_BY_NAME[name] for name in names)
    contest = Contest(kinds, knobs=tuple(options.knob))
    with log_only_tuning():
        rounds = options.rounds
        if rounds is None:
            rounds = rounds_within_budget(budget_seconds(options.budget), options.challenger, baseline_names, contest)
            print(f"{rounds} rounds in each run", file=sys.stderr)
        judgement = judge(
            options.challenger, baseline_names, dataclasses.replace(contest, rounds=rounds), options.out, options.ledger
        )
    path = Path(options.out) / f"{options.challenger}.json"
    with replacement_file(path) as file:
        file.write(json.dumps(nan_to_none(judgement.as_json()), indent=2) + "\n")
    print(judgement.sentence)
    print(f"\n{path}", file=sys.stderr)


def budget_seconds(budget: str) -> float:
    """Of '5m'."""
    match = BUDGET_PATTERN.fullmatch(budget)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--budget {budget} must be a time such as 90s, 5m or 1h")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]
