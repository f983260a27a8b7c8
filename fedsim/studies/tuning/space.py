"""What is tuned: knobs with a grid of values or an interval, written in Hydra's syntax for sweeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Transformer

from fedsim.app.explain import explain_hydra_error
from fedsim.app.log_scale import LOG, accept_log_intervals, rounded_to_two_digits
from fedsim.core.errors import ConfigError

Trial: TypeAlias = tuple[tuple[str, Any], ...]  # key and value of each knob, in their order

GEOMETRIC = (
    1.25  # the largest quotient of two ratios of neighbours in a grid that counts as geometric: 0.1, 0.3, 1 does
)


@dataclass(frozen=True)
class GridKnob:
    """A knob with a list of values.

    Attributes:
        key: of the configuration, or a group.
        values: that are tried; what is not a number is the text of an override's value.
    """

    key: str
    values: tuple[Any, ...]

    @property
    def geometric_ratio(self) -> float | None:
        """The mean ratio of neighbours in a geometric grid of positive numbers; None for other grids."""
        if len(self.values) < 2 or not all(is_number(value) and value > 0 for value in self.values):
            return None
        ordered = sorted(map(float, self.values))
        ratios = [high / low for low, high in itertools.pairwise(ordered)]
        if min(ratios) <= 1 or max(ratios) / min(ratios) > GEOMETRIC:
            return None
        return float((ordered[-1] / ordered[0]) ** (1 / (len(ordered) - 1)))

    def next_value_beyond_edge(self, value: Any) -> float | int | None:
        """The next value of a geometric grid behind its edge; None if `value` is not at an edge."""
        ratio = self.geometric_ratio
        if ratio is None or value not in (min(self.values), max(self.values)):
            return None
        next_value = rounded_to_two_digits(value * ratio if value == max(self.values) else value / ratio)
        if all(isinstance(number, int) for number in self.values):
            whole_number = round(next_value)
            return (
                whole_number
                if whole_number > 0 and whole_number not in self.values and math.isclose(whole_number, next_value)
                else None
            )
        return next_value


@dataclass(frozen=True)
class IntervalKnob:
    """A knob with numbers between two bounds.

    Attributes:
        key: of the configuration.
        lower_bound, upper_bound: bounds.
        is_logarithmic: whether numbers are drawn on a logarithmic scale.
    """

    key: str
    lower_bound: float
    upper_bound: float
    is_logarithmic: bool


Knob: TypeAlias = GridKnob | IntervalKnob


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_knobs(override_texts: Sequence[str]) -> tuple[tuple[str, ...], list[Knob]]:
    """Overrides that hold for all trials, and the knobs.

    Raises:
        ConfigError: a word cannot be parsed, or there is no knob.
    """
    try:
        with accept_log_intervals():
            parsed = OverridesParser.create().parse_overrides(list(override_texts))
    except Exception as error:
        raise ConfigError(explain_hydra_error(error)) from error
    fixed_overrides = tuple(
        override_text
        for override_text, override in zip(override_texts, parsed, strict=True)
        if not override.is_sweep_override()
    )
    knobs = [_parse_knob(override) for override in parsed if override.is_sweep_override()]
    if not knobs:
        raise ConfigError("nothing is tuned; give several values to a key, such as 'lr=log(0.001,1,8)' or lr=0.1,0.3,1")
    keys = [knob.key for knob in knobs]
    if duplicate_keys := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"{', '.join(sorted(duplicate_keys))} is given twice; give all its values at once")
    if reserved_keys := {"seeds", "out", "resume", "rounds"} & set(keys):
        raise ConfigError(
            f"{', '.join(sorted(reserved_keys))} cannot be tuned; seeds are set by {{seeds}}, and rounds by one value",
            mentions=("seeds",),
        )
    return fixed_overrides, knobs


def _parse_knob(override: Override) -> Knob:
    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, IntervalSweep):
        low, high = float(sweep.start or 0.0), float(sweep.end or 0.0)
        if not low < high or (LOG in sweep.tags and low <= 0):
            raise ConfigError(
                f"{override.input_line}: an interval needs a lower bound below the upper one, and above 0 for log"
            )
        return IntervalKnob(key, low, high, LOG in sweep.tags)
    try:
        elements = list(override.sweep_iterator(transformer=Transformer.identity))
        texts = [str(text) for text in override.sweep_iterator(transformer=Transformer.encode)]
    except Exception as error:
        raise ConfigError(f"{override.input_line}: {error}; list the values") from error
    values = tuple(
        element if is_number(element) else text.partition("=")[2] if text.startswith(f"{key}=") else text
        for element, text in zip(elements, texts, strict=True)
    )
    if len(set(values)) < len(values):
        raise ConfigError(f"{override.input_line}: a value is listed twice")
    return GridKnob(key, values)


def grid_trials(grids: Sequence[GridKnob]) -> list[Trial]:
    """All combinations of the grids' values, the last knob's changing first."""
    keys = [grid.key for grid in grids]
    return [tuple(zip(keys, values, strict=True)) for values in itertools.product(*(grid.values for grid in grids))]


def learning_rate_products(trials: Sequence[Trial]) -> list[float] | None:
    """Of each trial the product of its learning rates, the positive numbers whose key is `lr` or ends with `_lr`.

    Returns:
        None if there are no such knobs, or not for all trials.
    """
    rates = [
        [float(value) for key, value in trial if is_learning_rate_key(key) and is_number(value) and value > 0]
        for trial in trials
    ]
    if not rates or not rates[0] or any(len(of) < len(rates[0]) for of in rates):
        return None
    return [math.prod(of) for of in rates]


def is_learning_rate_key(key: str) -> bool:
    """Whether a key is a learning rate: `lr`, `local.lr`, `strategy.server_lr`."""
    name = key.rpartition(".")[2]
    return name == "lr" or name.endswith("_lr")


def format_override(key: str, value: Any) -> str:
    """The override that gives a key this value."""
    return f"{key}={value!r}" if is_number(value) else f"{key}={value}"


def trial_overrides(trial: Trial) -> str:
    """A trial as overrides."""
    return " ".join(format_override(key, value) for key, value in trial)
