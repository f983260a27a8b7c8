"""The sweeper `hydra/sweeper=tune`: a sweep of Hydra whose settings are tuned as `fedsim tune` tunes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from fedsim.app.folders import override_key
from fedsim.app.sweep import OPTUNA_RESULTS_FILE, release_sweep_folder
from fedsim.core import checks
from fedsim.core.errors import ConfigError, OutputError, RunError
from fedsim.core.files import replacement_file
from fedsim.run.stopping import Stopped
from fedsim.studies.tuning.choice import SelectionRule
from fedsim.studies.tuning.schedule import SuccessiveHalving
from fedsim.studies.tuning.tune import MAX_GRID_EXTENSIONS, TuningOutcome
from fedsim.studies.tuning.tune_cli import print_and_write, tune_with_options

SWEEPER_NAME = "tune"  # its choice in the group hydra/sweeper
DEFAULT_LAUNCHER = "basic"
COMMAND_LINE = "command-line"  # what Hydra calls the provider of --config-dir
KEYS_OF_THE_COMMAND = ("trusted", "out", "resume")  # which a file's list of parameters does not set


@dataclass(frozen=True)
class SweepOptions:
    """Options of the sweeper, with the names and defaults of those of `fedsim tune`.

    Attributes:
        seeds: of each trial, their number or a list.
        metric: column of metrics.csv that is optimised; None: validation accuracy or loss, if measured.
        trials: their number, if a knob is an interval.
        eta, rungs, finalists, smaller_rates: see `Halving`.
        prefer: see `SelectionRule`.
        extend: maximal number of extensions of a grid.
        together: maximal number of trials in one federation; None: all.
    """

    seeds: int | Sequence[int] = 5
    metric: str | None = None
    trials: int | None = None
    eta: int = SuccessiveHalving.eta
    rungs: int = SuccessiveHalving.rungs
    finalists: int = SuccessiveHalving.finalists
    smaller_rates: float = SuccessiveHalving.smaller_rates
    prefer: str = SelectionRule.prefer
    extend: int = MAX_GRID_EXTENSIONS
    together: int | None = None

    def __post_init__(self) -> None:
        numbers = [self.seeds] if isinstance(self.seeds, int) else self.seeds
        if isinstance(numbers, str) or not all(type(number) is int for number in numbers):
            raise ConfigError(key="seeds", value=self.seeds, needs="must be a number of seeds or a list of them")
        if self.trials is not None:
            checks.check_whole_number("trials", self.trials)


OPTION_NAMES = {field.name: f"hydra.sweeper.{field.name}" for field in fields(SweepOptions)}
PARAMETER_NAMES = OPTION_NAMES | {"extensions": OPTION_NAMES["extend"], "federation_size": OPTION_NAMES["together"]}


def run_tuning_sweep(
    loader: ConfigLoader,
    config: DictConfig,
    arguments: Sequence[str],
    params: Mapping[str, Any],
    options: Mapping[str, Any],
) -> TuningOutcome:
    """Tune, print the table and the choice, and write picture, table and outcome into the folder of the sweep.

    Args:
        loader: of Hydra's application, which knows where configurations are looked for.
        config: of the sweep.
        arguments: overrides of the command line.
        params: overrides of the configuration's `hydra.sweeper.params`, key → value.
        options: see `SweepOptions`.

    Raises:
        SystemExit: with one sentence, if nothing can be tuned, or if a signal stopped the sweep.
    """
    folder = Path(str(config.hydra.sweep.dir))
    try:
        check_launcher(config.hydra.runtime.choices["hydra/launcher"])
        for name in options:
            checks.check_choice("hydra.sweeper", name, OPTION_NAMES)
        overrides = [*_search_path_overrides(loader, config), *sweep_overrides(arguments, params)]
        outcome = tune_with_options(overrides, SweepOptions(**options), folder)
        OmegaConf.save(config, folder / "multirun.yaml")
        print_and_write(outcome, folder, [write_optimization_results(outcome, folder)])
        return outcome
    except ConfigError as error:
        sys.exit(f"fedsim: {error.with_renamed_keys(PARAMETER_NAMES)}")
    except (OutputError, RunError) as error:
        sys.exit(f"fedsim: {error}")
    except Stopped as stop:
        sys.exit(f"fedsim: {stop}; the same command with out={folder} continues")
    finally:
        release_sweep_folder()


def check_launcher(launcher: str) -> None:
    """Refuse launchers, which start one job per trial.

    Raises:
        ConfigError: it is not Hydra's default.
    """
    if launcher != DEFAULT_LAUNCHER:
        raise ConfigError(
            f"hydra/launcher={launcher} has no jobs to launch with hydra/sweeper={SWEEPER_NAME}, which computes all "
            "trials "
            "in this process; leave the launcher out"
        )


def sweep_overrides(arguments: Sequence[str], params: Mapping[str, Any]) -> list[str]:
    """The overrides of the trials: those of a file, each replaced by one of the command with the same key.

    Raises:
        ConfigError: a key is not for trials.
    """
    for key in map(str, params):
        name = override_key(key)
        if name in KEYS_OF_THE_COMMAND or name.partition(".")[0].partition("/")[0] == "hydra":
            raise ConfigError(f"hydra.sweeper.params.{key} cannot be set there; give {name} on the command line")
    texts = {override_key(str(key)): f"{key}={value}" for key, value in params.items()}
    texts |= {override_key(text): text for text in arguments}
    if "seeds" in texts:
        raise ConfigError(
            f"{texts['seeds']}: with hydra/sweeper={SWEEPER_NAME} give {OPTION_NAMES['seeds']} in its place"
        )
    if texts.pop("resume", "resume=auto") != "resume=auto":
        raise ConfigError(
            f"resume cannot be set with hydra/sweeper={SWEEPER_NAME}: a repeated command continues; choose another out"
        )
    texts.pop("out", None)  # the folder of the sweep
    texts.pop("objective", None)  # hydra.sweeper.metric refers to it
    return list(texts.values())


def write_optimization_results(outcome: TuningOutcome, folder: Path) -> Path:
    """Write the chosen settings and their mean as Hydra's sweepers that optimise do."""
    results = {"name": SWEEPER_NAME, "best_params": dict(outcome.choice.trial), "best_value": outcome.choice.mean}
    path = folder / OPTUNA_RESULTS_FILE
    with replacement_file(path) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(results)))
    return path


def _search_path_overrides(loader: ConfigLoader, config: DictConfig) -> list[str]:
    """The override by which trials find the configurations that the command finds."""
    folders = [entry.path for entry in loader.get_search_path().get_path() if entry.provider == COMMAND_LINE]
    folders += list(config.hydra.searchpath or [])
    quoted = ["'" + folder.replace("'", "\\'") + "'" for folder in folders]
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []
