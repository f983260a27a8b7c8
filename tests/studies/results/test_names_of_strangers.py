"""Names of runs that mean something to a spreadsheet, LaTeX, mathtext or a browser are text there."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedsim import load
from fedsim.studies.plots.compare import comparison_pictures
from fedsim.studies.plots.html_report import report_html
from fedsim.studies.plots.style import escape_mathtext
from fedsim.studies.results.forms import TABLE_FORMATTERS
from fedsim.studies.results.runs import Run
from fedsim.studies.results.table import ResultTable

NAMES = ["=cmd|' /C calc'!A0", "+1+cmd", "-2+3", "@SUM(A1)", "$\\frac$", "a$b", "_hidden", "<script>alert(1)</script>",
         "two\nlines", "50 % & more_#{}~^", "| a | b |", r"a\|b", "![x](http://a.b/c)", "[c](javascript:alert(1))",
         "−0.5", "-0.5", "\t=1"]  # fmt: skip


def run(folder: Path, name: str) -> Run:
    folder.mkdir()
    rows = "round,seed,test_loss,samples,seconds\n0,0,2.0,0,0.0\n1,0,1.0,9,1.0\n"
    (folder / "metrics.csv").write_text(f"# test_loss: l\n{rows}")
    found = load(folder)
    found.label = name
    return found


@pytest.fixture
def table() -> ResultTable:
    return ResultTable(["run"], [], [([name], []) for name in NAMES], ["a note\nof two lines <b>"])


def test_a_spreadsheet_meets_no_formula(table: ResultTable) -> None:
    text = "".join(
        line for line in TABLE_FORMATTERS["csv"](table).splitlines(keepends=True) if not line.startswith("#")
    )
    cells = [row[0] for row in csv.reader(io.StringIO(text))][1:]
    assert len(cells) == len(NAMES)
    assert [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t"))] == ["-0.5"]  # a number
    assert cells[0] == "'=cmd|' /C calc'!A0"


@pytest.mark.parametrize("form", ["text", "markdown", "latex"])
def test_every_name_keeps_to_its_line(table: ResultTable, form: str) -> None:
    lines = TABLE_FORMATTERS[form](table).splitlines()
    frame = {"text": 4, "markdown": 4, "latex": 8}[form]  # headings, rules, the note
    assert len(lines) == len(NAMES) + frame
    assert [line for line in lines if "two" in line and "lines" in line]


def test_markdown_has_no_tags_and_no_more_columns(table: ResultTable) -> None:
    lines = TABLE_FORMATTERS["markdown"](table).splitlines()
    assert not [line for line in lines if "<" in line]
    assert {re.sub(r"\\.", "", line).count("|") for line in lines if line.startswith("|")} == {2}
    assert not [line for line in lines if re.search(r"(?<!\\)\[|(?<!\\)!\[", line)]


def test_pictures_are_drawn_and_name_every_run(tmp_path: Path) -> None:
    runs = [run(tmp_path / str(n), name) for n, name in enumerate(NAMES)]
    drawn = {picture.name: picture.figure for picture in comparison_pictures(runs, ["test_loss"])}
    legend = [text.get_text() for text in drawn["curves"].legends[0].get_texts()] if drawn["curves"].legends else []
    for figure in drawn.values():
        FigureCanvasAgg(figure).draw()  # mathtext is read now
    assert len(legend) in (0, len(NAMES))
    assert [run.label for run in runs] == NAMES


def test_literal_names() -> None:
    assert escape_mathtext("a$b$c") == r"a\$b\$c"
    assert escape_mathtext("_x") == " _x"
    assert escape_mathtext("two\nlines") == "two lines"


def test_a_report_has_no_code_of_a_name(tmp_path: Path) -> None:
    page = report_html([run(tmp_path / str(n), NAMES[n]) for n in (6, 7)], ["test_loss"])
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
