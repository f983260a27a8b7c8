"""At smoke scale every recipe runs, reports and draws; a handful that meets every kind of them is in the fast suite."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path

import pytest

from fedsim.studies.reproduce import reproduce_cli as cli
from fedsim.studies.reproduce.measures import LeadEndRound, RoundsToTarget
from fedsim.studies.reproduce.recipe import Recipe, list_recipe_names, load_recipe

HANDFUL = (
    "fedpbc/fig3_tuned",
    "p_fedavg/rate",
    "amplified_scaffold/synthetic",
    "apfl/fig6",
    "apfl/table2",
    "fedawe/fig3",
    "fedawe/fig4",
    "fedawe/fig5",
    "fedawe/fig6",
    "fedawe/fig7b",
    "fedawe/lemma2",
    "fedawe/table8",
    "fedpbc/fig3a",
    "fedstale/beta",
    "focus/quadratics",
    "late/seconds",
    "time_to_accuracy/devices",
    "tracking/map",
    "p_fedavg/fig2",
    "p_fedavg/fig6",
    "p_fedavg/fig7",
    "players/multiplayer",
    "privacy/curve",
    "profl/fig2c",
    "profl/table1",
    "robust/table",
    "true_size/fedawe_table2",
    "dsgd/spectral_gap",
    "fedprox/stragglers_90",
    "izzo/pricing",
    "mcmahan/table1_iid",
    "mendler/strong",
    "miller/two_stage",
    "perdomo/fig2_rrm",
    "scaffnew/condition",
    "scaffold/drift",
    "fednova/quadratics",
    "mifa/mnist",
    "qffl/synthetic",
    "afl/fashion",
    "pfedme/table1",
    "ditto/fashion",
    "adaptive_clipping/median",
    "dp_ftrl/mnist",
)
FIRST = ("apfl/fig6", "fedawe/fig4", "fedawe/fig7b", "fedpbc/fig3a", "p_fedavg/fig6", "profl/fig2c")  # the quick ones
EACH = [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in list_recipe_names()]


def of_what_kinds(recipe: Recipe) -> set[str]:
    """Its paper, its figure's kind and options, whatever its measures say beside their metric, tuning, training."""
    kinds = {recipe.name.partition("/")[0], "trained" if recipe.train else "shown"}
    figure = recipe.figure or {}
    kinds |= {f"figure.kind={figure.get('kind')}", *(f"figure.{option}" for option in figure)}
    for measure in recipe.measures.values():
        kind = type(measure).__name__
        kinds |= {f"{kind}.{each.name}" for each in fields(measure) if getattr(measure, each.name) != each.default}
        kinds |= {w for w in (" or ", "newcomers ") if w in measure.metric}
        kinds |= {f"until={measure.until}"} if isinstance(measure, RoundsToTarget) else set()
    return kinds | ({"tuned"} if recipe.tune is not None else set())


@pytest.mark.slow
def test_the_handful_meets_every_kind_of_recipe() -> None:
    everything, met = (
        set().union(*(of_what_kinds(load_recipe(name)) for name in chosen)) for chosen in (list_recipe_names(), HANDFUL)
    )
    assert met == everything


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EACH)
def test_smoke_runs_reports_and_draws(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    lines = cli.reproduce_recipe(recipe, "smoke", "cpu", tmp_path, jobs="1", overrides=("tracking.progress=none",))
    paper, _, short = name.partition("/")
    folder = tmp_path / paper / "results" / f"{short}-smoke"
    report = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    absent = [why for why in report["skipped"].values() if "no usable" in why]
    if absent:
        pytest.skip(absent[0])
    assert not report["skipped"]
    assert [row["name"] for row in report["rows"]] == [line.name for line in lines]
    assert {"command", "scale", "seeds", "versions", "source"} <= set(report)
    assert report["scale"] == "smoke"
    if recipe.train:
        expected = len(recipe.settings("smoke")) * len(recipe.measures)
        if recipe.tune is not None:
            expected //= len(recipe.axes_at_scale("smoke")[recipe.tune.axis])
        numbers = [row for row in report["rows"] if row["comparison"] is None]
        assert len(numbers) == expected
        rare = (RoundsToTarget, LeadEndRound)  # and windows that end after a few rounds
        names_of = tuple(n for n, m in recipe.measures.items() if isinstance(m, rare) or getattr(m, "window", None))
        assert all(row["ours"] is not None for row in numbers if not row["name"].endswith(names_of))
        with open(folder / "results.csv", newline="") as file:
            table = list(csv.DictReader(line for line in file if not line.startswith("#")))
        assert len(table) == len(lines)
    for ending in ("png", "pdf"):
        assert (folder / f"figure.{ending}").stat().st_size > 5000
