"""Tables of runs: lines and columns by the keys in which runs differ, the best value of a key, differences by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.results.bold import MIN_RELIABLE_REPLICATES, best_line_indices
from fedsim.studies.results.differences import (
    is_value_displayed_as,
    numbers_first_sort_key,
    recorded_setting,
    setting_value_text,
    swept_keys,
)
from fedsim.studies.results.display_names import UserDisplayNames, class_display_name, key_display_name
from fedsim.studies.results.paired import paired_difference
from fedsim.studies.results.run_measures import ReferenceDifference, TableCell, TableMeasure
from fedsim.studies.results.run_state import unfinished_run_text
from fedsim.studies.results.runs import Run
from fedsim.studies.results.selection import find_best_run, selection_metric

SPREADS = ("std", "interval")


@dataclass
class ResultTable:
    """A table of runs.

    Attributes:
        keys: headings of the first columns.
        measures: measures of the further columns.
        table_rows: texts of the keys, and a cell for each measure; None where there is no such run.
        notes: notes for readers.
        paper_keys, paper_rows: keys and their texts as a LaTeX table prints them; if empty, those above.
        num_block_keys: number of keys that make blocks of lines, whose best is bold.
        confidence: confidence level of the intervals that decide what is distinguishable from the best.
        reference_name: display name of the runs from which differences are taken; empty without differences.
        spread: what ± is: 'std', the standard deviation, or 'interval', half the width of Student's interval.
    """

    keys: list[str]
    measures: list[TableMeasure]
    table_rows: list[tuple[list[str], list[TableCell | ReferenceDifference | None]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paper_keys: list[str] = field(default_factory=list)
    paper_rows: list[list[str]] = field(default_factory=list)
    num_block_keys: int = 0
    confidence: float = 0.95
    reference_name: str = ""
    spread: str = SPREADS[0]

    def row_indices_by_block(self) -> list[list[int]]:
        """Return the positions of the lines in each block."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for position, (texts, _) in enumerate(self.table_rows):
            groups.setdefault(tuple(texts[: self.num_block_keys]), []).append(position)
        return list(groups.values())

    def bold_row_indices(self, column: int) -> set[int]:
        """Return the lines with the best mean of each block, and those that are not distinguishable from it."""
        measure = self.measures[column]
        return {
            lines[position]
            for lines in self.row_indices_by_block()
            for position in best_line_indices([self.table_rows[n][1][column] for n in lines], measure, self.confidence)
        }

    @property
    def replicates(self) -> list[int]:
        """The smallest and largest number of replicates of a cell."""
        counts = [len(cell.values) for _, cells in self.table_rows for cell in cells if isinstance(cell, TableCell)]
        return [min(counts, default=0), max(counts, default=0)]

    def explanations(self) -> list[str]:
        """Return sentences that explain ±, bold and differences, for a caption."""
        min_replicates, max_replicates = self.replicates
        replicates_text = (
            f"{min_replicates} to {max_replicates}" if min_replicates < max_replicates else f"{max_replicates}"
        )
        if not max_replicates:
            return []
        spread_text = "standard deviation over"
        if self.spread == "interval":
            spread_text = f"half the width of Student's {100 * self.confidence:g} % interval of the mean over"
        sentences = [f"Mean ± {spread_text} {replicates_text} seeds."] if max_replicates > 1 else ["One seed."]
        if any(self.bold_row_indices(column) for column in range(len(self.measures))):
            best = "the best of each column" + (" and block" if self.num_block_keys else "")
            if 1 < max_replicates < MIN_RELIABLE_REPLICATES:
                best += f" by its mean alone, since fewer than {MIN_RELIABLE_REPLICATES} seeds distinguish little"
            elif max_replicates > 1:
                seeds = [
                    tuple(c.seeds or ()) for _, cells in self.table_rows for c in cells if isinstance(c, TableCell)
                ]
                common_seeds = len(set(seeds)) == 1 and seeds[0]
                few_seeds_text = ""
                if min_replicates < MIN_RELIABLE_REPLICATES:
                    few_seeds_text = f"; only cells with at least {MIN_RELIABLE_REPLICATES} seeds"
                interval_text = (
                    "Student's, of differences by seed"
                    if common_seeds
                    else "of differences by seed; Welch's where the seeds differ"
                )
                best += (
                    f", and what is not distinguishable from it ({100 * self.confidence:g} % "
                    f"intervals, {interval_text}; each comparison by itself"
                    f"{few_seeds_text})"
                )
            sentences.append(f"Bold: {best}.")
        if self.reference_name:
            interval = f" [{100 * self.confidence:g} % interval, Student's]" if max_replicates > 1 else ""
            sentences.append(
                f"Differences from {self.reference_name}, paired by seed: mean{interval}, and the number of pairs in "
                "which the run is better."
            )
        has_intervals = any(" % interval" in sentence for sentence in sentences)
        if has_intervals and 1 < min_replicates < MIN_RELIABLE_REPLICATES:
            sentences.append(f"Intervals from fewer than {MIN_RELIABLE_REPLICATES} seeds are unreliable.")
        return sentences


