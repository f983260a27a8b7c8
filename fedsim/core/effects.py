"""Settings that have no effect in the run they are given for.

A class declares, beside its constructor, under which condition a parameter has an effect (`EffectiveIf`), which
parameters are rounds of the run (`RoundParameter`), and which values stop all training (`StopsTraining`).
`sentences_without_effect` and `no_training_sentences` read these declarations for a run; nothing outside the
class has to know of them. A class of one's own may declare some too:

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
    """Declares that a constructor's parameter has an effect only under a condition.

    Args:
        parameter: its name; the object keeps its value in the attribute of that name.
        condition: `(object, run)` → whether the value can change anything; `run` is the `Simulation`, wired up.
        requirement: what would make it so, after the words "has no effect without"; `{at}` stands for the object's
            place in the configuration, such as `strategy`.
        attribute: where the object keeps the value, if not in the attribute of the parameter's name; dots lead into
            further objects and dictionaries.
    """

    parameter: str
    condition: Callable[[Any, Any], Any]
    requirement: str
    attribute: str = ""


@dataclass(frozen=True)
class RoundParameter:
    """Declares that a constructor's parameter is a round, or a list of rounds, in which something begins: rounds after
    the run's last one have no effect. This is reported for defaults, too.

    Args:
        parameter, attribute: as in `EffectiveIf`.
        measured: the models of the last round are still evaluated with what the next round would begin with, such as
            drifted test samples.
        per_client: the list has an entry for each client, and is reported where no client's round is reached.
        added_to_round: `object` → the round from which the parameter is counted; it then is a number of rounds.
    """

    parameter: str
    measured: bool = False
    per_client: bool = False
    added_to_round: Callable[[Any], int] | None = None
    attribute: str = ""

    def warning_sentences(self, config_path: str, component: Any, simulation: Any) -> Iterator[str]:
        """Return a sentence for each round that the run does not reach, or one if the parameter has no effect at
        all."""
        value = _parameter_value(component, self)
        if value is None:
            return
        last_round = simulation.rounds if self.measured else simulation.rounds - 1
        setting_text = _setting_text(config_path, self.parameter, value)
        if self.added_to_round is not None:
            end = self.added_to_round(component) + value
            if end > simulation.rounds and differs_from_default(type(component), self.parameter, value):
                last_effective = simulation.rounds - self.added_to_round(component)
                yield f"{setting_text} has no effect above {last_effective}, since rounds={simulation.rounds}"
            return
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        late = [entry for entry in entries if entry > last_round]
        if len(late) == len(entries):
            yield f"{setting_text} has no effect without more than {min(late) - self.measured} rounds"
        elif not self.per_client:
            for entry in late:
                yield f"{setting_text} has no effect in round {entry} without more than {entry - self.measured} rounds"


EffectDeclarations: TypeAlias = tuple[EffectiveIf | RoundParameter, ...]


@dataclass(frozen=True)
class StopsTraining:
    """Declares values of a constructor's parameter with which no model ever moves.

    Args:
        parameter: its name, as in `EffectiveIf`.
        condition: `(object, run)` → whether its value is one of them.
        explanation: why, after the words "trains nothing: "; may hold `{at}`.
        attribute: as in `EffectiveIf`.
    """

    parameter: str
    condition: Callable[[Any, Any], Any]
    explanation: str
    attribute: str = ""


def sentences_without_effect(config_path: str, component: Any, simulation: Any) -> Iterator[str]:
    """Return a sentence for each parameter of an object, and of nested objects, that differs from its default and has
    no effect in this run, and for rounds that the run does not reach.

    Args:
        config_path: the object's place in the configuration, such as `strategy`.
        component: the object.
        simulation: the `Simulation` it is part of.
    """
    for path, declaring_object in _nested_objects(config_path, component):
        for parameter_name, rules in _declarations_of(declaring_object, "effective_if").items():
            conditional_rules = [rule for rule in rules if isinstance(rule, EffectiveIf)]
            of_rounds = [rule for rule in rules if isinstance(rule, RoundParameter)]
            for rule in conditional_rules:
                value = _parameter_value(declaring_object, rule)
                if differs_from_default(type(declaring_object), parameter_name, value) and not rule.condition(
                    declaring_object, simulation
                ):
                    setting_text = _setting_text(path, parameter_name, value)
                    yield f"{setting_text} has no effect without {rule.requirement.replace('{at}', path)}"
                    break
            else:
                if of_rounds and all(rule.condition(declaring_object, simulation) for rule in conditional_rules):
                    for rounds in of_rounds:
                        yield from rounds.warning_sentences(path, declaring_object, simulation)


def no_training_sentences(at: str, component: Any, run: Any) -> Iterator[str]:
    """Return a sentence for each parameter of an object, and of nested objects, because of which no model can move."""
    for path, owner in _nested_objects(at, component):
        for name, rules in _declarations_of(owner, "stops_training").items():
            for rule in rules:
                if rule.condition(owner, run):
                    value = _parameter_value(owner, rule)
                    yield f"{_setting_text(path, name, value)} trains nothing: {rule.explanation.replace('{at}', path)}"


def parameters_of_constructor(cls: type) -> dict[str, Any]:
    """Return name → default of a constructor's parameters, including those passed on as `**options`; `NO_DEFAULT`
    without one."""
    default_values: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        signature = inspect.signature(vars(base)["__init__"]).parameters.values()
        kinds = {parameter.kind for parameter in signature}
        for parameter in list(signature)[1:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                default_values.setdefault(parameter.name, parameter.default)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return default_values


def differs_from_default(cls: type, name: str, value: Any) -> bool:
    """Return whether a value differs from the default of a constructor's parameter."""
    default = parameters_of_constructor(cls).get(name, NO_DEFAULT)
    if default is NO_DEFAULT:
        return True
    try:
        return bool(value != default)
    except (ValueError, RuntimeError):  # tensors and arrays
        return True


