"""Numbers that README and pages print are those of the command beside them, or of the committed results."""

from __future__ import annotations

import csv
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from fedsim.app import cli
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.studies.results.run_measures import TableCell, final_metric_measure
from fedsim.studies.results.runs import Run

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "printed_output.py"))
QUICKSTART, MNIST = (ROOT / "experiments" / name for name in ("quickstart", "mnist_availability"))
NUMBER = re.compile(r"\d+\.\d+")
ROUNDING = 0.006  # two of the digits' 359 test images: other machines add in another order


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPT["PAGES"], ids=lambda page: page.name)
def test_a_command_prints_what_its_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(words: list[str]) -> str:
        monkeypatch.setattr("sys.argv", [*words, "tracking.progress=none", "tracking.tensorboard=false"])
        capsys.readouterr()
        cli.main()
        return SCRIPT["lasting"](capsys.readouterr().out, str(tmp_path))

    text = page.read_text(encoding="utf-8")
    again = SCRIPT["rewritten"](text, run)
    assert NUMBER.sub("…", again) == NUMBER.sub("…", text)
    printed, given = (np.array(NUMBER.findall(one), dtype=float) for one in (text, again))
    np.testing.assert_allclose(given, printed, rtol=0, atol=ROUNDING)


def test_pages_print_what_commands_give() -> None:
    marked = {page.name for page in SCRIPT["PAGES"] if SCRIPT["BLOCK"].search(page.read_text(encoding="utf-8"))}
    assert "first_run.md" in marked
    changed = SCRIPT["rewritten"]("<!-- printed by: fedsim a=1 -->\n```\nold\n```\n", lambda words: f"{words}\n")
    assert changed == "<!-- printed by: fedsim a=1 -->\n```\n['fedsim', 'a=1']\n```\n"
    assert SCRIPT["lasting"]("in 1.3 s (622,182 samples/s) in /tmp/x/a", "/tmp/x") == "in … s (… samples/s) in …/a"


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of a page's tables, whether Markdown or printed by a command."""
    for line in page.read_text(encoding="utf-8").splitlines():
        split = re.split(r" *\| *", line[1:-1]) if line.startswith("|") else re.split(r"  +", line)
        if len(split) > 1:
            yield [cell.strip(" *") for cell in split]  # the best may be in bold


def finals(folder: Path) -> dict[str, Run]:
    """Run → what was committed of it; FedAWE_evaluate-global.csv is of FedAWE evaluate=global."""
    known = {p.stem.replace("_", " ", 1).replace("-", "="): p for p in folder.glob("results/Fed*.csv")}
    known |= {p.stem: p for p in folder.glob("results/MIFA.csv")}
    return {name: Run(path, read_metrics(path), {}) for name, path in known.items()}


@pytest.mark.parametrize(
    ("page", "folder", "count"),
    [(QUICKSTART / "README.md", QUICKSTART, 4), (MNIST / "README.md", MNIST, 6)],
    ids=["quickstart", "mnist"],
)
def test_tables_of_runs_are_those_of_the_committed_results(page: Path, folder: Path, count: int) -> None:
    runs, header, met = finals(folder), [], set()
    for cells in rows(page):
        if cells[0] == "run" and "test_loss" in cells:
            header = cells[1:]
        elif cells[0] in runs and len(cells) == len(header) + 1:
            run = runs[cells[0]]
            assert cells[1:] == [
                TableCell(run.final_values(name)).format_entry(final_metric_measure(name, [run]))[0] for name in header
            ], cells[0]
            met.add(cells[0])
    assert met == set(runs)
    assert len(met) == count


def table(path: Path) -> list[dict[str, str]]:
    """A committed table by seeds."""
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def mean(found: list[dict[str, str]], metric: str) -> float:
    return 100 * float(np.mean([float(row[metric]) for row in found]))


def test_the_main_jobs_tuning_and_controls_are_those_of_the_committed_results() -> None:
    tuning, controls = (table(QUICKSTART / "results" / f"{name}.csv") for name in ("tuning", "controls"))
    rates, names, met = [], [], 0
    for cells in rows(QUICKSTART / "README.md"):
        rates = cells[1:] if cells[1] == "0.02" else rates
        names = cells[1:] if cells[0] == "changed" else names
        shown = [row for row in controls if cells[0].startswith(row["changed"])]
        for name, cell in zip(names, cells[1:], strict=False):
            if of := [row for row in shown if row["strategy"] == name]:
                expected = f"{mean(of, 'test_accuracy'):.1f} ({mean(of, 'client_accuracy_worst10'):.1f})"
                assert cell == expected, (cells[0], name)
                met += 1
        for rate, cell in zip(rates, cells[1:], strict=False):
            of = [r for r in tuning if r["strategy"] == cells[0] and float(r["lr"]) == float(rate)]
            of = [r for r in of if (r["evaluate"], r["ridge"]) == ("global", "0.01")]
            if of and NUMBER.search(cell):
                assert cell.strip("*") == f"{mean(of, 'test_accuracy'):.2f}", (cells[0], rate)
                met += 1
    assert met == 9 * 4 + 4 * 6  # the tenth row is the main job itself


def test_as_many_bad_inputs_as_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("app", "core"):
        monkeypatch.syspath_prepend(str(ROOT / "tests" / folder))
    files, runs = importlib.import_module("test_bad_files"), importlib.import_module("ranked_runs")
    configurations, folders = (importlib.import_module(f"test_bad_{what}") for what in ("configurations", "runs"))
    there = [len(configurations.CONFIGURATIONS), len(files.DATA), len(folders.RUNS)]
    page = " ".join((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").split())
    said = re.search(r"(\d+) configurations, (\d+) data files and (\d+) run folders", page)
    assert said is not None
    assert all(found >= least for found, least in zip(there, map(int, said.groups()), strict=True))
    values = importlib.import_module("test_any_value")
    pairs = re.search(r"with (\d+) wrong values .*? more than ([\d,]+) pairs", page)
    assert pairs is not None
    assert int(pairs[1]) == len(values.WRONG)
    assert len(values.SETTABLE) * len(values.WRONG) > int(pairs[2].replace(",", ""))
    cases = re.search(r"(\d+) cases", page)
    assert cases is not None
    assert int(cases[1]) == len(runs.CASES)
    counted = re.search(r"(\d+) cases of bad input", page)
    assert counted is not None
    assert f"{counted[1]} bad inputs" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_notebook_shows_what_its_cells_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / "first_run.ipynb", as_version=4)

    def numbers() -> list[float]:
        shown = [
            output.get("data", {}).get("text/plain", "")
            for cell in notebook.cells
            for output in cell.get("outputs", [])
        ]
        return [float(number) for number in NUMBER.findall("\n".join(shown))]

    committed = numbers()
    assert len(committed) == 6
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    np.testing.assert_allclose(numbers(), committed, rtol=0, atol=2 * ROUNDING)
