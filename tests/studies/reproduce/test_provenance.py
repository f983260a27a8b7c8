"""What made a result: the hash of the sources, refusals to write from an unclean tree, and runs that are repeated."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core import ConfigError
from fedsim.studies.reproduce import reproduce_cli as cli
from fedsim.studies.reproduce import stored, verify
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.provenance import (
    SOURCES_FILE,
    check_clean_checkout,
    commit_hash,
    common_source_hash,
    provenance_status,
    source_hash,
)
from fedsim.studies.reproduce.recipe import load_recipe, recipe_folder

RECIPE = """
source: nowhere Fig. 1
about: a test
base: [dataset=digits, clients=4, rounds=2, eval_every=1, local_steps=1, "seeds=[0,1]"]
axes: {algorithm: {FedAvg: strategy=fedavg, FedAWE: strategy=fedawe}}
scales: {smoke: {}, cpu: {}, paper: {}}
measures: {loss: {metric: train_loss}}
comparisons: [{we_test: training helps, ours: true, of: {}, is: below, than: 100, scales: [smoke]}]
"""


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@f", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean repository with a package and a folder of results."""
    for name, content in (("fedsim/a.py", "a = 1\n"), ("experiments/p/fig1.yaml", "about: x\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_hash_follows_names_and_contents_and_nothing_else(checkout: Path) -> None:
    package, first = checkout / "fedsim", source_hash(checkout / "fedsim", checkout)
    (package / "notes.txt").write_text("x")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("x")
    assert source_hash(package, checkout) == first
    (package / "a.py").write_bytes(b"a = 1\r\n")
    assert source_hash(package, checkout) == first
    (package / "a.py").write_text("a = 2\n")
    assert source_hash(package, checkout) != first
    (package / "a.py").rename(package / "b.py")
    (package / "b.py").write_text("a = 1\n")
    assert source_hash(package, checkout) != first


def test_a_clean_commit_of_a_branch_may_write_results(checkout: Path) -> None:
    experiments = checkout / "experiments"
    check_clean_checkout(experiments, experiments)
    (experiments / "p" / "results" / "fig1-paper").mkdir(parents=True)
    (experiments / "p" / "results" / "fig1-paper" / "report.json").write_text("{}")  # what the recipe before left
    check_clean_checkout(experiments, experiments)
    made_by = commit_hash(checkout)
    assert made_by is not None
    assert not made_by.endswith("+")


@pytest.mark.parametrize("path", ["fedsim/a.py", "experiments/p/fig1.yaml", "fedsim/new.py"])
def test_an_unclean_tree_may_not(checkout: Path, path: str) -> None:
    (checkout / path).write_text("changed")
    experiments = checkout / "experiments"
    with pytest.raises(ConfigError, match="the checkout has changes; commit them first"):
        check_clean_checkout(experiments, experiments)
    check_clean_checkout(checkout / "elsewhere", experiments)
    assert str(commit_hash(checkout)).endswith("+")


def test_a_commit_that_no_branch_has_may_not(checkout: Path) -> None:
    git(checkout, "checkout", "-q", "--detach")
    (checkout / "fedsim" / "a.py").write_text("a = 3\n")
    git(checkout, "commit", "-q", "-a", "-m", "on no branch")
    experiments = checkout / "experiments"
    with pytest.raises(ConfigError, match="no branch has the commit"):
        check_clean_checkout(experiments, experiments)
    git(checkout, "branch", "kept")
    check_clean_checkout(experiments, experiments)


def test_no_checkout_may_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is not a git checkout"):
        check_clean_checkout(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("report", "word"),
    [
        ({"sources": "a", "commit": "b"}, "traced"),
        ({"sources": "a", "commit": "b+"}, "unverified"),
        ({"sources": "a", "commit": None}, "unverified"),
        ({"commit": "b"}, "unverified"),
        ({"commit": "b", "verified": {"A / x": "a"}}, "verified"),
    ],
)
def test_a_report_is_traced_verified_or_unverified(report: dict[str, Any], word: str) -> None:
    assert provenance_status(report) == word


@pytest.mark.parametrize(
    ("values", "stored_values", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0004, 2.0004], [1.0, 2.0], True),
        ([1.3, 2.3], [1.0, 2.0], True),  # half a standard deviation is 0.35
        ([1.4, 2.4], [1.0, 2.0], False),
        ([1.002], [1.0], False),
        ([1e-15], [3e-12], True),
        ([np.nan], [np.nan], True),
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.inf], [np.inf], True),
        ([np.inf], [1.0], False),
    ],
)
def test_repeated_numbers_agree_within_the_stated_tolerance(
    values: list[float], stored_values: list[float], same: bool
) -> None:
    assert (
        verify.numbers_agree(MeasuredNumber({}, np.array(values)), MeasuredNumber({}, np.array(stored_values))) is same
    )


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[stored.StoredRecipeResult]:
    """Of a small recipe, just made."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr(verify, "load_recipe", lambda name: load_recipe(name, tmp_path))
    monkeypatch.setattr(stored, "load_recipe", lambda name, folder=None: load_recipe(name, tmp_path))
    cli.reproduce_recipe(load_recipe("mine/small", tmp_path), "smoke", "cpu", tmp_path / "out", jobs="1")
    return stored.load_stored_results(tmp_path / "out")


def test_results_come_out_again_and_a_changed_number_does_not(
    results: list[stored.StoredRecipeResult], capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = results
    assert len(result.report_content["sources"]) == 64
    assert set(result.report_content["seconds"]) == {"FedAvg", "FedAWE"}
    assert verify.verify_by_rerunning(results, 2)
    assert "1 numbers as stored" in capsys.readouterr().out
    assert "verified" not in result.report_content or provenance_status(result.report_content) != "unverified"
    with pytest.raises(ConfigError, match="there are 0 runs of stored results that are recorded to take at most 0 s"):
        verify.verify_by_rerunning(results, 1, max_seconds=0)
    for row in result.measured_number_rows:
        row["values"] = [value + 1 for value in row["values"]]
    assert not verify.verify_by_rerunning(results, 1)
    assert " instead of " in capsys.readouterr().out


def test_runs_that_other_sources_made_leave_no_trace(results: list[stored.StoredRecipeResult], tmp_path: Path) -> None:
    (result,) = results
    runs = [path.parent for path in (tmp_path / "out").rglob(SOURCES_FILE)]
    assert len(runs) == 2
    assert common_source_hash(runs) == source_hash() == result.report_content["sources"]
    (runs[0] / SOURCES_FILE).write_text("others\n")
    cli.reproduce_recipe(load_recipe("mine/small", tmp_path), "smoke", "cpu", tmp_path / "out", jobs="1")
    assert stored.load_stored_results(tmp_path / "out")[0].report_content["sources"] is None
    (runs[0] / SOURCES_FILE).unlink()
    assert common_source_hash(runs) is None


def test_an_old_report_is_unverified_until_a_run_comes_out_again(results: list[stored.StoredRecipeResult]) -> None:
    (result,) = results
    path = result.folder / "report.json"
    content = json.loads(path.read_text())
    del content["sources"], content["seconds"]
    for row in content["rows"]:
        for key in ("values", "at", "measure"):
            del row[key]
    path.write_text(json.dumps(content))
    (old,) = stored.load_stored_results(result.folder.parents[2])
    assert provenance_status(old.report_content) == "unverified"
    changed = [row | {"ours": 9.0} for row in old.report_content["rows"]]
    assert not verify.verify_by_rerunning(
        [stored.StoredRecipeResult(old.folder, old.report_content | {"rows": changed})], 1
    )
    assert provenance_status(json.loads(path.read_text())) == "unverified"
    assert verify.verify_by_rerunning([old], 1)
    written = json.loads(path.read_text())
    assert provenance_status(written) == "verified"
    assert set(written["verified"].values()) == {source_hash()}
    assert written["seconds"].keys() == written["verified"].keys()
    assert len(verify.verification_candidates([old], max_seconds=1e9)) == 1
    assert verify.verify_by_rerunning([old], 1, max_seconds=1e9)
    assert json.loads(path.read_text()) == written
    assert verify.verify_by_rerunning([old], 2)
    assert len(json.loads(path.read_text())["verified"]) == 2


def test_judging_anew_rewrites_the_verdicts_and_keeps_the_numbers(
    results: list[stored.StoredRecipeResult], tmp_path: Path
) -> None:
    (result,) = results
    before = json.loads((result.folder / "report.json").read_text())["rows"]
    assert [row["verdict"] for row in before if row["comparison"]] == ["held"]
    recipe = tmp_path / "mine" / "small.yaml"
    recipe.write_text(RECIPE.replace("is: below", "is: above").replace("training helps", "training harms"))
    stored.update_verdicts(result)
    after = json.loads((result.folder / "report.json").read_text())["rows"]
    assert [row for row in after if not row["comparison"]] == [row for row in before if not row["comparison"]]
    assert [(row["name"], row["verdict"]) for row in after if row["comparison"]] == [("training harms", "contradicted")]
    assert "training harms" in (result.folder / "results.csv").read_text()


@pytest.mark.parametrize(
    "result", stored.load_stored_results(recipe_folder()), ids=lambda result: f"{result.recipe}-{result.scale}"
)
def test_the_committed_verdicts_are_those_of_the_recipes(result: stored.StoredRecipeResult) -> None:
    """fedsim-reproduce --judge writes them again."""
    told = [
        (row["name"], row["verdict"], row["detail"]) for row in result.report_content["rows"] if row.get("comparison")
    ]
    assert told == [
        (each.comparison.we_test, each.verdict, each.evidence_text)
        for each in stored.judge(result, load_recipe(result.recipe))
    ]


def test_a_run_is_repeated_with_as_many_threads_as_it_had(tmp_path: Path) -> None:
    """The order of sums depends on them, and a run that diverges amplifies the rounding."""
    before = torch.get_num_threads()
    for recorded, expected in ((before + 1, before + 1), (None, before)):
        content = {} if recorded is None else {"threads": recorded}
        with verify._use_recorded_threads(stored.StoredRecipeResult(tmp_path, content)):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == before
