"""Tables of runs: lines and columns by the keys in which runs differ, the best value of a key, differences by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.results.bold import MIN_RELIABLE_REPLICATES, best_lines
from fedsim.studies.results.differences import recorded_value, setting_text, shows_text, sort_key, swept_keys
from fedsim.studies.results.display_names import UserDisplayNames, class_name, key_name
from fedsim.studies.results.paired import paired_difference
from fedsim.studies.results.run_measures import Cell, Difference, Measure
from fedsim.studies.results.run_state import unfinished
from fedsim.studies.results.runs import Run
from fedsim.studies.results.selection import best_run, selection_metric


@dataclass
class Table:
    """A table of runs.

    Attributes:
        keys: headings of the first columns.
        measures: measures of the further columns.
        lines: texts of the keys, and a cell for each measure; None where there is no such run.
        notes: notes for readers.
        paper_keys, paper_lines: keys and their texts as a LaTeX table prints them; if empty, those above.
        blocks: number of keys that make blocks of lines, whose best is bold.
        confidence: confidence level of the intervals that decide what is distinguishable from the best.
    """

    keys: list[str]
    measures: list[Measure]
    lines: list[tuple[list[str], list[Cell | Difference | None]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paper_keys: list[str] = field(default_factory=list)
    paper_lines: list[list[str]] = field(default_factory=list)
    blocks: int = 0
    confidence: float = 0.95

    def in_blocks(self) -> list[list[int]]:
        """Return the positions of the lines in each block."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for position, (texts, _) in enumerate(self.lines):
            groups.setdefault(tuple(texts[: self.blocks]), []).append(position)
        return list(groups.values())

    def bold(self, column: int) -> set[int]:
        """Return the lines with the best mean of each block, and those that are not distinguishable from it."""
        measure = self.measures[column]
        return {
            lines[position]
            for lines in self.in_blocks()
            for position in best_lines([self.lines[n][1][column] for n in lines], measure, self.confidence)
        }

    @property
    def replicates(self) -> list[int]:
        """The smallest and largest number of replicates of a cell."""
        counts = [len(cell.values) for _, cells in self.lines for cell in cells if isinstance(cell, Cell)]
        return [min(counts, default=0), max(counts, default=0)]

    def explained(self) -> list[str]:
        """Return sentences that explain ± and bold, for a caption."""
        min_replicates, max_replicates = self.replicates
        replicates_text = (
            f"{min_replicates} to {max_replicates}" if min_replicates < max_replicates else f"{max_replicates}"
        )
        if not max_replicates:
            return []
        sentences = (
            [f"Mean ± standard deviation over {replicates_text} seeds."] if max_replicates > 1 else ["One seed."]
        )
        if any(self.bold(column) for column in range(len(self.measures))):
            best = "the best of each column" + (" and block" if self.blocks else "")
            if max_replicates > 1:
                seeds = [tuple(c.seeds or ()) for _, cells in self.lines for c in cells if isinstance(c, Cell)]
                shared = len(set(seeds)) == 1 and seeds[0]
                interval_text = (
                    "Student's, of differences by seed"
                    if shared
                    else "of differences by seed; Welch's where the seeds differ"
                )
                best += (
                    f", and what is not distinguishable from it ({100 * self.confidence:g} % "
                    f"intervals, {interval_text}; each "
                    "comparison by itself)"
                )
            sentences.append(f"Bold: {best}.")
            if 1 < min_replicates < MIN_RELIABLE_REPLICATES:
                sentences.append(f"Intervals from fewer than {MIN_RELIABLE_REPLICATES} seeds are unreliable.")
        return sentences


