"""What several benchmarks are asked for."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from bench_rounds import CLOCKS


def parser(about: str, names: Collection[str], clock: str) -> argparse.ArgumentParser:
    """--json, --only some of these names, --repeat and --clock, with its default."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", metavar="FILE", help="write the figures here too")
    found.add_argument("--only", metavar="NAMES", help=f"comma-separated of {', '.join(names)} (default: all)")
    found.add_argument("--repeat", type=int, default=5, help="measured repetitions (default 5)")
    found.add_argument("--clock", choices=CLOCKS, default=clock, help="cpu: for one thread on a machine with others")
    return found


def wanted(found: argparse.ArgumentParser, only: str | None, names: Collection[str]) -> list[str]:
    """Those that --only names; one that is unknown ends the program."""
    asked = only.split(",") if only else list(names)
    if unknown := set(asked) - set(names):
        found.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from {', '.join(names)}")
    return asked
