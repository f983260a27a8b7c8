"""Metrics that a user adds, wherever a run's numbers are to be found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import QUICK, configuration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from fedsim.app.cli import run
from fedsim.run.rules import Stop
from fedsim.run.tracking import clients
from fedsim.run.tracking.metrics_csv import read_column_descriptions
from fedsim.studies.plots.plot_cli import main as plot
from fedsim.studies.reproduce.measures import make_measure
from fedsim.studies.results.differences import load_runs
from fedsim.studies.results.run_measures import final_metric_measure
from fedsim.studies.results.runs import load
from fedsim.studies.results.selection import find_best_run

pytest.importorskip("lightning_utilities")  # of the extra `metrics`

DOUBT = "{_target_:test_added_metrics_in_files.doubt,scale:2.0,better:lower,column:auc_doubt}"
WANTED = f"[{{name:f1_score,average:macro,column:f1}},{DOUBT}]"


def doubt(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    """One number per sample: the probability of everything else."""
    return scale * (1 - output.softmax(-1).gather(-1, target[:, None])[:, 0])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their rate, three replicates each."""
    root = tmp_path_factory.mktemp("runs")
    chosen = ["seeds=[0,1,2]", "evaluate=[global,client_mean]", "partition.validation=0.3", "personal.over=all"]
    chosen += ["objective=test_f1", "stop.metric=test_auc_doubt"]
    for lr in (0.01, 0.5):
        overrides = [option for option in QUICK if not option.startswith("tracking.tensorboard")]
        overrides += [*chosen, f"lr={lr}", f"metrics={WANTED}"]
        run(configuration(*overrides), root / f"lr={lr}", {})
    return root


@pytest.mark.slow
def test_columns_say_what_they_are_and_which_way_is_better(sweep: Path) -> None:
    meanings = read_column_descriptions(sweep / "lr=0.5" / "metrics.csv")
    ways = {
        name: match[1] for name, what in meanings.items() if (match := re.search("; (higher|lower) is better$", what))
    }
    columns = {"test_f1", "train_f1", "client_f1_worst10"} | {
        f"{model}_validation_f1{summary}"
        for model in ("global", "localized")
        for summary in ("", "_median", "_worst10")
    }
    columns |= {f"client_mean_{name}" for name in ("test_f1", "train_f1", "client_f1_worst10")}
    assert ways == dict.fromkeys(columns, "higher") | {name.replace("f1", "auc_doubt"): "lower" for name in columns}
    text = (sweep / "lr=0.5" / "metrics.csv").read_text()
    assert "# test_f1: f1_score(average=macro) of the whole test set; higher is better\n" in text
    assert (
        "# client_mean_test_f1: f1_score(average=macro) of the whole test set, of the mean of all clients' models"
        in text
    )
    assert (
        "# train_auc_doubt: mean over clients of test_added_metrics_in_files.doubt(scale=2.0) on (a subsample" in text
    )


@pytest.mark.slow
def test_files_agree(sweep: Path) -> None:
    """Summary, clients' file, TensorBoard and a recipe's measure have the numbers of the table."""
    folder = sweep / "lr=0.5"
    found, known = load(folder), clients.read(folder / "clients.npz")
    summary = json.loads((folder / "summary.json").read_text())
    rounds, values = found.curve("test_f1")
    assert (rounds[-1], values.shape) == (2, (3, 3))
    assert [row["test_f1"] for row in summary["per_replicate"]] == values[-1].tolist()
    assert make_measure(metric="test_f1")(found).tolist() == values[-1].tolist()
    assert known.metrics.keys() == {"f1", "auc_doubt"}
    for name, each in known.metrics.items():
        np.testing.assert_allclose(np.nanmean(each, 1), found.curve(f"train_{name}")[1][-1], rtol=1e-9)
    events = EventAccumulator(str(folder / "mean"))
    events.Reload()
    tags = events.Tags()
    assert {
        "f1/test_f1", "f1/train_f1", "f1/client_f1_worst10", "f1/client_mean_test_f1",
        "f1/global_validation_f1_worst10",
    } <= set(tags["scalars"])  # fmt: skip
    assert {"clients/f1", "clients/auc_doubt", "clients/global validation f1"} <= set(tags["histograms"])
    assert events.Scalars("f1/test_f1")[-1].value == pytest.approx(values[-1].mean())


@pytest.mark.slow
def test_plots_and_reports_show_them(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Marked as best: the higher F1, and the lower doubt."""
    plot([str(sweep), "--metric", "test_f1", "--metric", "test_auc_doubt", "--html", str(sweep / "report.html")])
    table = capsys.readouterr().out
    runs = {run.settings["lr"]: run for run in load_runs([sweep])}
    assert "test_f1" in table
    assert "test_auc_doubt" in table
    text = (sweep / "report.html").read_text()
    assert "From client to client: auc_doubt" in text
    for name, better in (("test_f1", max), ("test_auc_doubt", min)):
        ends = {lr: run.final(name)[0] for lr, run in runs.items()}
        assert ends[0.01] != ends[0.5]
        end = f"{better(ends.values()):.4g}"
        marked = [cell for cell in text.split("<td") if "best" in cell.split(">")[0] and end in cell]
        assert marked, (name, end)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers(sweep: Path, tmp_path: Path) -> None:
    base = [*QUICK, "seeds=[0,1,2]", f"metrics={WANTED}"]
    for rounds, out in (("rounds=1", "parted"), ("rounds=2", "parted"), ("rounds=2", "whole")):
        run(configuration(*base, rounds, "resume=auto"), tmp_path / out, {})
    parted, whole = (load(tmp_path / out).rows for out in ("parted", "whole"))
    assert [{**row, "seconds": 0} for row in parted] == [{**row, "seconds": 0} for row in whole]
    assert torch.tensor([row["test_f1"] for row in whole]).unique().numel() > 3


def test_the_best_model_is_that_of_the_lower_doubt(sweep: Path) -> None:
    """Though its name has a word of metrics of which more is better."""
    found = load(sweep / "lr=0.5")
    rounds, values = found.curve("test_auc_doubt")
    assert found.summary["best"]["rounds"] == rounds[values.argmin(0)].tolist() != [0, 0, 0]
    assert Stop(patience=1).stop_reason(found.rows, 0.0, "test_auc_doubt") is not None  # by the name alone
    assert Stop(patience=1).stop_reason(found.rows, 0.0, "test_auc_doubt", found.column_descriptions) is None


def test_choices_among_runs_know_which_way_is_better(sweep: Path) -> None:
    """The run with the lower doubt is the better one, and so is the table's measure of it."""
    runs = load_runs([sweep])
    ends = {run.label: run.final("test_auc_doubt")[0] for run in runs}
    assert find_best_run(runs, "test_auc_doubt").label == min(ends, key=ends.__getitem__)
    assert find_best_run(runs, "test_f1").higher_is_better("test_f1")
    assert [
        final_metric_measure(name, runs).higher_is_better
        for name in ("test_f1", "test_auc_doubt", "test_accuracy", "test_loss")
    ] == [
        1,
        0,
        1,
        0,
    ]
