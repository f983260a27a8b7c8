"""Settings that change nothing in the run they are given for.

A class declares, beside its constructor, under which condition a parameter has an effect (`EffectiveIf`), and which
values of it stop all training (`StopsTraining`). `sentences_without_effect` and `sentences_stopping_training` read
these declarations for a run; nothing outside the class has to know of them. A class of one's own may declare some too:

    >>> class Discount:
    ...     effective_if = (EffectiveIf("b", lambda component, run: component.kind == "hinge", "{at}.kind=hinge"),)
    ...     def __init__(self, kind="constant", b=4.0):
    ...         self.kind, self.b = kind, b
    >>> list(without_effect("strategy", Discount(b=2.0), None))
    ['strategy.b=2.0 has no effect without strategy.kind=hinge']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from fedsim.core.per_seed import PerSeed

NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class EffectiveIf:
    """A constructor's parameter changes the run only under a condition.

    Args:
        parameter: its name; the object keeps its value in the attribute of that name.
        condition: `(object, run)` → whether the value can change anything; `run` is the `Simulation`, wired up.
        needs: what would make it so, after the words "has no effect without"; `{at}` stands for the object's place in
            the configuration, such as `strategy`.
        attribute: where the object keeps the value, if not in the attribute of the parameter's name; dots lead into
            further objects and dictionaries.
    """

    parameter: str
    condition: Callable[[Any, Any], Any]
    needs: str
    attribute: str = ""


Declarations: TypeAlias = tuple[EffectiveIf, ...]


@dataclass(frozen=True)
class StopsTraining:
    """A constructor's parameter has values with which no model ever moves.

    Args:
        parameter: its name, as in `EffectiveIf`.
        condition: `(object, run)` → whether its value is one of them.
        because: why, after the words "trains nothing: "; may hold `{at}`.
        attribute: as in `EffectiveIf`.
    """

    parameter: str
    condition: Callable[[Any, Any], Any]
    because: str
    attribute: str = ""


def sentences_without_effect(at: str, component: Any, run: Any) -> Iterator[str]:
    """A sentence for every parameter of an object, and of those inside it, that differs from its default and changes
    nothing in this run.

    Args:
        at: the object's place in the configuration, such as `strategy`.
        component: the object.
        run: the `Simulation` it is part of.
    """
    for path, owner in _nested_objects(at, component):
        for name, rules in _declarations_of(owner, "effective_if").items():
            for rule in rules:
                value = _declared_value(owner, rule)
                if differs_from_default(type(owner), name, value) and not rule.condition(owner, run):
                    yield f"{_setting_text(path, name, value)} has no effect without {rule.needs.replace('{at}', path)}"
                    break


def sentences_stopping_training(at: str, component: Any, run: Any) -> Iterator[str]:
    """A sentence for every parameter of an object, and of those inside it, because of which no model can move."""
    for path, owner in _nested_objects(at, component):
        for name, rules in _declarations_of(owner, "stops_training").items():
            for rule in rules:
                if rule.condition(owner, run):
                    value = _declared_value(owner, rule)
                    yield f"{_setting_text(path, name, value)} trains nothing: {rule.because.replace('{at}', path)}"


def parameters(cls: type) -> dict[str, Any]:
    """Name → default of what a constructor takes, those handed on as `**options` included; `NO_DEFAULT` without one."""
    defaults: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        signature = inspect.signature(vars(base)["__init__"]).parameters.values()
        kinds = {parameter.kind for parameter in signature}
        for parameter in list(signature)[1:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                defaults.setdefault(parameter.name, parameter.default)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return defaults


def differs_from_default(cls: type, name: str, value: Any) -> bool:
    """Is this value other than the default of a constructor's parameter?"""
    default = parameters(cls).get(name, NO_DEFAULT)
    if default is NO_DEFAULT:
        return True
    try:
        return bool(value != default)
    except (ValueError, RuntimeError):  # tensors and arrays
        return True


def _declarations_of(component: Any, kind: str) -> dict[str, list[Any]]:
    """Parameter → declarations of an object's class and of those it derives from, for parameters that it takes."""
    declarations: dict[str, list[Any]] = {}
    constructor_parameters: dict[str, Any] | None = None
    for cls in type(component).__mro__:
        for rule in vars(cls).get(kind, ()):
            constructor_parameters = (
                parameters(type(component)) if constructor_parameters is None else constructor_parameters
            )
            if rule.parameter in constructor_parameters:
                declarations.setdefault(rule.parameter, []).append(rule)
    return declarations


def _nested_objects(path: str, component: Any) -> Iterator[tuple[str, Any]]:
    """The object and those that its constructor was given, each with its place in the configuration."""
    if component is None:
        return
    yield path, component
    members = getattr(component, "named_parts", None)  # of an object that was given several
    if path and members is None:
        parameter_names = (
            {f.name for f in fields(component)} if is_dataclass(component) else parameters(type(component)).keys()
        )
        members = {name: value for name, value in getattr(component, "__dict__", {}).items() if name in parameter_names}
    for name, value in (members or {}).items():
        if hasattr(value, "effective_if") or hasattr(value, "stops_training"):
            yield from _nested_objects(f"{path}.{name}", value)


def _declared_value(owner: Any, rule: Any) -> Any:
    """What the object was given for the parameter of this declaration."""
    value = owner
    for name in (rule.attribute or rule.parameter).split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def _setting_text(path: str, name: str, value: Any) -> str:
    """KEY=VALUE, or the key alone where the value is an object."""
    key = f"{path}.{name}" if path else name
    if not isinstance(value, (str, bool, int, float, list, tuple, dict, type(None), PerSeed)):
        return key
    text = value if isinstance(value, str) else repr(value)
    return f"{key}={text if len(text) <= 60 else text[:59] + '…'}"