@dataclass
class Choice:
    """The runs of a table after the best value of some keys was selected.

    Attributes:
        runs: the selected runs.
        keys: keys in which they differ, without those in `chosen`.
        chosen: keys whose best value was selected.
        notes: how it was selected.
    """

    runs: list[Run]
    keys: list[str]
    chosen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def best_runs(runs: list[Run], over: Sequence[str], reported: str, by: str | None = None, last: int = 1) -> Choice:
    """Select the best run of each group of runs that differ only in the keys `over`.

    Args:
        runs: the runs to select from.
        over: keys, such as 'lr'.
        reported: the metric of the table, which selects if there are no validation samples.
        by: another metric that selects instead.
        last: number of evaluations at the end of a run over which the metric is averaged.
    """
    keys = swept_keys(runs)
    for name in over:
        checks.choice("--best", name, keys)
    if not over:
        return Choice(runs, keys)
    remaining_keys = [key for key in keys if key not in over]
    metric, warning = (by, "") if by is not None else selection_metric(runs, reported)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_place_of_run(run, remaining_keys), []).append(run)
    selected_runs = [best_run(group, metric, last) for group in groups.values()]
    group_sizes = set(map(len, groups.values()))
    count_text = f"{'at most ' if len(group_sizes) > 1 else ''}{max(group_sizes)}"
    note = f"{', '.join(over)}: {warning or f'the best of {count_text} values by {metric}'}"
    edges = [_edge_text(key, selected_runs, list(groups.values())) for key in over]
    return Choice(selected_runs, remaining_keys, list(over), ["; ".join(filter(None, [note, *edges]))])


def _edge_text(key: str, selected_runs: Sequence[Run], groups: Sequence[Sequence[Run]]) -> str:
    """'0.5 is the largest lr tried' where the best value is at the end of those tried; '' where none is."""
    sentences: dict[str, int] = {}
    for chosen_run, group in zip(selected_runs, groups, strict=True):
        numbers = [recorded_value(run, key) for run in group]
        if len(set(map(str, numbers))) < 2 or not all(type(number) in (int, float) for number in numbers):
            continue
        value = recorded_value(chosen_run, key)
        for end, word in ((max(numbers), "largest"), (min(numbers), "smallest")):
            if value == end:
                sentence = f"{value} is the {word} {key} tried"
                sentences[sentence] = sentences.get(sentence, 0) + 1
    return "; ".join(
        sentence + (f" (in {count} of {len(groups)} choices)" if len(groups) > 1 else "")
        for sentence, count in sentences.items()
    )


def table(
    choice: Choice,
    measures: list[Measure],
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    against: dict[str, str] | None = None,
    confidence: float = 0.95,
    blocks: Sequence[str] = (),
    renaming: UserDisplayNames | None = None,
) -> Table:
    """Return a table with lines by the keys `rows` (else all not in `columns`), columns by measures and `columns`.

    Args:
        choice: the runs.
        measures: the measures of each run.
        rows, columns: keys in which runs differ.
        against: key → value of the reference runs, with which the others are compared by seed.
        confidence: confidence level of the intervals of the differences.
        blocks: those of the rows' keys that make blocks of lines.
        renaming: the user's names for keys, values and metrics.

    Raises:
        ConfigError: two runs belong in the same cell, or there is no reference run.
    """
    runs, keys, against = choice.runs, choice.keys, against or {}
    rows = _keys_of_rows(choice, rows, columns, blocks)
    if against and not keys:
        best_text = f" (after --best {','.join(choice.chosen)})" if choice.chosen else ""
        option_text = " ".join(f"{key}={text}" for key, text in against.items())
        raise ConfigError(f"--against {option_text}: no setting differs between the runs{best_text}")
    naming = _DisplayNames(runs, renaming or UserDisplayNames())
    runs_by_row = _runs_by_place(runs, keys, rows, columns)
    column_places = sorted(
        dict.fromkeys(_place_of_run(run, columns) for run in runs), key=lambda at: [sort_key(text) for text in at]
    )
    result = Table(
        [naming.renaming(key, key_name(key)) for key in rows] or ["run"],
        [],
        notes=list(choice.notes),
        paper_keys=[naming.renaming(key_name(key), key) for key in rows] or ["run"],
        blocks=len(blocks),
        confidence=confidence,
    )
    measures = [naming.of_measure(measure) for measure in measures]
    pairs = {id(run): find_partner(run, runs, keys, against) for run in runs} if against else {}
    for place in column_places:
        result.measures += _measures_at(place, columns, measures, naming, bool(against))
    states = {id(run): state for run in runs if (state := unfinished(run))}
    for row_key in sorted(runs_by_row, key=lambda values: [sort_key(text) for text in values]):
        cells: list[Cell | Difference | None] = []
        for place in column_places:
            cell = runs_by_row[row_key].get(place)
            cells += [None if cell is None else Cell(m.of(cell), cell.seeds, id(cell) in states) for m in measures]
            if against:
                cells += [_difference(m, cell, pairs, confidence) for m in measures]
        values = list(zip(rows, row_key, strict=True))
        run_name = [] if rows else [naming.of_line(list(runs_by_row[row_key].values()))]
        result.lines.append(([naming.plain(*value) for value in values] or run_name, cells))
        result.paper_lines.append([naming.paper(*value) for value in values] or run_name)
    naming.renaming.check()
    if states:
        unfinished_runs = [f"{run.label or run.folder.name} ({states[id(run)]})" for run in runs if id(run) in states]
        result.notes.append(f"* unfinished: {'; '.join(unfinished_runs)}")
    if against:
        result.notes += _notes(result, confidence, against)
    return result


