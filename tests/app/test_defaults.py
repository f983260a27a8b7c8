"""What a configuration says and what the class says by itself are the same, but where a choice is a variant."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from fedsim.app.config import _load_yaml, config_folder, groups

VARIANTS = {
    "availability/trajectory=night": {"period", "low", "share", "zones"},
    "columns=lg_fedavg": {"travels"},
    "dataset/augment=crop_flip": {"flip"},
    "dataset/augment=none": {"padding"},
    "local=fedbabu": {"head_steps"},
    "model=resnet18": {"small_images"},
    "partition=hierarchical": {"outer", "inner"},
    "partition=shards": {"form"},
}


def defaults(made: Callable[..., Any]) -> dict[str, Any]:
    """Of a constructor, those that it hands on to the classes it derives from included."""
    found: dict[str, Any] = {}
    for part in reversed(inspect.getmro(made)) if inspect.isclass(made) else [made]:
        function = vars(part).get("__init__") if inspect.isclass(part) else part
        if hasattr(function, "__code__"):
            for name, argument in inspect.signature(function).parameters.items():
                found.pop(name, None)
                if argument.default is not argument.empty:
                    found[name] = list(argument.default) if isinstance(argument.default, tuple) else argument.default
    return found


def test_configurations_say_the_defaults_of_classes() -> None:
    compared = 0
    for group, choices in groups().items():
        for choice in choices if group not in ("experiment", "sweep") else ():
            settings = _load_yaml(config_folder() / group / f"{choice}.yaml")
            target = settings.pop("_target_", None)
            if not isinstance(target, str) or not target.startswith("fedsim."):
                continue
            known = defaults(pkgutil.resolve_name(target))
            own = {k: v for k, v in settings.items() if k in known and not (isinstance(v, str) and "${" in v)}
            compared += len(own)
            others = {name for name, value in own.items() if value != known[name]}
            assert others == VARIANTS.get(f"{group}={choice}", set()), f"{group}={choice}"
    assert compared > 600
