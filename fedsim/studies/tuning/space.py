"""What is tuned: knobs with a grid of values or an interval, written in Hydra's syntax for sweeps.

Annotations are evaluated here, since Hydra looks at those of `log`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, Transformer

from fedsim.app.explain import explain
from fedsim.core.errors import ConfigError

Trial: TypeAlias = tuple[tuple[str, Any], ...]  # key and value of each knob, in their order

LOG = "log"  # Hydra's tag of a logarithmic scale
GEOMETRIC = (
    1.25  # the largest quotient of two ratios of neighbours in a grid that counts as geometric: 0.1, 0.3, 1 does
)


@dataclass(frozen=True)
class Grid:
    """A knob with a list of values.

    Attributes:
        key: of the configuration, or a group.
        values: that are tried; what is not a number is the text of an override's value.
    """

    key: str
    values: tuple[Any, ...]

    @property
    def ratio(self) -> float | None:
        """The mean ratio of neighbours in a geometric grid of positive numbers; None for other grids."""
        if len(self.values) < 2 or not all(is_number(value) and value > 0 for value in self.values):
            return None
        ordered = sorted(map(float, self.values))
        ratios = [high / low for low, high in itertools.pairwise(ordered)]
        if min(ratios) <= 1 or max(ratios) / min(ratios) > GEOMETRIC:
            return None
        return float((ordered[-1] / ordered[0]) ** (1 / (len(ordered) - 1)))

    def beyond(self, value: Any) -> float | int | None:
        """The next value of a geometric grid behind its edge; None if `value` is not at an edge."""
        ratio = self.ratio
        if ratio is None or value not in (min(self.values), max(self.values)):
            return None
        following = two_digits(value * ratio if value == max(self.values) else value / ratio)
        if all(isinstance(number, int) for number in self.values):
            whole_number = round(following)
            return (
                whole_number
                if whole_number > 0 and whole_number not in self.values and math.isclose(whole_number, following)
                else None
            )
        return following


@dataclass(frozen=True)
class Interval:
    """A knob with numbers between two bounds.

    Attributes:
        key: of the configuration.
        low, high: bounds.
        log: whether numbers are drawn on a logarithmic scale.
    """

    key: str
    low: float
    high: float
    log: bool


Knob: TypeAlias = Grid | Interval


def two_digits(value: float) -> float:
    """A number rounded to two significant digits."""
    return float(f"{value:.2g}")


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def log(low: int | float, high: int | float, count: int = 0) -> Any:
    """`log(0.001,1,8)`, 8 values with a constant ratio; `log(0.001,1)`, an interval on a logarithmic scale."""
    if not 0 < low < high or count < 0 or count == 1:
        raise ValueError(f"log({low},{high},{count}) needs 0 < low < high and at least two values")
    if not count:
        return IntervalSweep(start=float(low), end=float(high), tags={LOG})
    return ChoiceSweep(list=[two_digits(value) for value in np.geomspace(low, high, count)], tags={LOG})


def parse(words: Sequence[str]) -> tuple[tuple[str, ...], list[Knob]]:
    """Overrides that hold for all trials, and the knobs.

    Raises:
        ConfigError: a word cannot be parsed, or there is no knob.
    """
    functions = create_functions()
    functions.register(LOG, log)
    try:
        parsed = OverridesParser(functions).parse_overrides(list(words))
    except Exception as error:
        raise ConfigError(explain(error)) from error
    fixed = tuple(word for word, override in zip(words, parsed, strict=True) if not override.is_sweep_override())
    knobs = [_knob(override) for override in parsed if override.is_sweep_override()]
    if not knobs:
        raise ConfigError("nothing is tuned; give several values to a key, such as 'lr=log(0.001,1,8)' or lr=0.1,0.3,1")
    keys = [knob.key for knob in knobs]
    if duplicates := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"{', '.join(sorted(duplicates))} is given twice; give all its values at once")
    if reserved := {"seeds", "out", "resume", "rounds"} & set(keys):
        raise ConfigError(
            f"{', '.join(sorted(reserved))} cannot be tuned; seeds are set by --seeds, and rounds by one value"
        )
    return fixed, knobs


def _knob(override: Override) -> Knob:
    key, sweep = override.get_key_element(), override.value()
    if isinstance(sweep, IntervalSweep):
        low, high = float(sweep.start or 0.0), float(sweep.end or 0.0)
        if not low < high or (LOG in sweep.tags and low <= 0):
            raise ConfigError(
                f"{override.input_line}: an interval needs a lower bound below the upper one, and above 0 for log"
            )
        return Interval(key, low, high, LOG in sweep.tags)
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
    return Grid(key, values)


def product(grids: Sequence[Grid]) -> list[Trial]:
    """All combinations of the grids' values, the last knob's changing first."""
    keys = [grid.key for grid in grids]
    return [tuple(zip(keys, values, strict=True)) for values in itertools.product(*(grid.values for grid in grids))]


def as_override(key: str, value: Any) -> str:
    """The override that gives a key this value."""
    return f"{key}={value!r}" if is_number(value) else f"{key}={value}"


def overrides_of(trial: Trial) -> str:
    """A trial as overrides."""
    return " ".join(as_override(key, value) for key, value in trial)
