"""Write docs/what_the_papers_claim.md, each paper's statements with their verdicts and the arguments of docs/claims/,
and the table of README.md.

python scripts/claims_page.py
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from papers import (
    CLASSICS,
    ROOT,
    TITLES,
    Paper,
    anchor,
    entry_link,
    escaped,
    lines_of,
    papers,
    sentence,
    shown_by,
    title,
)

from fedsim.studies.reproduce import comparison as words
from fedsim.studies.reproduce.statements import (
    DEPENDS_VERDICT,
    HELD_VERDICT,
    LEVEL_VERDICT,
    NOT_COVERED_VERDICT,
    NOT_RUN_VERDICT,
    NOT_SHOWN_VERDICT,
    REDUCED_VERDICT,
    REFUTED_VERDICT,
    StatementEvidence,
    StatementJudgement,
    num_seeds_text,
)

PAGE, README = ROOT / "docs" / "what_the_papers_claim.md", ROOT / "README.md"
ARGUMENTS = ROOT / "docs" / "claims"
BEGIN, END = "<!--verdicts-->", "<!--/verdicts-->"
SECTION = 2  # level of a paper's heading
LINK = re.compile(r"\$[^$\n]+\$|\]\((?!\w+:|#)([^()\s]+)\)")  # E[x](y) in a formula is no link
COLUMNS = (
    HELD_VERDICT,
    REDUCED_VERDICT,
    LEVEL_VERDICT,
    NOT_SHOWN_VERDICT,
    REFUTED_VERDICT,
    DEPENDS_VERDICT,
    NOT_RUN_VERDICT,
    NOT_COVERED_VERDICT,
)


def main() -> None:
    """Write the page and the table."""
    read = papers()
    PAGE.write_text(page(read), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), read), encoding="utf-8")


def page(read: dict[str, Paper]) -> str:
    """All of it."""
    lines = [
        "# What the papers claim",
        "",
        "Written by `python scripts/claims_page.py` from `experiments/*/statements.yaml`, the committed results and",
        "`docs/claims/`; do not edit.",
        "",
        "For each paper: its statements in our words, with their places; what we test of them; and one of",
        "[seven verdicts](verdicts.md), or *not covered*, with its scale and number of seeds. Where a recipe asks",
        "for other seeds than the stored run has, the page says so: the verdict rests on the stored run until the",
        "recipe is run again. Then the reasons why refuted statements do not hold, and our choices where the paper",
        "prints none. All numbers: [results](../experiments/README.md).",
        "",
        *table(read, "", (*TITLES, *CLASSICS)),
    ]
    for folder in (*TITLES, *CLASSICS):
        if folder in read:
            lines += ["", *section(read[folder])]
    return "\n".join(lines) + "\n"


def table(read: dict[str, Paper], up: str, folders: Iterable[str] = TITLES) -> list[str]:
    """A row for each of these papers: how many of its statements have which verdict; `up` leads to this page."""
    lines = [f"| paper | statements | {' | '.join(COLUMNS)} |", f"|---|--:|{'--:|' * len(COLUMNS)}"]
    for folder in folders:
        verdicts = read[folder].verdicts() if folder in read else []
        if verdicts:
            counts = [sum(verdict.verdict_label == word for verdict in verdicts) for word in COLUMNS]
            cells = [f"[{title(folder)}]({up}#{anchor(title(folder))})", len(verdicts), *counts]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def with_table(readme: str, read: dict[str, Paper]) -> str:
    """README.md with the table as it is now."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"README.md lacks the lines {BEGIN} and {END}")
    return "\n".join([before + BEGIN, "", *table(read, "docs/what_the_papers_claim.md"), "", END]) + after


def section(paper: Paper) -> list[str]:
    """A paper: its statements, the reasons of what is refuted, controls of our own, arguments."""
    lines = [f"## {paper.title}"]
    if paper.ledger is not None:
        about = paper.ledger.paper_metadata
        lines += ["", f"[{about['title']}]({about['link']}), {about['authors']}, {about['venue']}, {about['year']}."]
    lines += statements(paper)
    lines += reasons(paper.verdicts())
    lines += controls(paper)
    return [*lines, *(["", *argued] if (argued := arguments(paper.folder)) else [])]


