"""Configurations that Hydra composes from overrides, without running Hydra's application."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from fedsim.app import per_choice
from fedsim.app.config import config_folder


@contextlib.contextmanager
def hydra_context() -> Iterator[None]:
    """Initialise Hydra to compose fedsim's configurations, also inside Hydra's own application."""
    application = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = application


def compose(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the configuration that overrides make, and the choice of each group. Only inside `hydra_context`.

    Raises:
        HydraException, OmegaConfBaseException: the overrides do not compose.
        ConfigError: a setting per choice is wrong.
    """
    config = hydra.compose("config", per_choice.add_plus_prefix(overrides), return_hydra_config=True)
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if v and not k.startswith("hydra")}
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    per_choice.apply_choice_settings(config, choices, overrides)
    return config, choices
