"""Things that users describe in YAML files, recipes and boards: read, and what is wrong with one told in a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from fedsim.core import checks
from fedsim.core.errors import ConfigError


@contextlib.contextmanager
def read_description(kind: str, name: str, folder: Path, names: list[str], command: str) -> Iterator[dict[str, Any]]:
    """The content of a file, for something to be made of it within.

    Args:
        kind: 'recipe', 'board', for messages.
        name: of the file, without its ending.
        folder: it is below.
        names: all names.
        command: that lists them.

    Raises:
        ConfigError: there is no such file, or nothing can be made of it.
    """
    if name not in names:
        raise ConfigError(f"{name} is no {kind}{checks.nearest(name, names)}; {command} --list names them")
    path = folder / f"{name}.yaml"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        assert isinstance(content, dict)
        yield {str(key): value for key, value in content.items()}
    except ConfigError:
        raise
    except (AssertionError, TypeError, KeyError, AttributeError, ValueError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{kind} {path} is not well formed ({reason})") from error


def choices(content: dict[str, Any]) -> dict[str, list[str]]:
    """label → overrides; one override may stand without a list, none as nothing."""
    return {
        str(label): [overrides] if isinstance(overrides, str) else list(overrides or [])
        for label, overrides in content.items()
    }
