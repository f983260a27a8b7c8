"""The verdict on each statement of a paper, from the comparisons that decide it at the largest scale that was run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedsim.studies.reproduce import comparison as words
from fedsim.studies.reproduce.comparison import Comparison, Judgement
from fedsim.studies.reproduce.ledger import Statement
from fedsim.studies.reproduce.recipe import Recipe

REFUTED, DEPENDS, NOT_SHOWN, LEVEL, NOT_RUN, REDUCED, HELD, NOT_COVERED = VERDICTS = (
    "refuted",
    "depends on an unprinted choice",
    "not shown",
    "level",
    "not run",
    "held at reduced scale",
    "held",
    "not covered",
)
SCALES_LARGEST_FIRST = ("paper", "cpu")


@dataclass(frozen=True)
class Evidence:
    """A comparison that decides a statement, with its verdict.

    Attributes:
        recipe: PAPER/NAME.
        comparison: a comparison of that recipe.
        scale: the largest that was run and that the comparison is meant for; '' where none was.
        reduced: what is smaller there than in the paper.
        judgement: None where none was run.
        seeds: how many the stored result has; 0 where that is not known.
    """

    recipe: str
    comparison: Comparison
    scale: str = ""
    reduced: str = ""
    judgement: Judgement | None = None
    seeds: int = 0

    @property
    def word(self) -> str:
        """The verdict of the comparison."""
        return self.judgement.word if self.judgement is not None else words.NOT_RUN

    @property
    def verdict(self) -> str:
        """The verdict on the statement from this comparison alone."""
        if self.word == words.HELD:
            return HELD if self.as_published else REDUCED
        if self.word == words.CONTRADICTED:
            return REFUTED if self.as_published and self.comparison.reason else NOT_SHOWN
        return self.word

    @property
    def as_published(self) -> bool:
        """Whether it was run with the paper's constants and size."""
        return self.scale == "paper" and not self.reduced

    @property
    def remark(self) -> str:
        """The reason why a contradiction does not refute the statement; '' otherwise."""
        if self.word != words.CONTRADICTED or self.verdict == REFUTED:
            return ""
        return "contradicted, reason not shown" if self.as_published else "contradicted at reduced scale"


@dataclass(frozen=True)
class StatementVerdict:
    """The verdict on a statement.

    Attributes:
        statement: the statement.
        word: one of the seven verdicts, or 'not covered'.
        evidence: the comparisons that decide it.
        remark: an explanation of the verdict.
    """

    statement: Statement
    word: str
    evidence: tuple[Evidence, ...] = ()
    remark: str = ""

    @property
    def scale(self) -> str:
        """The scales at which it was decided, the largest first."""
        scales = {evidence_item.scale for evidence_item in self.evidence if evidence_item.scale}
        return ", ".join(scale for scale in SCALES_LARGEST_FIRST if scale in scales)

    @property
    def seeds(self) -> str:
        """The number of seeds as text: '3 seeds', or '5 to 20 seeds' if results differ; '' if not known."""
        counts = sorted({evidence_item.seeds for evidence_item in self.evidence if evidence_item.seeds})
        if len(counts) > 1:
            return f"{counts[0]} to {counted(counts[-1])}"
        return counted(counts[0]) if counts else ""


def evidence_of(
    recipes: Iterable[Recipe],
    judged: Mapping[tuple[str, str], list[Judgement]],
    seeds: Mapping[tuple[str, str], int] | None = None,
) -> dict[str, list[Evidence]]:
    """Return statement → its comparisons, each at the largest scale that was run; '' holds controls of our own.

    Args:
        recipes: of the paper.
        judged: (recipe, scale) → judgements of a stored result.
        seeds: (recipe, scale) → how many seeds a stored result has.
    """
    evidence: dict[str, list[Evidence]] = {}
    for recipe in recipes:
        for comparison in recipe.comparisons:
            largest_evidence = Evidence(recipe.name, comparison)
            for scale in SCALES_LARGEST_FIRST:
                judgement = next((j for j in judged.get((recipe.name, scale), []) if j.comparison == comparison), None)
                if judgement is not None and judgement.word != words.NOT_RUN:
                    count = (seeds or {}).get((recipe.name, scale), 0)
                    largest_evidence = Evidence(
                        recipe.name, comparison, scale, recipe.scales[scale].reduced, judgement, count
                    )
                    break
            evidence.setdefault(comparison.statement, []).append(largest_evidence)
    return evidence


def judge_statement(statement: Statement, evidence: Iterable[Evidence]) -> StatementVerdict:
    """Return the verdict on a statement: the worst of its comparisons, or `DEPENDS` if unprinted choices disagree."""
    evidence = tuple(evidence)
    if not evidence:
        return StatementVerdict(statement, NOT_COVERED, remark=statement.not_covered)
    choices = sorted({evidence_item.comparison.choice for evidence_item in evidence if evidence_item.comparison.choice})
    by_choice = {
        choice: worst([evidence_item for evidence_item in evidence if evidence_item.comparison.choice in ("", choice)])
        for choice in choices
    }
    remark = "; ".join(f"{choice}: {evidence_item.word}" for choice, evidence_item in by_choice.items())
    if disagree([evidence_item for evidence_item in by_choice.values() if evidence_item.word != NOT_RUN]):
        return StatementVerdict(statement, DEPENDS, evidence, remark)
    if any(
        evidence_item.word == NOT_RUN for evidence_item in by_choice.values()
    ):  # it may turn on a choice that was not tried
        return StatementVerdict(statement, NOT_RUN, evidence, remark)
    decisive = worst(evidence)
    remarks = dict.fromkeys(
        evidence_item.remark
        for evidence_item in evidence
        if evidence_item.verdict == decisive.verdict and evidence_item.remark
    )
    return StatementVerdict(statement, decisive.verdict, evidence, "; ".join(remarks))


def worst(evidence: Iterable[Evidence]) -> Evidence:
    """Return the comparison with the worst verdict; in a tie a contradicted one."""
    return min(evidence, key=lambda each: (VERDICTS.index(each.verdict), each.word != words.CONTRADICTED))


def counted(seeds: int) -> str:
    """Format a number of seeds: '1 seed', '3 seeds'."""
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def disagree(evidence: Iterable[Evidence]) -> bool:
    """Return whether one choice is held and another is contradicted or level."""
    seen_words = {evidence_item.word for evidence_item in evidence}
    return words.HELD in seen_words and bool(seen_words & {words.CONTRADICTED, words.LEVEL})