@dataclass
class RunSelection:
    """The runs of a table after the best value of some keys was selected.

    Attributes:
        runs: the selected runs.
        keys: keys in which they differ, without those in `chosen`.
        chosen_texts: keys whose best value was selected.
        notes: how it was selected.
    """

    runs: list[Run]
    keys: list[str]
    chosen_texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def select_best_runs(
    runs: list[Run], selection_keys: Sequence[str], reported_metric: str, by: str | None = None, last: int = 1
) -> RunSelection:
    """Select the best run of each group of runs that differ only in the keys `selection_keys`.

    Args:
        runs: the runs to select from.
        selection_keys: keys, such as 'lr'.
        reported_metric: the metric of the table, which selects if there are no validation samples.
        by: another metric that selects instead.
        last: number of evaluations at the end of a run over which the metric is averaged.
    """
    keys = swept_keys(runs)
    for name in selection_keys:
        checks.check_choice("--best", name, keys)
    if not selection_keys:
        return RunSelection(runs, keys)
    remaining_keys = [key for key in keys if key not in selection_keys]
    metric, warning = (by, "") if by is not None else selection_metric(runs, reported_metric)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_column_values_of_run(run, remaining_keys), []).append(run)
    selected_runs = [find_best_run(group, metric, last) for group in groups.values()]
    group_sizes = set(map(len, groups.values()))
    count_text = f"{'at most ' if len(group_sizes) > 1 else ''}{max(group_sizes)}"
    selection_note = f"{', '.join(selection_keys)}: {warning or f'the best of {count_text} values by {metric}'}"
    edges = [_grid_edge_warning(key, selected_runs, list(groups.values())) for key in selection_keys]
    return RunSelection(
        selected_runs, remaining_keys, list(selection_keys), ["; ".join(filter(None, [selection_note, *edges]))]
    )


def _grid_edge_warning(key: str, selected_runs: Sequence[Run], groups: Sequence[Sequence[Run]]) -> str:
    """'0.5 is the largest lr tried' where the best value is at the end of those tried, and what to do; else ''."""
    sentences: dict[str, int] = {}
    for chosen_run, group in zip(selected_runs, groups, strict=True):
        numbers = [recorded_setting(run, key) for run in group]
        if len(set(map(str, numbers))) < 2 or not all(type(number) in (int, float) for number in numbers):
            continue
        value = recorded_setting(chosen_run, key)
        for end, edge_name in ((max(numbers), "largest"), (min(numbers), "smallest")):
            if value == end:
                sentence = f"{value} is the {edge_name} {key} tried"
                sentences[sentence] = sentences.get(sentence, 0) + 1
    edge_text = "; ".join(
        sentence + (f" (in {count} of {len(groups)} choices)" if len(groups) > 1 else "")
        for sentence, count in sentences.items()
    )
    return edge_text and f"{edge_text}; repeat the sweep with values beyond (finished runs are kept)"


