"""The classes and functions that a `_target_` in a configuration may name.

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
)  # packages in which classes for configurations are looked for
REMOTE_CODE_ARGUMENT = "trust_remote_code"  # with which Hugging Face's libraries run code from a repository
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
class ComponentKind:
    """The classes that are allowed in a place of a configuration.

    Attributes:
        description: they are called in messages, with their article.
        bases: classes that one is derived from; empty: any class.
        required_methods: methods that it has besides.
        modules: of the built-in packages where such classes are defined.
        reexporting_modules: further modules through which they may be named, without those below them.
        class_names: of the classes there that count; None: all.
        is_builder_function: says of a function of these modules whether it builds such an object.
        built_in_bases: bases of classes of built-in packages, where these differ from `bases`.
        argument_kinds_by_name: kinds of the objects among its arguments whose annotation does not say them.
        argument_kinds: kinds that arguments of the user's own classes may have.
        allows_instances: whether callable objects of the user's own code fit, too.
    """

    description: str
    bases: tuple[type, ...] = ()
    required_methods: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    reexporting_modules: tuple[str, ...] = ()
    class_names: frozenset[str] | None = None
    is_builder_function: Callable[[Any], bool] = field(default=lambda candidate: False)
    built_in_bases: tuple[type, ...] = ()
    argument_kinds_by_name: Mapping[str, ComponentKind] = field(default_factory=dict)
    argument_kinds: tuple[ComponentKind, ...] = ()
    allows_instances: bool = False

    def is_valid_class(self, candidate: type) -> bool:
        """Return whether a class is of this kind."""
        defined_names = {name for base in candidate.__mro__ if base is not object for name in vars(base)}
        return (not self.bases or issubclass(candidate, self.bases)) and defined_names >= set(self.required_methods)

    def includes_built_in(self, candidate: Any) -> bool:
        """Return whether a class or function is a built-in one of this kind."""
        if not _is_within_modules(candidate.__module__, self.modules):
            return False
        if not isinstance(candidate, type):
            return bool(self.is_builder_function(candidate))
        is_listed = self.class_names is None or candidate.__name__ in self.class_names
        return (
            is_listed
            and self.is_valid_class(candidate)
            and (not self.built_in_bases or issubclass(candidate, self.built_in_bases))
        )


@dataclass(frozen=True)
class ImportTrustSettings:
    """Attributes:

    trusted_packages: that the user trusts besides.
    trusts_own_code: is the user's own code trusted?
    remedy: how a package is trusted.
    """

    trusted_packages: tuple[str, ...] = ()
    trusts_own_code: bool = True
    remedy: str = TRUST_ON_COMMAND_LINE


_current_trust: ContextVar[ImportTrustSettings] = ContextVar(
    "whose code configurations may name",
    default=ImportTrustSettings(),  # noqa: B039 (frozen)
)


@contextlib.contextmanager
def trust_packages(
    packages: Sequence[str], own_code: bool = True, remedy: str = TRUST_ON_COMMAND_LINE
) -> Iterator[None]:
    """Within the block these packages are trusted, and the user's own code if `own_code` is set."""
    token = _current_trust.set(ImportTrustSettings(tuple(packages), own_code, remedy))
    try:
        yield
    finally:
        _current_trust.reset(token)


def migrated_target_path(target: str) -> str:
    """Return the current dotted path of a class of fedsim, given the path in an earlier version."""
    package, dot, subpath = target.partition(".")
    head, end, name = subpath.partition(".")
    current_module = RENAMED_MODULES.get(f"{package}{dot}{head}")
    return target if current_module is None else f"{current_module}{end}{name}"


