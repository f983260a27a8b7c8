"""Settings of a run as dotted keys: partition.alpha for {"partition": {"alpha": …}}."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any


def flatten_settings(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Return nested settings as dotted keys."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def abbreviated_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return key → its last word, or the whole key if other keys end in the same word."""
    unique_keys = list(dict.fromkeys(keys))
    last_components = {key: re.split(r"[./]", display_key(key))[-1] for key in unique_keys}
    count = Counter(last_components.values())
    return {
        key: last_components[key] if count[last_components[key]] == 1 else display_key(key).replace("/", ".")
        for key in unique_keys
    }


def display_key(key: str) -> str:
    """Return a key for display: the class of the strategy is shown as strategy."""
    return key.removesuffix("._target_")
