"""The gallery of results and the page of arguments: what they say of a report, old or new, and is it current?"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedsim
from fedsim.evaluation.columns import COLUMNS
from fedsim.studies.reproduce.recipe import load

ROOT = Path(__file__).parents[2]
MODULES = ("papers", "gallery", "claims_page")
REASON = {"reason": "it is 0 < 1", "shown_by": "tests/papers/test_p_fedavg.py::test_it"}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts' modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield {name: __import__(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


def number(name: str, paper: float | None, ours: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "paper": paper, "ours": ours, "std": 0.0, "claim": None, "held": None, "detail": None} | more


def claim(held: bool | None, **more: Any) -> dict[str, Any]:
    return {
        "name": "c",
        "paper": None,
        "ours": None,
        "std": None,
        "claim": "c",
        "held": held,
        "detail": "1 of 1",
    } | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of one recipe; its report is of before verdicts, as long as nobody changes it."""
    write(tmp_path, [claim(True), claim(False), claim(None)])
    return tmp_path


def write(root: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    place = root / "p_fedavg" / "results" / "fig1-paper"
    place.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": "p_fedavg/fig1", "scale": "paper", "source": "Fig. 1", "about": "what", "reduced": "", "seeds": [0],
        "machine": "a machine", "command": "fedsim-reproduce p_fedavg/fig1", "tuned": {}, "skipped": {},
        "versions": {"fedsim-torch": fedsim.__version__}, "rows": rows,
    }  # fmt: skip
    (place / "report.json").write_text(json.dumps(content | more))


def entry(scripts: dict[str, ModuleType], root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The gallery of a folder."""
    monkeypatch.setattr(scripts["gallery"], "EXPERIMENTS", root)
    return str(scripts["gallery"].page(scripts["papers"].reports(root)))


def test_a_report_without_verdicts_is_held_or_open(scripts, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = entry(scripts, folder, monkeypatch)
    assert "| [p_fedavg/fig1](#p_fedavgfig1-paper) | paper |  | 1 | 0 | 2 |" in page
    assert "| **P-FedAvg** | | | **1** | **0** | **2** |" in page
    assert "| **all papers** | | | **1** | **0** | **2** |" in page
    assert (page.count("- ✓ held: c."), page.count("- ○ **open**: c.")) == (1, 2)
    assert "What one learns" not in page


def test_verdicts_reasons_and_lessons(scripts, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuted, shown = claim(False, verdict="refuted", **REASON), claim(True, verdict="held", fitted=True, **REASON)
    write(folder, [refuted, refuted, shown, claim(False, verdict="open")])
    (folder / "p_fedavg" / "lessons.md").write_text("One.\nTwo.\nThree.\n")
    page = entry(scripts, folder, monkeypatch)
    assert "| paper |  | 1 | 2 | 1 |" in page
    by = "it is 0 &lt; 1. Shown by [`test_it`](../tests/papers/test_p_fedavg.py)"
    assert page.count(f"- ✗ **refuted**: c. 1 of 1. {by}; [argument](../docs/what_the_papers_claim.md#p-fedavg).") == 2
    assert f"- ✓ held: c *(fitted)*. 1 of 1. Its reason did not show in these runs: {by}." in page
    assert "- **P-FedAvg.** One. Two. Three. [Its claims](../docs/what_the_papers_claim.md#p-fedavg)." in page
    arguments = scripts["claims_page"].page(scripts["papers"].reports(folder))
    line = f"- [fig1](../experiments/README.md#p_fedavgfig1-paper), “c”, “c”: {by}."
    assert arguments.count(line) == 1
    assert arguments.index("\n## P-FedAvg\n") < arguments.index(line) < arguments.index("\n## ProFL\n")


def test_the_nearest_and_the_farthest_printed_number(scripts, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [number("a", 10.0, 11.0), number("b", 1.0, 1.05), number("c", 100.0, 80.0), number("d", None, 5.0)]
    write(folder, [*rows, number("e", 1.0, 9.0, fitted=True)])
    page = entry(scripts, folder, monkeypatch)
    assert "| paper | b: 1 → 1.05<br>c: 100 → 80 |  | a picture |  |" in page
    assert "| e *(fitted)* | 1 | 9 |" in page


def test_figures_are_in_the_order_of_their_numbers(scripts, folder: Path) -> None:
    for name in ("fig10-cpu", "fig2a-paper", "fig2-paper", "table1-paper"):
        (folder / "p_fedavg" / "results" / name).mkdir()
        (folder / "p_fedavg" / "results" / name / "report.json").write_text('{"rows": []}')
    found = [report.folder.name for report in scripts["papers"].reports(folder)["p_fedavg"]]
    assert found == ["fig1-paper", "fig2-paper", "fig2a-paper", "fig10-cpu", "table1-paper"]


def test_results_of_before_the_recipes_claims_say_so(scripts, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The recipe's claims have changed since" in entry(scripts, folder, monkeypatch)
    write(folder, [claim(True, claim=each.claim) for each in load("p_fedavg/fig1").claims])
    page = entry(scripts, folder, monkeypatch)
    assert "The recipe's claims have changed since" not in page


def test_who_made_it_is_said_of_another_version(scripts, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "; made by" not in entry(scripts, folder, monkeypatch)
    write(folder, [claim(True)], versions={"fedsim-torch": "0.0.1"})
    assert "a machine; made by fedsim 0.0.1." in entry(scripts, folder, monkeypatch)


@pytest.mark.parametrize("level", [2, 3])
def test_arguments_become_sections_whose_links_lead_on(
    scripts, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = "[a](../../tests/t.py) [b](../first_run.md) [c](#fig) [d](https://e.f)"
    signs = "#" * level
    (tmp_path / "profl.md").write_text(
        f"# ProFL\n\n{signs} Fig\n\n{links}\n\n```\n# x [a](../a)\n```\n\n{signs}# Part\n"
    )
    monkeypatch.setattr(scripts["claims_page"], "ARGUMENTS", tmp_path)
    led = "[a](../tests/t.py) [b](first_run.md) [c](#fig) [d](https://e.f)"
    expected = ["### Fig", "", led, "", "```", "# x [a](../a)", "```", "", "#### Part"]
    assert scripts["claims_page"].arguments("profl") == expected
    assert scripts["claims_page"].arguments("fedpbc") == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "claims").glob("*.md")), ids=lambda page: page.stem)
def test_every_test_that_an_argument_names_exists(page: Path) -> None:
    """`test_it`, or `tests/FILE.py::test_it` of that file; a column of metrics.csv may begin with test_ too."""
    files = {file: set(re.findall(r"^ *def (test_\w+)", file.read_text(), re.M)) for file in ROOT.glob("tests/**/*.py")}
    known = set().union(*files.values()) | set(COLUMNS)
    for path, name in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", page.read_text(encoding="utf-8")):
        assert name in (files.get(ROOT / path, set()) if path else known), f"{page.name}: {path} {name}"
    for path in re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)?`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), f"{page.name}: {path}"


@pytest.mark.parametrize("name", ["gallery", "claims_page"])
def test_the_committed_page_is_current(name: str, scripts) -> None:
    module = scripts[name]
    page = module.page(scripts["papers"].reports())
    assert module.PAGE.read_text(encoding="utf-8") == page, f"out of date: python scripts/{name}.py writes it again"
