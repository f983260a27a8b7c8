"""Data of one's own from the command line: a curve, clients' names in files and pictures, bad data leave nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsim import load
from fedsim.core import ConfigError
from fedsim.models import Linear
from fedsim.run.tracking.clients import ClientSummary, read
from fedsim.studies.plots import clients as pictures
from fedsim.studies.results.runs import Run

QUICK = ["rounds=2", "tracking.tensorboard=false", "tracking.progress=none", "out=out"]
TABLE = ["dataset=table", "dataset.path=people.csv", "dataset.target=ill", "dataset.client=who", "partition=natural"]
PEOPLE = ["007", "976906", "ann b."]


def write(folder: Path, ill: Callable[[int], str] = lambda row: ["no", "yes"][row % 2]) -> None:
    rows = [f"{row % 7},{row % 3}.5,{PEOPLE[row % 3]},{ill(row)}" for row in range(60)]
    (folder / "people.csv").write_text("\n".join(["age,dose,who,ill", *rows]))


def test_a_table_with_clients_of_any_names(tmp_path: Path, fedsim) -> None:
    write(tmp_path)
    ended = fedsim(tmp_path, *QUICK, *TABLE, "clients=all")
    assert ended.code == 0, ended.err
    known = read(tmp_path / "out" / "clients.npz")
    assert known.names.tolist() == known.accuracy_names.tolist() == PEOPLE
    assert known.labels.tolist() == ["no", "yes"]
    assert known.samples.tolist() == [16, 16, 16]
    metrics = json.loads((tmp_path / "out" / "summary.json").read_text())["final"]
    assert {"test_accuracy", "test_accuracy_by_client"} <= metrics.keys()
    assert known.held_out.shape == (1, 3)
    assert known.held_out.mean() == pytest.approx(metrics["test_accuracy_by_client"]["mean"], abs=1e-6)


def test_a_finished_run_predicts_for_people_it_has_not_seen(tmp_path: Path, fedsim, monkeypatch) -> None:
    write(tmp_path, lambda row: "yes" if row % 7 > 3 else "no")
    assert fedsim(tmp_path, *QUICK, "rounds=20", *TABLE, "clients=all").code == 0
    monkeypatch.chdir(tmp_path)
    run = load("out")
    people = run.dataset()
    module = Linear(shape=people.shape, classes=people.classes)
    module.load_state_dict(run.model(), strict=True)
    said = module(people.encode({"age": ["0", "6"], "dose": [1.5, 1.5]})).argmax(1)
    assert [people.label_names[n] for n in said] == ["no", "yes"]
    (tmp_path / "people.csv").unlink()
    with pytest.raises(ConfigError, match=r"the data set of out cannot be made: .*people\.csv is not a file"):
        run.dataset()


def test_some_clients_are_drawn_and_named(tmp_path: Path, fedsim) -> None:
    write(tmp_path)
    assert fedsim(tmp_path, *QUICK, *TABLE, "clients=2").code == 0
    names = read(tmp_path / "out" / "clients.npz").names.tolist()
    assert len(names) == 2
    assert set(names) < set(PEOPLE)


def test_clients_that_are_not_asked_for_are_mentioned(tmp_path: Path, fedsim) -> None:
    write(tmp_path)
    ended = fedsim(tmp_path, *QUICK, *TABLE, "clients=5", "partition=iid")
    assert "the data set's 3 clients are not used (partition=natural uses them)" in ended.log


@pytest.mark.parametrize("ill", [lambda row: "no", lambda row: f"{row}.5", lambda row: "no" if row else ""])
def test_bad_data_leave_nothing_behind(tmp_path: Path, fedsim, ill: Callable[[int], str]) -> None:
    write(tmp_path, ill)
    ended = fedsim(tmp_path, *QUICK, *TABLE, "clients=all")
    assert ended.code == 1
    assert ended.err.startswith("fedsim: people.csv: ")
    assert not (tmp_path / "out").exists()


def test_pictures_call_clients_and_classes_by_their_names() -> None:
    known = ClientSummary(
        number=3,
        accuracy=None,
        samples=None,
        class_fractions=np.array([[0.5, 0.5], [1, 0], [0, 1]]),
        present=np.array([[True, False], [False, True], [True, True]]),
        names=np.array(["007", "976906", "a name that is longer"]),
        labels=np.array(["no", "yes"]),
    )
    run = Run(Path("run"), [], {}, known)
    for drawing, wanted in (
        (pictures.partition_figure([run]), ["007", "976906", "a name that is …", "no", "yes"]),
        (pictures.availability_figure([run]), ["007", "976906"]),
    ):
        drawing.canvas.draw()
        shown = [
            text.get_text() for axes in drawing.axes for text in (*axes.get_yticklabels(), *axes.get_xticklabels())
        ]
        assert set(wanted) <= set(shown)


def test_clients_are_drawn_on_what_was_held_out_of_them_where_all_runs_have_that() -> None:
    def run(held: bool) -> Run:
        nothing = np.zeros((2, 1), dtype=bool)
        known = ClientSummary(2, np.array([[0.1, 0.2]]), None, None, nothing)
        known.held_out = np.array([[0.7, np.nan]]) if held else None
        return Run(Path("run"), [], {}, known)

    for runs, label, dots in (
        ([run(True)], "accuracy on samples held out of the client (%)", [70.0]),
        ([run(True), run(False)], "accuracy on the client's own training samples (%)", [10.0, 20.0]),
    ):
        (axes,) = pictures.accuracy_box_plot(runs).axes
        assert axes.get_xlabel() == label
        np.testing.assert_allclose(np.asarray(axes.collections[0].get_offsets())[:, 0], dots)


def test_any_dataset_of_pytorch_by_its_path(tmp_path: Path, fedsim) -> None:
    fake = "torchvision.datasets.FakeData"
    named = [f"dataset.train._target_={fake}", "+dataset.train.size=60", "+dataset.train.image_size=[3,4,4]"]
    test = [f"+dataset.test._target_={fake}", "+dataset.test.size=10", "+dataset.test.image_size=[3,4,4]"]
    ended = fedsim(tmp_path, *QUICK, "dataset=torch", *named, *test, "partition=iid", "clients=3")
    assert ended.code == 0, ended.err
    assert "dataset.train._target_ is missing" in fedsim(tmp_path, *QUICK, "dataset=torch", "out=b").err


def test_a_mistake_in_an_object_inside_names_where_it_is(tmp_path: Path, fedsim) -> None:
    ended = fedsim(tmp_path, *QUICK, "dataset=torch", "dataset.train._target_=builtins.range", "trusted=[builtins]")
    assert "dataset.train: range expected at least 1 argument" in ended.err


def test_a_panel_of_classes_is_as_wide_as_they_are_many() -> None:
    def width(classes: int) -> float:
        shares = np.full((2, classes), 1 / classes)
        known = ClientSummary(number=2, accuracy=None, samples=None, class_fractions=shares, present=None)
        drawing = pictures.partition_figure([Run(Path("run"), [], {}, known)])
        assert drawing is not None
        return drawing.get_figwidth()

    assert width(60) > width(20) > width(2) == width(3)
