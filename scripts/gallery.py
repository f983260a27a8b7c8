"""Write experiments/README.md, an index of all results, and experiments/PAPER/README.md with the results of each paper.

python scripts/gallery.py
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import thumbnails
from papers import CLASSICS, EXPERIMENTS, TITLES, Paper, anchor, escaped, heading, lines_of, papers, sentence, shown_by

import fedsim
from fedsim.studies.reproduce.comparison import (
    CONTRADICTED_VERDICT,
    HELD_VERDICT,
    LEVEL_VERDICT,
    NOT_RUN_VERDICT,
    NOT_SHOWN_VERDICT,
    VERDICTS_WORST_FIRST,
    Judgement,
)
from fedsim.studies.reproduce.provenance import TRACED_STATUS, provenance_status
from fedsim.studies.reproduce.recipe import RUN_SECONDS_FILE
from fedsim.studies.reproduce.stored import StoredRecipeResult

PAGE = EXPERIMENTS / "README.md"
STATEMENTS = "docs/what_the_papers_claim.md"
WITH_STATEMENTS = (*TITLES, *CLASSICS)
HOW_TO_READ = (  # a line of each paper's page
    "A line with a verdict names the measured quantity and the expected relation of two sides, such as *accuracy, A "
    "above B*; the measured differences follow. In parentheses is the statement of the paper that it tests; *ours* "
    "means that it tests none. See [how to read a verdict](../../docs/verdicts.md)."
)
MOST_ROWS = 40  # more numbers than this stay in results.csv
MARKS = {
    HELD_VERDICT: "✓ held",
    CONTRADICTED_VERDICT: "✗ **contradicted**",
    LEVEL_VERDICT: "= level",
    NOT_SHOWN_VERDICT: "○ not shown",
    NOT_RUN_VERDICT: "– not run",
}


def main() -> None:
    """Write the thumbnails and the pages."""
    read = papers()
    for paper in read.values():
        for result in paper.results:
            thumbnails.write(result.folder)
    PAGE.write_text(page(read), encoding="utf-8")
    (EXPERIMENTS / RUN_SECONDS_FILE).write_text(run_seconds(read), encoding="utf-8")
    for folder, text in paper_pages(read).items():
        (EXPERIMENTS / folder / "README.md").write_text(text, encoding="utf-8")


def run_seconds(read: dict[str, Paper]) -> str:
    """The file with the seconds of each recipe's runs at each scale, for `fedsim-reproduce --list`."""
    seconds: dict[str, dict[str, float]] = {}
    for paper in read.values():
        for result in paper.results:
            if result.run_seconds is not None:
                seconds.setdefault(result.recipe, {})[result.scale] = round(result.run_seconds)
    return json.dumps(seconds, indent=1, sort_keys=True) + "\n"


def page(read: dict[str, Paper]) -> str:
    """The index."""
    lines = [
        "# Reproduced figures and tables",
        "",
        "Written by `python scripts/gallery.py` from the results in this folder; the page of each result gives its",
        "command. The scale is the size of the runs: `paper` as published, `cpu` smaller, as described on the result's",
        "page. See also [the quickstart experiment](quickstart/README.md) and",
        "[MNIST under availability](mnist_availability/README.md).",
        "",
        "Each result has comparisons, which are [held, contradicted, level or not shown](../docs/verdicts.md); for the",
        f"resulting verdicts on the papers' statements, see [what the papers claim](../{STATEMENTS}). The column",
        "*printed → ours* compares published numbers with ours: the pair with the smallest and the pair with the",
        "largest relative difference, without fitted ones. *Made by*:",
        "[traced, verified or unverified](../docs/reproducing.md#where-a-result-comes-from).",
        "",
        "| | result | scale | printed → ours | comparisons | made by |",
        "|---|---|---|---|---|---|",
        *(row(paper, result) for paper in read.values() for result in paper.results),
    ]
    lessons = {folder: " ".join(lines_of(EXPERIMENTS / folder / "lessons.md")) for folder in read}
    lines += ["", "## Lessons", ""] if any(lessons.values()) else []
    for folder, said in lessons.items():
        link = (
            f" [Its statements](../{STATEMENTS}#{anchor(read[folder].title)})."
            if folder in TITLES or folder in CLASSICS
            else ""
        )
        lines += [f"- **{read[folder].title}.** {said}{link}"] if said else []
    return "\n".join(lines) + "\n"


def paper_pages(read: dict[str, Paper]) -> dict[str, str]:
    """Folder → its page, of those that have results."""
    pages = {}
    for folder, paper in read.items():
        if paper.results:
            lines = [f"# {paper.title}", "", "Written by `python scripts/gallery.py`; [all results](../README.md)."]
            if folder in WITH_STATEMENTS:
                lines[-1] += f" Verdicts: [statements of the paper](../../{STATEMENTS}#{anchor(paper.title)})."
            lines += ["", HOW_TO_READ]
            for result in paper.results:
                lines += ["", *entry(paper, result)]
            pages[folder] = "\n".join(lines) + "\n"
    return pages