def _declarations_of(component: Any, kind: str) -> dict[str, list[Any]]:
    """Return parameter → declarations of an object's class and its bases, for parameters that the class takes."""
    declarations: dict[str, list[Any]] = {}
    constructor_parameters: dict[str, Any] | None = None
    for cls in type(component).__mro__:
        for rule in vars(cls).get(kind, ()):
            constructor_parameters = (
                parameters_of_constructor(type(component)) if constructor_parameters is None else constructor_parameters
            )
            if rule.parameter in constructor_parameters:
                declarations.setdefault(rule.parameter, []).append(rule)
    return declarations


def _nested_objects(path: str, component: Any) -> Iterator[tuple[str, Any]]:
    """Yield the object and the objects that its constructor was given, each with its place in the configuration."""
    if component is None:
        return
    yield path, component
    members = getattr(component, "named_parts", None)  # of an object that received several of them
    if path and members is None:
        parameter_names = (
            {f.name for f in fields(component)}
            if is_dataclass(component)
            else parameters_of_constructor(type(component)).keys()
        )
        members = {name: value for name, value in getattr(component, "__dict__", {}).items() if name in parameter_names}
    for name, value in (members or {}).items():
        if hasattr(value, "effective_if") or hasattr(value, "stops_training"):
            yield from _nested_objects(f"{path}.{name}", value)


def _parameter_value(owner: Any, rule: Any) -> Any:
    """Return the value that the object was given for the parameter of this declaration."""
    value = owner
    for name in (rule.attribute or rule.parameter).split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def _setting_text(path: str, name: str, value: Any) -> str:
    """Return KEY=VALUE, or only the key if the value is an object."""
    key = f"{path}.{name}" if path else name
    if not isinstance(value, (str, bool, int, float, list, tuple, dict, type(None), PerSeed)):
        return key
    text = value if isinstance(value, str) else repr(value)
    return f"{key}={text if len(text) <= 60 else text[:59] + '…'}"
