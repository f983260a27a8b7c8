"""What a `_target_` in a configuration may name: a class of the kind that its place wants, or one of a few functions.

A `Kind` says which classes fit a place, and in which modules of the built-in packages they are looked for: nothing else
of these packages is imported or called. The user's own code is what is neither Python's own nor installed among its
packages: modules of the working directory, of PYTHONPATH, of a checkout. Its classes must be of the kind, too; its
functions may build what they like. What a name leads to counts, not what it is called: `torch.os.system` is none of
PyTorch's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError

BUILT_IN_PACKAGES = (
    "fedsim",
    "torch",
    "torchvision",
    "torchmetrics",
    "timm",
    "flwr_datasets",
)  # where kinds have classes
REMOTE_CODE_ARGUMENT = "trust_remote_code"  # by which Hugging Face's libraries run code of a repository
# Hydra's keys that change what a `_target_` does, and the value of each that changes nothing.
RESERVED_KEY_DEFAULTS: dict[str, Any] = {"_partial_": False, "_args_": [], "_recursive_": True, "_convert_": "all"}
MISSING_VALUE = "???"
TRUST_ON_COMMAND_LINE = "add trusted=[{root}]"

# Packages as earlier versions called them, whose configurations and run folders have these names: old → new.
RENAMED_MODULES = {
    "fedsim.attack": "fedsim.uplink.attack",
    "fedsim.clock": "fedsim.availability.clock",
    "fedsim.contamination": "fedsim.data.contamination",
    "fedsim.datasets": "fedsim.data.datasets",
    "fedsim.partition": "fedsim.data.partition",
    "fedsim.personal": "fedsim.evaluation.personal",
    "fedsim.tracking": "fedsim.run.tracking",
}


@dataclass(frozen=True)
class Kind:
    """The classes that fit a place of a configuration.

    Attributes:
        description: they are called in messages, with their article.
        bases: classes that one is derived from; empty: any class.
        required_methods: methods that it has besides.
        modules: of the built-in packages where such classes are defined.
        shown_in: further modules through which they may be named, without those below them.
        names: of the classes there that count; None: all.
        functions: says of a function of these modules whether it builds such an object.
        built_in: bases of classes of built-in packages, where these differ from `bases`.
        arguments: kinds of the objects among its arguments whose annotation does not say them.
        argument_kinds: kinds that arguments of the user's own classes may have.
        instances: whether callable objects of the user's own code fit, too.
    """

    description: str
    bases: tuple[type, ...] = ()
    required_methods: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    shown_in: tuple[str, ...] = ()
    names: frozenset[str] | None = None
    functions: Callable[[Any], bool] = field(default=lambda candidate: False)
    built_in: tuple[type, ...] = ()
    arguments: Mapping[str, Kind] = field(default_factory=dict)
    argument_kinds: tuple[Kind, ...] = ()
    instances: bool = False

    def fits(self, candidate: type) -> bool:
        """Is it a class of this kind?"""
        defined = {name for base in candidate.__mro__ if base is not object for name in vars(base)}
        return (not self.bases or issubclass(candidate, self.bases)) and defined >= set(self.required_methods)

    def has_built_in(self, candidate: Any) -> bool:
        """Is it one of the classes or functions of built-in packages that count?"""
        if not _is_below(candidate.__module__, self.modules):
            return False
        if not isinstance(candidate, type):
            return bool(self.functions(candidate))
        is_listed = self.names is None or candidate.__name__ in self.names
        return is_listed and self.fits(candidate) and (not self.built_in or issubclass(candidate, self.built_in))


@dataclass(frozen=True)
class Trust:
    """Attributes:

    packages: that the user trusts besides.
    own_code: is the user's own code trusted?
    remedy: how a package is trusted.
    """

    packages: tuple[str, ...] = ()
    own_code: bool = True
    remedy: str = TRUST_ON_COMMAND_LINE


_current_trust: ContextVar[Trust] = ContextVar("whose code configurations may name", default=Trust())  # noqa: B039 (frozen)


@contextlib.contextmanager
def trust_packages(
    packages: Sequence[str], own_code: bool = True, remedy: str = TRUST_ON_COMMAND_LINE
) -> Iterator[None]:
    """Within the block these packages are trusted, and the user's own code where `own_code` says so."""
    token = _current_trust.set(Trust(tuple(packages), own_code, remedy))
    try:
        yield
    finally:
        _current_trust.reset(token)


def current_name(target: str) -> str:
    """The dotted path by which a class of fedsim is known now, of one that an earlier version wrote."""
    package, dot, subpath = target.partition(".")
    head, end, name = subpath.partition(".")
    current_module = RENAMED_MODULES.get(f"{package}{dot}{head}")
    return target if current_module is None else f"{current_module}{end}{name}"


