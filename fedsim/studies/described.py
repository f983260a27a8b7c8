"""Readers of YAML descriptions, such as recipes and boards, with errors of one sentence."""

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
def read_description(
    description_kind: str, description_name: str, folder: Path, allowed_names: list[str], command: str
) -> Iterator[dict[str, Any]]:
    """Yield the content of a file; errors in the block are reported as errors of that file.

    Args:
        description_kind: 'recipe' or 'board', for messages.
        description_name: name of the file, without its suffix.
        folder: the folder that the name is relative to.
        allowed_names: all valid names.
        command: the command that lists them.

    Raises:
        ConfigError: there is no such file, or it is not well formed.
    """
    if description_name not in allowed_names:
        raise ConfigError(
            f"{description_name} is no {description_kind}{checks.nearest_name_hint(description_name, allowed_names)}; "
            f"{command} --list names them"
        )
    path = folder / f"{description_name}.yaml"
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        assert isinstance(content, dict)
        yield {str(key): value for key, value in content.items()}
    except ConfigError:
        raise
    except (AssertionError, TypeError, KeyError, AttributeError, ValueError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{description_kind} {path} is not well formed ({reason})") from error


def overrides_by_label(content: dict[str, Any]) -> dict[str, list[str]]:
    """Return label → list of overrides; a single override may be given without a list, and null means none."""
    return {
        str(label): [overrides] if isinstance(overrides, str) else list(overrides or [])
        for label, overrides in content.items()
    }
