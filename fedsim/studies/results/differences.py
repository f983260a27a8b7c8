"""The settings in which runs differ, the runs of a comparison, and their labels."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.settings import abbreviated_keys, display_key
from fedsim.run.run_files import ENVIRONMENT_FILE
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME
from fedsim.studies.results.display_names import CLASS_DISPLAY_NAMES
from fedsim.studies.results.runs import Run, load

log = logging.getLogger(__name__)

_IGNORED_KEYS = ("out", "resume", "device", "tracking.progress")
_TARGET_KEY = "_target_"
ABSENT_TEXT = "–"


def find_differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the dotted keys whose values differ: classes first, the strategy's before all, then other settings."""
    keys = {key for run in runs for key in run.settings}
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    differing_keys = {
        k for k, run_values in values.items() if any(v != run_values[0] for v in run_values) and k not in _IGNORED_KEYS
    }
    # `lr` also sets `local.lr`.
    differing_keys -= {k for k in differing_keys if k.rpartition(".")[2] in differing_keys and "." in k}
    return sorted(
        differing_keys, key=lambda key: (not key.endswith(_TARGET_KEY), not key.startswith("strategy"), "." in key, key)
    )


def differing_class_options(keys: Sequence[str]) -> set[str]:
    """Return the keys that are options of a class which itself differs, so that some runs do not have them."""
    class_prefixes = tuple(key.removesuffix(_TARGET_KEY) for key in keys if key.endswith(_TARGET_KEY))
    return {key for key in keys if not key.endswith(_TARGET_KEY) and key.startswith(class_prefixes)}


def keys_set_per_choice(runs: Sequence[Run]) -> set[str]:
    """Keys that commands set for one choice of a group, as in when.local.rrm.shift.deploy=round."""
    commands = {str(run.environment.get("command", "")) for run in runs}
    return {key for command in commands for key in re.findall(r"\bwhen\.[\w/]+\.\w+\.([\w./]+)=", command)}


def setting_label(run: Run, key: str, keys: Sequence[str] = ()) -> str:
    """Return a run's value of a key for a label, '' if the run does not have the key.

    A class is shown by the name in its paper, other values as KEY=VALUE with an abbreviated key if it is unambiguous.
    """
    if key not in run.settings:
        return ""
    if key.endswith(_TARGET_KEY):
        class_name = str(run.settings[key]).rpartition(".")[2]
        return CLASS_DISPLAY_NAMES.get(class_name, class_name)
    return f"{abbreviated_keys([*keys, key])[key]}={shortened_text(setting_value_text(run.settings, key))}"


def shortened_text(text: str, max_length: int = 24) -> str:
    """Shorten a path to its last component, and a long text to its beginning and end."""
    last_component = text.rstrip("/").rpartition("/")[2] or text
    return (
        last_component
        if len(last_component) <= max_length
        else f"{last_component[: max_length - 9]}…{last_component[-8:]}"
    )


def run_name(run: Run, keys: Sequence[str]) -> str:
    """Return a name of a run made of its values of some keys."""
    return " ".join(text for text in (setting_label(run, key, keys) for key in keys) if text)


def label_runs(runs: list[Run]) -> None:
    """Label each run by the settings that distinguish the runs, and also by its folder where these do not suffice."""
    keys = swept_settings(runs)
    for run in runs:
        run.label = run_name(run, keys) or run.folder.name
    for folder_text in (lambda run: run.folder.name, lambda run: str(run.folder)):
        labels = Counter(run.label for run in runs)
        for run in (run for run in runs if labels[run.label] > 1):
            run.label = f"{run.label.removesuffix(f' ({run.folder.name})')} ({folder_text(run)})"


def run_group_name(group: Sequence[Run], runs: Sequence[Run]) -> str:
    """Return a name of a group of runs, made of the swept settings that its members share."""
    if len(group) == len(runs):
        return "all runs" if len(runs) > 1 else ""
    if len(group) == 1:
        return group[0].label
    keys = [key for key in swept_settings(runs) if len({str(run.settings.get(key)) for run in group}) == 1]
    return run_name(group[0], keys) or f"{group[0].label} and {len(group) - 1} more"