def with_current_class_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted keys, with the current name in each `_target_`."""
    return {
        key: migrated_target_path(value) if key.rpartition(".")[2] == "_target_" and isinstance(value, str) else value
        for key, value in settings.items()
    }


def resolve_target(config_key: str, dotted_path: str, expected_kind: ComponentKind) -> Any:
    """Return the class or function at a dotted path.

    Args:
        config_key: under which a configuration names it.
        dotted_path: package.module.Name.
        expected_kind: that the place wants.

    Raises:
        ConfigError: a configuration may not name it there.
        ImportError, ValueError: there is no such thing.
    """
    dotted_path = migrated_target_path(dotted_path)
    path_segments = _checked_path_segments(config_key, dotted_path)
    root = path_segments[0]
    trust_label = _trust_source(root)
    if trust_label is None:
        raise ConfigError(f"{config_key}={dotted_path!r} {_untrusted_text(root)}")
    if trust_label == "built in" and not (
        _is_within_modules(dotted_path, expected_kind.modules)
        or dotted_path.rpartition(".")[0] in expected_kind.reexporting_modules
    ):
        raise ConfigError(f"{config_key}={dotted_path!r} {_unfit_text(root, expected_kind)}")
    if root in ("torchvision", "torchmetrics"):
        from fedsim.core.torchvision_import import import_torchvision

        import_torchvision()  # a plain import fails where its compiled operators cannot be loaded
    candidate = _walk_path(config_key, dotted_path, path_segments, trust_label)
    _check_target_object(config_key, dotted_path, candidate, expected_kind, trust_label)
    return candidate


def _checked_path_segments(config_key: str, dotted_path: str) -> list[str]:
    """Return the names on a dotted path; forbidden ones are refused before anything is imported."""
    path_segments = dotted_path.split(".")
    if not all(segment.isidentifier() for segment in path_segments):
        raise ConfigError(f"{config_key}={dotted_path!r} is not the path of a class; give package.module.Class")
    for segment in path_segments:
        if segment.startswith("_"):
            raise ConfigError(
                f"{config_key}={dotted_path!r}: {segment} begins with an underscore, and is closed to configurations"
            )
    return path_segments


def _check_target_object(
    config_key: str, dotted_path: str, candidate: Any, expected_kind: ComponentKind, trust_label: str
) -> None:
    """Refuse a candidate that is not a class or function, that is defined in a package that is not trusted, or that
    does not fit the place. The defining module counts, not only the path: `trusted_package.os.system` belongs to
    the operating system."""
    defining_module, is_class = _defining_module(candidate), isinstance(candidate, type)
    is_function = isinstance(candidate, (types.FunctionType, types.BuiltinFunctionType))
    if not (
        is_class
        or is_function
        or (expected_kind.allows_instances and callable(candidate) and trust_label != "built in")
    ):
        raise ConfigError(f"{config_key}={dotted_path!r} is a {type(candidate).__name__}; give a function or class")
    home_root = defining_module.partition(".")[0] or "builtins"
    home_trust = _trust_source(home_root)
    if home_trust is None or (trust_label == "built in" and home_trust != trust_label):
        qualified_name = f"{defining_module}.{getattr(candidate, '__qualname__', type(candidate).__name__)}"
        raise ConfigError(f"{config_key}={dotted_path!r} is {qualified_name}, and that {_untrusted_text(home_root)}")
    if home_trust == "built in" and not expected_kind.includes_built_in(candidate):
        raise ConfigError(f"{config_key}={dotted_path!r} {_unfit_text(home_root, expected_kind)}")
    if isinstance(candidate, types.BuiltinFunctionType) and home_trust != "named":
        raise ConfigError(
            f"{config_key}={dotted_path!r} is a builtin function; give a class, or a function written in Python"
        )
    if is_class and not expected_kind.is_valid_class(candidate):
        raise ConfigError(
            f"{config_key}={dotted_path!r} is a class, but not {expected_kind.description}; "
            f"{_requirement_text(expected_kind)}"
        )


@dataclass
class ObjectSpec:
    """An object that a configuration describes, ready to be built.

    Attributes:
        key: where it stands.
        kind: it is of.
        factory: its class, or the function that builds it.
        arguments: of the call; those that are objects are parts themselves.
    """

    key: str
    kind: ComponentKind
    factory: Callable[..., Any]
    arguments: dict[str, Any]

    def nested_objects(self) -> Iterator[ObjectSpec]:
        """Yield this object and those among its arguments, the innermost first."""
        yield from _configured_objects_within(list(self.arguments.values()))
        yield self

    def build(self) -> Any:
        """Build the object.

        Raises:
            ConfigError: the class refuses its arguments; the message names the key.
        """
        for name, value in self.arguments.items():
            if isinstance(value, str) and value == MISSING_VALUE:
                raise ConfigError(f"{self.key}.{name} is missing; set {self.key}.{name}=…")
        arguments = {name: _build_value(value) for name, value in self.arguments.items()}
        try:
            instance = self.factory(**arguments)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, ConfigError):
                cause = cause.__cause__
            if isinstance(cause, ConfigError):
                raise cause.with_key_prefix(self.key) from None
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise ConfigError(f"{self.key}: {reason}") from error
        if self.kind.bases and not isinstance(instance, self.kind.bases):
            raise ConfigError(
                f"{self.key}: {self.factory.__qualname__} returned a {type(instance).__name__}, not "
                f"{self.kind.description}; {_requirement_text(self.kind)}"
            )
        return instance


def parse_object(config_key: str, config_node: Mapping[str, Any], expected_kind: ComponentKind) -> ObjectSpec:
    """Parse a mapping with a `_target_`, without calling anything.

    Raises:
        ConfigError: it names what none may, or what is not there; the message says where.
    """
    target = config_node.get("_target_")
    if target is None or target == MISSING_VALUE:
        raise ConfigError(f"{config_key}._target_ is missing; set {config_key}._target_=package.module.Class")
    if not isinstance(target, str):
        raise ConfigError(f"{config_key}._target_={target!r} names no class; choose one of the group's choices")
    for reserved_key, neutral_value in RESERVED_KEY_DEFAULTS.items():
        if config_node.get(reserved_key, neutral_value) not in (neutral_value, None):
            if reserved_key == "_partial_":
                raise ConfigError(
                    f"{config_key}._partial_=true leaves an object half made, and a run needs a whole one; leave it out"
                )
            raise ConfigError(
                f"{config_key}.{reserved_key}={config_node[reserved_key]!r}: objects are built of named arguments; "
                "leave it out"
            )
    check_remote_code(config_key, config_node)
    try:
        factory = resolve_target(f"{config_key}._target_", target, expected_kind)
    except ConfigError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(f"{config_key}._target_={target!r} cannot be imported ({error})") from error
    arguments = {
        reserved_key: value
        for reserved_key, value in config_node.items()
        if reserved_key not in ("_target_", *RESERVED_KEY_DEFAULTS)
    }
    return ObjectSpec(
        config_key,
        expected_kind,
        factory,
        {
            n: _parse_nested_objects(f"{config_key}.{n}", v, allowed_argument_kinds(factory, n, expected_kind))
            for n, v in arguments.items()
        },
    )


def check_remote_code(key: str, node: Mapping[str, Any]) -> None:
    """Refuse arguments by which a library would run code from a repository."""
    if node.get(REMOTE_CODE_ARGUMENT) and not {"transformers", "datasets"} & set(_current_trust.get().trusted_packages):
        raise ConfigError(
            f"{key}.{REMOTE_CODE_ARGUMENT}={node[REMOTE_CODE_ARGUMENT]} runs code of a repository; "
            f"if you know it, {_remedy_text('transformers')}"
        )


def allowed_argument_kinds(
    factory: Any, parameter_name: str, expected_kind: ComponentKind
) -> tuple[ComponentKind, ...]:
    """Return the kinds of objects that an argument takes: for user-defined classes `argument_kinds`, otherwise by
    annotation."""
    if parameter_name in expected_kind.argument_kinds_by_name:
        return (expected_kind.argument_kinds_by_name[parameter_name],)
    if _trust_source(_defining_module(factory).partition(".")[0]) != "built in":
        return expected_kind.argument_kinds
    if bases := tuple(dict.fromkeys(_argument_classes(factory, parameter_name))):
        description = " or ".join(base.__name__ for base in bases)
        return (
            ComponentKind(f"a {description}", bases, modules=("fedsim",), argument_kinds=expected_kind.argument_kinds),
        )
    return ()


def _parse_nested_objects(config_key: str, config_value: Any, expected_kinds: Sequence[ComponentKind]) -> Any:
    """Return the same value with objects in place of mappings that have a `_target_`."""
    if isinstance(config_value, (list, tuple)):
        return [_parse_nested_objects(config_key, item, expected_kinds) for item in config_value]
    if not isinstance(config_value, Mapping):
        return config_value
    check_remote_code(config_key, config_value)
    if "_target_" not in config_value:
        return {
            name: _parse_nested_objects(f"{config_key}.{name}", item, expected_kinds)
            for name, item in config_value.items()
        }
    problem = None
    for kind in expected_kinds:
        try:
            return parse_object(config_key, config_value, kind)
        except ConfigError as error:
            problem = problem or error
    if problem is None:
        target = config_value["_target_"]
        root = str(target).partition(".")[0]
        reason = "stands where no object is wanted; leave it out" if _trust_source(root) else _untrusted_text(root)
        problem = ConfigError(f"{config_key}._target_={target!r} {reason}")
    raise problem


def _configured_objects_within(value: Any) -> Iterator[ObjectSpec]:
    if isinstance(value, ObjectSpec):
        yield from value.nested_objects()
    elif isinstance(value, (list, dict)):
        for item in value if isinstance(value, list) else value.values():
            yield from _configured_objects_within(item)


def _build_value(value: Any) -> Any:
    if isinstance(value, ObjectSpec):
        return value.build()
    if isinstance(value, dict):
        return {name: _build_value(item) for name, item in value.items()}
    return [_build_value(item) for item in value] if isinstance(value, list) else value


def _walk_path(config_key: str, dotted_path: str, path_segments: list[str], trust_label: str) -> Any:
    """Return the object at the end of the path, if everything on the way is as trusted as its root.

    On the way lie modules; of the user's own code also classes that hold the last one.
    """
    current_object: Any = importlib.import_module(path_segments[0])
    for number, name in enumerate(path_segments[1:], 1):
        if isinstance(current_object, types.ModuleType):
            current_object = _module_member(current_object, name, is_last_segment=number == len(path_segments) - 1)
        elif isinstance(current_object, type) and trust_label == "own":
            current_object = vars(current_object).get(name)
            if not isinstance(current_object, type):
                raise ConfigError(
                    f"{config_key}={dotted_path!r} is not a class; what belongs to a class is closed to configurations"
                )
        else:
            raise ConfigError(
                f"{config_key}={dotted_path!r} is an attribute of a {type(current_object).__name__}; "
                "give a function or class"
            )
        if isinstance(current_object, types.ModuleType):
            root = current_object.__name__.partition(".")[0]
            if root != path_segments[0] and (trust_label == "built in" or _trust_source(root) != trust_label):
                raise ConfigError(
                    f"{config_key}={dotted_path!r} leads to the package {root}, and that {_untrusted_text(root)}"
                )
    if isinstance(current_object, types.ModuleType):
        raise ImportError(f"{dotted_path} is a module")
    return current_object


def _module_member(module: types.ModuleType, name: str, is_last_segment: bool) -> Any:
    """Return an attribute of a module, or a module inside it; on the way modules come first, at the end attributes."""
    submodule = f"{module.__name__}.{name}"
    if not is_last_segment or not hasattr(module, name):
        try:
            return importlib.import_module(submodule)
        except ModuleNotFoundError as error:
            if not submodule.startswith(error.name or ""):
                raise  # the module exists, and one of its imports does not
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ImportError(str(error)) from error


def _defining_module(candidate: Any) -> str:
    """Return the module where a class or function was defined; for another object that of its class."""
    if isinstance(candidate, types.ModuleType):
        return candidate.__name__
    definition = (
        candidate if isinstance(candidate, (type, types.FunctionType, types.BuiltinFunctionType)) else type(candidate)
    )
    module_name = getattr(definition, "__module__", None)
    return module_name if isinstance(module_name, str) else ""


def _trust_source(root: str) -> str | None:
    """Return 'named' by the user, 'built in', the user's 'own', or None."""
    trust = _current_trust.get()
    if root in trust.trusted_packages:
        return "named"
    if root in BUILT_IN_PACKAGES and (root == "fedsim" or root in sys.modules or _is_installed(root) is not False):
        return "built in"
    return "own" if trust.trusts_own_code and not _is_installed(root) else None


