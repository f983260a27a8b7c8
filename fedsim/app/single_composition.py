"""Let a single run compose its configuration only once.

Hydra composes it to read `hydra.mode`, and then again, with `hydra.mode=RUN` added, to run it, which takes 0.15 s. Both
are equal but for this override.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig

SINGLE_RUN_OVERRIDE = "hydra.mode=RUN"
SWEEP_FLAGS = {"-m", "--multirun"}


@contextlib.contextmanager
def reuse_composition() -> Iterator[None]:
    """Within the block Hydra runs the configuration from which it has read the mode."""
    get_mode, load = Hydra.get_mode, ConfigLoaderImpl.load_configuration
    composed: dict[tuple[str | None, tuple[str, ...]], DictConfig] = {}

    def get_cached_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        if SWEEP_FLAGS.intersection(sys.argv):
            return get_mode(self, config_name, overrides)
        try:
            config = load(self.config_loader, config_name, overrides, RunMode.RUN)  # type: ignore[arg-type]
        except Exception:  # a sweep, or an error that Hydra reports when it composes again
            return get_mode(self, config_name, overrides)
        mode = config.hydra.mode
        if mode is None:
            config.hydra.mode = RunMode.RUN
            config.hydra.overrides.hydra.append(SINGLE_RUN_OVERRIDE)
            composed[config_name, (*overrides, SINGLE_RUN_OVERRIDE)] = config
        return mode

    def load_once(
        self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], run_mode: RunMode, *arguments: Any,
        **options: Any,
    ) -> DictConfig:  # fmt: skip
        config = composed.pop((config_name, tuple(overrides)), None) if run_mode == RunMode.RUN else None
        return load(self, config_name, overrides, run_mode, *arguments, **options) if config is None else config

    Hydra.get_mode, ConfigLoaderImpl.load_configuration = get_cached_mode, load_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode, ConfigLoaderImpl.load_configuration = get_mode, load  # type: ignore[method-assign]
