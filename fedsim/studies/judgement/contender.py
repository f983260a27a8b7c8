"""The strategies that are compared: a choice or a class, and the knobs by which it is tuned."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.app.config import choice_target, groups
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.judgement.environments import BenchmarkEnvironments
from fedsim.studies.tuning.space import IntervalKnob, Trial, format_override, parse_knobs


@dataclass(frozen=True)
class Contender:
    """A strategy.

    Attributes:
        name: a choice of the group strategy, or the dotted path of a class.
        overrides: that choose it.
        knob_overrides: what is tuned.
        default_trial: its settings where nothing is tuned.
        source_digest: digest of its class's source.
    """

    name: str
    overrides: tuple[str, ...]
    knob_overrides: tuple[str, ...]
    default_trial: Trial
    source_digest: str


def make_contender(
    contender_name: str, environments: BenchmarkEnvironments, knob_names: Sequence[str] = ()
) -> Contender:
    """A strategy by its choice or class, with the knobs of its rates and further ones.

    A class without server_lr gets as many values of the local rate as the others have pairs of rates.

    Raises:
        ConfigError: there is no such strategy.
    """
    overrides: tuple[str, ...]
    if "." not in contender_name:
        checks.check_choice("strategy", contender_name, groups()["strategy"])
        cls, overrides = _import_class(choice_target("strategy", contender_name)), (f"strategy={contender_name}",)
    else:
        cls, overrides = _import_class(contender_name), ("strategy=custom", f"strategy._target_={contender_name}")
    has_rate = "server_lr" in inspect.signature(cls).parameters
    if "." in contender_name:  # strategy=custom has no keys of its own
        strategy_knobs = (
            [knob for knob in parse_knobs(knob_names)[1] if knob.key.startswith("strategy.")] if knob_names else []
        )
        firsts = [
            format_override(knob.key, knob.lower_bound if isinstance(knob, IntervalKnob) else knob.values[0])
            for knob in strategy_knobs
        ]
        overrides = (*overrides, *(f"++{text}" for text in (*["strategy.server_lr=1.0"] * has_rate, *firsts)))
    rates: tuple[str, ...] = (f"lr={environments.rates_alone}",)
    if has_rate:
        rates = (f"lr={environments.rates}", f"strategy.server_lr={environments.server_rates}")
    default = (("lr", 0.1), ("strategy.server_lr", 1.0)) if has_rate else (("lr", 0.1),)
    source = hashlib.sha256(inspect.getsource(inspect.getmodule(cls) or cls).encode()).hexdigest()[:10]
    return Contender(contender_name, overrides, (*rates, *knob_names), default, source)


def _import_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        strategy_class: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported ({error}); give a class as PACKAGE.MODULE.CLASS") from error
    if not inspect.isclass(strategy_class):
        raise ConfigError(f"{path} is not a class; give a class as PACKAGE.MODULE.CLASS")
    return strategy_class
