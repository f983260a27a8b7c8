"""Tables in LaTeX for the package booktabs: a tabular, or a table if there is a caption or a label.

pandas' Styler writes LaTeX too. It is not used: pandas is an extra, which `fedsim table` does without, and it leaves to
its caller what most of this package is about (what is bold, rounding to the error, escapes in names of strangers).
"""

from __future__ import annotations

import itertools
import re
import textwrap

from fedsim.core.speaking import escape_unprintable
from fedsim.studies.results.run_measures import TableMeasure
from fedsim.studies.results.table import ResultTable

LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "θ": r"$\theta$",
    "–": "--",
    **{character: f"${character}$" for character in "<>|"},  # which the oldest text fonts replace by other characters
}
HEADING_WIDTH = 22  # characters of a heading's line
BOLD_TEMPLATE = r"\textbf{{\boldmath {}}}"


def latex_table(table: ResultTable, caption: str | None = None, label: str | None = None) -> str:
    """Return the table in LaTeX, with the best of each column and block in bold.

    Args:
        table: to print.
        caption: LaTeX that begins the caption; what ± and bold mean follows. Without a caption that is a comment.
        label: for `\\ref`.
    """
    explanations = [escape_latex(_one_line(sentence)) for sentence in table.explanations()]
    keys = [escape_latex(_one_line(key)) for key in table.paper_keys or table.keys]
    tabular = [
        rf"\begin{{tabular}}{{{'l' * len(keys)}{'r' * len(table.measures)}}}",
        r"\toprule",
        *_headings(keys, table.measures),
        r"\midrule",
        *_table_body(table),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    comments = [r"% \usepackage{booktabs}", *(f"% {_one_line(table_note)}" for table_note in table.notes)]
    if caption is None and label is None:
        return "\n".join([*comments, *(f"% {_one_line(sentence)}" for sentence in table.explanations()), *tabular])
    sentences = [_with_full_stop(caption)] if caption else []
    return "\n".join(
        [
            *comments,
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{' '.join(sentences + explanations)}}}",
            *([rf"\label{{{label}}}"] if label else []),
            *tabular,
            r"\end{table}",
        ]
    )


def escape_latex(text: str) -> str:
    """Escape the special characters of LaTeX; θ^PS becomes mathematics."""
    return re.sub(r"θ\^([A-Za-z]+)|[\\&%$#_{}~^±θ–<>|]", _escape_match, text)


def _escape_match(match: re.Match[str]) -> str:
    return rf"$\theta^{{\mathrm{{{match[1]}}}}}$" if match[1] else LATEX_ESCAPES[match[0]]


def _one_line(text: str) -> str:
    """Put a text on one line, with unprintable characters escaped."""
    return escape_unprintable(" ".join(text.split()))


def _with_full_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _headings(keys: list[str], measures: list[TableMeasure]) -> list[str]:
    """Return the line of headings; two lines if swept keys make columns, the upper one spanning what they share."""
    labels = [f"{measure.label or measure.heading}{_unit_suffix(measure)}" for measure in measures]
    place_labels = [measure.column_group_label for measure in measures]
    if not any(place_labels):
        return [" & ".join([*keys, *map(_wrapped_heading, labels)]) + r" \\"]
    upper_labels, lower_labels = (labels, place_labels) if len(set(labels)) == 1 else (place_labels, labels)
    groups, rules, column = [], [], len(keys) + 1
    for text, members in itertools.groupby(upper_labels):
        width = len(list(members))
        groups.append(rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(_one_line(text))}}}")
        rules.append(rf"\cmidrule(lr){{{column}-{column + width - 1}}}")
        column += width
    empty_cells = [""] * len(keys)
    return [
        " & ".join([*empty_cells, *groups]).strip() + r" \\",
        " ".join(rules),
        " & ".join([*keys, *map(_wrapped_heading, lower_labels)]) + r" \\",
    ]


def _unit_suffix(measure: TableMeasure) -> str:
    return f" ({measure.unit})" if measure.unit else ""


def _wrapped_heading(text: str) -> str:
    """Break a long heading into several lines."""
    lines = [escape_latex(line) for line in textwrap.wrap(_one_line(text), HEADING_WIDTH, break_long_words=False)]
    if len(lines) < 2:
        return "".join(lines)
    return r"\begin{tabular}[b]{@{}r@{}}" + r" \\ ".join(lines) + r"\end{tabular}"


def _table_body(table: ResultTable) -> list[str]:
    """Return the lines of the table, with a rule between blocks; a block's name is printed once."""
    bold_lines = [table.bold_row_indices(column) for column in range(len(table.measures))]
    names = table.paper_rows or [texts for texts, _ in table.table_rows]
    lines = []
    for number, block in enumerate(table.row_indices_by_block()):
        lines += [r"\midrule"] * (number > 0)
        for position in block:
            texts = [
                "" if column < table.num_block_keys and position != block[0] else escape_latex(_one_line(text))
                for column, text in enumerate(names[position])
            ]
            for column, (cell, measure) in enumerate(zip(table.table_rows[position][1], table.measures, strict=True)):
                text = "" if cell is None else cell.format_entry(measure)[1]
                texts.append(BOLD_TEMPLATE.format(text) if position in bold_lines[column] and text else text)
            lines.append(" & ".join(texts).strip() + r" \\")
    return lines
