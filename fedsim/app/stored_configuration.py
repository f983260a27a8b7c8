"""Configurations of finished runs that are to be changed: config.yaml holds values, without the links between them."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.app.composition import compose, hydra_context
from fedsim.app.config import groups
from fedsim.core.errors import ConfigError
from fedsim.core.settings import flatten_settings
from fedsim.run.run_files import CONFIG_FILE, ENVIRONMENT_FILE


def load_run_configuration(arguments: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the configuration of a run folder or of overrides, and the choice of each group.

    Overrides may follow a folder. A setting that follows another one, such as `local.lr: ${lr}`, then follows it again.

    Raises:
        ConfigError: the folder cannot be read.
    """
    if not Path(arguments[0]).is_dir():
        if "=" not in arguments[0]:
            raise ConfigError(f"{arguments[0]} is neither a run folder nor an override KEY=VALUE")
        with hydra_context():
            return compose(arguments)
    folder = Path(arguments[0])
    runs = [] if (folder / CONFIG_FILE).exists() else sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
    if runs:
        raise ConfigError(f"{folder} is a sweep of {len(runs)} runs; name one of them, such as {runs[0]}")
    try:
        config = OmegaConf.load(folder / CONFIG_FILE)
        if not isinstance(config, DictConfig):
            raise ConfigError(f"{folder / CONFIG_FILE} holds no configuration; give a run folder")
        choices = _stored_choices(folder)
        _restore_links(config, choices)
        config = OmegaConf.merge(config, {"trusted": []}, OmegaConf.from_dotlist(arguments[1:]))
    except (OSError, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{folder / CONFIG_FILE} cannot be read ({str(error).splitlines()[0]}); give a run folder"
        ) from error
    assert isinstance(config, DictConfig)
    return config, choices


def _stored_choices(folder: Path) -> dict[str, str]:
    """Return the choice of each group, as the run stored it; those of a folder without the file are not known."""
    path = folder / ENVIRONMENT_FILE
    settings = json.loads(path.read_text(encoding="utf-8")).get("settings", {}) if path.exists() else {}
    return {name: str(value) for name, value in settings.items() if name in groups()}


def _restore_links(config: DictConfig, choices: dict[str, str]) -> None:
    """Set the settings that follow others to these links again, where the stored values agree with them."""
    own_choices = {group for group, choice in choices.items() if choice not in groups()[group]}
    with hydra_context():
        composed, _ = compose([f"{group}={choice}" for group, choice in choices.items() if group not in own_choices])
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    for key, link in flatten_settings({str(name): value for name, value in raw.items()}):
        if not isinstance(link, str) or "${" not in link or key.partition(".")[0] in own_choices:
            continue
        stored_value = OmegaConf.select(config, key)
        trial = OmegaConf.merge(config)
        OmegaConf.update(trial, key, link)
        if OmegaConf.select(trial, key) == stored_value:
            OmegaConf.update(config, key, link)
