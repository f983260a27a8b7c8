"""Build a `Simulation` from a Hydra configuration; each mistake raises an error of one sentence that names its key."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from fedsim.app.config import groups, identifying_settings, resolved_settings, top_level_keys
from fedsim.app.signature import check_types
from fedsim.core import checks, targets
from fedsim.core.errors import ConfigError
from fedsim.core.settings import flatten_settings

if TYPE_CHECKING:  # help and shell completion run without PyTorch
    from fedsim.core.ranks import ProcessRanks
    from fedsim.run.simulation import Simulation
    from fedsim.run.tracking import Tracking

# Groups whose choices are objects that `Simulation` takes under the group's name.
PARTS = (
    "dataset",
    "partition",
    "availability",
    "drift",
    "shift",
    "contamination",
    "local",
    "strategy",
    "uplink",
    "attack",
    "clock",
    "work",
    "delay",
    "columns",
    "capacity",
    "personal",
    "stop",
)
# Keys of the top level that `Simulation` takes as they are.
TOP_LEVEL = ("clients", "rounds", "seeds", "start", "on_nonfinite")
# Keys of the top level that belong to `EvaluationOptions` and `Execution`: key → what it is called there.
EVALUATION_ARGUMENT_BY_KEY = {
    "eval_every": "every",
    "evaluate": "of",
    "metrics": "metrics",
    "diagnostics": "diagnostics",
}
EXECUTION_ARGUMENT_BY_KEY = {"device": "device", "deterministic": "deterministic"}


def build(
    cfg: DictConfig,
    ranks: ProcessRanks | None = None,
    shared: dict[str, Any] | None = None,
    trusted: Sequence[str] = (),
) -> tuple[Simulation, Tracking, dict[str, Any]]:
    """Build what a run needs: the simulation, its tracking options, and the settings that a resumed run must share.

    Args:
        cfg: the configuration.
        ranks: the processes that share the run; None: this one is alone.
        shared: data sets of other runs in this process, by their settings and device; this run's is taken from there,
            or goes there.
        trusted: packages that the user named, on the command line; a configuration that trusts others is refused.

    Raises:
        ConfigError: for anything that cannot run, naming key, value and remedy.
    """
    from fedsim.evaluation import EvaluationOptions
    from fedsim.run.setup import Setup
    from fedsim.run.simulation import Simulation
    from fedsim.trainer import Execution

    settings = resolved_settings(cfg)
    _check_setting_names(settings)
    tracking = dict(settings["tracking"])
    evaluation = {EVALUATION_ARGUMENT_BY_KEY[key]: settings[key] for key in EVALUATION_ARGUMENT_BY_KEY}
    evaluation["client_samples"] = tracking.pop("client_samples", 20)
    model = dict(settings["model"])
    loss, ridge, output = model.pop("loss", None), model.pop("ridge", 0.0), model.pop("output", None)
    setup = {key: settings[key] for key in TOP_LEVEL}
    execution = settings["trainer"] | {name: settings[key] for key, name in EXECUTION_ARGUMENT_BY_KEY.items()}
    names = alias_by_key(cfg)
    check_types(Setup, setup, names)
    execution_names = {key: f"trainer.{key}" for key in settings["trainer"]}
    evaluation_names = {name: key for key, name in EVALUATION_ARGUMENT_BY_KEY.items()} | {
        "client_samples": "tracking.client_samples"
    }
    check_types(Execution, execution, execution_names)
    check_types(EvaluationOptions, evaluation, evaluation_names)
    packages = _trusted_packages(settings["trusted"], trusted)
    with targets.trust_packages(packages), _translate_memory_errors():
        components = {name: _instantiate(name, settings[name], names) for name in PARTS if name != "dataset"}
        shared = {} if shared is None else shared
        cache_key = json.dumps([settings["dataset"], settings["device"]], sort_keys=True, default=str)
        if cache_key not in shared:
            shared[cache_key] = _instantiate("dataset", settings["dataset"], names)
        components["dataset"] = shared[cache_key]
        with _rename_error_keys(evaluation_names):
            options = EvaluationOptions(**evaluation)
        with _rename_error_keys(execution_names):
            execution_options = Execution(**execution)
        with _rename_error_keys(names | {"ridge": "model.ridge"}):
            simulation = Simulation(
                model=_model_builder(model, names),
                loss=_resolve_loss(loss),
                output=output,
                ridge=ridge,
                evaluation=options,
                execution=execution_options,
                ranks=ranks,
                **components,
                **setup,
            )
        tracking_options = _instantiate("tracking", tracking, names)
    return simulation, tracking_options, identifying_settings(cfg)


def _check_setting_names(settings: dict[str, Any]) -> None:
    """Refuse settings of the top level that are unknown or missing."""
    if settings.pop("when", None):
        raise ConfigError("when: settings for some choices are applied by the command line; give them as they are")
    setting_names = top_level_keys()
    for name in settings:
        if name not in setting_names:
            raise ConfigError(f"{name} is not a setting{checks.nearest_name_hint(name, setting_names)}")
    for name in (
        *TOP_LEVEL,
        *EVALUATION_ARGUMENT_BY_KEY,
        *EXECUTION_ARGUMENT_BY_KEY,
        *PARTS,
        "model",
        "trainer",
        "tracking",
        "trusted",
    ):
        if name not in settings:
            raise ConfigError(f"{name} is missing; leave it as it is, or give it another value")


def _trusted_packages(packages: Any, trusted: Sequence[str]) -> list[str]:
    """Return the packages that a configuration trusts, if the command line does too."""
    if not isinstance(packages, list) or not all(isinstance(name, str) and name.isidentifier() for name in packages):
        raise ConfigError(f"trusted={packages!r} must be a list of packages' names, such as [mypackage]")
    if not set(packages) <= set(trusted):
        raise ConfigError(f"trusted={packages} is set in a file; give it on the command line")
    return packages


def _resolve_loss(name: Any) -> Any:
    """Return a loss by its name, or a user-defined one by its dotted path."""
    from fedsim.models.kinds import LOSS_KIND

    if not isinstance(name, str) or "." not in name:
        return name
    try:
        return targets.resolve_target("model.loss", name, LOSS_KIND)
    except ConfigError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(f"model.loss={name!r} cannot be imported ({error})") from error


@contextlib.contextmanager
def _translate_memory_errors() -> Iterator[None]:
    """Report sizes that exceed the memory as errors of the configuration."""
    from fedsim.trainer.device_memory import is_out_of_memory

    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        if not isinstance(error, (MemoryError, OverflowError)) and not is_out_of_memory(error):
            raise
        raise ConfigError(f"the sizes of this configuration need more memory than there is ({reason})") from error


@contextlib.contextmanager
def _rename_error_keys(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block error messages name a parameter by its configuration key."""
    try:
        yield
    except ConfigError as error:
        error.with_renamed_keys(names)
        raise


