"""Recipes: all are well formed and compose; the papers' numbers stand at their places."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fedsim.app.build import build
from fedsim.app.composition import hydra_context
from fedsim.studies.reproduce import reproduce_cli
from fedsim.studies.reproduce.recipe import SCALES, Recipe, RecipeSetting, list_recipe_names, load_recipe
from fedsim.studies.reproduce.runner import compose_config

ROOT = Path(__file__).parents[3]
RECIPES = list_recipe_names()


def once_per_label(recipe: Recipe, scale: str) -> list[RecipeSetting]:
    """Settings of a scale, enough to meet every label of every axis."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for setting in recipe.settings(scale):
        if not seen.issuperset(setting.labels):
            seen.update(setting.labels)
            chosen.append(setting)
    return chosen


def test_the_papers_are_there() -> None:
    assert {"fedpbc/fig2a", "fedpbc/fig2b", "fedpbc/fig3a", "fedpbc/fig3b", "fedpbc/fig3c"} <= set(RECIPES)
    tables = {"fedawe/table2", "fedawe/table8", "fedawe/table9", "fedawe/table10"}
    figures = {f"fedawe/fig{n}" for n in ("2", "3", "4", "5", "6", "7a", "7b")}
    assert tables | figures <= set(RECIPES)
    profl = ("table1", "table2", "1a", "1b", "1c", "2a", "2b", "2c", "3", "4", "5", "6", "7", "absent")
    assert {f"profl/{'fig' * name[0].isdigit()}{name}" for name in profl} <= set(RECIPES)
    apfl = ("fig2", "fig3", "fig4", "fig5", "fig6", "table1", "table2", "table3", "drift")
    assert {f"apfl/{name}" for name in apfl} <= set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_label_composes_at_every_scale(name: str) -> None:
    recipe = load_recipe(name)
    with hydra_context():
        for scale in SCALES:
            for setting in once_per_label(recipe, scale):
                compose_config((*setting.overrides, "out=unused"))


@pytest.mark.slow
def test_the_dp_curves_labels_are_the_accountants() -> None:
    """Each run may claim the ε of its label, at δ = 1e-5 after all its rounds."""
    pytest.importorskip("dp_accounting")
    met = 0
    with hydra_context():
        for setting in load_recipe("privacy/curve").settings("cpu"):
            if setting.axis_labels["C"] == "1" and setting.axis_labels["epsilon"] != "no noise":
                cfg, _ = compose_config((*setting.overrides, "out=unused"))
                found = build(cfg)[0].privacy(cfg.rounds)
                wanted = float(setting.axis_labels["epsilon"].removeprefix("ε = "))
                assert 0.99 * wanted < found.epsilon <= wanted
                assert found.delta == pytest.approx(1e-5)
                met += 1
    assert met == 6


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_numbers_meet_labels_that_exist(name: str) -> None:
    recipe = load_recipe(name)

    def labels(node: object) -> set[str]:
        return set(node) | {x for v in node.values() for x in labels(v)} if isinstance(node, dict) else set()

    known = {label for choices in recipe.axes.values() for label in choices}
    assert labels({k: v for t in recipe.paper.values() for k, v in t.items()}) <= known
    printed = [
        recipe.paper_value(measure, setting.axis_labels)
        for measure in recipe.paper
        for setting in recipe.settings("paper")
    ]
    assert not recipe.paper or any(number is not None for number in printed)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", RECIPES)
def test_every_reason_is_shown_by_a_test_or_a_recipe(name: str) -> None:
    """Why a comparison fails is a fact somewhere else: a test that exists by file and name, or another recipe."""
    for comparison in load_recipe(name).comparisons:
        assert bool(comparison.reason) == bool(comparison.shown_by)
        file, _, test = comparison.shown_by.partition("::")
        if test:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, comparison.shown_by
        elif file:
            assert file in set(RECIPES) - {name}, comparison.shown_by


def test_table_2_holds_the_papers_numbers_at_their_places() -> None:
    recipe = load_recipe("fedawe/table2")
    for dynamics, data, algorithm, number in (
        ("stationary", "SVHN", "FedAWE", 86.1),
        ("staircase", "CINIC-10", "FedAvg active", 42.3),
        ("sine", "CIFAR-10", "known p", 67.3),
        ("interleaved sine", "CIFAR-10", "FedVARP", 65.7),
    ):
        at = {"dynamics": dynamics, "dataset": data, "algorithm": algorithm}
        assert recipe.paper_value("test accuracy", at) == number
    at = {"dynamics": "sine", "dataset": "CINIC-10", "algorithm": "MIFA"}
    assert recipe.paper_value("train accuracy", at) == 47.4
    assert recipe.paper_value("train accuracy", at | {"dynamics": "interleaved sine", "algorithm": "FedAU"}) is None


@pytest.mark.parametrize(
    ("alpha", "algorithm", "number"), [("0", "PG", 5.56), ("0.5", "PG", 6.32), ("0.5", "ProFL", 5.67)]
)
def test_profls_table_1_holds_the_papers_numbers(alpha: str, algorithm: str, number: float) -> None:
    assert load_recipe("profl/table1").paper_value("loss", {"α": f"α = {alpha}", "algorithm": algorithm}) == number


@pytest.mark.parametrize(
    ("table", "measure", "algorithm", "number"),
    [
        ("table1", "own model", "SCAFFOLD", 85.25),
        ("table1", "global model", "FedAvg", 32.51),
        ("table2", "own model", "APFL adaptive", 98.10),
        ("table2", "own training loss", "pFedMe", 0.182),
        ("table3", "own model", "APFL α = 0.5", 98.52),
    ],
)
def test_apfls_tables_hold_the_papers_numbers(table: str, measure: str, algorithm: str, number: float) -> None:
    assert load_recipe(f"apfl/{table}").paper_value(measure, {"algorithm": algorithm}) == number


def test_a_scale_without_verdicts_names_one_with() -> None:
    from fedsim.studies.reproduce.reproduce_cli import no_verdicts_note

    recipe = load_recipe("fedawe/table2")
    assert no_verdicts_note(recipe, "smoke") == "no verdicts at scale smoke; use --scale cpu"
    assert no_verdicts_note(recipe, "cpu") == ""
    recipe.comparisons.clear()
    assert no_verdicts_note(recipe, "cpu") == "no verdicts: the recipe compares nothing"


def test_a_paper_in_place_of_a_recipe_is_told_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"fedawe is a paper, not a recipe; use --all fedawe, or name its recipes"):
        reproduce_cli.main(["fedawe"])
