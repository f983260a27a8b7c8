"""Formats of a table: text for a terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable

from fedsim.core.speaking import escape_markdown, escape_unprintable
from fedsim.studies.results.latex import latex_table
from fedsim.studies.results.table import ResultTable


def with_single_line_texts(table: ResultTable) -> ResultTable:
    """Return the table with each text on one line and unprintable characters escaped."""

    def to_single_lines(texts: list[str]) -> list[str]:
        return [escape_unprintable(" ".join(text.split())) for text in texts]

    lines = [(to_single_lines(keys), cells) for keys, cells in table.table_rows]
    return dataclasses.replace(
        table, keys=to_single_lines(table.keys), table_rows=lines, notes=to_single_lines(table.notes)
    )


def terminal_table(table: ResultTable) -> str:
    """Return the table as text with aligned columns, followed by its notes."""
    table = with_single_line_texts(table)
    return "\n".join([_aligned_lines(table, "", "  ", ""), *([""] if table.notes else []), *table.notes])


def markdown_table(table: ResultTable) -> str:
    """Return the table as Markdown, followed by its notes as a list.

    The best of each column and block, and what is not distinguishable from it, are bold.
    """
    table = with_single_line_texts(table)
    explanations = [sentence for sentence in table.explanations() if sentence.startswith("Bold")]
    notes = "".join(f"\n- {escape_markdown(note)}" for note in [*explanations, *table.notes])
    return _aligned_lines(table, "| ", " | ", " |", bold_format="**{}**") + (f"\n{notes}" if notes else "")


def _aligned_lines(table: ResultTable, edge: str, column_gap: str, end: str, bold_format: str = "{}") -> str:
    escape = escape_markdown if edge else escape_unprintable
    cells = [[escape(text) for text in (*table.keys, *(measure.heading for measure in table.measures))]]
    cells += _cell_texts_by_line(table, bold_format, escape)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    count = len(table.keys)
    lines = [
        (
            edge + column_gap.join(f"{t:{'<' if c < count else '>'}{widths[c]}}" for c, t in enumerate(row)) + end
        ).rstrip()
        for row in cells
    ]
    dashes = ["-" * (width + 1) + (":" if c >= count else "-") for c, width in enumerate(widths)]
    rule = "|" + "|".join(dashes) + "|" if edge else "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell_texts_by_line(table: ResultTable, bold_format: str, formatter: Callable[[str], str]) -> list[list[str]]:
    """Return the texts of each line; `formatter` escapes the keys."""
    best = [table.bold_row_indices(column) for column in range(len(table.measures))]
    lines = []
    for number, (keys, cells) in enumerate(table.table_rows):
        line = [formatter(text) for text in keys]
        for column, (cell, measure) in enumerate(zip(cells, table.measures, strict=True)):
            text = "" if cell is None else cell.format_entry(measure)[0]
            line.append(bold_format.format(text) if number in best[column] and text else text)
        lines.append(line)
    return lines


def csv_table(table: ResultTable) -> str:
    """Return the table as CSV with unrounded numbers, fractions not in per cent; notes are lines that begin with '#'.

    The mean is under the measure's heading, further numbers are under headings that begin with it.
    """
    table = with_single_line_texts(table)
    file = io.StringIO()
    file.writelines(f"# {note}\n" for note in table.notes)
    suffixes = [_csv_column_suffixes(table, column) for column in range(len(table.measures))]
    writer = csv.writer(file, lineterminator="\n")
    headings = [
        m.heading + suffix
        for m, column_suffixes in zip(table.measures, suffixes, strict=True)
        for suffix in column_suffixes
    ]
    writer.writerow([_escape_spreadsheet_formula(text) for text in (*table.keys, *headings)])
    for keys, cells in table.table_rows:
        numbers: list[float] = []
        for cell, column_suffixes in zip(cells, suffixes, strict=True):
            cell_numbers = {} if cell is None else cell.value_by_column_suffix()
            numbers += [cell_numbers.get(suffix, math.nan) for suffix in column_suffixes]
        writer.writerow(
            [*map(_escape_spreadsheet_formula, keys), *("" if math.isnan(number) else number for number in numbers)]
        )
    return file.getvalue().rstrip("\n")


def _escape_spreadsheet_formula(text: str) -> str:
    """Put an apostrophe before text that a spreadsheet would take for a formula, unless it is a number."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
    return text


def _csv_column_suffixes(table: ResultTable, column: int) -> list[str]:
    """Return the suffixes of a measure's CSV columns, from its first cell that is present."""
    present_cells = [cell for _, cells in table.table_rows if (cell := cells[column]) is not None]
    return list(present_cells[0].value_by_column_suffix()) if present_cells else [""]


TABLE_FORMATTERS: dict[str, Callable[[ResultTable], str]] = {
    "text": terminal_table,
    "markdown": markdown_table,
    "latex": latex_table,
    "csv": csv_table,
}
