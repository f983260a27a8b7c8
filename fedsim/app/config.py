"""The contents of configurations: groups, keys, the identity of a run and the names of run folders."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import fedsim
from fedsim.app.folders import run_folder_name
from fedsim.core.settings import flatten_settings
from fedsim.core.targets import with_current_class_paths

# Settings that decide where and how a run is computed, but not what.
KEYS_WITHOUT_EFFECT = (
    "out",
    "resume",
    "objective",
    "device",
    "deterministic",
    "trainer.executor",
    "trainer.chunk",
    "trainer.workers",
    "trainer.trial",
    "trainer.compile",
    "tracking.progress",
    "tracking.tensorboard",
    "tracking.observers",
    "tracking.checkpoint_every",
    "trainer.memory",
    "trusted",
)
# Settings that a resumed run may change: they affect neither the computation nor what was written.
KEYS_FREE_ON_RESUME = (*KEYS_WITHOUT_EFFECT, "rounds", "tracking", "on_nonfinite", "stop")


def config_folder() -> Path:
    """Return the folder of the YAML files: inside an installed wheel, or next to the package in the checkout."""
    package = Path(fedsim.__file__).parent
    installed_folder = package / "configs"
    return installed_folder if installed_folder.is_dir() else package.parent / "configs"


def register_resolvers() -> None:
    """Register the interpolations that config.yaml uses."""
    OmegaConf.register_new_resolver("fedsim_steps", default_steps, replace=True)
    OmegaConf.register_new_resolver("fedsim_job_dir", run_folder_name, replace=True)


def default_steps(steps: int | None, epochs: int | None) -> int | None:
    """Return 10 local steps, unless epochs are requested."""
    return 10 if steps is None and epochs is None else steps


@functools.cache
def groups() -> dict[str, list[str]]:
    """Return the configuration groups and their choices, by the name used on the command line."""
    root, choices_by_group = config_folder(), {}
    for folder in sorted(p for p in root.rglob("*") if p.is_dir() and not p.name.startswith("_")):
        choices = sorted(f.stem for f in folder.glob("*.yaml"))
        name = folder.relative_to(root).as_posix()
        if choices and not name.startswith("hydra/"):
            choices_by_group[name] = choices
    return choices_by_group


def choice_target(group: str, choice: str) -> str:
    """Return the class of a choice."""
    return str(_load_yaml(config_folder() / group / f"{choice}.yaml")["_target_"])


def top_level_keys() -> list[str]:
    """Return the keys at the top level of a configuration, and the groups that are not inside others."""
    return [*_top_level_settings(), *(name for name in groups() if "/" not in name)]


@functools.cache
def _top_level_settings() -> dict[str, Any]:
    """Return config.yaml's own settings."""
    content = _load_yaml(config_folder() / "config.yaml")
    return {name: value for name, value in content.items() if name not in ("defaults", "hydra")}


@functools.cache
def keys() -> dict[str, list[str]]:
    """Return all settable keys, and the choices (as group=choice) under which each exists; [] for top-level keys."""
    root = config_folder()
    choices_by_key: dict[str, list[str]] = {}

    def walk(node: Any, path: str) -> Iterator[str]:
        for name, value in node.items():
            yield f"{path}{name}"
            if isinstance(value, dict):
                yield from walk(value, f"{path}{name}.")

    for name in walk(_top_level_settings(), ""):
        choices_by_key[name] = []
    for group, choices in groups().items():
        if group in ("experiment", "sweep"):
            continue
        for choice in choices:
            content = _load_yaml(root / group / f"{choice}.yaml")
            content.pop("defaults", None)
            for name in walk(content, group.replace("/", ".") + "."):
                choices_by_key.setdefault(name, []).append(f"{group}={choice}")
    return choices_by_key


def identifying_settings(cfg: DictConfig, free_keys: tuple[str, ...] = KEYS_FREE_ON_RESUME) -> dict[str, Any]:
    """Return the settings that identify a run, as dotted keys: all except the free ones; by default those that a
    resumed run must share."""
    settings = with_current_class_paths(dict(flatten_settings(resolved_settings(cfg))))
    return {name: value for name, value in settings.items() if not name.startswith(free_keys)}


def resolved_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return all settings with interpolations resolved."""
    plain_settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain_settings, dict)
    return {str(k): v for k, v in plain_settings.items()}


def _load_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file as it is, with unresolved interpolations."""
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return {str(name): value for name, value in content.items()}


# Also at import: a launcher's worker resolves a job's folder before it calls fedsim.
register_resolvers()
