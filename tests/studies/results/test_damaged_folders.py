"""Whatever is damaged in a run folder: one sentence, and the other runs of the sweep are shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import cases, copies, damage

import fedsim
from fedsim import EvaluationOptions, Simulation, Tracking
from fedsim.app import commands
from fedsim.core import CheckpointError, ConfigError
from fedsim.data.datasets import Digits
from fedsim.models import Linear
from fedsim.run.tracking import RunConfig
from fedsim.studies.plots import plot_cli as cli
from fedsim.studies.results.reading import MAX_MESSAGE_LENGTH, read_config, translate_read_errors

CONFIG = "strategy:\n  _target_: fedsim.strategies.FedAvg\nlr: 0.1\nrounds: 2\ndataset:\n  seed: 0\n"


@pytest.fixture(scope="module", name="good")
def good_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all files."""
    folder = tmp_path_factory.mktemp("good") / "run"
    simulation = Simulation(Digits(), Linear, clients=4, rounds=2, seeds=[0, 1], evaluation=EvaluationOptions(every=1))
    simulation.run(folder, tracking=Tracking(progress="none", tensorboard=False), config=RunConfig(yaml=CONFIG))
    return folder


def in_one_sentence(said: str) -> bool:
    return 0 < len(said) < 600 and "\n" not in said.rstrip("\n") and "Traceback" not in said


def one_sentence_of(call: Callable[[], object]) -> None:
    """It ends well, or by an error of one sentence."""
    said = ""
    try:
        call()
    except (ConfigError, SystemExit) as error:
        said = str(error)
    assert not said or in_one_sentence(said)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("file", "how"), cases())
def test_a_damaged_file_is_one_sentence_and_the_others_are_shown(
    good: Path,
    tmp_path: Path,
    file: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad, other = copies(good, tmp_path, ("lr=0.1", "lr=0.2"))
    (other / "config.yaml").write_text(CONFIG.replace("0.1", "0.2"))
    damage(bad, file, how)
    try:
        run = fedsim.load(bad)
    except ConfigError as error:
        problem: ConfigError | None = error
    else:
        problem = None
        run.arrays()
        one_sentence_of(lambda: run.model(0))
    left_out = problem is not None
    if problem is not None:
        assert in_one_sentence(str(problem))
        assert isinstance(problem, CheckpointError) or file == "metrics.csv"
        assert str(bad) in str(problem)
    with caplog.at_level(logging.WARNING):
        commands.run_subcommand("table", [str(tmp_path)])
    assert capsys.readouterr().out.count("\n") == (4 if not left_out else 3)
    if not left_out:
        cli.main([str(tmp_path), "--html", str(tmp_path / "report.html")])
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == left_out
    assert all(in_one_sentence(message) for message in told)
    model = str(tmp_path / "model.pt")
    one_sentence_of(lambda: commands.run_subcommand("export", [str(bad), "--seed", "0", "--to", model]))


def test_where_nothing_can_be_read_there_is_one_sentence(good: Path, tmp_path: Path) -> None:
    for folder in copies(good, tmp_path, ("a", "b")):
        damage(folder, "summary.json", "half")
    with pytest.raises(SystemExit, match="none of the 2 runs can be read"):
        commands.run_subcommand("table", [str(tmp_path)])
    with pytest.raises(SystemExit, match=r"summary\.json is damaged"):
        commands.run_subcommand("table", [str(tmp_path / "a")])


def test_a_configuration_that_is_a_list_holds_no_settings(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("- lr: 0.1\n")
    with pytest.raises(CheckpointError, match=r"config\.yaml is damaged \(it holds no settings\)"):
        read_config(tmp_path / "config.yaml")


def test_a_round_that_was_cut_short_is_passed_over(good: Path, tmp_path: Path) -> None:
    (run,) = copies(good, tmp_path, ("run",))
    whole = fedsim.load(run)
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[:-1]))
    assert fedsim.load(run).rows == whole.rows[:-2]


def test_a_long_reason_is_cut_and_one_that_fits_is_not(tmp_path: Path) -> None:
    for length, expected in (
        (MAX_MESSAGE_LENGTH, "x" * MAX_MESSAGE_LENGTH),
        (MAX_MESSAGE_LENGTH + 1, "x" * (MAX_MESSAGE_LENGTH - 1) + "…"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"({expected})")), translate_read_errors(tmp_path / "file"):
            raise ValueError("x" * length)
