"""Settings of a run as people say them: partition.alpha for {"partition": {"alpha": …}}."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any


def flatten_settings(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted keys."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def abbreviated_keys(keys: Iterable[str]) -> dict[str, str]:
    """Key → its last word, or the whole key where others end alike."""
    unique_keys = list(dict.fromkeys(keys))
    last_components = {key: re.split(r"[./]", display_key(key))[-1] for key in unique_keys}
    count = Counter(last_components.values())
    return {
        key: last_components[key] if count[last_components[key]] == 1 else display_key(key).replace("/", ".")
        for key in unique_keys
    }


def display_key(key: str) -> str:
    """A key as a person says it: the class of the strategy is the strategy."""
    return key.removesuffix("._target_")