def row(paper: Paper, result: StoredRecipeResult) -> str:
    """A result's line of the index, with a small version of its figure."""
    told = "<br>".join(
        f"{escaped(line['name'])}: {number(line['paper'])} → {number(line['ours'], line['std'])}"
        for line in extremes(paper, result)
    )
    counts = Counter(judgement.verdict for judgement in paper.judgements(result))
    counted = (
        ", ".join(f"{counts[word]} {word}" for word in reversed(VERDICTS_WORST_FIRST) if counts[word])
        or "a figure only"
    )
    link = f"[{result.recipe}]({paper.folder}/README.md#{anchor(heading(result))})"
    cells = [picture(paper, result), link, result.scale, told, counted, provenance_status(result.report_content)]
    return f"| {' | '.join(cells)} |"


def picture(paper: Paper, result: StoredRecipeResult) -> str:
    """The thumbnail of a result's figure; empty if it has none."""
    if not (result.folder / thumbnails.FIGURE).exists():
        return ""
    folder = result.folder.relative_to(EXPERIMENTS).as_posix()
    return f"![{escaped(result.report_content['about'])}]({folder}/{thumbnails.THUMBNAIL})"


def extremes(paper: Paper, result: StoredRecipeResult) -> list[dict[str, Any]]:
    """Of the first printed measure the number that ours is nearest to and the one it is farthest from."""
    rows = [
        line
        for line in result.measured_number_rows
        if None not in (line["paper"], line["ours"]) and not line.get("fitted")
    ]
    first = next(iter(paper.recipes[result.recipe].paper), "")
    rows = [line for line in rows if line["name"].endswith(first)] or rows
    by_gap = sorted(rows, key=lambda line: gap(line["paper"], line["ours"]))
    return by_gap if len(by_gap) < 3 else [by_gap[0], by_gap[-1]]


def gap(paper: float, ours: float) -> float:
    """Relative to the print."""
    return abs(ours - paper) / abs(paper) if paper else math.copysign(math.inf, abs(ours))


def entry(paper: Paper, result: StoredRecipeResult) -> list[str]:
    """One figure or table."""
    content, folder = result.report_content, result.folder.relative_to(EXPERIMENTS / paper.folder).as_posix()
    lines = [f"## {heading(result)}", "", f"{content['source']}: {sentence(content['about'])}"]
    if content["reduced"]:
        lines.append(f"Smaller than published: {sentence(content['reduced'])}")
    if remark := paper.recipes[result.recipe].remark:
        lines.append(remark.strip())
    lists = [
        [judged(judgement) for judgement in paper.judgements(result)],
        [f"- tuned for {place}: {label}" for place, label in content["tuned"].items()]
        + [f"- not run: {place} ({why})" for place, why in content["skipped"].items()],
    ]
    for listed in lists:
        lines += ["", *listed] if listed else []
    if (result.folder / "figure.png").exists():
        lines += ["", f"![{content['about']}]({folder}/figure.png)"]
    rows = result.measured_number_rows
    if 0 < len(rows) <= MOST_ROWS:
        lines += ["", "| | paper | ours |", "|---|---|---|"]
        lines += [f"| {named(line)} | {number(line['paper'])} | {number(line['ours'], line['std'])} |" for line in rows]
    elif rows:
        lines += ["", f"All {len(rows)} numbers: [results.csv]({folder}/results.csv)."]
    seeds = ", ".join(map(str, content["seeds"]))
    return [*lines, "", f"`{content['command']}`; seeds {seeds}; {content['machine']}; {made_by(content)}."]


def judged(judgement: Judgement) -> str:
    """A comparison, its verdict, the differences, what the seeds would have shown, and the reason where it has one."""
    comparison, word = judgement.comparison, judgement.verdict
    purpose = f"`{comparison.statement}`" if comparison.statement else "ours"
    mark = ", fitted" if comparison.fitted else ""
    evidence = sentence(escaped(judgement.evidence_text))
    evidence = evidence[:1].upper() + evidence[1:]
    said = f"- {MARKS[word]} ({purpose}{mark}): {escaped(comparison.we_test)}. {evidence}"
    if judgement.smallest_detectable_difference:
        smallest = f"{judgement.smallest_detectable_difference:.2g}"
        said += f" Smallest difference detectable with these seeds (80 % power): {smallest}."
    if not comparison.reason:
        return said
    because = f"{sentence(escaped(comparison.reason))} Shown by {shown_by(comparison, '../../')}."
    if word == CONTRADICTED_VERDICT:
        return f"{said} Reason: {because}"
    return f"{said} Why it need not hold in general (these runs do not show it): {because}"


def named(line: dict[str, Any]) -> str:
    """A number's place; marked where it uses fitted constants."""
    return escaped(line["name"]) + " *(fitted)*" * bool(line.get("fitted"))


def made_by(content: dict[str, Any]) -> str:
    """Version and provenance."""
    version = content["versions"].get("fedsim-torch")
    state = provenance_status(content)
    if state == TRACED_STATUS:
        state = f"sources {content['sources'][:12]}"
    elif content.get("verified"):
        state = f"{len(content['verified'])} of its runs verified with sources {max(content['verified'].values())[:12]}"
    return state if version == fedsim.__version__ else f"made by fedsim {version}, {state}"


def number(value: float | None, std: float | None = None) -> str:
    """With the digits that a reader compares; large ones in full."""
    if value is None:
        return ""
    if abs(value) >= 10_000:
        return f"{value:,.0f}" + (f" ± {std:,.0f}" if std else "")
    return f"{value:.4g}" + (f" ± {std:.2g}" if std else "")


if __name__ == "__main__":
    main()