def current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted keys, with the current name in every `_target_`."""
    return {
        key: current_name(value) if key.rpartition(".")[2] == "_target_" and isinstance(value, str) else value
        for key, value in settings.items()
    }


def resolve(key: str, target: str, kind: Kind) -> Any:
    """The class or function at a dotted path.

    Args:
        key: under which a configuration names it.
        target: package.module.Name.
        kind: that the place wants.

    Raises:
        ConfigError: a configuration may not name it there.
        ImportError, ValueError: there is no such thing.
    """
    target = current_name(target)
    segments = _segments(key, target)
    root = segments[0]
    trust_label = _trust_label(root)
    if trust_label is None:
        raise ConfigError(f"{key}={target!r} {_untrusted_text(root)}")
    if trust_label == "built in" and not (
        _is_below(target, kind.modules) or target.rpartition(".")[0] in kind.shown_in
    ):
        raise ConfigError(f"{key}={target!r} {_unfit_text(root, kind)}")
    if root in ("torchvision", "torchmetrics"):
        from fedsim.core.torchvision_import import torchvision

        torchvision()  # where its compiled operators do not load, a plain import fails
    candidate = _walk_path(key, target, segments, trust_label)
    _check_candidate(key, target, candidate, kind, trust_label)
    return candidate


def _segments(key: str, target: str) -> list[str]:
    """The names on a dotted path; refused before the first of them is imported."""
    segments = target.split(".")
    if not all(segment.isidentifier() for segment in segments):
        raise ConfigError(f"{key}={target!r} is no path of a class; give package.module.Class")
    for segment in segments:
        if segment.startswith("_"):
            raise ConfigError(f"{key}={target!r}: {segment} begins with an underscore, and is closed to configurations")
    return segments


def _check_candidate(key: str, target: str, candidate: Any, kind: Kind, trust_label: str) -> None:
    """Refuse what stands at the path, where it is no class or function, lives in a package that is not trusted, or does
    not fit the place. Its home counts, not only the path: `trusted_package.os.system` is the operating system's."""
    defining_module, is_class = _defining_module(candidate), isinstance(candidate, type)
    is_function = isinstance(candidate, (types.FunctionType, types.BuiltinFunctionType))
    if not (is_class or is_function or (kind.instances and callable(candidate) and trust_label != "built in")):
        raise ConfigError(f"{key}={target!r} is a {type(candidate).__name__}; give a function or class")
    home_root = defining_module.partition(".")[0] or "builtins"
    home_trust = _trust_label(home_root)
    if home_trust is None or (trust_label == "built in" and home_trust != trust_label):
        qualified_name = f"{defining_module}.{getattr(candidate, '__qualname__', type(candidate).__name__)}"
        raise ConfigError(f"{key}={target!r} is {qualified_name}, and that {_untrusted_text(home_root)}")
    if home_trust == "built in" and not kind.has_built_in(candidate):
        raise ConfigError(f"{key}={target!r} {_unfit_text(home_root, kind)}")
    if isinstance(candidate, types.BuiltinFunctionType) and home_trust != "named":
        raise ConfigError(f"{key}={target!r} is a builtin function; give a class, or a function written in Python")
    if is_class and not kind.fits(candidate):
        raise ConfigError(f"{key}={target!r} is a class, but not {kind.description}; {_requirement(kind)}")


@dataclass
class Part:
    """An object that a configuration describes, ready to be built.

    Attributes:
        key: where it stands.
        kind: it is of.
        call: its class, or the function that builds it.
        arguments: of the call; those that are objects are parts themselves.
    """

    key: str
    kind: Kind
    call: Callable[..., Any]
    arguments: dict[str, Any]

    def nested_parts(self) -> Iterator[Part]:
        """This one, and those among its arguments, the innermost first."""
        yield from _parts_within(list(self.arguments.values()))
        yield self

    def build(self) -> Any:
        """The object.

        Raises:
            ConfigError: the class refuses its arguments; the message names the key.
        """
        for name, value in self.arguments.items():
            if isinstance(value, str) and value == MISSING_VALUE:
                raise ConfigError(f"{self.key}.{name} is missing; give {self.key}.{name}=…")
        arguments = {name: _build_value(value) for name, value in self.arguments.items()}
        try:
            instance = self.call(**arguments)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, ConfigError):
                cause = cause.__cause__
            if isinstance(cause, ConfigError):
                raise cause.with_prefix(self.key) from None
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise ConfigError(f"{self.key}: {reason}") from error
        if self.kind.bases and not isinstance(instance, self.kind.bases):
            raise ConfigError(
                f"{self.key}: {self.call.__qualname__} returned a {type(instance).__name__}, not "
                f"{self.kind.description}; "
                f"{_requirement(self.kind)}"
            )
        return instance


