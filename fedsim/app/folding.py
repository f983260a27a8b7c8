"""Select the jobs of a sweep that can be folded into one federation, and build the configuration of that federation."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedsim.app.build import alias_by_key
from fedsim.app.config import resolved_settings
from fedsim.core import targets
from fedsim.core.constraints import PerSeedConstraint, constraints_in_hint, declared_type_hints
from fedsim.core.errors import ConfigError
from fedsim.core.settings import flatten_settings

log = logging.getLogger(__name__)

PER_SEED_GROUPS = ("strategy", "local")  # whose objects have settings with one value per seed
KEYS_THAT_MAY_DIFFER = ("seeds", "out", "resume", "objective")


def per_seed_setting_keys(cfg: DictConfig) -> dict[str, str]:
    """Return the keys of settings that may be lists with one value per seed, and the key that sets each (local.lr is
    set by lr).

    Raises:
        ConfigError: an object of the configuration cannot be what it says.
    """
    from fedsim.app.kinds import KINDS

    settings, names = resolved_settings(cfg), alias_by_key(cfg)
    keys = {}
    for group in PER_SEED_GROUPS:
        for component in targets.parse_object(group, settings[group], KINDS[group]).nested_objects():
            if not component.factory.__module__.startswith("fedsim."):
                continue  # a subclass of a user may inherit the annotation without supporting lists
            for name, hint in declared_type_hints(component.factory).items():
                if name in component.arguments and any(
                    isinstance(c, PerSeedConstraint) for c in constraints_in_hint(hint)
                ):
                    key = f"{component.key}.{name}"
                    keys[key] = names.get(key, key)
    return keys


def shared_settings_text(cfg: DictConfig) -> str | None:
    """Return all settings except those in which jobs of one federation may differ, for comparison; None if they
    cannot be determined."""
    if cfg.trusted or not isinstance(cfg.seeds, Sequence):
        return None
    try:
        keys = per_seed_setting_keys(cfg)
    except ConfigError:
        return None  # the job itself reports the error
    settings = dict(flatten_settings(resolved_settings(cfg)))
    without_number = sorted(key for key in keys if settings[key] is None)
    varying_keys = {*keys, *keys.values(), *KEYS_THAT_MAY_DIFFER}
    settings_in_common = {name: value for name, value in settings.items() if name not in varying_keys}
    return json.dumps([settings_in_common, without_number], sort_keys=True, default=str)


def foldable_job_groups(configs: Sequence[DictConfig], folders: Sequence[Path]) -> list[list[int]]:
    """Return the positions of jobs of each group of two or more that can be folded into one federation.

    They differ only in seeds and settings with one value per seed, and have completed the same number of rounds.
    """
    from fedsim.run.checkpoint import NAME, completed_rounds

    groups: dict[tuple[str, int], list[int]] = {}
    for position, (cfg, folder) in enumerate(zip(configs, folders, strict=True)):
        rounds = 0 if cfg.resume == "overwrite" else completed_rounds(folder / NAME)
        settings_in_common = shared_settings_text(cfg)
        if settings_in_common is not None and rounds is not None:
            groups.setdefault((settings_in_common, rounds), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def combined_config(configs: Sequence[DictConfig]) -> DictConfig:
    """Return the configuration whose replicates are those of all jobs, in their order."""
    joint_config = configs[0].copy()
    for key in dict.fromkeys(per_seed_setting_keys(joint_config).values()):
        values = [OmegaConf.select(cfg, key) for cfg in configs]
        if any(value != values[0] for value in values) or isinstance(values[0], Sequence):
            numbers = [
                number
                for cfg, value in zip(configs, values, strict=True)
                for number in _setting_values_per_seed(value, cfg)
            ]
            OmegaConf.update(joint_config, key, numbers)
    joint_config.seeds = [seed for cfg in configs for seed in cfg.seeds]
    joint_config.out, joint_config.resume, joint_config.tracking.progress = None, None, "none"
    return joint_config


def _setting_values_per_seed(value: Any, cfg: DictConfig) -> list[float]:
    """Return one value per seed of a job."""
    if not isinstance(value, Sequence):
        return [value] * len(cfg.seeds)
    return list(value) * len(cfg.seeds) if len(value) == 1 else list(value)
