"""A table of runs: lines and columns by the keys in which they differ, the best value of a key, differences by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.results.differences import given, order, same, swept, value
from fedsim.results.measured import Cell, Difference, Measure
from fedsim.results.paired import paired
from fedsim.results.runs import Run
from fedsim.results.selection import best, judge


@dataclass
class Table:
    """Attributes:

    keys: headings of the first columns.
    measures: of the further columns, with headings of their own.
    lines: texts of the keys, and a cell for each measure; None where there is no such run.
    notes: what a reader must know.
    """

    keys: list[str]
    measures: list[Measure]
    lines: list[tuple[list[str], list[Cell | Difference | None]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def best(self, column: int) -> int | None:
        """The line of the best mean; None among fewer than two, or of differences."""
        cells = [(n, line[1][column]) for n, line in enumerate(self.lines)]
        means = [(n, cell.mean) for n, cell in cells if isinstance(cell, Cell) and not math.isnan(cell.mean)]
        if len(means) < 2:
            return None
        return (max if self.measures[column].more else min)(means, key=lambda pair: pair[1])[0]


@dataclass
class Choice:
    """The runs that a table is of, after the best value of a key was taken.

    Attributes:
        runs: those taken.
        keys: in which they differ, those that were chosen over left out.
        chosen: keys that were chosen over.
        notes: how.
    """

    runs: list[Run]
    keys: list[str]
    chosen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose(runs: list[Run], over: Sequence[str], reported: str, by: str | None = None, last: int = 1) -> Choice:
    """Of the runs that differ in the keys `over` alone take the best.

    Args:
        runs: to choose from.
        over: keys, such as 'lr'.
        reported: the metric that the table is about, which chooses where there are no validation samples.
        by: the metric that chooses instead.
        last: evaluations at the end of a run that it is the mean of.
    """
    keys = swept(runs)
    for name in over:
        checks.choice("--best", name, keys)
    if not over:
        return Choice(runs, keys)
    remaining_keys = [key for key in keys if key not in over]
    metric, warning = (by, "") if by is not None else judge(runs, reported)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_at(run, remaining_keys), []).append(run)
    selected_runs = [best(group, metric, last) for group in groups.values()]
    largest_group = max(map(len, groups.values()))
    key_names = ", ".join(over)
    note = (
        f"{key_names}: {warning}" if warning else f"{key_names}: the best of at most {largest_group} values by {metric}"
    )
    return Choice(selected_runs, remaining_keys, list(over), [note])


def table(
    choice: Choice,
    measures: list[Measure],
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    against: dict[str, str] | None = None,
    confidence: float = 0.95,
) -> Table:
    """Lines by the keys `rows` (all that are not in `columns`), columns by the measures and `columns`.

    Args:
        choice: the runs.
        measures: what is told of each.
        rows, columns: keys in which runs differ.
        against: key → value of the runs that the others are held against, seed by seed.
        confidence: of the intervals of the differences.

    Raises:
        ConfigError: two runs have the same place, or there is nothing to be held against.
    """
    runs, keys, against = choice.runs, choice.keys, against or {}
    available_keys = [*keys, *choice.chosen]
    for option, names in (("--rows", rows), ("--columns", columns)):
        for name in names:
            checks.choice(option, name, available_keys)
    rows = list(rows) or [key for key in keys if key not in columns] + choice.chosen * (not columns)
    runs_by_row: dict[tuple[str, ...], dict[tuple[str, ...], Run]] = {}
    for run in runs:
        row_runs = runs_by_row.setdefault(_at(run, rows), {})
        if (at := _at(run, columns)) in row_runs:
            settings_text = ", ".join(
                f"{key}={text}" for key, text in zip([*rows, *columns], [*_at(run, rows), *at], strict=True)
            )
            extra_keys = [key for key in keys if key not in (*rows, *columns)]
            raise ConfigError(
                f"several runs have {settings_text or 'nothing that tells them apart'}; "
                + (
                    f"add {' or '.join(extra_keys)} to --rows or --columns, or take --best of it"
                    if extra_keys
                    else "give one of them"
                )
            )
        row_runs[at] = run
    across = sorted(dict.fromkeys(_at(run, columns) for run in runs), key=lambda at: [order(text) for text in at])
    result = Table(rows or ["run"], [], notes=list(choice.notes))
    pairs = {id(run): partner(run, runs, keys, against) for run in runs} if against else {}
    for at in across:
        result.measures += [replace(m, heading=" ".join([m.heading, _called(columns, at)]).strip()) for m in measures]
        if against:
            result.measures += [
                replace(m, heading=" ".join([f"difference of {m.heading}", _called(columns, at)]).strip())
                for m in measures
            ]
    for place in sorted(runs_by_row, key=lambda place: [order(text) for text in place]):
        cells: list[Cell | Difference | None] = []
        for at in across:
            cell = runs_by_row[place].get(at)
            cells += [None if cell is None else Cell(m.of(cell)) for m in measures]
            if against:
                cells += [_difference(m, cell, pairs, confidence) for m in measures]
        first_run = next(iter(runs_by_row[place].values()))
        result.lines.append((list(place) or [first_run.label or first_run.folder.name], cells))
    if against:
        result.notes += _said(result, confidence, against)
    return result


def partner(run: Run, runs: list[Run], keys: list[str], against: dict[str, str]) -> Run | None:
    """The run that has the values of `against` and otherwise those of this one; None of one that has them itself.

    Raises:
        ConfigError: there is none.
    """
    for key in against:
        checks.choice("--against", key, keys)
    shared_keys = [key for key in keys if key not in against and key != "seeds"]  # `paired` refuses other seeds
    candidates = [candidate for candidate in runs if all(same(candidate, key, text) for key, text in against.items())]
    reference_text = " ".join(f"{key}={text}" for key, text in against.items())
    if not candidates:
        values = {key: ", ".join(dict.fromkeys(_text(candidate, key) for candidate in runs)) for key in against}
        raise ConfigError(
            f"--against {reference_text}: no run has it; {'; '.join(f'{k} is {v}' for k, v in values.items())}"
        )
    if any(run is candidate for candidate in candidates):
        return None
    partners = [candidate for candidate in candidates if _at(candidate, shared_keys) == _at(run, shared_keys)]
    if len(partners) != 1:
        raise ConfigError(f"--against {reference_text}: {len(partners)} such runs for {run.label or run.folder}")
    return partners[0]


def _difference(
    measure: Measure, run: Run | None, pairs: dict[int, Run | None], confidence: float
) -> Difference | None:
    partner_run = None if run is None else pairs[id(run)]
    if run is None or partner_run is None:
        return None
    return Difference(
        paired(measure.of(run), measure.of(partner_run), run.seeds, partner_run.seeds, confidence), measure.more
    )


def _said(found: Table, confidence: float, against: dict[str, str]) -> list[str]:
    """A sentence for every difference, and what they have in common."""
    reference_text = " ".join(f"{key}={text}" for key, text in against.items())
    sentences = [
        f"{' '.join(row_keys)} against {reference_text}, {measure.heading.removeprefix('difference of ')}: "
        f"{cell.by.said(cell.more, measure.percent)}"
        for row_keys, cells in found.lines
        for measure, cell in zip(found.measures, cells, strict=True)
        if isinstance(cell, Difference)
    ]
    method_note = (
        f"differences are paired by seed; [low, high] is Student's {100 * confidence:g} % interval, each by itself"
    )
    return [*sentences, f"{method_note}, and k/n says that k of n pairs are better"]


def _at(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_text(run, key) for key in keys)


def _text(run: Run, key: str) -> str:
    setting = given(run, key)
    return value({key: setting}, key) if setting is not None or key in run.settings else value({}, key)


def _called(columns: Sequence[str], at: tuple[str, ...]) -> str:
    """A place among the columns: 'lr=0.1', a class by its name alone."""
    return ", ".join(text if order(text)[0] else f"{key}={text}" for key, text in zip(columns, at, strict=True))
