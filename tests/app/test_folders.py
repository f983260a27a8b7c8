"""A sweep's folders: they say what varies, in few words, and lie side by side in the sweep's own folder."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import QUICK

from fedsim.app import folders
from fedsim.app.cli import flags_first
from fedsim.app.folders import MAX_NAME_LENGTH, SINGLE_RUN_FOLDER, run_folder_name

LEAST = [*QUICK, "rounds=1", "dataset=quadratics", "partition=natural", "model=mean"]


def below(folder: Path) -> set[str]:
    """The run folders of a sweep, relative to it."""
    return {path.parent.relative_to(folder).as_posix() for path in folder.rglob("metrics.csv")}


def test_long_names_of_runs_are_cut_and_stay_distinct() -> None:
    names = [run_folder_name([f"lr={'1' * 300}{end}"]) for end in ("2", "3")]
    assert len(set(names)) == 2
    assert all(len(name.encode()) <= MAX_NAME_LENGTH for name in names)


@pytest.mark.parametrize(
    ("overrides", "fixed", "name"),
    [
        (["lr=0.1"], [], "lr=0.1"),
        (["strategy=fedavg", "lr=0.1", "clients=9"], ["clients"], "lr=0.1,strategy=fedavg"),
        (["availability/base=groups", "+availability.trajectory.gamma=0.5"], [], "gamma=0.5,base=groups"),
        (["strategy.beta=1", "local.beta=2"], [], "local.beta=2,strategy.beta=1"),
        (["strategy.beta=1", "local.beta=2"], ["local.beta"], "beta=1"),
        (["model._target_=mine.Net", "seeds=[0,1]"], [], "model=mine.Net,seeds=[0,1]"),
        (["rounds=10", "experiment=apfl"], [], "experiment=apfl,rounds=10"),
        (["lr=0.1"], ["lr"], SINGLE_RUN_FOLDER),
    ],
)
def test_names_carry_what_varies_by_its_last_word(overrides: list[str], fixed: list[str], name: str) -> None:
    assert run_folder_name(overrides, fixed) == name


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.text(alphabet="./\\a\n '\"~*é=,", max_size=12), min_size=2, max_size=2, unique=True))
def test_whatever_is_swept_stays_in_one_folder_below_and_apart(values: list[str]) -> None:
    names = [run_folder_name([f"dataset.path={value}"]) for value in values]
    assert names[0] != names[1]
    for name in names:
        assert len(PurePath(name).parts) == 1
        assert name.startswith("path=")
        assert not set(name) & set("/\\\n\"'~*")


@pytest.mark.slow
def test_a_sweep_of_paths_lies_side_by_side(fedsim, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("1," * 11 + "1\n")
    trace = ["availability=trace", "availability.path=../a.csv,../b.csv"]
    ended = fedsim(tmp_path / "in", *LEAST, "-m", *trace, "clients=12", "out=paths")
    assert ended.code == 0, ended.err + ended.log
    found = sorted(below(tmp_path / "in" / "paths"))
    assert [name.partition(".csv-")[0] for name in found] == ["path=a", "path=b"]
    assert below(tmp_path) == {f"in/paths/{name}" for name in found}
    assert "fedsim-plot paths" in ended.err


def test_flags_may_stand_anywhere() -> None:
    assert flags_first(["lr=1", "-m", "strategy=a,b", "~x", "--cfg", "job"]) == [
        "-m", "--cfg", "job", "lr=1", "strategy=a,b", "~x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategy=fedavg,fedawe"], "strategy=fedavg,fedawe are several values; add -m for a run of each"),
        (["seeds=0,1"], "add -m for a run of each, or for a list write 'seeds=[0,1]'"),
        (["-m", "out=a,b"], "out is the folder of the whole sweep"),
        (
            ["availability=full", "availability/base=groups"],
            "it goes with availability=arrivals, bernoulli, common_factor",
        ),
    ],
)
def test_what_does_not_go_together_is_explained(fedsim, tmp_path: Path, arguments: list[str], message: str) -> None:
    ended = fedsim(tmp_path, *LEAST, *arguments)
    assert ended.code == 1
    assert message in ended.err
    assert not list(tmp_path.iterdir())


def test_signs_that_a_system_forbids_are_not_in_a_folders_name(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["metrics=[{name:accuracy,top_k:3}]"]
    assert run_folder_name(overrides) == "metrics=[{name:accuracy,top_k:3}]"
    monkeypatch.setattr(folders, "FORBIDDEN_CHARACTERS", ":")
    name = run_folder_name(overrides)
    assert ":" not in name
    assert name != run_folder_name(["metrics=[{name:accuracy,top_k:4}]"])
