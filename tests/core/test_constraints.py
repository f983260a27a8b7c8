"""Constraints stand beside parameters: what lies outside is refused by the part's own key, what lies at the border is
taken, and whoever composes parts adds where they stand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import pickle
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from fedsim.app.build import _instantiate
from fedsim.app.config import config_folder, groups
from fedsim.app.kinds import KINDS
from fedsim.availability import Availability, Bernoulli, Probability, Trajectory, UniformK
from fedsim.availability.clock import Clock, Delay, Work
from fedsim.core import constraints as declarations
from fedsim.core.constraints import (
    AboveZero,
    AutoOrAtLeast,
    Constraint,
    Count,
    Finite,
    Fraction,
    IntegerAtLeast,
    OneOf,
    Positive,
    PositivePerSeed,
    Validated,
    WithinUnit,
    ZeroOrMore,
    declared_type_hints,
    describe_allowed_values,
    resolved_type_hints,
    validate_arguments,
)
from fedsim.core.errors import ClientCountError, ConfigError, MissingDataError
from fedsim.core.per_seed import PerSeed, as_per_seed
from fedsim.data.contamination import Contamination
from fedsim.data.drift import Drift
from fedsim.data.partition import Partition
from fedsim.evaluation import EvaluationOptions
from fedsim.evaluation.personal import Personal
from fedsim.local import LocalRule, Schedule
from fedsim.models.selectors import Selector
from fedsim.run.rules import Stop
from fedsim.run.tracking import Tracking
from fedsim.shift import Shift
from fedsim.strategies import FedAvg, FedOpt, Krum, LocalOnly, RobustServer, State, Strategy
from fedsim.trainer import Execution
from fedsim.uplink import Stage
from fedsim.uplink.attack import Attack

# Constraint → values just outside, and values at the border with what the body gets for them.
EXAMPLES: dict[type[Constraint], Any] = {
    IntegerAtLeast: lambda c: ([c.minimum - 1, 1.5, True, "1", None], [c.minimum]),
    AutoOrAtLeast: lambda c: ([c.minimum - 1, "many"], [c.minimum, "auto"]),
    Finite: lambda c: ([float("inf"), float("nan"), "1", True], [-1e300, 0.0]),
    AboveZero: lambda c: ([0, -5e-324, float("nan")], [5e-324]),
    ZeroOrMore: lambda c: ([-5e-324, float("inf")], [0.0]),
    WithinUnit: lambda c: (
        [-5e-324, 1 + 1e-15, *([0] if c.above_zero else []), *([1] if c.below_one else [])],
        [5e-324 if c.above_zero else 0.0, 1 - 1e-15 if c.below_one else 1.0],
    ),
    OneOf: lambda c: ([f"{c.options[0]}x", None, 3], list(c.options)),
}
BASES = (
    Strategy, LocalRule, Schedule, Availability, Probability, Trajectory, Partition, Drift, Shift, Contamination, Stage,
    Attack, Clock, Work, Delay, Selector, Personal, Stop, Tracking, Execution, EvaluationOptions,
)  # fmt: skip


def descendants(cls: type) -> Iterator[type]:
    yield cls
    for below in cls.__subclasses__():
        yield from descendants(below)


def declared_parameters() -> list[Any]:
    """(class, parameter, its constraint) of fedsim's parts, a list of one number per seed and Optional looked through;
    only what a class' own constructor declares."""
    classes = {c for base in BASES for c in descendants(base) if c.__module__.startswith("fedsim.")}
    cases = []
    for cls in sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)):
        constructor = vars(cls).get("__init__")
        for name, hint in resolved_type_hints(constructor).items() if inspect.isfunction(constructor) else ():
            found = [c for c in declarations.constraints_in_hint(hint) if type(c) in EXAMPLES]
            scalar = not any(typing.get_origin(part) not in (None, Annotated) for part in typing.get_args(hint)[:1])
            if found and (scalar or "PerSeed" in str(hint)):
                cases.append(pytest.param(cls, name, found[0], hint, id=f"{cls.__name__}-{name}"))
    return cases


CASES = declared_parameters()


def check_of(cls: type, name: str) -> Any:
    """What the constructor does to an argument before its body runs."""
    parameters = declarations._ParameterChecks(inspect.unwrap(vars(cls)["__init__"]))
    return next(check for parameter, _, check, _ in parameters.declared_parameters if parameter == name)


