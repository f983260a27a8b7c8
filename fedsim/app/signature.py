"""Check settings against the annotations of their class: a wrong type is reported in one sentence that names the
key."""

import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import yaml

from fedsim.core import checks
from fedsim.core.errors import ConfigError

TYPE_DESCRIPTIONS = {
    bool: "true or false",
    int: "a whole number below 2^63",
    float: "a number",
    str: "a word",
    type(None): "null",
}


def check_types(target: Callable[..., Any], settings: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse values of a type that the constructor does not take. Annotations other than `TYPE_DESCRIPTIONS` and lists
    are not checked.

    Args:
        target: a class or function.
        settings: its arguments.
        names: what the person who set an argument calls it.

    Raises:
        ConfigError: the key, its value, and what would work.
    """
    type_hints = argument_type_hints(target)
    for name, value in settings.items():
        annotation = type_hints.get(name, Any)
        if value != "???" and not fits_hint(value, annotation):
            size = ", and is too large for a whole one" if too_large(value) else ""
            raise ConfigError(
                f"{names.get(name, name)}={value!r} must be "
                f"{describe_type_hint(annotation)}{size}{_unquoted_number_advice(value, annotation)}"
            )
        if name == "seed" and value != "???":  # of a random number generator, whatever it is drawn for
            checks.check_whole_number(names.get(name, name), value, minimum=0)


def _unquoted_number_advice(value: Any, hint: Any) -> str:
    """Advise how to quote a number that is text, as all values of the environment are."""
    if not isinstance(value, str) or str in (hint, *typing.get_args(hint)):
        return ""
    parsed_value = yaml.safe_load(value) if re.fullmatch(r"[-+.\w]+", value) else value
    if isinstance(parsed_value, str) or not fits_hint(parsed_value, hint):
        return ""
    return ", without quotes; of the environment, ${oc.decode:${oc.env:NAME}}"


def argument_type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return argument → annotation; for a class also of arguments that it passes to its base classes."""
    type_hints: dict[str, Any] = {}
    for owner in reversed(inspect.getmro(target)) if inspect.isclass(target) else [target]:
        function = vars(owner).get("__init__") if inspect.isclass(owner) else owner
        if function is None or not hasattr(function, "__annotations__"):
            continue
        try:
            own_hints = typing.get_type_hints(function)
        except (NameError, TypeError, AttributeError):  # a name that only a type checker sees
            continue
        type_hints |= {name: hint for name, hint in own_hints.items() if name not in ("return", "options")}
    return type_hints


def fits_hint(value: Any, hint: Any) -> bool:
    """Return whether a value has the annotated type, as far as this is checked."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(fits_hint(value, alternative_hint) for alternative_hint in typing.get_args(hint))
    if too_large(value):
        return False
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if typing.get_origin(hint) in (list, Sequence, tuple):
        element_hints = [
            alternative_hint for alternative_hint in typing.get_args(hint) if alternative_hint is not Ellipsis
        ] or [Any]
        return isinstance(value, (list, tuple)) and all(
            any(fits_hint(v, alternative_hint) for alternative_hint in element_hints) for v in value
        )
    return isinstance(value, hint) if hint in TYPE_DESCRIPTIONS else True


def too_large(value: Any) -> bool:
    """Return whether a value is an integer that does not fit into 64 bits."""
    return isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**63


def describe_type_hint(hint: Any) -> str:
    """Describe an annotation in words."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(describe_type_hint(alternative_hint) for alternative_hint in typing.get_args(hint))
        )
    if typing.get_origin(hint) in (list, Sequence, tuple):
        element_hints = [
            alternative_hint for alternative_hint in typing.get_args(hint) if alternative_hint is not Ellipsis
        ] or [Any]
        return "a list, each entry " + " or ".join(
            describe_type_hint(alternative_hint) for alternative_hint in element_hints
        )
    return TYPE_DESCRIPTIONS.get(hint, "something else")