def statements(paper: Paper) -> list[str]:
    """A row for each."""
    verdicts = paper.verdicts()
    if not verdicts:
        return []
    lines = ["", "| place | the paper states | we test | verdict |", "|---|---|---|---|"]
    for verdict in verdicts:
        statement = verdict.statement
        place = f"**{escaped(statement.item)}** {escaped(statement.place)}"
        tests = "<br>".join(tested(each, paper) for each in verdict.evidence) or "–"
        lines.append(f"| {place} | {escaped(statement.states)} | {tests} | {judged(verdict)} |")
    return lines


def tested(evidence: StatementEvidence, paper: Paper) -> str:
    """What a comparison tests, its verdict, and a link to the result or the command that would make it."""
    name = evidence.recipe
    if evidence.scale:
        where = entry_link(name, evidence.scale, "../")
        now = paper.seeds_now(evidence)
        since = (
            f", {num_seeds_text(evidence.num_seeds)}; the recipe asks for {now} now"
            if now not in (0, evidence.num_seeds)
            else ""
        )
        said = f"{evidence.comparison_verdict}, {where}{since}"
    else:
        scale = "paper" if "paper" in evidence.comparison.scales else evidence.comparison.scales[0]
        said = f"{words.NOT_RUN_VERDICT}: `fedsim-reproduce {name} --scale {scale}`"
    choice = f"; {escaped(evidence.comparison.choice)}" if evidence.comparison.choice else ""
    return f"{escaped(evidence.comparison.we_test)}{choice} ({said})"


def judged(verdict: StatementJudgement) -> str:
    """The verdict in bold, at which scale, and what else must be said."""
    decided = verdict.scales_text if verdict.verdict_label != words.NOT_RUN_VERDICT else ""
    scale = f", scale {decided}" + f", {verdict.seed_counts_text}" * bool(verdict.seed_counts_text) if decided else ""
    choice = (
        f". Not printed: {escaped(sentence(verdict.statement.choice))}"
        if verdict.verdict_label == DEPENDS_VERDICT
        else ""
    )
    remark = f": {escaped(verdict.remark)}" if verdict.remark else ""
    return f"**{verdict.verdict_label}**{scale}{remark}{choice}"


def reasons(verdicts: Iterable[StatementJudgement]) -> list[str]:
    """Why what is refuted does not hold; one reason may stand for several statements."""
    by_reason: dict[str, list[str]] = {}
    for verdict in verdicts:
        for each in verdict.evidence:
            if each.comparison_verdict == words.CONTRADICTED_VERDICT and each.comparison.reason:
                because = f"{sentence(escaped(each.comparison.reason))} Shown by {shown_by(each.comparison, '../')}."
                named = f"{escaped(verdict.statement.states).rstrip('.')} ({verdict.verdict_label})"
                those = by_reason.setdefault(because, [])
                those += [named] if named not in those else []
    lines = [f"- {'; '.join(those)}. Because: {because}" for because, those in by_reason.items()]
    return ["", "Why comparisons are contradicted:", "", *lines] if lines else []


def controls(paper: Paper) -> list[str]:
    """Comparisons of our own; they decide no statement."""
    evidence = paper.evidence().get("", [])
    if not evidence:
        return []
    fitted = [" (fitted constants)" if each.comparison.fitted else "" for each in evidence]
    lines = [f"- {tested(each, paper)}{mark}" for each, mark in zip(evidence, fitted, strict=True)]
    return ["", "Controls of our own, which decide no statement:", "", *lines]


def arguments(paper: str) -> list[str]:
    """A paper's file of docs/claims/ as a section: its headings below the section's own, its links from here."""
    fences = re.split(r"(^```.*?^```$)", "\n".join(lines_of(ARGUMENTS / f"{paper}.md")), flags=re.M | re.S)
    prose = [re.sub(r"\A# .*\n", "", part) for part in fences[::2]]
    highest = min((len(signs) for part in prose for signs in re.findall(r"^(#+) ", part, re.M)), default=SECTION + 1)
    for number, part in enumerate(prose):
        below = re.sub(r"^#+(?= )", lambda match: "#" * (len(match[0]) - highest + SECTION + 1), part, flags=re.M)
        fences[2 * number] = LINK.sub(from_here, below)
    return "".join(fences).strip().splitlines()


def from_here(match: re.Match[str]) -> str:
    """A link of a file in docs/claims/, from docs/; a formula as it is."""
    if match[1] is None:
        return match[0]
    return f"]({posixpath.normpath(posixpath.join('claims', match[1]))})"


if __name__ == "__main__":
    main()