def test_parts_of_each_group_declare_what_they_take() -> None:
    families = {package for case in CASES for package in case.values[0].__module__.split(".")[1:-1]}
    assert families >= {
        "strategies", "local", "availability", "partition", "shift", "contamination", "uplink", "attack", "clock",
        "drift", "personal", "run", "tracking", "trainer", "evaluation", "models",
    }  # fmt: skip
    assert len(CASES) >= 250


@pytest.mark.parametrize(("cls", "name", "constraint", "hint"), CASES)
def test_what_lies_outside_is_refused_and_the_border_is_not(cls: type, name: str, constraint: Any, hint: Any) -> None:
    """Of a list, each entry is checked, and an error names it with its index."""
    outside, inside = EXAMPLES[type(constraint)](constraint)
    check = check_of(cls, name)
    in_list = declarations._is_list_hint(hint)
    key = f"{name}[0]" if in_list else name
    optional = type(None) in typing.get_args(hint)
    for value in outside:
        if value is None and optional:
            assert check(name, None) is None
            continue
        with pytest.raises(ConfigError) as refused:
            check(name, [value] if in_list else value)
        assert str(refused.value).startswith(f"{key}={value!r} ")
        assert refused.value.key == key
        assert str(refused.value.with_key_prefix("group")).startswith(f"group.{key}={value!r} ")
    for value in inside:
        assert check(name, [value] if in_list else value) == ([value] if in_list else value)


# group=choice, key, a value outside: what a library user reads, and after the group's name the command line.
SAMPLE = [
    ("strategy", "fedavg", "server_lr", -1, "must be positive"),
    ("strategy", "fedavg", "weighting", "dat", "is unknown; choose one of uniform, data; did you mean 'data'?"),
    ("strategy", "fedavgm", "momentum", 1.5, "must lie between 0 and 1"),
    ("strategy", "oort", "k", 0, "must be a whole number of at least 1"),
    ("strategy", "feddyn", "alpha", 0, "must be positive"),
    ("strategy", "fedprox", "mu", -0.1, "must not be negative"),
    ("strategy", "mifa", "max_age", -1, "must be a whole number of at least 0"),
    ("strategy", "krum", "bucket", 0, "must be a whole number of at least 1"),
    ("local", "sgd", "weight_decay", -1, "must not be negative"),
    ("local", "sgd", "clip", 0, "must be positive"),
    ("local", "momentum", "momentum", 2, "must lie between 0 and 1"),
    ("local", "fedsam", "rho", -1, "must not be negative"),
    ("local", "ditto", "personal_lr", 0, "must be positive"),
    ("local", "profl", "bins", 1, "must be a whole number of at least 2"),
    ("availability", "uniform_k", "k", 0, "must be a whole number of at least 1"),
    ("availability", "common_shock", "shock", 2, "must lie between 0 and 1"),
    ("availability", "cyclic", "length", 0, "must be a whole number of at least 1"),
    ("partition", "dirichlet", "alpha", 0, "must be positive"),
    ("partition", "quantity", "sigma", -1, "must not be negative"),
    ("partition", "iid", "validation", 2, "must lie between 0 and 1"),
    ("shift", "location", "inertia", -1, "must lie between 0 and 1"),
    ("shift", "elastic", "reach", 0, "must be positive"),
    ("shift", "demand", "spread", -1, "must not be negative"),
    ("drift", "cyclic", "period", 0, "must be positive"),
    ("contamination", "gaussian", "std", -1, "must not be negative"),
    ("attack", "alie", "fraction", 1.1, "must lie between 0 and 1"),
    ("attack", "mimic", "warmup", 0, "must be a whole number of at least 1"),
    ("clock", "devices", "jitter", -1, "must not be negative"),
    ("delay", "lognormal", "spread", -1, "must not be negative"),
    ("work", "uniform", "least", 0, "must be a whole number of at least 1"),
    ("columns", "fedper", "layers", 0, "must be a whole number of at least 1"),
    ("personal", "default", "newcomers", -1, "must be a whole number of at least 0"),
    ("stop", "default", "patience", 0, "must be a whole number of at least 1"),
    ("tracking", "default", "checkpoint_every", 0, "must be a whole number of at least 1"),
    ("dataset", "house_prices", "noise", -1, "must not be negative"),
]


