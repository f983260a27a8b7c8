"""Passes properties of the data to a model's constructor: shape, number of classes, number of tokens, and whether
positions have labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedsim.core.errors import ConfigError, prefix_error_keys


def fill_constructor_arguments(
    model: Callable[..., nn.Module] | nn.Module,
    shape: tuple[int, ...],
    classes: int | None,
    per_position: bool | None,
    num_tokens: Callable[[], int | None] = lambda: None,
) -> Callable[[], nn.Module] | nn.Module:
    """Return the model's constructor with `shape`, `classes`, `per_position` (labels at each position) and `num_tokens`
    set, if it takes them and they are not set; None for an unknown constructor.

    Raises:
        ConfigError: its arguments cannot be known, or it needs what the data do not have.
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
        raise ConfigError(
            f"model {_model_name(model)} takes `classes`, but the data set has no number of classes: give "
            "Dataset(…, classes=C), or use fedsim.data.datasets.Arrays, which counts the labels"
        )
    arguments: dict[str, Any] = {"shape": shape, "classes": classes}
    arguments = {name: value for name, value in arguments.items() if value and name not in fixed_keywords}
    if "num_tokens" in model_parameters and "num_tokens" not in fixed_keywords:
        arguments["num_tokens"] = _require_num_tokens(model, num_tokens())
    if per_position is not None and fixed_keywords.get("every") is None:
        arguments["every"] = per_position
    return functools.partial(
        _built_model, model, **{name: value for name, value in arguments.items() if name in model_parameters}
    )


def _built_model(model: Callable[..., nn.Module], /, **arguments: Any) -> nn.Module:
    with prefix_error_keys("model"):
        return model(**arguments)


def _require_num_tokens(model: Callable[..., nn.Module], num_tokens: int | None) -> int:
    if num_tokens is None:
        raise ConfigError(
            f"model {_model_name(model)} takes `num_tokens`, but the inputs of the data set are no tokens; use it with "
            "texts, such as dataset=text_table"
        )
    return num_tokens


def _model_name(model: Callable[..., nn.Module]) -> str:
    definition = model.func if isinstance(model, functools.partial) else model
    return str(getattr(definition, "__name__", type(definition).__name__))
