"""`fedsim why`: measure which causes reduce the performance of a run, by runs without them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.composition import hydra_context
from fedsim.app.folders import override_key
from fedsim.app.stored_configuration import load_run_configuration
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import describe_metric
from fedsim.run.stopping import exit_on_sigterm
from fedsim.studies.attribution.attribute import Attribution, causes_in_subset, run_attribution, summary_sentence
from fedsim.studies.attribution.causes import CAUSES, ChoiceByGroup, applicable_causes
from fedsim.studies.plots.waterfall import waterfall_figure
from fedsim.studies.reproduce.runner import compose_config, num_concurrent_jobs, trusted_packages
from fedsim.studies.results.paired import PairedDifference

MIN_SEEDS = 3  # fewer seeds in the configuration are replaced by DEFAULT_SEEDS
DEFAULT_SEEDS = [0, 1, 2, 3, 4]


def main(arguments: list[str]) -> None:
    """Attribute the performance of a run, given as a folder or by overrides, to its causes."""
    cause_list_text = ", ".join(cause.name for cause in CAUSES)
    parser = argparse.ArgumentParser("fedsim why", description=f"Compute {COMMAND_DESCRIPTIONS['why']}.")
    parser.add_argument("what", nargs="+", metavar="RUN_OR_OVERRIDES", help="a run folder, or overrides KEY=VALUE …")
    parser.add_argument("--metric", help="column of metrics.csv, compared after the last round (test_accuracy)")
    parser.add_argument(
        "--causes",
        help=f"causes, separated by commas, up to five of: {cause_list_text} (default: the first five present in the "
        "run)",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds (default: those of the run, or 5 if it has fewer than 3)"
    )
    parser.add_argument("--jobs", default="auto", help="number of processes (auto: one per core)")
    parser.add_argument("--out", default="why", help="folder for runs, picture and table (why)")
    options = parser.parse_intermixed_args(arguments)
    if any(override_key(text) == "out" for text in options.what if "=" in text):
        raise ConfigError("out= is set for each run by fedsim why; --out FOLDER names the folder of its results")
    config, choice_by_group = _run_configuration(options.what)
    _set_config_seeds(config, options.seeds)
    chosen_causes = options.causes.split(",") if options.causes else None
    causes = applicable_causes(config, choice_by_group, chosen_causes, trusted_packages(options.what))
    folder = Path(options.out)
    count = num_concurrent_jobs(options.jobs, str(config.device), 2 ** len(causes))
    with exit_on_sigterm("fedsim why"):
        attribution = run_attribution(
            config, choice_by_group, causes, folder / "runs", options.metric, count, trusted_packages(options.what)
        )
    print("\n".join(report(attribution)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "why.json").write_text(json.dumps(as_json(attribution, list(config.seeds)), indent=2) + "\n")
    waterfall_figure(*_waterfall_data(attribution)).savefig(folder / "why.png")
    print(f"\n{folder / 'why.png'}, {folder / 'why.json'}", file=sys.stderr)


def _run_configuration(folder_or_overrides: list[str]) -> tuple[DictConfig, ChoiceByGroup]:
    """Return the configuration and choices of a run folder or of overrides, on the CPU if a folder is given."""
    if "=" in folder_or_overrides[0] and not Path(folder_or_overrides[0]).is_dir():
        with hydra_context():
            return compose_config((*folder_or_overrides, "out=unused"))
    config, choice_by_group = load_run_configuration(folder_or_overrides)
    config.device = "cpu"
    return config, choice_by_group


def _set_config_seeds(config: DictConfig, count: int | None) -> None:
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
    value_scale, unit_label = _scale_and_unit(attribution)
    label = describe_metric(attribution.metric).label
    first_value, last_value = (value_scale * attribution.values[index].mean() for index in (0, -1))
    report_lines = [
        f"{label} after the last round, mean of {attribution.values.shape[1]} seeds: {first_value:.4g} "
        f"as it is, {last_value:.4g} "
        "without all of the causes below",
        "",
        f"{'cause':20}  {'share':>8}  {'95 % interval':>18}  {'removed alone':>13}  removed means",
    ]
    for cause, share, single_gain in zip(
        attribution.all_causes, attribution.shares, attribution.single_removal_gains, strict=True
    ):
        low, high = PairedDifference(value_scale * share).confidence_interval
        bounds, mean, gain = f"[{low:.3g}, {high:.3g}]", value_scale * share.mean(), value_scale * single_gain.mean()
        report_lines.append(f"{cause.label:20}  {mean:8.3g}  {bounds:>18}  {gain:13.3g}  {cause.removal}")
    return [*report_lines, "", summary_sentence(attribution, value_scale, unit_label)]


def as_json(attribution: Attribution, seeds: list[int]) -> dict[str, object]:
    """Return the measured values, shares and summary sentence for JSON."""
    return {
        "metric": attribution.metric,
        "seeds": seeds,
        "causes": [cause.name for cause in attribution.all_causes],
        "values": {
            ",".join(cause.name for cause in causes_in_subset(attribution.all_causes, subset)): values.tolist()
            for subset, values in enumerate(attribution.values)
        },
        "shares": {
            cause.name: share.tolist() for cause, share in zip(attribution.all_causes, attribution.shares, strict=True)
        },
        "sentence": summary_sentence(attribution, *_scale_and_unit(attribution)),
    }


def _waterfall_data(attribution: Attribution) -> tuple[list[str], np.ndarray, float, str]:
    value_scale, _ = _scale_and_unit(attribution)
    cause_order = attribution.cause_order
    labels = [attribution.all_causes[cause].label for cause in cause_order]
    unit_label = " (%)" if value_scale > 1 else ""
    best = float(value_scale * attribution.values[-1].mean())
    return (
        labels,
        -attribution.metric_sign * value_scale * attribution.shares[cause_order],
        best,
        f"{describe_metric(attribution.metric).label}{unit_label}",
    )
