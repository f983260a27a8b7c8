"""Constraints on parameters, declared once in the annotation: `def __init__(self, k: Count = 10, bias: Fraction =
0.0)`.

A constructor of a class derived from `Validated`, and whatever is decorated with `@validated`, checks its annotated
arguments before its body runs, those of base classes included, and refuses one with a `ConfigError` that carries the
parameter's name. The body gets plain Python numbers. The reference of the configuration reads the same declarations.
pydantic's `validate_call` is not used: its messages list types and links for programmers, it wants to know the type of
each argument (models, tensors, callables), and it would be a further dependency.

Example:
    >>> class Halve(Strategy[State]):
    ...     def __init__(self, share: Fraction = 0.5, rounds: Count | None = None) -> None:
    ...         self.share, self.rounds = share, rounds
    >>> Halve(share=2)
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: share=2 must lie between 0 and 1
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, Union

from typing_extensions import Self

from fedsim.core import checks
from fedsim.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
CheckFunction = Callable[[str, Any], Any]
_NO_DEFAULT = inspect.Parameter.empty
_VALIDATED_ATTRIBUTE = "_checks_its_arguments"  # of functions that `validated` made


@dataclass
class _ExampleDataclass:
    default_list: list[int] = field(default_factory=list)


_DEFAULT_FACTORY_MARKER = (
    inspect.signature(_ExampleDataclass).parameters["default_list"].default
)  # stands for a default that is created when needed


class Constraint(ABC):
    """A condition on one value, in the `Annotated` of a parameter. Its `str` describes the allowed values."""

    @abstractmethod
    def check(self, key: str, value: Any) -> Any:
        """Return the value as a plain Python value, or raise a ConfigError that names the key."""


@dataclass(frozen=True)
class IntegerAtLeast(Constraint):
    """A whole number, `minimum` or more."""

    minimum: int

    def check(self, key: str, value: Any) -> int:
        return checks.check_whole_number(key, value, self.minimum)

    def __str__(self) -> str:
        return f"≥ {self.minimum}, whole"


@dataclass(frozen=True)
class AutoOrAtLeast(IntegerAtLeast):
    """The word auto, or a whole number, `minimum` or more."""

    def check(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and value != "auto":
            raise ConfigError(
                key=key, value=value, needs=f"must be 'auto' or a whole number of at least {self.minimum}"
            )
        return value if value == "auto" else super().check(key, value)

    def __str__(self) -> str:
        return f"auto, or {super().__str__()}"


@dataclass(frozen=True)
class NameOrAtLeast(IntegerAtLeast):
    """A name, or a whole number, `minimum` or more."""

    def check(self, key: str, value: Any) -> Any:
        return value if isinstance(value, str) else super().check(key, value)

    def __str__(self) -> str:
        return f"a name, or {super().__str__()}"


@dataclass(frozen=True)
class Finite(Constraint):
    """A number that is neither infinite nor NaN."""

    def check(self, key: str, value: Any) -> float:
        return checks.check_finite(key, value)

    def __str__(self) -> str:
        return "finite"


@dataclass(frozen=True)
class AboveZero(Constraint):
    """A finite number > 0."""

    def check(self, key: str, value: Any) -> float:
        return checks.check_positive(key, value)

    def __str__(self) -> str:
        return "> 0"


@dataclass(frozen=True)
class ZeroOrMore(Constraint):
    """A finite number ≥ 0."""

    def check(self, key: str, value: Any) -> float:
        return checks.check_not_negative(key, value)

    def __str__(self) -> str:
        return "≥ 0"


@dataclass(frozen=True)
class WithinUnit(Constraint):
    """A number between 0 and 1; with `above_zero` not 0, with `below_one` not 1."""

    above_zero: bool = False
    below_one: bool = False

    def check(self, key: str, value: Any) -> float:
        number = checks.check_fraction(key, value)
        if self.below_one and number == 1:
            raise ConfigError(key=key, value=value, needs="must be below 1")
        return checks.check_positive(key, value) if self.above_zero else number

    def __str__(self) -> str:
        return f"{'(' if self.above_zero else '['}0, 1{')' if self.below_one else ']'}"


class OneOf(Constraint):
    """One of these words."""

    def __init__(self, *options: str) -> None:
        self.options = options

    def check(self, key: str, value: Any) -> str:
        return checks.check_choice(key, value, self.options)

    def __str__(self) -> str:
        return ", ".join(self.options)


@dataclass(frozen=True)
class PerSeedConstraint(Constraint):
    """One number, or a list with one number for each seed. The inner annotation constrains each of them."""

    def check(self, key: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and not len(value):
            raise ConfigError(key=key, value=value, needs="has no entries; give one number, or one per seed")
        return value

    def __str__(self) -> str:
        return "or one per seed"


Count = Annotated[int, IntegerAtLeast(1)]
CountOrZero = Annotated[int, IntegerAtLeast(0)]
AutoOrCount = Annotated[int | str, AutoOrAtLeast(1)]
IndexOrName = Annotated[int | str, NameOrAtLeast(0)]
Real = Annotated[float, Finite()]
Positive = Annotated[float, AboveZero()]
NonNegative = Annotated[float, ZeroOrMore()]
Fraction = Annotated[float, WithinUnit()]  # [0, 1]
PositiveFraction = Annotated[float, WithinUnit(above_zero=True)]  # (0, 1]
RealPerSeed = Annotated[Real | list[Real], PerSeedConstraint()]
PositivePerSeed = Annotated[Positive | list[Positive], PerSeedConstraint()]
NonNegativePerSeed = Annotated[NonNegative | list[NonNegative], PerSeedConstraint()]
FractionPerSeed = Annotated[Fraction | list[Fraction], PerSeedConstraint()]


def validate_arguments(decorated_function: F) -> F:
    """Decorate a function or class so that its annotated arguments are checked before its body runs.

    Annotations are looked up when it is called first, so that they may name what the module defines later; one that
    cannot be looked up (a name that only a type checker sees) declares nothing. Defaults are held to the declarations,
    too.
    """
    if isinstance(decorated_function, type):
        _wrap_constructor(decorated_function)
        return decorated_function
    parameters: _ParameterChecks | None = None

    @functools.wraps(decorated_function)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal parameters
        if parameters is None:
            parameters = _ParameterChecks(decorated_function)
        checked_args = parameters.check_arguments(args, kwargs)
        for name in kwargs:
            if name not in parameters.parameter_names and not parameters.takes_any_name:
                remedies = getattr(type(args[0]), "config_key_by_argument", {}) if args else {}
                remedy = (
                    f"; {remedies[name]}"
                    if name in remedies
                    else checks.nearest_name_hint(name, parameters.parameter_names)
                )
                raise TypeError(
                    f"{decorated_function.__qualname__}() got an unexpected keyword argument {name!r}{remedy}"
                )
        return decorated_function(*checked_args, **kwargs)

    vars(checked_call)[_VALIDATED_ATTRIBUTE] = True
    return typing.cast("F", checked_call)


def _wrap_constructor(cls: type) -> None:
    constructor = vars(cls).get("__init__")
    if isinstance(constructor, types.FunctionType) and not hasattr(constructor, _VALIDATED_ATTRIBUTE):
        cls.__init__ = validate_arguments(constructor)  # type: ignore[misc]


_VALIDATED_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()  # classes whose constructors check


class _ConstructorSignature:
    """The `__signature__` of classes: that of their constructor, or `()` without one. `inspect.signature` would
    otherwise return that of `Validated.__new__`."""

    def __get__(self, instance: object | None, owner: type) -> inspect.Signature | None:
        """Return the signature; None if `inspect.signature` should look further: at an object's `__call__`, or
        another `__new__`."""
        if instance is not None or owner.__new__ is not Validated.__new__:  # type: ignore[comparison-overlap]
            return None
        constructor = owner.__init__  # type: ignore[misc]
        if constructor is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(constructor)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Validated:
    """A base class whose constructors, and those of derived classes, check their annotated arguments.

    Each constructor of a class and of its bases checks what it declares itself, when it is called.
    """

    __signature__ = _ConstructorSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls not in _VALIDATED_CLASSES:
            for base in cls.__mro__:  # the constructor of a dataclass is made after __init_subclass__
                if base is not object and issubclass(base, Validated):
                    _wrap_constructor(base)
            _VALIDATED_CLASSES.add(cls)
        if (args or kwargs) and cls.__init__ is object.__init__:  # object.__init__ ignores them, as there is a __new__
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _wrap_constructor(cls)


class _ParameterChecks:
    """The constrained parameters of a function.

    Attributes:
        declared_parameters: name, place among positional arguments or −1, check, and the default as the check returns
            it where that is another object; else `_NO_DEFAULT`.
        parameter_names: of all parameters that can be given by name, in order.
        takes_any_name: whether the function has a parameter `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = resolved_type_hints(function)
        self.declared_parameters: list[tuple[str, int, CheckFunction, Any]] = []
        parameters = inspect.signature(function).parameters.values()
        self.takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.parameter_names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name != "self"
        ]
        for parameter_index, parameter in enumerate(parameters):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if (check := _check_for_hint(hints.get(parameter.name))) is None:
                continue
            default = _NO_DEFAULT if parameter.default is _DEFAULT_FACTORY_MARKER else parameter.default
            if default is not _NO_DEFAULT:
                checked_default = check(parameter.name, default)
                default = _NO_DEFAULT if checked_default is default else checked_default
            position = -1 if parameter.kind is parameter.KEYWORD_ONLY else parameter_index
            self.declared_parameters.append((parameter.name, position, check, default))

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the positional arguments, checked; keyword arguments are checked in place."""
        positional_count = len(args)
        checked_args = list(args)
        for parameter_name, position, check, default_value in self.declared_parameters:
            if 0 <= position < positional_count:
                checked_args[position] = check(parameter_name, args[position])
            elif parameter_name in kwargs:
                kwargs[parameter_name] = check(parameter_name, kwargs[parameter_name])
            elif default_value is not _NO_DEFAULT:
                kwargs[parameter_name] = default_value
        return checked_args


def resolved_type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return parameter → annotation, `Annotated` included, for annotations that can be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        pass  # some annotations are names for type checkers only; the others are resolved one by one
    type_hints: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        annotation_holder = type("alone", (), {"__annotations__": {name: annotation}})
        try:
            scope = inspect.unwrap(function).__globals__
            type_hints |= typing.get_type_hints(annotation_holder, globalns=scope, include_extras=True)
        except (NameError, TypeError, AttributeError):
            continue
    return type_hints


def declared_type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return parameter → annotation for constrained parameters of a function or class; of a class also those that
    its constructor passes to its bases as `**options`."""
    type_hints: dict[str, Any] = {}
    for owner in inspect.getmro(target) if inspect.isclass(target) else [target]:
        function = vars(owner).get("__init__") if inspect.isclass(owner) else owner
        if not isinstance(function, types.FunctionType):
            continue
        type_hints = {
            name: hint for name, hint in resolved_type_hints(function).items() if any(constraints_in_hint(hint))
        } | type_hints
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
            break
    return type_hints


def constraints_in_hint(type_hint: Any) -> Iterator[Constraint]:
    """Yield all constraints in an annotation, the outermost last."""
    if typing.get_origin(type_hint) is Annotated:
        base_hint, *markers = typing.get_args(type_hint)
        yield from constraints_in_hint(base_hint)
        yield from (marker for marker in markers if isinstance(marker, Constraint))
    else:
        for argument in typing.get_args(type_hint):
            yield from constraints_in_hint(argument)


def describe_allowed_values(hint: Any) -> str:
    """Describe the values that an annotation allows, in a few words."""
    hint_text = _constraint_text(hint)
    return f"{hint_text}; or null" if type(None) in typing.get_args(hint) else hint_text


def _constraint_text(type_hint: Any) -> str:
    if typing.get_origin(type_hint) is Annotated:
        base_hint, *markers = typing.get_args(type_hint)
        constraint_descriptions = [
            _constraint_text(base_hint),
            *(str(marker) for marker in markers if isinstance(marker, Constraint)),
        ]
        return ", ".join(filter(None, constraint_descriptions))
    if _is_list_hint(type_hint):
        entries = _constraint_text(typing.get_args(type_hint)[0])
        return entries and f"each {entries}"
    constraint_descriptions = [
        description for description in map(_constraint_text, typing.get_args(type_hint)) if description
    ]
    return " or ".join(
        description
        for description in constraint_descriptions
        if description.removeprefix("each ") == description or description[5:] not in constraint_descriptions
    )


def _check_for_hint(type_hint: Any) -> CheckFunction | None:
    """Return the check that an annotation requires; None if it requires none."""
    if not any(constraints_in_hint(type_hint)):
        return None
    hint_origin = typing.get_origin(type_hint)
    if hint_origin is Annotated:
        base_hint, *markers = typing.get_args(type_hint)
        steps = [marker.check for marker in markers if isinstance(marker, Constraint)]
        of_inner = _check_for_hint(base_hint)
        return _chain_checks([*([of_inner] if of_inner else []), *steps])
    if hint_origin in (Union, types.UnionType):
        return _make_union_check(typing.get_args(type_hint))
    if _is_list_hint(type_hint):
        inner_check = _check_for_hint(typing.get_args(type_hint)[0])
        assert inner_check is not None
        return _list_check(inner_check)
    return None


def _is_list_hint(hint: Any) -> bool:
    return typing.get_origin(hint) in (list, tuple, Sequence)


def _is_list_like(value: Any) -> bool:
    """Return whether a value is a list, a tuple, a range or an array."""
    return not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _chain_checks(steps: list[CheckFunction]) -> CheckFunction:
    if len(steps) == 1:
        return steps[0]

    def check(key: str, value: Any) -> Any:
        for step in steps:
            value = step(key, value)
        return value

    return check


def _list_check(check: CheckFunction) -> CheckFunction:
    def check_entries(key: str, value: Any) -> Any:
        if not _is_list_like(value):
            raise ConfigError(key=key, value=value, needs="must be a list")
        entries = [check(f"{key}[{index}]", entry) for index, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries

    return check_entries


def _make_union_check(union_members: tuple[Any, ...]) -> CheckFunction:
    """Return the check of a union: lists are checked as lists, other values as single ones, unless they are of a
    class without constraints."""
    of_lists = next((_check_for_hint(hint) for hint in union_members if _is_list_hint(hint)), None)
    of_single = next(
        (check for hint in union_members if not _is_list_hint(hint) and (check := _check_for_hint(hint))), None
    )
    scalar_types = tuple(
        hint for hint in union_members if isinstance(hint, type) and not _is_list_hint(hint)
    )  # NoneType among them

    def check_union(key: str, value: Any) -> Any:
        if isinstance(value, scalar_types):
            return value
        if of_lists is not None and (of_single is None or _is_list_like(value)):
            return of_lists(key, value)
        return value if of_single is None else of_single(key, value)

    return check_union