def make_table(
    choice: RunSelection,
    measures: list[TableMeasure],
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    reference_settings: dict[str, str] | None = None,
    confidence: float = 0.95,
    blocks: Sequence[str] = (),
    renaming: UserDisplayNames | None = None,
    spread: str = SPREADS[0],
) -> ResultTable:
    """Return a table with lines by the keys `rows` (else all not in `columns`), columns by measures and `columns`.

    Args:
        choice: the runs.
        measures: the measures of each run.
        rows, columns: keys in which runs differ.
        reference_settings: key → value of the reference runs, with which the others are compared by seed.
        confidence: confidence level of the intervals of the differences.
        blocks: those of the rows' keys that make blocks of lines.
        renaming: the user's names for keys, values and metrics.
        spread: see `ResultTable`.

    Raises:
        ConfigError: two runs belong in the same cell, or there is no reference run.
    """
    runs, keys, reference_settings = choice.runs, choice.keys, reference_settings or {}
    rows = _keys_of_rows(choice, rows, columns, blocks)
    if reference_settings and not keys:
        best_text = f" (after --best {','.join(choice.chosen_texts)})" if choice.chosen_texts else ""
        option_text = " ".join(f"{key}={text}" for key, text in reference_settings.items())
        raise ConfigError(f"--against {option_text}: no setting differs between the runs{best_text}")
    naming = _DisplayNames(runs, renaming or UserDisplayNames())
    runs_by_row = _runs_by_row_and_column(runs, keys, rows, columns)
    column_places = sorted(
        dict.fromkeys(_column_values_of_run(run, columns) for run in runs),
        key=lambda at: [numbers_first_sort_key(text) for text in at],
    )
    result = ResultTable(
        [naming.user_display_names(key, key_display_name(key)) for key in rows] or ["run"],
        [],
        notes=list(choice.notes),
        paper_keys=[naming.user_display_names(key_display_name(key), key) for key in rows] or ["run"],
        num_block_keys=len(blocks),
        confidence=confidence,
        reference_name=", ".join(naming.latex_name(key, text) for key, text in reference_settings.items()),
        spread=spread,
    )
    interval_level = confidence if spread == "interval" else None
    measures = [naming.with_display_names(measure) for measure in measures]
    pairs = {id(run): find_partner(run, runs, keys, reference_settings) for run in runs} if reference_settings else {}
    for column_values in column_places:
        result.measures += _column_group_measures(column_values, columns, measures, naming, bool(reference_settings))
    states = {id(run): state for run in runs if (state := unfinished_run_text(run))}
    for row_key in sorted(runs_by_row, key=lambda values: [numbers_first_sort_key(text) for text in values]):
        cells: list[TableCell | ReferenceDifference | None] = []
        for column_values in column_places:
            cell = runs_by_row[row_key].get(column_values)
            cells += [
                None
                if cell is None
                else TableCell(m.values_function(cell), cell.seeds, id(cell) in states, interval_level)
                for m in measures
            ]
            if reference_settings:
                cells += [_difference_cell(m, cell, pairs, confidence) for m in measures]
        values = list(zip(rows, row_key, strict=True))
        run_name = [] if rows else [naming.row_name(list(runs_by_row[row_key].values()))]
        result.table_rows.append(([naming.plain_name(*value) for value in values] or run_name, cells))
        result.paper_rows.append([naming.latex_name(*value) for value in values] or run_name)
    naming.user_display_names.check()
    if states:
        unfinished_runs = [f"{run.label or run.folder.name} ({states[id(run)]})" for run in runs if id(run) in states]
        result.notes.append(f"* unfinished: {'; '.join(unfinished_runs)}")
    if reference_settings:
        result.notes += _table_notes(result, confidence, reference_settings)
    return result


def _keys_of_rows(
    choice: RunSelection, rows: Sequence[str], columns: Sequence[str], blocks: Sequence[str]
) -> list[str]:
    """Return the keys of the lines, those of blocks first."""
    available_keys = [*choice.keys, *choice.chosen_texts]
    for option, names in (("--rows", rows), ("--columns", columns)):
        for name in names:
            checks.check_choice(option, name, available_keys)
    if not rows:
        rows = [key for key in choice.keys if key not in columns]
        if not columns:  # the best value of a key is a column of text, unless columns leave it no single value
            rows += choice.chosen_texts
    for name in blocks:
        checks.check_choice("--blocks", name, rows)
    return [*blocks, *(key for key in rows if key not in blocks)]