@pytest.mark.parametrize(("group", "choice", "key", "value", "needs"), SAMPLE)
def test_the_command_line_adds_the_group_to_what_the_library_says(
    group: str, choice: str, key: str, value: Any, needs: str
) -> None:
    from omegaconf import OmegaConf

    node: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / group / f"{choice}.yaml"), resolve=False)
    module, _, name = node["_target_"].rpartition(".")
    given = {name: v for name, v in node.items() if name != "defaults" and not str(v).startswith(("${", "???"))}
    keywords = {name: v for name, v in given.items() if name != "_target_" and not isinstance(v, dict)}
    shown = str(value) if not isinstance(value, str) else repr(value)
    with pytest.raises(ConfigError) as library:
        getattr(importlib.import_module(module), name)(**(keywords | {key: value}))
    assert str(library.value) == f"{key}={shown} {needs}"
    with pytest.raises(ConfigError) as command_line:
        _instantiate(group, given | {key: value}, {})
    assert str(command_line.value) == f"{group}.{key}={shown} {needs}"


def test_a_key_that_another_one_sets_is_named_as_it_is_set() -> None:
    node = {"_target_": "fedsim.local.SGD", "lr": [0.1, -1.0]}
    with pytest.raises(ConfigError, match=r"^local\.lr\[1\]=-1\.0 must be positive$"):
        _instantiate("local", node, {})
    with pytest.raises(ConfigError, match=r"^lr\[1\]=-1\.0 must be positive$"):
        _instantiate("local", node, {"local.lr": "lr"})


def test_nested_parts_are_named_by_their_whole_path() -> None:
    rule = {"_target_": "fedsim.strategies.Krum", "bad": -1}
    with pytest.raises(ConfigError, match=r"^strategy\.rule\.bad=-1 must not be negative$"):
        _instantiate("strategy", {"_target_": "fedsim.strategies.RobustServer", "rule": rule}, {})
    with pytest.raises(ConfigError, match=r"^bad=-1 must not be negative$"):
        Krum(bad=-1)
    process = UniformKnown()
    many = RobustServer(Krum(bad=3), FedOpt())
    with pytest.raises(ConfigError, match=r"^rule\.bad=3: Krum needs .*; lower rule\.bad or rule\.bucket$"):
        many.check(process)
    schedule = {"_target_": "fedsim.local.Cosine", "rounds": 0}
    with pytest.raises(ConfigError, match=r"^local\.schedule\.rounds=0 must be a whole"):
        _instantiate("local", {"_target_": "fedsim.local.SGD", "schedule": schedule}, {})


class UniformKnown(Bernoulli):
    """Of six clients."""

    @property
    def population(self) -> Any:  # type: ignore[override]
        return dataclasses.make_dataclass("Six", [("clients", int, 6)])()


class Halving(FedAvg):
    """A part of a user's own, which declares one parameter and hands another one on."""

    def __init__(
        self, share: Fraction, server_lr: PositivePerSeed = 1.0, times: Count | None = None, *, scale: Positive = 1
    ) -> None:
        super().__init__(server_lr)
        self.share, self.times, self.scale = share, times, scale


class Quartering(Halving):
    """Without a constructor of its own."""


class Renamed(Halving):
    """Whose base refuses."""

    def __init__(self, rate: float) -> None:
        super().__init__(0.5, rate)


def test_a_users_own_part_is_checked_as_fedsims_are() -> None:
    with pytest.raises(ConfigError, match=r"^share=2 must lie between 0 and 1$"):
        Halving(2)
    with pytest.raises(ConfigError, match=r"^share=2 must lie"):
        Quartering(share=2)
    with pytest.raises(ConfigError, match=r"^scale=0 must be positive$"):
        Quartering(0.5, scale=0)
    with pytest.raises(ConfigError, match=r"^server_lr=-3 must be positive$"):
        Renamed(-3)
    with pytest.raises(TypeError, match=r"Halving\.__init__\(\) got an unexpected keyword argument 'shares'"):
        Halving(shares=1)
    part = Quartering(1, [1, 2])
    assert (part.share, part.times, part.server_lr) == (1.0, None, PerSeed((1.0, 2.0)))
    assert type(part.share) is float is type(part.scale)  # the default, 1, too


