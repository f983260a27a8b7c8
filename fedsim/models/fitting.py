"""Passes properties of the data to a model's constructor: shape, number of classes, and whether positions have
labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedsim.core.errors import ConfigError, prefix_error_keys


def fit_constructor(
    model: Callable[..., nn.Module] | nn.Module,
    shape: tuple[int, ...],
    classes: int | None,
    per_position: bool | None,
) -> Callable[[], nn.Module] | nn.Module:
    """Return the model's constructor with `shape`, `classes` and `per_position` (labels at each position) set, if it
    takes them and they are not set; None for an unknown constructor.

    Raises:
        ConfigError: its arguments cannot be known.
    """
    if isinstance(model, nn.Module):
        return model
    try:
        model_parameters = inspect.signature(model).parameters
    except ValueError as error:
        raise ConfigError(f"model cannot be built: {error}") from error
    fixed_keywords = model.keywords if isinstance(model, functools.partial) else {}
    takes_classes = model_parameters.get("classes")
    if not classes and takes_classes is not None and takes_classes.default is takes_classes.empty:
        name = getattr(model, "__name__", type(model).__name__)
        raise ConfigError(
            f"model {name} takes `classes`, but the data set has no number of classes: give Dataset(…, classes=C), or "
            "use fedsim.data.datasets.Arrays, which counts the labels"
        )
    arguments: dict[str, Any] = {"shape": shape, "classes": classes}
    arguments = {name: value for name, value in arguments.items() if value and name not in fixed_keywords}
    if per_position is not None and fixed_keywords.get("every") is None:
        arguments["every"] = per_position
    return functools.partial(
        _built_model, model, **{name: value for name, value in arguments.items() if name in model_parameters}
    )


def _built_model(model: Callable[..., nn.Module], /, **arguments: Any) -> nn.Module:
    with prefix_error_keys("model"):
        return model(**arguments)
