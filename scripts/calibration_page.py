"""Write docs/calibration.md: the field's reference results outside the five papers, printed against ours, with reasons.

python scripts/calibration_page.py
"""

from __future__ import annotations

from collections.abc import Iterator

from gallery import number
from papers import CLASSICS, ROOT, Paper, anchor, entry_link, escaped, papers

from fedsim.studies.reproduce.recipe import Recipe
from fedsim.studies.reproduce.statements import NOT_COVERED_VERDICT, NOT_RUN_VERDICT
from fedsim.studies.reproduce.stored import StoredRecipeResult

PAGE = ROOT / "docs" / "calibration.md"
CLAIMS = "what_the_papers_claim.md"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(papers()), encoding="utf-8")


def page(read: dict[str, Paper]) -> str:
    """All of it."""
    classics = [read[folder] for folder in CLASSICS if folder in read]
    lines = [
        "# Calibration",
        "",
        "Written by `python scripts/calibration_page.py` from the committed results; do not edit.",
        "",
        "Reference results of federated learning and performative prediction, run with the same harness as the",
        f"[five papers]({CLAIMS}): the printed numbers next to those of fedsim, and why they differ if that is known.",
        "The recipes are in `experiments/`; the scale `smoke` runs each of them in seconds.",
        "",
        "## Printed numbers",
        "",
        *printed(classics),
        "",
        "## Statements",
        "",
        "The [verdicts](verdicts.md) on the papers' statements. Those that no comparison decides are in",
        f"[what the papers claim]({CLAIMS}), with the reason.",
        "",
        *statements(classics),
        "",
        "## What was found",
        "",
        *remarks(classics),
        "",
        "## Not run yet",
        "",
        *not_run(classics),
        "",
        "## Run it again",
        "",
        "Runs that have finished are not repeated. The times are those of the committed results, on a machine that was",
        "busy with other work.",
        "",
        *commands(classics),
    ]
    return "\n".join(lines) + "\n"


def results(classics: list[Paper]) -> Iterator[tuple[Paper, Recipe, StoredRecipeResult]]:
    """The committed results in the order of the papers."""
    for paper in classics:
        for result in paper.results:
            yield paper, paper.recipes[result.recipe], result


def printed(classics: list[Paper]) -> list[str]:
    """A row for each number that a paper printed and a committed result has."""
    lines = ["| paper | result | cell | printed | ours | ours / printed |", "|---|---|---|--:|--:|--:|"]
    for paper, _, result in results(classics):
        for row in result.measured_number_rows:
            if row["paper"] is None or row["ours"] is None:
                continue
            cells = [
                f"[{paper.title}]({CLAIMS}#{anchor(paper.title)})",
                entry_link(result.recipe, result.scale, "../"),
                escaped(row["name"]),
                number(row["paper"]),
                number(row["ours"], row["std"]),
                f"{row['ours'] / row['paper']:.2f}" if row["paper"] else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def statements(classics: list[Paper]) -> list[str]:
    """A row for each statement that a committed result decides."""
    lines = ["| paper | place | the paper states | verdict |", "|---|---|---|---|"]
    for paper in classics:
        for verdict in paper.verdicts():
            if verdict.verdict_label in (NOT_RUN_VERDICT, NOT_COVERED_VERDICT):
                continue
            scale = f", scale {verdict.scales_text}, {verdict.seed_counts_text}"
            remark = f": {escaped(verdict.remark)}" if verdict.remark else ""
            cells = [
                f"[{paper.title}]({CLAIMS}#{anchor(paper.title)})",
                escaped(verdict.statement.place),
                escaped(verdict.statement.states),
                f"**{verdict.verdict_label}**{scale}{remark}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def remarks(classics: list[Paper]) -> list[str]:
    """What the recipes of the committed results say of them."""
    return [
        f"- **{paper.title}**, {entry_link(result.recipe, result.scale, '../')}: {' '.join(recipe.remark.split())}"
        for paper, recipe, result in results(classics)
        if recipe.remark
    ]


def not_run(classics: list[Paper]) -> list[str]:
    """The recipes without a committed result at the paper's scale, and the command of each."""
    done = {(result.recipe, result.scale) for _, _, result in results(classics)}
    return [
        f"- `fedsim-reproduce {name} --scale paper`: {escaped(recipe.source)}, {escaped(recipe.about)}"
        for paper in classics
        for name, recipe in paper.recipes.items()
        if (name, "paper") not in done
    ]


def commands(classics: list[Paper]) -> list[str]:
    """A command for each committed result, with the seconds it took."""
    lines = ["| command | seconds |", "|---|--:|"]
    total = 0.0
    for _, _, result in results(classics):
        seconds = sum(result.report_content.get("seconds", {}).values())
        total += seconds
        lines.append(f"| `fedsim-reproduce {result.recipe} --scale {result.scale}` | {seconds:,.0f} |")
    return [*lines, f"| all | {total:,.0f} |"]


if __name__ == "__main__":
    main()
