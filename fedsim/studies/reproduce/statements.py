"""The verdict on each statement of a paper, from the comparisons that decide it at the largest scale that was run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedsim.studies.reproduce import comparison as words
from fedsim.studies.reproduce.comparison import Comparison, Judgement
from fedsim.studies.reproduce.ledger import Statement, StatementLedger
from fedsim.studies.reproduce.recipe import Recipe

(
    REFUTED_VERDICT,
    DEPENDS_VERDICT,
    NOT_SHOWN_VERDICT,
    LEVEL_VERDICT,
    NOT_RUN_VERDICT,
    REDUCED_VERDICT,
    HELD_VERDICT,
    NOT_COVERED_VERDICT,
) = VERDICTS = (
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
class StatementEvidence:
    """A comparison that decides a statement, with its verdict.

    Attributes:
        recipe: PAPER/NAME.
        comparison: a comparison of that recipe.
        scale: the largest that was run and that the comparison is meant for; '' where none was.
        reduction_note: what is smaller there than in the paper.
        judgement: None where none was run.
        num_seeds: how many the stored result has; 0 where that is not known.
        equals_paper_scale: whether the runs at this scale are those of the scale 'paper'.
    """

    recipe: str
    comparison: Comparison
    scale: str = ""
    reduction_note: str = ""
    judgement: Judgement | None = None
    num_seeds: int = 0
    equals_paper_scale: bool = False

    @property
    def comparison_verdict(self) -> str:
        """The verdict of the comparison."""
        return self.judgement.verdict if self.judgement is not None else words.NOT_RUN_VERDICT

    @property
    def statement_verdict(self) -> str:
        """The verdict on the statement from this comparison alone."""
        if self.comparison_verdict == words.HELD_VERDICT:
            return HELD_VERDICT if self.is_at_paper_scale else REDUCED_VERDICT
        if self.comparison_verdict == words.CONTRADICTED_VERDICT:
            return REFUTED_VERDICT if self.is_at_paper_scale and self.comparison.reason else NOT_SHOWN_VERDICT
        return self.comparison_verdict

    @property
    def is_at_paper_scale(self) -> bool:
        """Whether it was run with the paper's constants and size."""
        return (self.scale == "paper" or self.equals_paper_scale) and not self.reduction_note

    @property
    def exemption_reason(self) -> str:
        """The reason why a contradiction does not refute the statement; '' otherwise."""
        if self.comparison_verdict != words.CONTRADICTED_VERDICT or self.statement_verdict == REFUTED_VERDICT:
            return ""
        return "contradicted, reason not shown" if self.is_at_paper_scale else "contradicted at reduced scale"


@dataclass(frozen=True)
class StatementJudgement:
    """The verdict on a statement.

    Attributes:
        statement: the statement.
        verdict_label: one of the seven verdicts, or 'not covered'.
        evidence: the comparisons that decide it.
        remark: an explanation of the verdict.
    """

    statement: Statement
    verdict_label: str
    evidence: tuple[StatementEvidence, ...] = ()
    remark: str = ""

    @property
    def scales_text(self) -> str:
        """The scales at which it was decided, the largest first."""
        scales = {evidence_item.scale for evidence_item in self.evidence if evidence_item.scale}
        return ", ".join(scale for scale in SCALES_LARGEST_FIRST if scale in scales)

    @property
    def seed_counts_text(self) -> str:
        """The number of seeds as text: '3 seeds', or '5 to 20 seeds' if results differ; '' if not known."""
        counts = sorted({evidence_item.num_seeds for evidence_item in self.evidence if evidence_item.num_seeds})
        if len(counts) > 1:
            return f"{counts[0]} to {num_seeds_text(counts[-1])}"
        return num_seeds_text(counts[0]) if counts else ""


