"""Settings that apply only to runs with a certain choice of a group, so that a sweep can set them per choice.

    when.local.pofl.local.history=6          # on the command line: local.history=6 in the runs with local=pofl

    when:                                    # the same in an experiment file
      local:
        pofl: {local: {history: 6}}
        rrm: {shift: {deploy: round, redraw: 5}}

Below a choice are ordinary settings. They are applied before the run is built and stored in config.yaml: the run is the
same as one with these settings only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedsim.app.config import groups
from fedsim.app.folders import override_key
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.settings import flatten_settings

WHEN_KEY = "when"
KEYS_NOT_PER_CHOICE = (
    "hydra",
    "out",
    "resume",
    "trusted",
    WHEN_KEY,
)  # settings that are resolved before those of a choice
USAGE_EXAMPLE = f"write {WHEN_KEY}.GROUP.CHOICE.KEY=VALUE, such as {WHEN_KEY}.local.pofl.local.history=6"


def add_plus_prefix(arguments: Sequence[str]) -> list[str]:
    """Return the command with Hydra's prefix for new keys, which users need not write."""
    return [f"++{text}" if text.startswith(f"{WHEN_KEY}.") else text for text in arguments]


def apply_choice_settings(cfg: DictConfig, choices: Mapping[str, str], overrides: Sequence[str] = ()) -> None:
    """Apply the settings under `when` for these choices, and remove `when`.

    A key set on the command line takes precedence over `when` in a file, but not over `when` on the command line, which
    is more specific.

    Args:
        cfg: of the run; unchanged if an error is raised.
        choices: group → choice.
        overrides: of the command line.

    Raises:
        ConfigError: a group, a choice or a setting does not exist.
    """
    if WHEN_KEY not in cfg:
        return
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    block = content[WHEN_KEY]
    override_keys = {override_key(text) for text in overrides} - groups().keys()
    settings = list(_settings_of_choices(block, choices, override_keys)) if block not in (None, {}) else []
    for key, _, source in settings:
        _check_choice_key(cfg, key, source, choices)
    for key, value, source in settings:
        try:
            OmegaConf.update(cfg, key, value, merge=True, force_add=_is_custom(key, choices))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}={value!r} cannot be set there ({str(error).splitlines()[0]})") from error
    with open_dict(cfg):
        cfg.pop(WHEN_KEY)


def _settings_of_choices(
    block: Any, choices: Mapping[str, str], override_keys: set[str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and location of the settings for the current choices."""
    for group, choice, content in _entries_by_choice(block, ""):
        if choices.get(group) != choice:
            continue
        path = f"{WHEN_KEY}.{group.replace('/', '.')}.{choice}"
        for key, value in flatten_settings(content):
            if _is_key_overridden(f"{path}.{key}", override_keys) or not _is_key_overridden(key, override_keys):
                yield key, value, f"{path}.{key}"


def _is_key_overridden(key: str, override_keys: set[str]) -> bool:
    """Return whether an override sets the key or a mapping that contains it."""
    return any(key == name or key.startswith(f"{name}.") for name in override_keys)


def _entries_by_choice(block: Any, outer_path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield group, choice and settings of each entry; `availability: {base: …}` is the group availability/base."""
    location = ".".join([WHEN_KEY, *filter(None, [outer_path.replace("/", ".")])])
    if not isinstance(block, dict):
        raise ConfigError(f"{location}={block!r} names no choice; {USAGE_EXAMPLE}")
    for entry_key, content in block.items():
        inner_path = f"{outer_path}/{entry_key}" if outer_path else str(entry_key)
        if inner_path in groups():
            yield from _entries_by_choice(content, inner_path)
        elif not outer_path:
            raise ConfigError(
                f"{location}.{entry_key}: {entry_key} is not a "
                f"group{checks.nearest_name_hint(str(entry_key), groups())}; {USAGE_EXAMPLE}"
            )
        elif str(entry_key) not in (options := _choices_of_group(outer_path)):
            raise ConfigError(
                f"{location}.{entry_key}: {outer_path}={entry_key} is "
                f"unknown{checks.nearest_name_hint(str(entry_key), options)}"
            )
        elif not isinstance(content, dict):
            raise ConfigError(f"{location}.{entry_key}={content!r} is not a setting; {USAGE_EXAMPLE}")
        else:
            yield outer_path, str(entry_key), {str(key): value for key, value in content.items()}


def _choices_of_group(group: str) -> list[str]:
    """Return the choices of a group, including those in configuration folders of the user."""
    options = list(groups()[group])
    if GlobalHydra.instance().is_initialized():
        hydra_overrides = list(HydraConfig.get().overrides.hydra) if HydraConfig.initialized() else []
        options += (
            GlobalHydra.instance()
            .config_loader()
            .get_group_options(group, config_name="config", overrides=hydra_overrides)
        )
    return options


def _is_custom(key: str, choices: Mapping[str, str]) -> bool:
    """Return whether a key is an argument of a user's class, whose keys are in no configuration file."""
    return choices.get(key.rpartition(".")[0].replace(".", "/")) == "custom"


def _check_choice_key(cfg: DictConfig, key: str, source: str, choices: Mapping[str, str]) -> None:
    """Raise an error for keys that are not settings of the run, and for those that cannot depend on a choice."""
    if key.partition(".")[0] in KEYS_NOT_PER_CHOICE:
        raise ConfigError(f"{source}: {key.partition('.')[0]} cannot depend on a choice; set it for all runs")
    if _is_custom(key, choices):
        return
    node, _, last_component = key.rpartition(".")
    parent_node = OmegaConf.select(cfg, node) if node else cfg
    if not isinstance(parent_node, DictConfig) or last_component not in parent_node:
        content: Any = OmegaConf.to_container(cfg, resolve=False)
        names = [name for name, _ in flatten_settings(content) if not name.startswith(f"{WHEN_KEY}.")]
        raise ConfigError(f"{source}: {key} is not a setting of this run{checks.nearest_name_hint(key, names)}")