def alias_by_key(cfg: DictConfig) -> dict[str, str]:
    """Return dotted key → the key by which it is set, if its value is that of another key (local.lr: ${lr})."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    names = {}
    for name, value in flatten_settings({str(k): v for k, v in raw.items()}):
        match = re.search(r"\$\{(\w+)\}", value) if isinstance(value, str) else None
        if match and match[1] not in groups():
            names[name] = match[1]
    return names


def _check_group_choices(path: str, node: dict[str, Any]) -> None:
    """Refuse values where a choice of a group is expected."""
    for key, value in node.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _check_group_choices(f"{path}.{key}", item)
        if isinstance(value, str) and (group := f"{path}.{key}".replace(".", "/")) in groups():
            raise ConfigError(f"{path}.{key}={value} is a value where a choice is wanted; set {group}={value}")


def _check_argument_types(spec: targets.ObjectSpec, names: dict[str, str]) -> None:
    """Check the types of one object's settings."""
    argument_keys = {name: names.get(f"{spec.key}.{name}", f"{spec.key}.{name}") for name in spec.arguments}
    check_types(spec.factory, spec.arguments, argument_keys)


def _instantiate(group: str, node: Any, names: dict[str, str]) -> Any:
    """Build one object; errors name the group."""
    from fedsim.app.kinds import KINDS

    if not isinstance(node, dict):
        choices = ", ".join(groups().get(group, []))
        raise ConfigError(f"{group}={node!r} is not a choice of this group; choose one of {choices}")
    _check_group_choices(group, node)
    root = targets.parse_object(group, node, KINDS[group])
    for component in root.nested_objects():
        _check_argument_types(component, names)
    try:
        with _rename_error_keys(names):
            return root.build()
    except ConfigError as error:
        if re.search("unexpected keyword argument|takes no arguments", str(error)) and "custom" in groups()[group]:
            raise ConfigError(
                f"{error}; a file or sweep that sets it for one choice does so under when.{group}.CHOICE, and "
                f"{group}=custom leaves out the keys of {group}'s other choices"
            ) from error
        raise


def _model_builder(node: dict[str, Any], names: dict[str, str]) -> Any:
    """Return a callable that builds a new module; it is called once per replicate."""
    from fedsim.app.kinds import KINDS

    if node.get("_target_", targets.MISSING_VALUE) == targets.MISSING_VALUE:
        raise ConfigError("model._target_ is missing; give the class of an nn.Module, such as package.module.Class")
    component = targets.parse_object("model", node, KINDS["model"])
    _check_argument_types(component, names)
    return functools.partial(
        component.factory, **{name: value for name, value in node.items() if name in component.arguments}
    )