def setting_value_text(settings: dict[str, Any], key: str) -> str:
    """Return a setting as readable text; a dash if the run does not have it."""
    if key not in settings:
        return ABSENT_TEXT
    setting = settings[key]
    if key.endswith(_TARGET_KEY):
        return str(setting).rpartition(".")[2]
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    return "none" if setting is None else str(setting)


def load_runs(folders: list[Path]) -> list[Run]:
    """Return the runs in or below the given folders (a sweep), labelled by their differences.

    Runs of a single folder are sorted by their swept settings. Damaged runs, and those without rows, are logged and
    left out. A path that does not exist is taken as a glob.

    Raises:
        ConfigError: no readable run was found.
    """
    run_folders: dict[Path, None] = {}
    errors_of_damaged: list[ConfigError] = []
    for folder in (
        location
        for pattern in folders
        for location in ([pattern] if os.path.exists(pattern) else _matching_folders(pattern))
    ):
        try:
            below = {path.parent for name in (METRICS_FILENAME, ENVIRONMENT_FILE) for path in folder.rglob(name)}
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read ({error.strerror}); give another folder") from error
        if not below:
            raise ConfigError(f"{folder} holds no run: there is no {METRICS_FILENAME} in it or below it")
        run_folders.update(dict.fromkeys(sorted(below)))
    runs = []
    for folder in run_folders:
        try:
            runs.append(load(folder))
        except ConfigError as error:
            errors_of_damaged.append(error)
    if not runs and len(errors_of_damaged) == 1:
        raise errors_of_damaged[0]
    for problem in errors_of_damaged:
        log.warning("left out: %s", problem)
    if not runs:
        raise ConfigError(f"none of the {len(errors_of_damaged)} runs can be read")
    if len(folders) == 1:
        keys = swept_settings(runs)
        runs.sort(key=lambda run: [numbers_first_sort_key(setting_value_text(run.settings, key)) for key in keys])
    label_runs(runs)
    return runs


def numbers_first_sort_key(text: str) -> tuple[bool, Any]:
    """Return a sort key that puts numbers by size before words in alphabetical order."""
    try:
        return False, float(text)
    except ValueError:
        return True, text.casefold()


def _matching_folders(pattern: Path) -> list[Path]:
    """Return the folders that match a glob; the pattern itself if there are none."""
    return sorted(path for path in map(Path, glob(str(pattern))) if path.is_dir()) or [pattern]


def swept_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys that distinguish the runs, in the form in which they are displayed."""
    return [display_key(key) for key in swept_settings(runs)]


def swept_settings(runs: Sequence[Run]) -> list[str]:
    """Return the keys that distinguish the runs; options of a differing class, and keys that the command sets for one
    choice (`when`), only if they add a distinction."""
    keys = find_differing_keys(runs)
    class_options = differing_class_options(keys) | keys_set_per_choice(runs).intersection(keys)
    plain_keys = [key for key in keys if key not in class_options]

    def num_distinct_settings(keys: Sequence[str]) -> int:
        return len({tuple(str(run.settings.get(key)) for key in keys) for run in runs})

    for key in (key for key in keys if key in class_options):
        if num_distinct_settings(plain_keys) < num_distinct_settings([*plain_keys, key]):
            plain_keys.append(key)
    return plain_keys


def recorded_setting(run: Run, key: str) -> Any:
    """Return a run's value of a key as given: a group's choice, the name of a class, or a value; None if absent."""
    if key in (recorded_settings := run.environment.get("settings", {})):
        return recorded_settings[key]
    if f"{key}.{_TARGET_KEY}" in run.settings:
        return str(run.settings[f"{key}.{_TARGET_KEY}"]).rpartition(".")[2]
    return run.settings.get(key)


def is_value_displayed_as(run: Run, key: str, text: str) -> bool:
    """Return whether this text is the run's value of the key; a class may be given by its name, in any spelling."""
    run_values = {str(recorded_setting(run, key)), str(run.settings.get(f"{key}.{_TARGET_KEY}", "")).rpartition(".")[2]}
    return _normalised_text(text) in map(_normalised_text, run_values)


def _normalised_text(text: str) -> str:
    """Remove underscores, spaces and case, so that fedavg_all equals FedAvgAll."""
    return text.replace("_", "").replace(" ", "").lower()
