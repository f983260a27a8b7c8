"""`fedsim plan`: the time, memory and traffic that a run will take, extrapolated from its first rounds."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.composition import compose, hydra_context
from fedsim.app.job_progress import duration_text
from fedsim.core.errors import ConfigError
from fedsim.core.files import write_json

if TYPE_CHECKING:  # help runs without PyTorch
    from fedsim.run.plan import RunCostEstimate

DEFAULT_SECONDS = 10.0
MAX_EVALUATION_INTERVAL = 2  # rounds between evaluations while measuring


def main(arguments: list[str]) -> None:
    """Print the plan of the run that overrides describe."""
    start = time.perf_counter()  # PyTorch is imported below, as it is for a run
    parser = argparse.ArgumentParser("fedsim plan", description=f"Estimate {COMMAND_DESCRIPTIONS['plan']}.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, as for a run")
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        help=f"how many seconds of rounds and evaluations to measure, but at least two rounds ({DEFAULT_SECONDS:g})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan to a file, too")
    options = parser.parse_intermixed_args(arguments)
    if not 0 < options.seconds < math.inf:
        raise ConfigError(f"--seconds {options.seconds:g} must be above 0 and finite")
    plan = plan_of_overrides(options.overrides, options.seconds, start)
    print("\n".join(report(plan)))
    if options.json is not None:
        write_json(Path(options.json), dataclasses.asdict(plan))


def plan_of_overrides(overrides: list[str], seconds: float, start: float) -> RunCostEstimate:
    """Measure the run that overrides describe.

    Raises:
        ConfigError: they describe several runs.
    """
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line} are several runs; plan one of them (a sweep takes at most the sum of its runs)"
            )
    with hydra_context():
        config, _ = compose(overrides)
    eval_every = config.eval_every
    if isinstance(eval_every, int):  # `build` rejects other values
        config.eval_every = min(eval_every, MAX_EVALUATION_INTERVAL)
    from fedsim.app.build import build
    from fedsim.run.plan import estimate_run_cost

    simulation, tracking, _ = build(config)
    return estimate_run_cost(simulation, tracking, eval_every, seconds, start)


def report(plan: RunCostEstimate) -> list[str]:
    """Return the printed lines of a plan."""
    if plan.measured_rounds == plan.rounds:
        basis = "all rounds"
    else:
        basis = f"the first {plan.measured_rounds} of {plan.rounds} rounds; later ones may cost more or less"
    if plan.may_end_earlier:
        basis += "; stop may end the run earlier"
    memory = "unknown" if plan.memory_gib is None else f"{plan.memory_gib:.2f} GiB of the process"
    if plan.device_memory_gib is not None:
        memory += f", {plan.device_memory_gib:.2f} GiB of tensors on the GPU"
    return [
        f"measured  {basis}",
        f"time      {duration_text(plan.seconds)}: {plan.seconds_before:.1f} s before the first round, "
        f"rounds {plan.rounds} × {short_duration_text(plan.seconds_per_round)}, "
        f"evaluations {plan.evaluations} × {short_duration_text(plan.seconds_per_evaluation)}, "
        f"{plan.seconds_after:.1f} s at the end",
        f"memory    {memory}",
        f"traffic   {bytes_text(plan.total_bytes_up)} from clients to the server, "
        f"{bytes_text(plan.total_bytes_down)} from it to them, for one seed",
    ]


def short_duration_text(seconds: float) -> str:
    """Format a short duration with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def bytes_text(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for exponent, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**exponent:
            return f"{count / 1000**exponent:.3g} {unit}"
    return f"{count:.0f} bytes"