def _keys_of_rows(choice: Choice, rows: Sequence[str], columns: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """Return the keys of the lines, those of blocks first."""
    available_keys = [*choice.keys, *choice.chosen]
    for option, names in (("--rows", rows), ("--columns", columns)):
        for name in names:
            checks.choice(option, name, available_keys)
    if not rows:
        rows = [key for key in choice.keys if key not in columns]
        if not columns:  # the best value of a key is a column of text, unless columns leave it no single value
            rows += choice.chosen
    for name in blocks:
        checks.choice("--blocks", name, rows)
    return [*blocks, *(key for key in rows if key not in blocks)]


def _runs_by_place(
    runs: Sequence[Run], keys: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> dict[tuple[str, ...], dict[tuple[str, ...], Run]]:
    """Return values of the rows' keys → values of the columns' keys → the run that has them."""
    runs_by_row: dict[tuple[str, ...], dict[tuple[str, ...], Run]] = {}
    for run in runs:
        row_runs = runs_by_row.setdefault(_place_of_run(run, rows), {})
        place = _place_of_run(run, columns)
        if place in row_runs:
            shared_settings = zip([*rows, *columns], [*_place_of_run(run, rows), *place], strict=True)
            settings_text = (
                ", ".join(f"{key}={text}" for key, text in shared_settings) or "nothing that tells them apart"
            )
            extra_keys = [key for key in keys if key not in (*rows, *columns)]
            remedy = "give one of them"
            if extra_keys:
                remedy = f"add {' or '.join(extra_keys)} to --rows or --columns, or take --best of it"
            raise ConfigError(f"several runs have {settings_text}; {remedy}")
        row_runs[place] = run
    return runs_by_row


def _measures_at(
    place: Sequence[str], columns: Sequence[str], measures: Sequence[Measure], naming: _DisplayNames, differences: bool
) -> list[Measure]:
    """Return the measures of one group of columns, followed by their differences to the reference runs."""
    block_label = _block_label(
        [naming.renaming(key, key_name(key)) for key in columns],
        [naming.plain(key, text) for key, text in zip(columns, place, strict=True)],
    )
    placed_measures = [replace(m, place_label=naming.of_place(columns, place)) for m in measures]
    headed = [replace(m, heading=f"{m.heading} {block_label}".strip()) for m in placed_measures]
    if differences:
        for m in placed_measures:
            heading = f"difference of {m.heading} {block_label}".strip()
            headed.append(replace(m, heading=heading, label=f"difference of {m.label or m.heading}"))
    return headed


def find_partner(run: Run, runs: list[Run], keys: list[str], against: dict[str, str]) -> Run | None:
    """Return the run with the values of `against` and otherwise this run's; None if this run is a reference itself.

    Raises:
        ConfigError: there is no such run, or there are several.
    """
    for key in against:
        checks.choice("--against", key, keys)
    # `paired_difference` refuses other seeds.
    shared_keys = [key for key in keys if key not in against and key != "seeds"]
    candidates = [
        candidate for candidate in runs if all(shows_text(candidate, key, text) for key, text in against.items())
    ]
    reference_text = " ".join(f"{key}={text}" for key, text in against.items())
    if not candidates:
        values = {key: ", ".join(dict.fromkeys(_setting_text(candidate, key) for candidate in runs)) for key in against}
        raise ConfigError(
            f"--against {reference_text}: no run has it; {'; '.join(f'{k} is {v}' for k, v in values.items())}"
        )
    if any(run is candidate for candidate in candidates):
        return None
    partners = [
        candidate
        for candidate in candidates
        if _place_of_run(candidate, shared_keys) == _place_of_run(run, shared_keys)
    ]
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
        paired_difference(measure.of(run), measure.of(partner_run), run.seeds, partner_run.seeds, confidence),
        measure.higher_is_better,
    )


def _notes(table_or_result: Table, confidence: float, against: dict[str, str]) -> list[str]:
    """Return a sentence for each difference, followed by a note on the method."""
    reference_text = " ".join(f"{key}={text}" for key, text in against.items())
    sentences = [
        f"{' '.join(row_keys)} against {reference_text}, {measure.heading.removeprefix('difference of ')}: "
        f"{cell.by.sentence(cell.higher_is_better, measure.percent)}"
        for row_keys, cells in table_or_result.lines
        for measure, cell in zip(table_or_result.measures, cells, strict=True)
        if isinstance(cell, Difference)
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
        self.runs, self.renaming = runs, renaming

    def _printed(self, key: str, text: str) -> str:
        targets = [run.settings.get(f"{key}._target_") for run in self.runs if _setting_text(run, key) == text]
        return class_name(text, str(targets[0])) if targets and targets[0] else text

    def plain(self, key: str, text: str) -> str:
        """Return the name of a value in plain text."""
        return self.renaming(text, self._printed(key, text))

    def paper(self, key: str, text: str) -> str:
        """Return the name of a value in a LaTeX table."""
        return self.renaming(self._printed(key, text), text)

    def of_line(self, runs: Sequence[Run]) -> str:
        """A line that no key names: its run, or the strategy that its several runs share, or nothing."""
        if len(runs) == 1:
            return self.renaming(runs[0].label or runs[0].folder.name)
        strategies = {recorded_value(run, "strategy") for run in runs}
        shared = len(strategies) == 1 and None not in strategies
        return self.plain("strategy", _setting_text(runs[0], "strategy")) if shared else ""

    def of_place(self, columns: Sequence[str], place: Sequence[str]) -> str:
        """Return the label of a group of columns: 'learning rate 0.1', or only the name of a class."""
        values = [(key, text, self.paper(key, text)) for key, text in zip(columns, place, strict=True)]
        return ", ".join(
            label if sort_key(text)[0] else f"{self.renaming(key_name(key), key)} {label}"
            for key, text, label in values
        )

    def of_measure(self, measure: Measure) -> Measure:
        """Return the measure with the user's names in its headings."""
        heading, label = measure.heading, measure.label or measure.heading
        return replace(measure, heading=self.renaming(heading, label), label=self.renaming(label, heading))


def _place_of_run(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_setting_text(run, key) for key in keys)


def _setting_text(run: Run, key: str) -> str:
    setting = recorded_value(run, key)
    return setting_text({key: setting}, key) if setting is not None or key in run.settings else setting_text({}, key)


def _block_label(columns: Sequence[str], place: Sequence[str]) -> str:
    """Return the label of a group of columns: 'lr=0.1', or only the name of a class."""
    return ", ".join(text if sort_key(text)[0] else f"{key}={text}" for key, text in zip(columns, place, strict=True))