def _runs_by_row_and_column(
    runs: Sequence[Run], keys: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> dict[tuple[str, ...], dict[tuple[str, ...], Run]]:
    """Return values of the rows' keys → values of the columns' keys → the run that has them."""
    runs_by_row: dict[tuple[str, ...], dict[tuple[str, ...], Run]] = {}
    for run in runs:
        row_runs = runs_by_row.setdefault(_column_values_of_run(run, rows), {})
        column_values = _column_values_of_run(run, columns)
        if column_values in row_runs:
            shared_settings = zip([*rows, *columns], [*_column_values_of_run(run, rows), *column_values], strict=True)
            settings_text = (
                ", ".join(f"{key}={text}" for key, text in shared_settings) or "no setting that distinguishes them"
            )
            extra_keys = [key for key in keys if key not in (*rows, *columns)]
            remedy = "give one of them"
            if extra_keys:
                remedy = f"add {' or '.join(extra_keys)} to --rows or --columns, or take --best of it"
            raise ConfigError(f"several runs have {settings_text}; {remedy}")
        row_runs[column_values] = run
    return runs_by_row


def _column_group_measures(
    column_values: Sequence[str],
    columns: Sequence[str],
    measures: Sequence[TableMeasure],
    naming: _DisplayNames,
    differences: bool,
) -> list[TableMeasure]:
    """Return the measures of one group of columns, followed by their differences to the reference runs."""
    block_label = _block_label(
        [naming.user_display_names(key, key_display_name(key)) for key in columns],
        [naming.plain_name(key, text) for key, text in zip(columns, column_values, strict=True)],
    )
    placed_measures = [
        replace(m, column_group_label=naming.column_group_label(columns, column_values)) for m in measures
    ]
    headed_measures = [replace(m, heading=f"{m.heading} {block_label}".strip()) for m in placed_measures]
    if differences:
        for m in placed_measures:
            in_points = [text.replace(" (%)", " (percentage points)") for text in (m.heading, m.label or m.heading)]
            heading = f"difference of {in_points[0]} {block_label}".strip()
            headed_measures.append(replace(m, heading=heading, label=f"difference of {in_points[1]}"))
    return headed_measures


def find_partner(run: Run, runs: list[Run], keys: list[str], reference_settings: dict[str, str]) -> Run | None:
    """Return the run with the values of `reference_settings` and otherwise this run's; None if this run is a reference
    itself.

    Raises:
        ConfigError: there is no such run, or there are several.
    """
    for key in reference_settings:
        checks.check_choice("--against", key, keys)
    # `paired_difference` refuses other seeds.
    shared_keys = [key for key in keys if key not in reference_settings and key != "seeds"]
    candidates = [
        candidate
        for candidate in runs
        if all(is_value_displayed_as(candidate, key, text) for key, text in reference_settings.items())
    ]
    reference_text = " ".join(f"{key}={text}" for key, text in reference_settings.items())
    if not candidates:
        values = {
            key: ", ".join(dict.fromkeys(_setting_text(candidate, key) for candidate in runs))
            for key in reference_settings
        }
        raise ConfigError(
            f"--against {reference_text}: no run has it; {'; '.join(f'{k} is {v}' for k, v in values.items())}"
        )
    if any(run is candidate for candidate in candidates):
        return None
    partners = [
        candidate
        for candidate in candidates
        if _column_values_of_run(candidate, shared_keys) == _column_values_of_run(run, shared_keys)
    ]
    if len(partners) != 1:
        raise ConfigError(f"--against {reference_text}: {len(partners)} such runs for {run.label or run.folder}")
    return partners[0]


def _difference_cell(
    measure: TableMeasure, run: Run | None, pairs: dict[int, Run | None], confidence: float
) -> ReferenceDifference | None:
    partner_run = None if run is None else pairs[id(run)]
    if run is None or partner_run is None:
        return None
    return ReferenceDifference(
        paired_difference(
            measure.values_function(run), measure.values_function(partner_run), run.seeds, partner_run.seeds, confidence
        ),
        measure.higher_is_better,
    )


def _table_notes(table_or_result: ResultTable, confidence: float, reference_settings: dict[str, str]) -> list[str]:
    """Return a sentence for each difference, followed by a note on the method."""
    reference_text = " ".join(f"{key}={text}" for key, text in reference_settings.items())
    sentences = [
        f"{' '.join(row_keys)} against {reference_text}, {measure.heading.removeprefix('difference of ')}: "
        f"{cell.paired_differences.summary_sentence(cell.higher_is_better, measure.is_percent)}"
        for row_keys, cells in table_or_result.table_rows
        for measure, cell in zip(table_or_result.measures, cells, strict=True)
        if isinstance(cell, ReferenceDifference)
    ]
    method_note = (
        f"differences are paired by seed; [low, high] is Student's {100 * confidence:g} % interval, "
        "without correction for multiple comparisons"
    )
    return [*sentences, f"{method_note}, and k/n says that k of n pairs are better"]


class _DisplayNames:
    """The display names of keys, values and measures in a table.

    Args:
        runs: the runs whose classes name the choices of groups.
        renaming: the user's names.
    """

    def __init__(self, runs: Sequence[Run], renaming: UserDisplayNames) -> None:
        self.runs, self.user_display_names = runs, renaming

    def _display_text(self, key: str, text: str) -> str:
        targets = {run.settings.get(f"{key}._target_") for run in self.runs if _setting_text(run, key) == text}
        target = targets.pop() if len(targets) == 1 else None
        return class_display_name(text, str(target)) if target else text

    def plain_name(self, key: str, text: str) -> str:
        """Return the name of a value in plain text."""
        return self.user_display_names(text, self._display_text(key, text))

    def latex_name(self, key: str, text: str) -> str:
        """Return the name of a value in a LaTeX table."""
        return self.user_display_names(self._display_text(key, text), text)

    def row_name(self, runs: Sequence[Run]) -> str:
        """A line that no key names: its run, or the strategy that its several runs share, or nothing."""
        if len(runs) == 1:
            return self.user_display_names(runs[0].label or runs[0].folder.name)
        strategies = {recorded_setting(run, "strategy") for run in runs}
        is_single_strategy = len(strategies) == 1 and None not in strategies
        return self.plain_name("strategy", _setting_text(runs[0], "strategy")) if is_single_strategy else ""

    def column_group_label(self, columns: Sequence[str], column_values: Sequence[str]) -> str:
        """Return the label of a group of columns: 'learning rate 0.1', or only the name of a class."""
        values = [(key, text, self.latex_name(key, text)) for key, text in zip(columns, column_values, strict=True)]
        return ", ".join(
            label
            if numbers_first_sort_key(text)[0]
            else f"{self.user_display_names(key_display_name(key), key)} {label}"
            for key, text, label in values
        )

    def with_display_names(self, measure: TableMeasure) -> TableMeasure:
        """Return the measure with the user's names in its headings."""
        heading, label = measure.heading, measure.label or measure.heading
        return replace(
            measure, heading=self.user_display_names(heading, label), label=self.user_display_names(label, heading)
        )


def _column_values_of_run(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_setting_text(run, key) for key in keys)


def _setting_text(run: Run, key: str) -> str:
    setting = recorded_setting(run, key)
    return (
        setting_value_text({key: setting}, key)
        if setting is not None or key in run.settings
        else setting_value_text({}, key)
    )


def _block_label(columns: Sequence[str], column_values: Sequence[str]) -> str:
    """Return the label of a group of columns: 'lr=0.1', or only the name of a class."""
    return ", ".join(
        text if numbers_first_sort_key(text)[0] else f"{key}={text}"
        for key, text in zip(columns, column_values, strict=True)
    )