def parse(key: str, node: Mapping[str, Any], kind: Kind) -> Part:
    """What a mapping with a `_target_` describes. Nothing is called.

    Raises:
        ConfigError: it names what none may, or what is not there; the message says where.
    """
    target = node.get("_target_")
    if target is None or target == MISSING_VALUE:
        raise ConfigError(f"{key}._target_ is missing; give {key}._target_=package.module.Class")
    if not isinstance(target, str):
        raise ConfigError(f"{key}._target_={target!r} names no class; choose one of the group's choices")
    for name, neutral_value in RESERVED_KEY_DEFAULTS.items():
        if node.get(name, neutral_value) not in (neutral_value, None):
            if name == "_partial_":
                raise ConfigError(
                    f"{key}._partial_=true leaves an object half made, and a run needs a whole one; leave it out"
                )
            raise ConfigError(f"{key}.{name}={node[name]!r}: objects are built of named arguments; leave it out")
    check_remote(key, node)
    try:
        call = resolve(f"{key}._target_", target, kind)
    except ConfigError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(f"{key}._target_={target!r} cannot be imported ({error})") from error
    arguments = {name: value for name, value in node.items() if name not in ("_target_", *RESERVED_KEY_DEFAULTS)}
    return Part(
        key, kind, call, {n: _parse_value(f"{key}.{n}", v, kinds_of(call, n, kind)) for n, v in arguments.items()}
    )


def check(key: str, node: Any, kinds: Sequence[Kind]) -> None:
    """Refuse what none may name in a mapping or list, however deep, that is handed on as it stands."""
    _parse_value(key, node, kinds)


def check_remote(key: str, node: Mapping[str, Any]) -> None:
    """Refuse arguments by which a library runs code of a repository."""
    if node.get(REMOTE_CODE_ARGUMENT) and not {"transformers", "datasets"} & set(_current_trust.get().packages):
        raise ConfigError(
            f"{key}.{REMOTE_CODE_ARGUMENT}={node[REMOTE_CODE_ARGUMENT]} runs code of a repository; "
            f"if you know it, {_remedy_text('transformers')}"
        )


def kinds_of(call: Any, name: str, kind: Kind) -> tuple[Kind, ...]:
    """The kinds of objects that an argument takes: of the user's own code `argument_kinds`, else what is annotated."""
    if name in kind.arguments:
        return (kind.arguments[name],)
    if _trust_label(_defining_module(call).partition(".")[0]) != "built in":
        return kind.argument_kinds
    if bases := tuple(dict.fromkeys(_annotated_classes(call, name))):
        description = " or ".join(base.__name__ for base in bases)
        return (Kind(f"a {description}", bases, modules=("fedsim",), argument_kinds=kind.argument_kinds),)
    return ()


def _parse_value(key: str, value: Any, kinds: Sequence[Kind]) -> Any:
    """The same with parts in the place of mappings that have a `_target_`."""
    if isinstance(value, (list, tuple)):
        return [_parse_value(key, item, kinds) for item in value]
    if not isinstance(value, Mapping):
        return value
    check_remote(key, value)
    if "_target_" not in value:
        return {name: _parse_value(f"{key}.{name}", item, kinds) for name, item in value.items()}
    problem = None
    for kind in kinds:
        try:
            return parse(key, value, kind)
        except ConfigError as error:
            problem = problem or error
    if problem is None:
        target = value["_target_"]
        root = str(target).partition(".")[0]
        reason = "stands where no object is wanted; leave it out" if _trust_label(root) else _untrusted_text(root)
        problem = ConfigError(f"{key}._target_={target!r} {reason}")
    raise problem


def _parts_within(value: Any) -> Iterator[Part]:
    if isinstance(value, Part):
        yield from value.nested_parts()
    elif isinstance(value, (list, dict)):
        for item in value if isinstance(value, list) else value.values():
            yield from _parts_within(item)


def _build_value(value: Any) -> Any:
    if isinstance(value, Part):
        return value.build()
    if isinstance(value, dict):
        return {name: _build_value(item) for name, item in value.items()}
    return [_build_value(item) for item in value] if isinstance(value, list) else value


