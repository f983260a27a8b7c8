"""The commands that follow `fedsim`. Hydra's overrides all contain a `=`, so that none is mistaken for a command."""

from __future__ import annotations

import importlib
import sys

from fedsim.core.errors import ConfigError

COMMAND_DESCRIPTIONS = {
    "info": "versions, devices, threads, extras, and the folders searched for data",
    "data": "what each data set needs and whether its files are available; `fedsim data NAME` downloads it",
    "plan": "the time, memory and traffic of a run, extrapolated from its first rounds",
    "judge": "whether a strategy's advantage is due to its mechanism, to tuning, or to the seeds",
    "table": "runs as a table: pivots, best values, targets, differences by seed; as text, Markdown, LaTeX or CSV",
    "algorithms": "strategies, local rules, columns, uplinks, attacks: papers, memory, communication and assumptions",
    "audit": "the ε that a private run claims, and a lower bound from simulated attacks with canary clients",
    "tune": "the settings with which a run performs best, by successive halving over several seeds",
    "watch": "the runs of a folder on a local page: live curves, last values, which runs are still running",
    "why": "by how much availability, client drift, heterogeneity and other causes reduce a run's performance",
    "export": "a model of a run as .safetensors or .pt, with the parameter names of its module",
}

# Commands whose modules are elsewhere: they read finished runs, which this package must not import.
COMMAND_MODULES = {
    "export": "fedsim.studies.results.export_cli",
    "judge": "fedsim.studies.judgement.judge_cli",
    "table": "fedsim.studies.results.table_cli",
    "tune": "fedsim.studies.tuning.tune_cli",
    "watch": "fedsim.studies.watch.watch_cli",
    "why": "fedsim.studies.attribution.why_cli",
}


def run_subcommand(command: str, arguments: list[str]) -> None:
    """Execute one of `COMMAND_DESCRIPTIONS`. Its module is imported only now, since most need PyTorch, which takes
    seconds."""
    try:
        importlib.import_module(COMMAND_MODULES.get(command, f"fedsim.app.commands.{command}")).main(arguments)
    except ConfigError as error:
        sys.exit(f"fedsim {command}: {error}")