def test_a_decorated_constructor_is_checked_too() -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)

        return wrapper

    class Logged(FedAvg):
        @logged
        def __init__(self, share: Fraction) -> None:
            super().__init__()
            self.share = share

    assert Logged(1).share == 1.0
    with pytest.raises(ConfigError, match=r"^share=2 must lie"):
        Logged(2)


def test_a_base_that_is_a_dataclass_is_checked_through_super() -> None:
    class Child(Options):
        def __init__(self, many: int) -> None:
            super().__init__(many)

    with pytest.raises(ConfigError, match=r"^rounds=0 must be"):
        Child(0)


def test_parts_are_copied_pickled_and_have_their_signature() -> None:
    part = Halving(0.5, [0.1, 0.2])
    for twin in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert type(twin) is Halving
        assert vars(twin) == vars(part)
    assert list(inspect.signature(Halving).parameters) == ["share", "server_lr", "times", "scale"]
    assert list(declared_type_hints(Halving)) == ["share", "server_lr", "times", "scale"]
    assert describe_allowed_values(declared_type_hints(Halving)["times"]) == "≥ 1, whole; or null"
    assert describe_allowed_values(declared_type_hints(Halving)["server_lr"]) == "> 0, or one per seed"
    assert "weighting" in declared_type_hints(FedAvg)
    assert "weighting" not in declared_type_hints(Halving)


@dataclass(frozen=True)
class Options(Validated):
    rounds: Count = 5
    widths: list[Count] = dataclasses.field(default_factory=lambda: [3])
    every: Annotated[int, IntegerAtLeast(2)] | str = "auto"


@dataclass(frozen=True)
class MoreOptions(Options):
    share: Annotated[float, WithinUnit(below_one=True)] | list[Fraction] = 0.0


def test_dataclasses_declare_their_fields() -> None:
    assert MoreOptions(widths=(1, 2), share=[1]) == MoreOptions(5, (1, 2), "auto", [1.0])
    for wrong, said in (
        ({"rounds": 0}, "rounds=0 must be a whole number of at least 1"),
        ({"widths": [3, 0]}, "widths[1]=0 must be a whole number of at least 1"),
        ({"widths": 3}, "widths=3 must be a list"),
        ({"every": 1}, "every=1 must be a whole number of at least 2"),
        ({"share": 1}, "share=1 must be below 1"),
        ({"share": [0, 2]}, "share[1]=2 must lie between 0 and 1"),
    ):
        with pytest.raises(ConfigError) as refused:
            MoreOptions(**wrong)
        assert str(refused.value) == said
    with pytest.raises(ConfigError, match="rounds=0"):
        dataclasses.replace(MoreOptions(), rounds=0)


def test_functions_and_defaults_are_held_to_what_is_declared() -> None:
    @validate_arguments
    def twice(number: Positive, /, times: Count = 2) -> float:
        return number * times

    assert twice(1.5) == 3.0
    with pytest.raises(ConfigError, match=r"^number=0 must be positive$"):
        twice(0)

    @validate_arguments
    def impossible(share: Fraction = 2.0) -> float:
        return share

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^share=2\.0 must lie"):
            impossible()


def test_a_list_for_seeds_has_entries() -> None:
    with pytest.raises(ConfigError, match=r"^server_lr=\[\] has no entries; give one number, or one per seed$"):
        FedAvg(server_lr=[])
    with pytest.raises(ConfigError, match=r"^server_lr\[1\]=0 must be positive$"):
        FedAvg(server_lr=[1, 0])
    assert as_per_seed([2.0]) == 2.0


def test_an_error_carries_its_parts() -> None:
    error = MissingDataError("{path}=x is none; see {kind}", mentions=("path", "kind"))
    assert str(error) == "path=x is none; see kind"
    assert error.with_key_prefix("dataset") is error
    assert str(error) == "dataset.path=x is none; see dataset.kind"
    error = ConfigError(key="low[1]", value="{high}", needs="exceeds {high}", mentions=("high",))
    assert (error.key, error.value, error.needs) == ("low[1]", "{high}", "exceeds {high}")
    assert str(error.with_key_prefix("a").with_key_prefix("b")) == "b.a.low[1]='{high}' exceeds b.a.high"
    assert str(error.with_renamed_keys({"b.a.low": "low"})) == "low[1]='{high}' exceeds b.a.high"
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert str(twin.with_key_prefix("c")) == "c.low[1]='{high}' exceeds c.b.a.high"
    assert str(ConfigError("a sentence of {braces}").with_key_prefix("strategy")) == "a sentence of {braces}"
    assert (
        str(ConfigError(key="strategy.rate", value=1, needs="is old").with_key_prefix("strategy"))
        == "strategy.rate=1 is old"
    )


