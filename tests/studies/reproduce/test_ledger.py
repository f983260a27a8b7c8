"""A paper's ledger of statements: what is refused, and the verdict on a statement from its comparisons."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.core import ConfigError
from fedsim.studies.reproduce import statements as verdicts
from fedsim.studies.reproduce.comparison import VERDICTS_WORST_FIRST, Comparison, Judgement
from fedsim.studies.reproduce.ledger import Statement, load_statement_ledger, papers_with_ledger
from fedsim.studies.reproduce.recipe import list_recipe_names, load_recipe
from fedsim.studies.reproduce.statements import StatementEvidence, judge_statement

LEDGER: dict[str, Any] = {
    "paper": {"short": "P", "title": "T", "authors": "A", "venue": "V", "year": 2024, "link": "https://arxiv.org/abs/1"},
    "items": ["Fig. 1", "Theorem 1"],
    "statements": [
        {"id": "fig1-falls", "item": "Fig. 1", "place": "Section 4, second sentence", "states": "The loss falls."},
        {"id": "thm1-rate", "item": "Theorem 1", "place": "Section 3", "states": "O(1/T).", "not_covered": "Needs T."},
    ],
}  # fmt: skip
RECIPE = """
source: p Fig. 1
about: a test
axes: {algorithm: {A: [], B: []}}
scales: {smoke: {}, cpu: {reduced: few rounds}, paper: {}}
measures: {loss: {metric: train_loss}}
comparisons: [{we_test: the loss, statement: fig1-falls, of: {}, is: below, than: 100}]
"""


def write(folder: Path, ledger: dict[str, Any] = LEDGER, recipe: str = RECIPE) -> Path:
    (folder / "p").mkdir(exist_ok=True)
    (folder / "p" / "statements.yaml").write_text(yaml.safe_dump(ledger))
    (folder / "p" / "fig1.yaml").write_text(recipe)
    return folder


def changed(**content: Any) -> dict[str, Any]:
    """The ledger with its first statement changed; None removes a key."""
    ledger = copy.deepcopy(LEDGER)
    ledger["statements"][0] = {k: v for k, v in (ledger["statements"][0] | content).items() if v is not None}
    return ledger


def test_a_ledger_is_no_recipe_and_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    assert (list_recipe_names(tmp_path), papers_with_ledger(tmp_path)) == (["p/fig1"], ["p"])
    ledger = load_statement_ledger("p", tmp_path)
    ledger.check_statements_covered({"p/fig1": load_recipe("p/fig1", tmp_path).comparisons})
    assert [statement.id for statement in ledger.statements] == ["fig1-falls", "thm1-rate"]


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        (changed(item="Fig. 2"), "item='Fig. 2' is unknown"),
        (changed(id="thm1-rate"), "two statements have this id"),
        (changed(id="Fig1"), "id must be lower-case words"),
        (changed(place=None), "not well formed"),
        (changed(states=""), "lacks states"),
        (changed(states='It is "best".'), "has no quotation marks"),
        (changed(state="x"), "not well formed"),
        (LEDGER | {"items": ["Fig. 1", "Theorem 1", "Fig. 2"]}, "no statement belongs to the item Fig. 2"),
        (LEDGER | {"paper": {"short": "P"}}, "paper lacks title"),
        ({"items": []}, "not well formed"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(tmp_path: Path, ledger: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_statement_ledger("p", write(tmp_path, ledger))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("statement: fig1-falls", "statement: fig1-fall", "did you mean 'fig1-falls'"),
        ("statement: fig1-falls", "statement: fig1-falls, choice: decaying", "names no choice"),
        ("statement: fig1-falls", "statement: fig1-falls, fitted: true", "fitted constants decide no statement"),
    ],
)
def test_a_comparison_that_does_not_fit_the_ledger_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("p/fig1", write(tmp_path, recipe=RECIPE.replace(old, new)))


@pytest.mark.parametrize(
    ("ledger", "recipe", "message"),
    [
        (LEDGER, RECIPE.replace("statement: fig1-falls", "ours: true"), "fig1-falls: no comparison decides it"),
        (changed(not_covered="Too long."), RECIPE, "a comparison decides it, so that it cannot have not_covered"),
    ],
)
def test_a_statement_is_decided_or_says_why_not(
    tmp_path: Path, ledger: dict[str, Any], recipe: str, message: str
) -> None:
    write(tmp_path, ledger, recipe)
    with pytest.raises(ConfigError, match=message):
        load_statement_ledger("p", tmp_path).check_statements_covered(
            {"p/fig1": load_recipe("p/fig1", tmp_path).comparisons}
        )


STATEMENT = Statement("s", "Fig. 1", "there", "so it is")


def test_a_scale_that_is_the_papers_counts_as_the_papers() -> None:
    small = evidence("contradicted", "cpu")
    assert judge_statement(STATEMENT, [replace(small, equals_paper_scale=True)]).verdict_label == "refuted"
    assert judge_statement(STATEMENT, [small]).verdict_label == "not shown"


def evidence(
    word: str, scale: str = "paper", reduced: str = "", reason: bool = True, choice: str = ""
) -> StatementEvidence:
    because = {"reason": "why", "shown_by": "p/other"} if reason else {}
    comparison = Comparison("…", {}, "below", 1.0, statement="s", choice=choice, **because)
    return StatementEvidence("p/fig1", comparison, scale, reduced, Judgement(comparison, word, ""))


@pytest.mark.parametrize(
    ("those", "word", "remark"),
    [
        ([evidence("held")], "held", ""),
        ([evidence("held", "cpu")], "held at reduced scale", ""),
        ([evidence("held", reduced="a smaller model")], "held at reduced scale", ""),
        ([evidence("held"), evidence("held", "cpu")], "held at reduced scale", ""),
        ([evidence("level")], "level", ""),
        ([evidence("contradicted")], "refuted", ""),
        ([evidence("contradicted", reason=False)], "not shown", "contradicted, reason not shown"),
        ([evidence("contradicted", "cpu")], "not shown", "contradicted at reduced scale"),
        ([evidence("not shown"), evidence("contradicted", "cpu")], "not shown", "contradicted at reduced scale"),
        ([evidence("held"), evidence("contradicted")], "refuted", ""),
        ([evidence("held"), evidence("level"), evidence("not run")], "level", ""),
        ([evidence("held"), evidence("not run")], "not run", ""),
        ([evidence("level"), evidence("not shown")], "not shown", ""),
        ([], "not covered", ""),
        (
            [evidence("held", choice="a"), evidence("contradicted", choice="b")],
            "depends on an unprinted choice",
            "a: held; b: contradicted",
        ),
        ([evidence("held", choice="a"), evidence("held", choice="b")], "held", ""),
        ([evidence("contradicted", choice="a"), evidence("contradicted", choice="b")], "refuted", ""),
        ([evidence("held", choice="a"), evidence("not shown", choice="b")], "not shown", ""),
        (
            [evidence("contradicted", choice="a"), evidence("not run", choice="b")],
            "not run",
            "a: contradicted; b: not run",
        ),
        ([evidence("held", choice="a"), evidence("held", choice="b"), evidence("contradicted")], "refuted", ""),
    ],
)
def test_the_verdict_on_a_statement(those: list[StatementEvidence], word: str, remark: str) -> None:
    for order in itertools.permutations(those) if "choice" not in word else [those]:
        verdict = judge_statement(STATEMENT, order)
        assert (verdict.verdict_label, verdict.remark) == (word, remark)


def test_no_addition_of_evidence_makes_a_verdict_better() -> None:
    kinds = [evidence(word, scale) for word in VERDICTS_WORST_FIRST for scale in ("paper", "cpu")]
    for first, second in itertools.product(kinds, repeat=2):
        both, alone = judge_statement(STATEMENT, [first, second]), judge_statement(STATEMENT, [first])
        assert verdicts.VERDICTS.index(both.verdict_label) <= verdicts.VERDICTS.index(alone.verdict_label)


def test_a_verdict_names_the_seeds_of_the_stored_results(tmp_path: Path) -> None:
    recipe = load_recipe("p/fig1", write(tmp_path))
    judged = {("p/fig1", "paper"): [Judgement(recipe.comparisons[0], "held", "")]}
    for seeds, expected in (({}, ""), ({("p/fig1", "paper"): 1}, "1 seed"), ({("p/fig1", "paper"): 3}, "3 seeds")):
        those = verdicts.evidence_by_statement([recipe], judged, seeds)["fig1-falls"]
        assert judge_statement(STATEMENT, those).seed_counts_text == expected
    more = verdicts.StatementEvidence("p/fig2", recipe.comparisons[0], "paper", "", those[0].judgement, 10)
    not_run = verdicts.StatementEvidence("p/fig3", recipe.comparisons[0])
    assert judge_statement(STATEMENT, [more, *those, not_run]).seed_counts_text == "3 to 10 seeds"


def test_the_largest_scale_that_was_run_decides_and_is_told(tmp_path: Path) -> None:
    recipe = load_recipe("p/fig1", write(tmp_path))
    small, large = (Judgement(recipe.comparisons[0], word, "") for word in ("contradicted", "held"))
    for judged, word, scale in (
        ({("p/fig1", "cpu"): [small], ("p/fig1", "paper"): [large]}, "held", "paper"),
        ({("p/fig1", "cpu"): [large]}, "held at reduced scale", "cpu"),
        ({("p/fig1", "paper"): [Judgement(recipe.comparisons[0], "not run", "")]}, "not run", ""),
        ({}, "not run", ""),
    ):
        those = verdicts.evidence_by_statement([recipe], judged)["fig1-falls"]
        verdict = judge_statement(STATEMENT, those)
        assert (verdict.verdict_label, verdict.scales_text) == (word, scale)
