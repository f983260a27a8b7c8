"""Hydra's own section of a configuration, as far as it names code: callbacks and log handlers.

Hydra imports and calls these before a run begins. What the command says counts; a file that came from elsewhere may
name fedsim's own callback, and handlers of Python's logging.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from fedsim.app.folders import override_key
from fedsim.core.errors import ConfigError

ALLOWED_CALLBACKS = ("fedsim.app.sweep.SweepCallback",)
ALLOWED_HANDLER_PREFIXES = ("logging.", "colorlog.")


@contextlib.contextmanager
def refuse_unsafe_hydra_sections() -> Iterator[None]:
    """Within the block configurations are refused if their Hydra section calls something that a file named."""
    load = ConfigLoaderImpl.load_configuration

    def load_and_check(
        self: ConfigLoaderImpl, config_name: Any, overrides: list[str], *arguments: Any, **options: Any
    ) -> DictConfig:
        cfg = load(self, config_name, overrides, *arguments, **options)
        check_hydra_callbacks(cfg, overrides)
        return cfg

    ConfigLoaderImpl.load_configuration = load_and_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def check_hydra_callbacks(cfg: DictConfig, overrides: list[str]) -> None:
    """Refuse callbacks and handlers that the overrides do not name.

    Raises:
        ConfigError: a file names one; the message says which.
    """
    override_keys = {override_key(text).replace("/", ".") for text in overrides}
    for section in ("callbacks", "job_logging", "hydra_logging", "job.env_set"):
        key = f"hydra.{section}"
        if any(name == key or name.startswith(f"{key}.") for name in override_keys):
            continue
        node = OmegaConf.select(cfg, key)
        content = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else None
        if section == "job.env_set" and content:
            raise ConfigError(f"{key}={content} is set in a file; give it on the command line if you know what it does")
        for name, target in _callable_keys(content):
            if target not in ALLOWED_CALLBACKS and not (
                name == "class" and str(target).startswith(ALLOWED_HANDLER_PREFIXES)
            ):
                raise ConfigError(
                    f"{key}: {name}={target!r} is set in a file, and Hydra would call it; give it on the command line "
                    "if you know what it does"
                )


def _callable_keys(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys below which a callable is named, and its name."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("_target_", "class", "()", "stream") and not str(value).startswith("ext://sys.std"):
                yield str(name), value
            yield from _callable_keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from _callable_keys(value)