def test_an_error_of_the_number_of_clients_knows_newcomers() -> None:
    error = ClientCountError("k=4 exceeds {clients}; set clients={settable}", clients=3, settable=4)
    assert str(error) == "k=4 exceeds clients=3; set clients=4"
    assert error.clients == 3
    assert str(error.with_newcomer_count(2)) == (
        "k=4 exceeds the 3 of clients=5 that are no newcomers (personal.newcomers=2); set clients=6"
    )


def test_each_group_of_the_configuration_is_built_with_the_prefix() -> None:
    assert set(KINDS) <= set(groups())
    with pytest.raises(ConfigError, match=r"^availability\.k=0 must be"):
        _instantiate("availability", {"_target_": "fedsim.availability.UniformK", "k": 0}, {})
    with pytest.raises(ConfigError, match=r"^k=0 must be"):
        UniformK(0)


def test_a_subclass_declares_what_it_takes_by_its_bases_name_and_type() -> None:
    """A constructor that repeats a base's parameter, of the same type, repeats what may be given for it."""
    undeclared = []
    for cls in {c for base in BASES for c in descendants(base) if c.__module__.startswith("fedsim.")}:
        constructor = vars(cls).get("__init__")
        own = resolved_type_hints(constructor) if inspect.isfunction(constructor) else {}
        for base in cls.__mro__[1:]:
            above = vars(base).get("__init__")
            for name, hint in resolved_type_hints(above).items() if inspect.isfunction(above) else ():
                bare = typing.get_type_hints(above).get(name)
                if any(declarations.constraints_in_hint(hint)) and own.get(name, hint) == bare:
                    undeclared.append((cls.__name__, name))
    assert not undeclared


def test_a_state_is_no_part() -> None:
    assert not issubclass(State, Validated)


def test_a_part_without_a_constructor_takes_no_arguments() -> None:
    assert LocalOnly().vectors_up == 0
    for arguments in ((1.0,), ()):
        with pytest.raises(TypeError, match=r"LocalOnly\(\) takes no arguments"):
            LocalOnly(*arguments, **({} if arguments else {"server_lr": 1.0}))


class _Scaling:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class _OwnConstructor(LocalOnly):
    def __init__(self, share: float = 0.5) -> None:
        self.share = share


class _ConstructorOfAnotherBase(LocalOnly, _Scaling):
    pass


@dataclass
class _Fields(LocalOnly):
    share: float = 0.5


class _OwnNew(LocalOnly):
    def __new__(cls, share: float = 0.5) -> Any:
        return super().__new__(cls)


class _Callable(Validated):
    def __call__(self, rows: int) -> int:
        return rows


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        (LocalOnly, []),
        (_Callable, []),
        (_Callable(), ["rows"]),
        (_OwnConstructor, ["share"]),
        (_ConstructorOfAnotherBase, ["scale"]),
        (_Fields, ["share"]),
        (_OwnNew, ["share"]),
        (UniformK, list(inspect.signature(UniformK.__init__).parameters)[1:]),
    ],
)
def test_a_signature_has_the_parameters_of_the_constructor_and_none_without_one(
    target: Any, parameters: list[str]
) -> None:
    assert list(inspect.signature(target).parameters) == parameters


def test_a_call_of_a_part_follows_its_signature() -> None:
    """Whatever a part's signature says can be given is taken; everything else is refused."""
    assert _ConstructorOfAnotherBase(2.0).scale == 2.0
    assert _Fields(share=0.25).share == _OwnConstructor(0.25).share == 0.25
    for call in (_Callable, LocalOnly, _ConstructorOfAnotherBase, _Fields, _OwnConstructor):
        with pytest.raises(TypeError):
            inspect.signature(call).bind(1, 2, 3)
        with pytest.raises(TypeError):
            call(1, 2, 3)
