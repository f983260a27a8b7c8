"""Write experiments/README.md: one table of numbers and verdicts over all papers, what one learns, and every result.

python scripts/gallery.py
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from papers import (
    EXPERIMENTS,
    HELD,
    OPEN,
    REFUTED,
    Report,
    anchor,
    escaped,
    lines_of,
    reports,
    sentence,
    shown_by,
    title,
    verdict,
)

import fedsim
from fedsim.studies.reproduce.recipe import Recipe, load

PAGE = EXPERIMENTS / "README.md"
ARGUMENTS = "docs/what_the_papers_claim.md"
MOST_ROWS = 40  # more numbers than this stay in results.csv
MARKS = {HELD: "✓ held", REFUTED: "✗ **refuted**", OPEN: "○ **open**"}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(reports()), encoding="utf-8")


def page(papers: dict[str, list[Report]]) -> str:
    """All of it."""
    lines = [
        "# Reproduced figures and tables",
        "",
        "Written by `python scripts/gallery.py` from the results in this folder, each made by the command below it.",
        "Its scale says how large the runs were: `paper` as published, `cpu` smaller, as the entry says. Beside these:",
        "[the main job](quickstart/README.md) and [MNIST under availability](mnist_availability/README.md).",
        "",
        "A claim is **held**, **refuted** (it fails, for a reason that a test or another recipe shows) or **open**;",
        f"[what the papers claim](../{ARGUMENTS}) has the arguments. Printed → ours: of what a paper prints the",
        "number that ours is nearest to, and the one it is farthest from, relative to the print; none that was fitted.",
        "",
        "| recipe | scale | printed → ours | held | refuted | open |",
        "|---|---|---|--:|--:|--:|",
    ]
    for paper, those in papers.items():
        lines += [row(report) for report in those]
        lines.append(total(f"**{title(paper)}**", those))
    lines.append(total("**all papers**", [report for those in papers.values() for report in those]))
    lessons = {paper: " ".join(lines_of(EXPERIMENTS / paper / "lessons.md")) for paper in papers}
    lines += ["", "## What one learns", ""] if any(lessons.values()) else []
    for paper, said in lessons.items():
        lines += [f"- **{title(paper)}.** {said} [Its claims](../{ARGUMENTS}#{anchor(title(paper))})."] if said else []
    for those in papers.values():
        for report in those:
            lines += ["", *entry(report)]
    return "\n".join(lines) + "\n"


def row(report: Report) -> str:
    """A recipe's line of the table."""
    content = report.content
    told = "<br>".join(
        f"{escaped(line['name'])}: {number(line['paper'])} → {number(line['ours'], line['std'])}"
        for line in extremes(report)
    )
    counted = report.count().values() if report.claims else ("", "a picture", "")
    cells = [f"[{content['recipe']}](#{anchor(report.heading)})", content["scale"], told, *counted]
    return f"| {' | '.join(map(str, cells))} |"


def extremes(report: Report) -> list[dict[str, Any]]:
    """Of the first printed measure the number that ours is nearest to and the one it is farthest from."""
    printed = [line for line in report.numbers if None not in (line["paper"], line["ours"]) and not line.get("fitted")]
    first = next(iter(known(report.content["recipe"]).paper), "")
    printed = [line for line in printed if line["name"].endswith(first)] or printed
    by_gap = sorted(printed, key=lambda line: gap(line["paper"], line["ours"]))
    return by_gap if len(by_gap) < 3 else [by_gap[0], by_gap[-1]]


@functools.cache
def known(name: str) -> Recipe:
    """Reading one takes longer than all else."""
    return load(name)


def gap(paper: float, ours: float) -> float:
    """Relative to the print."""
    return abs(ours - paper) / abs(paper) if paper else math.copysign(math.inf, abs(ours))


def total(name: str, those: list[Report]) -> str:
    """A line of sums."""
    counts = [report.count() for report in those]
    sums = [sum(count[word] for count in counts) for word in (HELD, REFUTED, OPEN)]
    return f"| {name} | | | {' | '.join(f'**{n}**' for n in sums)} |"


def entry(report: Report) -> list[str]:
    """One figure or table."""
    content, folder = report.content, report.folder.relative_to(EXPERIMENTS).as_posix()
    lines = [f"## {report.heading}", "", f"{content['source']}: {sentence(content['about'])}"]
    if content["reduced"]:
        lines.append(f"Smaller than published: {sentence(content['reduced'])}")
    if outdated(report):
        lines.append("*The recipe's claims have changed since, and it has not been run again yet.*")
    elif remark := known(content["recipe"]).remark:
        lines.append(remark.strip())
    lists = [
        [judged(line, report.paper) for line in report.claims],
        [f"- tuned for {place}: {label}" for place, label in content["tuned"].items()]
        + [f"- not run: {place} ({why})" for place, why in content["skipped"].items()],
    ]
    for listed in lists:
        lines += ["", *listed] if listed else []
    if (report.folder / "figure.png").exists():
        lines += ["", f"![{content['about']}]({folder}/figure.png)"]
    numbers = report.numbers
    if 0 < len(numbers) <= MOST_ROWS:
        lines += ["", "| | paper | ours |", "|---|---|---|"]
        lines += [
            f"| {named(line)} | {number(line['paper'])} | {number(line['ours'], line['std'])} |" for line in numbers
        ]
    elif numbers:
        lines += ["", f"All {len(numbers)} numbers: [results.csv]({folder}/results.csv)."]
    seeds = ", ".join(map(str, content["seeds"]))
    return [*lines, "", f"`{content['command']}`; seeds {seeds}; {content['machine']}{older(content)}."]


def outdated(report: Report) -> bool:
    """Has its recipe other claims by now?"""
    recipe = known(report.content["recipe"])
    return [line["claim"] for line in report.claims] != [
        claim.claim for claim in recipe.claims if report.content["scale"] in claim.scales
    ]


def judged(line: dict[str, Any], paper: str) -> str:
    """A claim, its verdict and what was compared; the reason where it has one."""
    word = verdict(line)
    said = f"- {MARKS[word]}: {escaped(line['claim'])}{mark(line)}. {sentence(escaped(line['detail']))}"
    if not line.get("reason"):
        return said
    because = f"{sentence(escaped(line['reason']))} Shown by {shown_by(line, '../')}"
    if word == HELD:
        return f"{said} Its reason did not show in these runs: {because}."
    argued = (Path(__file__).parents[1] / "docs" / "claims" / f"{paper}.md").exists()  # not for recipes of our own
    return f"{said} {because}" + (f"; [argument](../{ARGUMENTS}#{anchor(title(paper))})." if argued else ".")


def mark(line: dict[str, Any]) -> str:
    """Behind what uses fitted constants."""
    return " *(fitted)*" if line.get("fitted") else ""


def named(line: dict[str, Any]) -> str:
    return escaped(line["name"]) + mark(line)


def older(content: dict[str, Any]) -> str:
    """The version that made it, where it is not this one."""
    made_by = content["versions"].get("fedsim-torch")
    return f"; made by fedsim {made_by}" if made_by != fedsim.__version__ else ""


def number(value: float | None, std: float | None = None) -> str:
    """With the digits that a reader compares; large ones in full."""
    if value is None:
        return ""
    if abs(value) >= 10_000:
        return f"{value:,.0f}" + (f" ± {std:,.0f}" if std else "")
    return f"{value:.4g}" + (f" ± {std:.2g}" if std else "")


if __name__ == "__main__":
    main()
