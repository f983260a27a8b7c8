"""The pages of results and of the papers' statements: what they say of a result, and are the committed ones current?"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from PIL import Image

import fedsim
from fedsim.evaluation.columns import COLUMN_DESCRIPTIONS
from fedsim.studies.reproduce.ledger import papers_with_ledger as ledgers
from fedsim.studies.reproduce.recipe import recipe_folder

ROOT = Path(__file__).parents[2]
MODULES = ("papers", "gallery", "claims_page", "calibration_page")
SHOWN = "tests/papers/test_p_fedavg.py::test_it"
RECIPE: dict[str, Any] = {
    "source": "Fig. 1",
    "about": "what",
    "axes": {"algorithm": {"A": [], "B": []}},
    "scales": {"smoke": {}, "cpu": {"reduced": "few rounds"}, "paper": {}},
    "measures": {"loss": {"metric": "train_loss"}},
    "comparisons": [
        {"we_test": "loss, A below B", "statement": "fig1-a", "of": {"algorithm": "A"}, "is": "below",
         "than": {"algorithm": "B"}},
        {"we_test": "loss, A above B", "statement": "fig1-b", "of": {"algorithm": "A"}, "is": "above",
         "than": {"algorithm": "B"}, "reason": "it is 0 < 1", "shown_by": SHOWN},
        {"we_test": "loss below 9", "ours": True, "of": {}, "is": "below", "than": 9},
    ],
}  # fmt: skip
LEDGER: dict[str, Any] = {
    "paper": {"short": "P", "title": "On P", "authors": "A. B.", "venue": "V", "year": 2021, "link": "https://arxiv.org/abs/1"},
    "items": ["Fig. 1", "Table 1"],
    "statements": [
        {"id": "fig1-a", "item": "Fig. 1", "place": "Section 4, first sentence", "states": "A has less loss than B."},
        {"id": "fig1-b", "item": "Fig. 1", "place": "Section 4, second sentence",
         "states": "A's loss is $|a|$ < b * c | d."},
        {"id": "table1", "item": "Table 1", "place": "Table 1", "states": "The loss.", "not_covered": "No data."},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts' modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield {name: __import__(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


def number(name: str, values: list[float], paper: float | None = None, **more: Any) -> dict[str, Any]:
    mean = sum(values) / len(values)
    content = {"name": name, "at": {"algorithm": name}, "measure": "loss", "paper": paper, "ours": mean, "std": 0.1}
    return content | {"values": values, "comparison": None} | more


ROWS = [number("A", [1.0, 1.1, 0.9]), number("B", [2.0, 2.2, 2.1])]


@pytest.fixture
def folder(tmp_path: Path, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Path:
    """One recipe with a ledger, and its result at paper scale."""
    monkeypatch.setattr(scripts["gallery"], "EXPERIMENTS", tmp_path)
    (tmp_path / "p_fedavg").mkdir()
    (tmp_path / "p_fedavg" / "statements.yaml").write_text(yaml.safe_dump(LEDGER))
    (tmp_path / "p_fedavg" / "fig1.yaml").write_text(yaml.safe_dump(RECIPE))
    write(tmp_path, ROWS)
    return tmp_path


def write(root: Path, rows: list[dict[str, Any]], scale: str = "paper", **more: Any) -> None:
    place = root / "p_fedavg" / "results" / f"fig1-{scale}"
    place.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": "p_fedavg/fig1", "scale": scale, "source": "Fig. 1", "about": "what", "reduced": "",
        "seeds": [0, 1, 2], "machine": "a machine", "command": "fedsim-reproduce p_fedavg/fig1",
        "tuned": {}, "skipped": {},
        "versions": {"fedsim-torch": fedsim.__version__}, "rows": rows, "commit": "a", "sources": "0123456789abcdef",
    }  # fmt: skip
    (place / "report.json").write_text(json.dumps(content | more))


def index(scripts: dict[str, ModuleType], root: Path) -> str:
    return str(scripts["gallery"].page(scripts["papers"].papers(root)))


def entries(scripts: dict[str, ModuleType], root: Path) -> str:
    return str(scripts["gallery"].paper_pages(scripts["papers"].papers(root))["p_fedavg"])


def statements(scripts: dict[str, ModuleType], root: Path) -> str:
    return str(scripts["claims_page"].page(scripts["papers"].papers(root)))


def test_a_result_has_a_line_of_the_index_and_an_entry(scripts, folder: Path) -> None:
    page = index(scripts, folder)
    link = "[p_fedavg/fig1](p_fedavg/README.md#p_fedavgfig1-paper)"
    assert f"|  | {link} | paper |  | 2 held, 1 contradicted | traced |" in page
    assert "## Lessons" not in page
    (folder / "p_fedavg" / "lessons.md").write_text("One.\nTwo.\n")
    assert "- **P-FedAvg.** One. Two. [Its statements](../docs/what_the_papers_claim.md#p-fedavg)." in index(
        scripts, folder
    )
    entry = entries(scripts, folder)
    assert "## p_fedavg/fig1, paper\n" in entry
    held = r"- ✓ held (`fig1-a`): loss, A below B. 1 of 1 held; A: 1 against 2.1 (B), paired difference -1.1 (95 %: "
    assert held in entry
    power = r"Smallest difference detectable with these seeds \(80 % power\): 0\.\d+\."
    assert re.search(rf"- ✓ held \(ours\): loss below 9\. .* {power}", entry)
    because = 'it is 0 &lt; 1. Shown by the test ["it"](../../tests/papers/test_p_fedavg.py).'
    assert re.search(rf"- ✗ \*\*contradicted\*\* \(`fig1-b`\): loss, A above B\. .* {re.escape(because)}\n", entry)
    assert "a machine; sources 0123456789ab." in entry


def test_each_statement_has_a_row_with_place_test_verdict_and_link(scripts, folder: Path) -> None:
    page = statements(scripts, folder)
    link = "[fig1, paper](../experiments/p_fedavg/README.md#p_fedavgfig1-paper)"
    first = "| **Fig. 1** Section 4, first sentence | A has less loss than B. | loss, A below B"
    assert f"{first} (held, {link}) | **held**, scale paper, 3 seeds |" in page
    second = (
        r"| **Fig. 1** Section 4, second sentence | A's loss is $\vert a\vert $ &lt; b \* c \| d. | loss, A above B"
    )
    assert f"{second} (contradicted, {link}) | **refuted**, scale paper, 3 seeds |" in page
    assert "| **Table 1** Table 1 | The loss. | – | **not covered**: No data. |" in page
    assert 'Because: it is 0 &lt; 1. Shown by the test ["it"](../tests/papers/test_p_fedavg.py).' in page
    assert f"- loss below 9 (held, {link})" in page
    assert "| [P-FedAvg](#p-fedavg) | 3 | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 1 |" in page
    assert "“" not in page


@pytest.mark.parametrize(
    ("asked", "remark"), [("[0,1,2]", ""), ("[0,1,2,3,4]", ", 3 seeds; the recipe asks for 5 now")]
)
def test_a_recipe_with_other_seeds_than_its_result_is_named(scripts, folder: Path, asked: str, remark: str) -> None:
    recipe = RECIPE | {"base": ["seeds=[0]", f"seeds={asked}"]}
    (folder / "p_fedavg" / "fig1.yaml").write_text(yaml.safe_dump(recipe))
    link = "[fig1, paper](../experiments/p_fedavg/README.md#p_fedavgfig1-paper)"
    assert f"(held, {link}{remark}) | **held**, scale paper, 3 seeds |" in statements(scripts, folder)


def test_without_a_result_the_page_gives_the_command(scripts, folder: Path) -> None:
    (folder / "p_fedavg" / "results" / "fig1-paper" / "report.json").unlink()
    page = statements(scripts, folder)
    assert "(not run: `fedsim-reproduce p_fedavg/fig1 --scale paper`) | **not run** |" in page


def test_a_smaller_scale_is_said_and_refutes_nothing(scripts, folder: Path) -> None:
    (folder / "p_fedavg" / "results" / "fig1-paper" / "report.json").unlink()
    write(folder, ROWS, "cpu")
    page = statements(scripts, folder)
    assert "| **held at reduced scale**, scale cpu, 3 seeds |" in page
    assert "| **not shown**, scale cpu, 3 seeds: contradicted at reduced scale |" in page


def test_the_table_of_the_readme_is_replaced_between_its_marks(scripts, folder: Path) -> None:
    module = scripts["claims_page"]
    readme = f"# R\n\n{module.BEGIN}\nold\n{module.END}\n\n## After\n"
    new = module.with_table(readme, scripts["papers"].papers(folder))
    assert "old" not in new
    assert "| [P-FedAvg](docs/what_the_papers_claim.md#p-fedavg) | 3 | 1 |" in new
    assert new.startswith("# R\n\n")
    assert new.endswith(f"{module.END}\n\n## After\n")
    assert module.with_table(new, scripts["papers"].papers(folder)) == new
    with pytest.raises(ValueError, match="lacks the lines"):
        module.with_table("# R", {})


def test_the_nearest_and_the_farthest_printed_number(scripts, folder: Path) -> None:
    rows = [
        number("a", [11.0], 10.0), number("b", [1.05], 1.0), number("c", [80.0], 100.0), number("d", [5.0]),
        number("e", [9.0], 1.0, fitted=True),
    ]  # fmt: skip
    write(folder, rows)
    assert "| paper | b: 1 → 1.05 ± 0.1<br>c: 100 → 80 ± 0.1 |" in index(scripts, folder)
    assert "| e *(fitted)* | 1 | 9 ± 0.1 |" in entries(scripts, folder)


def test_figures_are_in_the_order_of_their_numbers(scripts, folder: Path) -> None:
    for name in ("fig10", "fig2a", "fig2", "table1"):
        (folder / "p_fedavg" / f"{name}.yaml").write_text(yaml.safe_dump(RECIPE))
    read = scripts["papers"].papers(folder)["p_fedavg"]
    assert [name.partition("/")[2] for name in read.recipes] == ["fig1", "fig2", "fig2a", "fig10", "table1"]


def test_the_calibration_page_has_ours_beside_the_print(scripts, folder: Path, monkeypatch) -> None:
    module, read = scripts["calibration_page"], scripts["papers"].papers
    monkeypatch.setattr(module, "CLASSICS", {"p_fedavg": "P-FedAvg"})
    write(folder, [number("A", [11.0, 13.0, 12.0], 10.0), number("B", [2.0, 2.2, 2.1])], seconds={"A": 60.2, "B": 1.0})
    page = module.page(read(folder))
    paper = "[P-FedAvg](what_the_papers_claim.md#p-fedavg)"
    link = "[fig1, paper](../experiments/p_fedavg/README.md#p_fedavgfig1-paper)"
    assert f"| {paper} | {link} | A | 10 | 12 ± 0.1 | 1.20 |" in page
    assert "| B |" not in page  # nothing is printed of it
    judged = "A has less loss than B. | **not shown**, scale paper, 3 seeds"
    assert f"| {paper} | Section 4, first sentence | {judged}" in page
    assert "| `fedsim-reproduce p_fedavg/fig1 --scale paper` | 61 |" in page
    without_result = "- `fedsim-reproduce p_fedavg/fig1 --scale paper`: Fig. 1, what"
    assert without_result not in page
    (folder / "p_fedavg" / "results" / "fig1-paper" / "report.json").unlink()
    assert without_result in module.page(read(folder))


def test_who_made_it_is_said(scripts, folder: Path) -> None:
    write(folder, ROWS, versions={"fedsim-torch": "0.0.1"}, sources=None)
    assert "a machine; made by fedsim 0.0.1, unverified." in entries(scripts, folder)
    write(folder, ROWS, sources=None, verified={"A": "fedcba9876543210", "B": "fedcba9876543210"})
    assert "a machine; 2 of its runs verified with sources fedcba987654." in entries(scripts, folder)
    assert "| verified |" in index(scripts, folder)


@pytest.mark.parametrize("level", [2, 3])
def test_arguments_become_sections_whose_links_lead_on(
    scripts, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = "[a](../../tests/t.py) $E[x](1+y)$ [b](../first_run.md) [c](#fig) [d](https://e.f)"
    signs = "#" * level
    (tmp_path / "profl.md").write_text(
        f"# ProFL\n\n{signs} Fig\n\n{links}\n\n```\n# x [a](../a)\n```\n\n{signs}# Part\n"
    )
    monkeypatch.setattr(scripts["claims_page"], "ARGUMENTS", tmp_path)
    led = "[a](../tests/t.py) $E[x](1+y)$ [b](first_run.md) [c](#fig) [d](https://e.f)"
    expected = ["### Fig", "", led, "", "```", "# x [a](../a)", "```", "", "#### Part"]
    assert scripts["claims_page"].arguments("profl") == expected
    assert scripts["claims_page"].arguments("fedpbc") == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "claims").glob("*.md")), ids=lambda page: page.stem)
def test_every_test_that_an_argument_names_exists(page: Path) -> None:
    """`test_it`, or `tests/FILE.py::test_it` of that file; a column of metrics.csv may begin with test_ too."""
    files = {file: set(re.findall(r"^ *def (test_\w+)", file.read_text(), re.M)) for file in ROOT.glob("tests/**/*.py")}
    known = set().union(*files.values()) | set(COLUMN_DESCRIPTIONS)
    for path, name in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", page.read_text(encoding="utf-8")):
        assert name in (files.get(ROOT / path, set()) if path else known), f"{page.name}: {path} {name}"
    for path in re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)?`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), f"{page.name}: {path}"


@pytest.fixture(scope="module")
def committed(scripts: dict[str, ModuleType]) -> dict[str, Any]:
    """What is committed of each paper; reading it takes seconds."""
    papers: dict[str, Any] = scripts["papers"].papers()
    return papers


def test_a_thumbnail_is_made_anew_only_for_another_figure(scripts, tmp_path: Path) -> None:
    module = scripts["gallery"].thumbnails
    assert module.write(tmp_path) is None  # no figure
    figure = tmp_path / module.FIGURE
    Image.new("RGB", (900, 500), "white").save(figure)
    made = module.write(tmp_path)
    with Image.open(made) as image:
        assert image.width <= module.SIZE[0] and image.height <= module.SIZE[1]  # noqa: PT018
    before = made.stat().st_mtime_ns
    module.write(tmp_path)
    assert made.stat().st_mtime_ns == before
    Image.new("RGB", (900, 500), "black").save(figure)
    assert not module.is_current(tmp_path)
    module.write(tmp_path)
    assert module.is_current(tmp_path)


def test_each_entry_of_the_index_has_a_small_picture_of_its_figure(scripts, committed: dict[str, Any]) -> None:
    gallery = scripts["gallery"]
    page = gallery.PAGE.read_text(encoding="utf-8")
    results = [(paper, result) for paper in committed.values() for result in paper.results]
    assert results
    for paper, result in results:
        thumbnail = result.folder / gallery.thumbnails.THUMBNAIL
        assert gallery.thumbnails.is_current(result.folder), f"python scripts/gallery.py makes {thumbnail} anew"
        assert thumbnail.stat().st_size <= 30_000
        line = next(line for line in page.splitlines() if gallery.row(paper, result) == line)
        assert f"]({thumbnail.relative_to(ROOT / 'experiments').as_posix()})" in line


def test_the_committed_pages_are_current(scripts, committed: dict[str, Any]) -> None:
    read = committed
    written = {scripts["gallery"].PAGE: scripts["gallery"].page(read), scripts["claims_page"].PAGE: None}
    for module in (scripts["claims_page"], scripts["calibration_page"]):
        written[module.PAGE] = module.page(read)
    written[recipe_folder() / "run_seconds.json"] = scripts["gallery"].run_seconds(read)
    for paper, text in scripts["gallery"].paper_pages(read).items():
        written[scripts["gallery"].EXPERIMENTS / paper / "README.md"] = text
    for path, text in written.items():
        again = "python scripts/gallery.py, claims_page.py and calibration_page.py write it again"
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is out of date: {again}"
    readme = scripts["claims_page"].README.read_text(encoding="utf-8")
    assert readme == scripts["claims_page"].with_table(readme, read), "the table of README.md is out of date"


@pytest.mark.parametrize("paper", ledgers(recipe_folder()))
def test_the_page_has_each_item_statement_and_comparison(paper: str, scripts, committed: dict[str, Any]) -> None:
    """Every figure and table of the paper, whatever its ledger says, and whatever its recipes compare."""
    module, read = scripts["claims_page"], committed[paper]
    escaped = scripts["papers"].escaped
    text = "\n".join(module.section(read))
    read.ledger.check_statements_covered({name: recipe.comparisons for name, recipe in read.recipes.items()})
    for item in read.ledger.paper_items:
        assert f"| **{escaped(item)}** " in text, item
    for statement in read.ledger.statements:
        assert f"| **{escaped(statement.item)}** {escaped(statement.place)} | {escaped(statement.states)} |" in text
    for recipe in read.recipes.values():
        for comparison in recipe.comparisons:
            assert escaped(comparison.we_test) in text, f"{recipe.name}: {comparison.we_test}"
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(rows) == len(read.ledger.statements)