def _walk_path(key: str, target: str, segments: list[str], trust_label: str) -> Any:
    """What stands at the end of the path, where all that lies on the way is trusted as its root is.

    On the way lie modules; of the user's own code also classes that hold the last one.
    """
    current: Any = importlib.import_module(segments[0])
    for number, name in enumerate(segments[1:], 1):
        if isinstance(current, types.ModuleType):
            current = _module_member(current, name, last=number == len(segments) - 1)
        elif isinstance(current, type) and trust_label == "own":
            current = vars(current).get(name)
            if not isinstance(current, type):
                raise ConfigError(f"{key}={target!r} is no class; what belongs to a class is closed to configurations")
        else:
            raise ConfigError(
                f"{key}={target!r} is an attribute of a {type(current).__name__}; give a function or class"
            )
        if isinstance(current, types.ModuleType):
            root = current.__name__.partition(".")[0]
            if root != segments[0] and (trust_label == "built in" or _trust_label(root) != trust_label):
                raise ConfigError(f"{key}={target!r} leads to the package {root}, and that {_untrusted_text(root)}")
    if isinstance(current, types.ModuleType):
        raise ImportError(f"{target} is a module")
    return current


def _module_member(module: types.ModuleType, name: str, last: bool) -> Any:
    """An attribute of a module, or a module inside it; on the way modules come first, at the end attributes."""
    submodule = f"{module.__name__}.{name}"
    if not last or not hasattr(module, name):
        try:
            return importlib.import_module(submodule)
        except ModuleNotFoundError as error:
            if not submodule.startswith(error.name or ""):
                raise  # the module is there, and imports what is not
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ImportError(str(error)) from error


def _defining_module(candidate: Any) -> str:
    """The module where a class or function was defined; of another object, its class."""
    if isinstance(candidate, types.ModuleType):
        return candidate.__name__
    definition = (
        candidate if isinstance(candidate, (type, types.FunctionType, types.BuiltinFunctionType)) else type(candidate)
    )
    home = getattr(definition, "__module__", None)
    return home if isinstance(home, str) else ""


def _trust_label(root: str) -> str | None:
    """'named' by the user, 'built in', the user's 'own', or None."""
    trust = _current_trust.get()
    if root in trust.packages:
        return "named"
    if root in BUILT_IN_PACKAGES and (root == "fedsim" or root in sys.modules or _is_installed(root) is not False):
        return "built in"
    return "own" if trust.own_code and not _is_installed(root) else None


def _remedy_text(root: str) -> str:
    return _current_trust.get().remedy.format(root=root)


def _untrusted_text(root: str) -> str:
    return (
        f"is of the package {root}, which configurations may not call; if you trust it with its arguments, "
        f"{_remedy_text(root)}"
    )


def _unfit_text(root: str, kind: Kind) -> str:
    alternatives = f"{' or '.join(kind.modules)}, or one of your own" if kind.modules else "your own"
    trust = "" if root == "fedsim" else f"; if you trust {root} with its arguments, {_remedy_text(root)}"
    return f"is not {kind.description} that configurations may build; name one of {alternatives}{trust}"


def _requirement(kind: Kind) -> str:
    if kind.bases:
        return f"derive it from {' or '.join(f'{base.__module__}.{base.__qualname__}' for base in kind.bases)}"
    return f"it needs {' and '.join(kind.required_methods)}"


def _is_below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _annotated_classes(call: Any, name: str) -> Iterator[type]:
    """The classes of fedsim's in the annotation of an argument, which a base class may have."""
    for definition in inspect.getmro(call) if isinstance(call, type) else (call,):
        function = vars(definition).get("__init__") if isinstance(definition, type) else definition
        if not isinstance(function, types.FunctionType):
            continue
        try:
            hints = typing.get_type_hints(function)
        except (NameError, TypeError, AttributeError):  # a name that only a type checker sees
            continue
        parameters = inspect.signature(function).parameters
        variadic_names = [n for n, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        parameter_names = [name] if name in parameters else variadic_names
        if annotated_classes := [cls for n in parameter_names for cls in _classes_in_hint(hints.get(n))]:
            yield from annotated_classes
            return


def _classes_in_hint(hint: Any) -> Iterator[type]:
    origin = typing.get_origin(hint)
    if origin is not None and not isinstance(origin, type):
        origin = None
    for candidate in (hint, origin):
        if isinstance(candidate, type) and candidate.__module__.partition(".")[0] == "fedsim":
            yield candidate
    for inner in typing.get_args(hint):
        yield from _classes_in_hint(inner)


def _is_installed(root: str) -> bool | None:
    """Is it Python's own, or among the installed packages? None where nothing of the name is found."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return root != "__main__"
    if spec is None:
        return None
    locations = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or [])
    if not locations:
        return True  # built in, or frozen
    library_roots = [
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    return any(
        {"site-packages", "dist-packages"} & set(location.parts)
        or any(location.is_relative_to(base) for base in library_roots)
        for location in (Path(text).resolve() for text in locations)
    )
