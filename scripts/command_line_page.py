"""Write docs/command_line.md: what the commands' --help prints.

python scripts/command_line_page.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "command_line.md"
WIDTH = "100"
PROGRAMS = (  # what is typed, the module whose `main` it is, what it is for
    ("fedsim table", "fedsim.app.cli", "A table that compares runs: [tables](results.md#tables)."),
    (
        "fedsim plan",
        "fedsim.app.cli",
        "How long a run will take: [performance](performance.md#how-long-a-run-will-take).",
    ),
    ("fedsim watch", "fedsim.app.cli", "Curves of runs while they are computed: [watch](results.md#while-it-runs)."),
    ("fedsim tune", "fedsim.app.cli", "Tune settings over several seeds: [tune](how_to_tune.md)."),
    (
        "fedsim judge",
        "fedsim.app.cli",
        "Whether an advantage is due to the mechanism, to tuning or to the seeds: [judge](how_to_judge.md).",
    ),
    (
        "fedsim why",
        "fedsim.app.cli",
        "By how much availability, client drift and other causes reduce a run's performance: [why](how_to_why.md).",
    ),
    ("fedsim export", "fedsim.app.cli", "Write a model to a file for PyTorch: [predict](how_to_predict.md)."),
    ("fedsim audit", "fedsim.app.cli", "A lower bound on ε from simulated attacks: [privacy](privacy.md)."),
    ("fedsim data", "fedsim.app.cli", "List data sets and their files, or download them."),
    ("fedsim algorithms", "fedsim.app.cli", "Papers, memory and assumptions: [algorithms](algorithms.md)."),
    ("fedsim-plot", "fedsim.studies.plots.plot_cli", "Pictures and an HTML report: [results](results.md#pictures)."),
    (
        "fedsim-reproduce",
        "fedsim.studies.reproduce.reproduce_cli",
        "Reproduce figures and tables of papers: [reproduce a paper](reproducing.md).",
    ),
    (
        "fedsim-leaderboard",
        "fedsim.studies.board.leaderboard_cli",
        "Compare many algorithms in many environments: [leaderboards](leaderboard.md).",
    ),
)


def main() -> None:
    """Write the page."""
    PAGE.write_text(commands(), encoding="utf-8")


def commands() -> str:
    """What the commands print when they are asked for help."""
    lines = [
        "# Command line",
        "",
        "Written by `python scripts/command_line_page.py` from what the commands print; do not edit.",
        "",
        "| command | |",
        "|---|---|",
        "| `fedsim group=choice key=value` | one run; [all choices](choices.md), [every key](configuration.md) |",
        "| `fedsim -m key=a,b` | a sweep: [compose an experiment](composing.md#sweeps) |",
        "| `fedsim --help` | groups, choices and common keys |",
        "| `fedsim info` | versions, devices, data folders |",
        *(f"| [`{title}`](#{title.replace(' ', '-')}) | {about} |" for title, _, about in PROGRAMS),
    ]
    for title, module, _ in PROGRAMS:
        said = printed(title, module)
        lines += ["", f"## {title}", "", "<!-- not executed: what --help prints -->", "```text", said, "```"]
    return "\n".join(lines) + "\n"


def printed(title: str, module: str) -> str:
    """What a command's --help prints on a terminal of fixed width, without colours."""
    environment = os.environ | {"COLUMNS": WIDTH, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    program = f"import sys; from {module} import main; sys.argv = {[*title.split(), '--help']!r}; main()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


if __name__ == "__main__":
    main()
