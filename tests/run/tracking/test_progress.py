"""What a person reads while a run goes on and at its end: whose loss it is, and a spread where there is one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fedsim import Simulation
from fedsim.app.cli import report
from fedsim.app.sweep import SUMMARY
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean
from fedsim.run.tracking import RunConfig, Tracking
from fedsim.run.tracking.progress import LogProgress, evaluation_line
from fedsim.run.tracking.result import mean_std

ROW = {"train_loss": 0.5, "test_loss": 0.25, "test_accuracy": 0.75, "total_bytes_up": 0}
QUIET = Tracking(progress="none", tensorboard=False)


def test_the_line_says_what_is_of_training_and_what_of_testing() -> None:
    assert evaluation_line([ROW], None) == "train loss 0.5  test accuracy 75.0 %"
    assert evaluation_line([ROW, ROW | {"train_loss": 0.7}], None).startswith(
        "train loss 0.6 ± 0.14  test accuracy 75.0 ± 0 %"
    )
    assert (
        evaluation_line([{k: v for k, v in ROW.items() if k != "test_accuracy"}], None)
        == "train loss 0.5  test loss 0.25"
    )


def test_one_number_has_no_spread() -> None:
    assert mean_std([3.0, math.nan])[0] == 3
    assert math.isnan(mean_std([3.0, math.nan])[1])
    assert evaluation_line([ROW, dict.fromkeys(ROW, math.nan) | {"total_bytes_up": 0}], None).count("±") == 0


def test_no_client_is_active_before_the_first_round(caplog: pytest.LogCaptureFixture) -> None:
    progress = LogProgress(20)
    with caplog.at_level("INFO"):
        progress.evaluated(0, "train loss 0.5", 0.0)
        progress.evaluated(5, "train loss 0.4", 2.5)
    assert caplog.messages == ["round  0/20  train loss 0.5", "round  5/20  train loss 0.4  2.5 active"]


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_of_one_seed_neither_file_nor_report_has_a_deviation(tmp_path: Path, seeds: list[int]) -> None:
    simulation = Simulation(Quadratics(clients=3, dimension=2), Mean, clients=3, rounds=1, seeds=seeds)
    result = simulation.run(tmp_path, tracking=QUIET, config=RunConfig(yaml="{}"))
    assert ("±" in report(result)) == (len(seeds) > 1)
    assert "nan" not in report(result)
    stds = [found["std"] for found in json.loads((tmp_path / SUMMARY).read_text())["final"].values()]
    assert [std is None for std in stds] == [len(seeds) == 1] * len(stds)