def _remedy_text(root: str) -> str:
    return _current_trust.get().remedy.format(root=root)


def _untrusted_text(root: str) -> str:
    return (
        f"is of the package {root}, which configurations may not call; if you trust it with its arguments, "
        f"{_remedy_text(root)}"
    )


def _unfit_text(root: str, kind: ComponentKind) -> str:
    alternatives = f"{' or '.join(kind.modules)}, or one of your own" if kind.modules else "your own"
    trust_hint = "" if root == "fedsim" else f"; if you trust {root} with its arguments, {_remedy_text(root)}"
    return f"is not {kind.description} that configurations may build; name one of {alternatives}{trust_hint}"


def _requirement_text(kind: ComponentKind) -> str:
    if kind.bases:
        return f"derive it from {' or '.join(f'{base.__module__}.{base.__qualname__}' for base in kind.bases)}"
    return f"it needs {' and '.join(kind.required_methods)}"


def _is_within_modules(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _argument_classes(call: Any, parameter_name: str) -> Iterator[type]:
    """Return the fedsim classes in the annotation of an argument, which may be that of a base class."""
    for definition in inspect.getmro(call) if isinstance(call, type) else (call,):
        function = vars(definition).get("__init__") if isinstance(definition, type) else definition
        if not isinstance(function, types.FunctionType):
            continue
        try:
            type_hints = typing.get_type_hints(function)
        except (NameError, TypeError, AttributeError):  # a name that only a type checker sees
            continue
        parameters = inspect.signature(function).parameters
        variadic_names = [n for n, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        parameter_names = [parameter_name] if parameter_name in parameters else variadic_names
        if annotated_classes := [cls for n in parameter_names for cls in _classes_in_hint(type_hints.get(n))]:
            yield from annotated_classes
            return


def _classes_in_hint(type_hint: Any) -> Iterator[type]:
    origin = typing.get_origin(type_hint)
    if origin is not None and not isinstance(origin, type):
        origin = None
    for candidate in (type_hint, origin):
        if isinstance(candidate, type) and candidate.__module__.partition(".")[0] == "fedsim":
            yield candidate
    for argument_hint in typing.get_args(type_hint):
        yield from _classes_in_hint(argument_hint)


def _is_installed(root: str) -> bool | None:
    """Return whether a module is part of Python or of an installed package; None if no module has this name."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return root != "__main__"
    if spec is None:
        return None
    package_locations = (
        [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or [])
    )
    if not package_locations:
        return True  # built in, or frozen
    library_roots = [
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    return any(
        {"site-packages", "dist-packages"} & set(location.parts)
        or any(location.is_relative_to(base) for base in library_roots)
        for location in (Path(text).resolve() for text in package_locations)
    )