def evidence_by_statement(
    recipes: Iterable[Recipe],
    judged: Mapping[tuple[str, str], list[Judgement]],
    seeds: Mapping[tuple[str, str], int] | None = None,
) -> dict[str, list[StatementEvidence]]:
    """Return statement → its comparisons, each at the largest scale that was run; '' holds controls of our own.

    Args:
        recipes: of the paper.
        judged: (recipe, scale) → judgements of a stored result.
        seeds: (recipe, scale) → how many seeds a stored result has.
    """
    evidence: dict[str, list[StatementEvidence]] = {}
    for recipe in recipes:
        for comparison in recipe.comparisons:
            largest_evidence = StatementEvidence(recipe.name, comparison)
            for scale in SCALES_LARGEST_FIRST:
                judgement = next((j for j in judged.get((recipe.name, scale), []) if j.comparison == comparison), None)
                if judgement is not None and judgement.verdict != words.NOT_RUN_VERDICT:
                    count = (seeds or {}).get((recipe.name, scale), 0)
                    recipe_scale = recipe.scales[scale]
                    largest_evidence = StatementEvidence(
                        recipe.name,
                        comparison,
                        scale,
                        recipe_scale.reduced,
                        judgement,
                        count,
                        equals_paper_scale=recipe_scale == recipe.scales["paper"],
                    )
                    break
            evidence.setdefault(comparison.statement, []).append(largest_evidence)
    return evidence


def judge_statement(statement: Statement, evidence: Iterable[StatementEvidence]) -> StatementJudgement:
    """Return the verdict on a statement: the worst of its comparisons, or `DEPENDS_VERDICT` if unprinted choices
    disagree."""
    evidence = tuple(evidence)
    if not evidence:
        return StatementJudgement(statement, NOT_COVERED_VERDICT, remark=statement.not_covered)
    choices = sorted({evidence_item.comparison.choice for evidence_item in evidence if evidence_item.comparison.choice})
    by_choice = {
        choice: evidence_of_worst_verdict(
            [evidence_item for evidence_item in evidence if evidence_item.comparison.choice in ("", choice)]
        )
        for choice in choices
    }
    remark = "; ".join(f"{choice}: {evidence_item.comparison_verdict}" for choice, evidence_item in by_choice.items())
    if does_verdict_depend_on_choice(
        [evidence_item for evidence_item in by_choice.values() if evidence_item.comparison_verdict != NOT_RUN_VERDICT]
    ):
        return StatementJudgement(statement, DEPENDS_VERDICT, evidence, remark)
    if any(
        evidence_item.comparison_verdict == NOT_RUN_VERDICT for evidence_item in by_choice.values()
    ):  # it may turn on a choice that was not tried
        return StatementJudgement(statement, NOT_RUN_VERDICT, evidence, remark)
    decisive_evidence = evidence_of_worst_verdict(evidence)
    remarks = dict.fromkeys(
        evidence_item.exemption_reason
        for evidence_item in evidence
        if evidence_item.statement_verdict == decisive_evidence.statement_verdict and evidence_item.exemption_reason
    )
    return StatementJudgement(statement, decisive_evidence.statement_verdict, evidence, "; ".join(remarks))


def statements_text(recipe: Recipe, scale: str, judgements: list[Judgement], ledger: StatementLedger) -> str:
    """Return the paper's statements that a recipe tests, each with its place and the verdict from these runs alone; ''
    if they decide none."""
    evidence = evidence_by_statement([recipe], {(recipe.name, scale): judgements})
    lines = []
    for statement in ledger.statements:
        own_evidence = [entry for entry in evidence.get(statement.id, []) if entry.judgement is not None]
        if own_evidence:
            verdict = judge_statement(statement, own_evidence)
            remark = f" ({verdict.remark})" if verdict.remark else ""
            lines.append(f"  {verdict.verdict_label}{remark} [{statement.id}], {statement.place}: {statement.states}")
    heading = "Statements of the paper, restated, and the verdicts from these runs alone (docs/verdicts.md):"
    return "\n".join([heading, *lines]) if lines else ""


def evidence_of_worst_verdict(evidence: Iterable[StatementEvidence]) -> StatementEvidence:
    """Return the comparison with the worst verdict; in a tie a contradicted one."""
    return min(
        evidence,
        key=lambda each: (
            VERDICTS.index(each.statement_verdict),
            each.comparison_verdict != words.CONTRADICTED_VERDICT,
        ),
    )


def num_seeds_text(seeds: int) -> str:
    """Format a number of seeds: '1 seed', '3 seeds'."""
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def does_verdict_depend_on_choice(evidence: Iterable[StatementEvidence]) -> bool:
    """Return whether one choice is held and another is contradicted or level."""
    seen_words = {evidence_item.comparison_verdict for evidence_item in evidence}
    return words.HELD_VERDICT in seen_words and bool(seen_words & {words.CONTRADICTED_VERDICT, words.LEVEL_VERDICT})
