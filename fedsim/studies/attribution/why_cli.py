"""`fedsim why`: measure which causes reduce the performance of a run, by runs without them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.commands.audit import audited_configuration
from fedsim.app.composition import hydra_context
from fedsim.app.config import groups
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import describe
from fedsim.run.run_files import ENVIRONMENT
from fedsim.studies.attribution.attribute import Attribution, attribute, removed_causes, summary_sentence
from fedsim.studies.attribution.causes import CAUSES, ChoiceByGroup, causes_of
from fedsim.studies.plots.waterfall import waterfall
from fedsim.studies.reproduce.runner import compose, jobs_at_once, trusted_by
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.results.reading import read_environment

MIN_SEEDS = 3  # fewer seeds in the configuration are replaced by DEFAULT_SEEDS
DEFAULT_SEEDS = [0, 1, 2, 3, 4]


def main(arguments: list[str]) -> None:
    """Attribute the performance of a run, given as a folder or by overrides, to its causes."""
    names = ", ".join(cause.name for cause in CAUSES)
    parser = argparse.ArgumentParser("fedsim why", description=f"Compute {COMMAND_DESCRIPTIONS['why']}.")
    parser.add_argument("what", nargs="+", metavar="RUN_OR_OVERRIDES", help="a run folder, or overrides KEY=VALUE …")
    parser.add_argument("--metric", help="a column of metrics.csv, after the last round (test_accuracy)")
    parser.add_argument("--causes", help=f"separated by commas, up to five of: {names} (the first five of the run)")
    parser.add_argument("--seeds", type=int, help="how many (the run's own, or 5 if it has fewer than 3)")
    parser.add_argument("--jobs", default="auto", help="processes (auto: one per core)")
    parser.add_argument("--out", default="why", help="folder of runs, picture and table (why)")
    options = parser.parse_intermixed_args(arguments)
    config, choices = _run_configuration(options.what)
    _set_seeds(config, options.seeds)
    chosen_causes = options.causes.split(",") if options.causes else None
    causes = causes_of(config, choices, chosen_causes)
    folder = Path(options.out)
    count = jobs_at_once(options.jobs, str(config.device), 2 ** len(causes))
    attribution = attribute(config, choices, causes, folder / "runs", options.metric, count, trusted_by(options.what))
    print("\n".join(report(attribution)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "why.json").write_text(json.dumps(as_json(attribution, list(config.seeds)), indent=2) + "\n")
    waterfall(*_waterfall_figure(attribution)).savefig(folder / "why.png")
    print(f"\n{folder / 'why.png'}, {folder / 'why.json'}", file=sys.stderr)


def _run_configuration(folder_or_overrides: list[str]) -> tuple[DictConfig, ChoiceByGroup]:
    """Return the configuration and choices of a run folder or of overrides."""
    if not Path(folder_or_overrides[0]).is_dir():
        if "=" not in folder_or_overrides[0]:
            raise ConfigError(f"{folder_or_overrides[0]} is neither a run folder nor an override KEY=VALUE")
        with hydra_context():
            return compose((*folder_or_overrides, "out=unused"))
    config = audited_configuration(folder_or_overrides)
    settings = read_environment(Path(folder_or_overrides[0]) / ENVIRONMENT).get("settings", {})
    return config, {name: str(value) for name, value in settings.items() if name in groups()}


def _set_seeds(config: DictConfig, count: int | None) -> None:
    if count is not None:
        if count < 2:
            raise ConfigError(f"--seeds {count} must be at least 2, since intervals are over seeds")
        config.seeds = list(range(count))
    elif len(config.seeds) < MIN_SEEDS:
        config.seeds = DEFAULT_SEEDS


def _scale_and_unit(attribution: Attribution) -> tuple[float, str]:
    """Return the factor and unit in which the metric is reported; fractions are reported in percentage points."""
    return (100.0, " percentage points") if is_fraction(attribution.metric) else (1.0, "")


def report(attribution: Attribution) -> list[str]:
    """Return the lines of the printed table, followed by the summary sentence."""
    scale, unit = _scale_and_unit(attribution)
    label = describe(attribution.metric).label
    first, last = (scale * attribution.values[index].mean() for index in (0, -1))
    lines = [
        f"{label} after the last round, mean of {attribution.values.shape[1]} seeds: {first:.4g} as it is, {last:.4g} "
        "without all of the causes below",
        "",
        f"{'cause':20}  {'share':>8}  {'95 % interval':>18}  {'removed alone':>13}  removed means",
    ]
    for cause, share, alone in zip(attribution.causes, attribution.shares, attribution.alone, strict=True):
        low, high = PairedDifference(scale * share).interval
        bounds, mean, gain = f"[{low:.3g}, {high:.3g}]", scale * share.mean(), scale * alone.mean()
        lines.append(f"{cause.label:20}  {mean:8.3g}  {bounds:>18}  {gain:13.3g}  {cause.removal}")
    return [*lines, "", summary_sentence(attribution, scale, unit)]


def as_json(attribution: Attribution, seeds: list[int]) -> dict[str, object]:
    """Return the measured values, shares and summary sentence for JSON."""
    return {
        "metric": attribution.metric,
        "seeds": seeds,
        "causes": [cause.name for cause in attribution.causes],
        "values": {
            ",".join(cause.name for cause in removed_causes(attribution.causes, subset)): values.tolist()
            for subset, values in enumerate(attribution.values)
        },
        "shares": {
            cause.name: share.tolist() for cause, share in zip(attribution.causes, attribution.shares, strict=True)
        },
        "sentence": summary_sentence(attribution, *_scale_and_unit(attribution)),
    }


def _waterfall_figure(attribution: Attribution) -> tuple[list[str], np.ndarray, float, str]:
    scale, _ = _scale_and_unit(attribution)
    order = attribution.largest_first
    labels = [attribution.causes[cause].label for cause in order]
    unit = " (%)" if scale > 1 else ""
    best = float(scale * attribution.values[-1].mean())
    return (
        labels,
        -attribution.sign * scale * attribution.shares[order],
        best,
        f"{describe(attribution.metric).label}{unit}",
    )
