"""Write docs/what_the_papers_claim.md: every refuted claim in a sentence, and the arguments of docs/claims/ below.

python scripts/claims_page.py
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from papers import REFUTED, ROOT, TITLES, Report, anchor, escaped, lines_of, reports, sentence, shown_by, title, verdict

PAGE = ROOT / "docs" / "what_the_papers_claim.md"
ARGUMENTS = ROOT / "docs" / "claims"
SECTION = 2  # level of a paper's heading
LINK = re.compile(r"\]\((?!\w+:|#)([^()\s]+)\)")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(reports()), encoding="utf-8")


def page(papers: dict[str, list[Report]]) -> str:
    """All of it."""
    lines = [
        "# What the papers claim",
        "",
        "Written by `python scripts/claims_page.py` from the committed results and `docs/claims/`; do not edit.",
        "",
        "Each claim of a paper is a comparison in a recipe, and [held, refuted or open](reproducing.md#verdicts).",
        "Below stands, paper by paper, why what is refuted does not hold, and what was chosen that nobody printed.",
        "Every formula is a test; all numbers are in the [results](../experiments/README.md).",
        "",
        ", ".join(f"[{title(paper)}](#{anchor(title(paper))})" for paper in TITLES) + ".",
    ]
    for paper in TITLES:
        lines += ["", f"## {title(paper)}"]
        refuted = [line for report in papers.get(paper, []) for line in sentences(report)]
        lines += ["", "Refuted:", "", *refuted] if refuted else []
        lines += ["", *argued] if (argued := arguments(paper)) else []
    return "\n".join(lines) + "\n"


def sentences(report: Report) -> Iterator[str]:
    """The refuted claims of a result with their reasons and what shows these; one reason may stand for several."""
    name = report.content["recipe"].partition("/")[2]
    where = f"[{name}](../experiments/README.md#{anchor(report.heading)})"
    claims: dict[str, list[str]] = {}
    for row in report.claims:
        if verdict(row) == REFUTED:
            because = f"{sentence(escaped(row['reason']))} Shown by {shown_by(row, '../')}."
            claims.setdefault(because, []).append(f"“{escaped(row['claim']).strip()}”")
    for because, those in claims.items():
        yield f"- {where}, {', '.join(those)}: {because}"


def arguments(paper: str) -> list[str]:
    """A paper's file of docs/claims/ as a section: its headings below the section's own, its links from here."""
    fences = re.split(r"(^```.*?^```$)", "\n".join(lines_of(ARGUMENTS / f"{paper}.md")), flags=re.M | re.S)
    prose = [re.sub(r"\A# .*\n", "", part) for part in fences[::2]]
    highest = min((len(signs) for part in prose for signs in re.findall(r"^(#+) ", part, re.M)), default=SECTION + 1)
    for number, part in enumerate(prose):
        below = re.sub(r"^#+(?= )", lambda found: "#" * (len(found[0]) - highest + SECTION + 1), part, flags=re.M)
        fences[2 * number] = LINK.sub(from_here, below)
    return "".join(fences).strip().splitlines()


def from_here(found: re.Match[str]) -> str:
    """A link of a file in docs/claims/, from docs/."""
    return f"]({posixpath.normpath(posixpath.join('claims', found[1]))})"


if __name__ == "__main__":
    main()
