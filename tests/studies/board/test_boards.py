"""Boards as they are read: those that ship compose, and one that contradicts itself is one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedsim.app.composition import hydra_context
from fedsim.core import ConfigError
from fedsim.studies.board import leaderboard_cli as cli
from fedsim.studies.board import submission
from fedsim.studies.board.board import Leaderboard, leaderboard_names, load_leaderboard, results_folder
from fedsim.studies.board.markdown import PICTURE_CAPTIONS, standings_markdown
from fedsim.studies.board.rows import TunedRates
from fedsim.studies.board.standings import Standings
from fedsim.studies.board.trials import BoardTrial, TunedParameter, TuningBudget, best_trial, geometric_grid
from fedsim.studies.reproduce.runner import compose_config

SHIPPED = [(name, entry) for name in leaderboard_names() for entry in load_leaderboard(name).entries]


@pytest.mark.parametrize("name", leaderboard_names())
def test_boards_that_ship_are_well_formed(name: str) -> None:
    board = load_leaderboard(name)
    cells = [cell.name for cell in board.cells()]
    assert len(cells) == len(set(cells))
    assert board.about


@pytest.mark.slow
@pytest.mark.parametrize("name", leaderboard_names())
def test_committed_rows_belong_together_and_their_page_says_what_they_are(name: str) -> None:
    folder = results_folder() / name
    if not folder.is_dir():
        pytest.skip("nothing is computed of it yet")
    found = Standings.read_folder(submission.add_submitted_entries(folder, load_leaderboard(name)), folder)
    rates = TunedRates.read(folder)
    for cells in found.cell_rows:
        for entry in cells.rows:
            rates.check(found.board, cells.cell.track, entry)
    drawn = sorted((path.name for path in folder.glob("*.png")), key=lambda n: list(PICTURE_CAPTIONS).index(n[:-4]))
    assert standings_markdown(found, drawn) == (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "entry"), SHIPPED)
def test_entries_compose_with_every_value_of_their_knob(name: str, entry: str) -> None:
    board = load_leaderboard(name)
    cell, found = board.cells()[0], board.entries[entry]
    values = [None] if found.knob is None else found.knob.values
    with hydra_context():
        for value in values:
            knob = [] if found.knob is None else [found.knob.override(value)]
            config, _ = compose_config(
                (*board.base, *cell.overrides, *found.overrides, *knob, "lr=[0.1,0.2]", "seeds=[1,2]")
            )
            assert config.lr == [0.1, 0.2]


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("seeds: [10, 11]", "seeds: [1, 2]", "tuning.seeds=.* share some"),
        ("against: FedAvg", "against: FedAvgg", "against='FedAvgg' is unknown"),
        (
            "tuned_at: [{availability: rare}]",
            "tuned_at: [{availability: never}]",
            "tuned_at.availability='never' is unknown",
        ),
        ("tuned_at: [{availability: rare}]", "tuned_at: []", "tuned_at is empty"),
        ("target: 0.3,", "target: 0.3, axes: {availability: [never]},", "axes.availability='never' is unknown"),
        ("values: [0.5, 1]", "values: [0.5, 1, 2]", "must be as many as divide tuning.trials=4"),
        ("until: rounds", "until: hours", "until='hours' is unknown"),
        (
            "against: FedAvg",
            "against: FedAvg\nfindings: [{question: 'x?', comparisons: [{one: MIFA, other: y}]}]",
            "other='y' is unknown",
        ),
        (
            "against: FedAvg",
            "against: FedAvg\n"
            "findings: [{question: 'x?', comparisons: [{one: MIFA, other: FedAvg, asks: equivalent}]}]",
            "set equivalence_margins.accuracy",
        ),
        (
            "against: FedAvg",
            "against: FedAvg\n"
            "findings: [{question: 'x?', comparisons: [{one: MIFA, other: FedAvg, cells: ['*/never']}]}]",
            "matches none of the board's cells",
        ),
        (
            "against: FedAvg",
            "against: FedAvg\n"
            "findings: [{question: 'x?', comparisons: [{one: MIFA, other: FedAvg, but: ['*/never']}]}]",
            "but: .* matches none of the board's cells",
        ),
        (
            "against: FedAvg",
            "against: FedAvg\nfindings: [{question: 'x?', comparisons: [{one: MIFA, other: FedAvg, but: ['*']}]}]",
            "leaves none of its cells",
        ),
        (
            "against: FedAvg",
            "against: FedAvg\nfindings: [{question: It helps., comparisons: [{one: MIFA, other: FedAvg}]}]",
            "must be a question",
        ),
        (
            "against: FedAvg",
            "against: FedAvg\nequivalence_margins: {speed: 1}",
            "equivalence_margins=.*speed",
        ),
        ("against: FedAvg", "against: FedAvg\nequivalence_margins: {accuracy: 0}", "equivalence_margins.accuracy"),
        ("title: small", "subtitle: small", "not well formed"),
        ("tracks:", "tracks: [", "not well formed"),
    ],
)
def test_a_board_that_contradicts_itself_is_one_sentence(
    boards: Path, tmp_path: Path, was: str, becomes: str, said: str
) -> None:
    text = (boards / "small.yaml").read_text()
    assert was in text
    (tmp_path / "small.yaml").write_text(text.replace(was, becomes))
    with pytest.raises(ConfigError, match=said) as told:
        load_leaderboard("small", tmp_path)
    assert "\n" not in str(told.value)


def test_unknown_names_are_told(boards: Path, small: Leaderboard, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["smal"], "smal is no board"),
        (["small", "--cell", "digits/never"], "matches none of the 2 cells"),
        (["small", "--only", "FedAvgg"], "FedAvgg"),
        (["small", "--page", "--results", "nowhere"], "has no rows yet"),
        (["small", "--check", "--results", "nowhere"], "no cell has a row yet"),
    ):
        with pytest.raises(SystemExit, match=said):
            cli.main([*arguments, "--boards", str(boards)])
    cli.main(["--list", "--boards", str(boards)])
    assert "digits: 2 cells; digits" in capsys.readouterr().out


def test_trials_share_the_budget(small: Leaderboard) -> None:
    assert small.tuning.rate_grids(None, (0.01, 1.0)) == {None: [0.01, 0.046, 0.22, 1.0]}
    assert small.tuning.rate_grids(TunedParameter("k", [1, 2]), (0.01, 1.0)) == {1: [0.01, 1.0], 2: [0.01, 1.0]}
    assert geometric_grid(0.01, 1.0, 1) == [0.1]
    failed = float("-inf")
    assert best_trial(
        {BoardTrial(1.0): [0.9, failed], BoardTrial(0.1): [0.5, 0.6], BoardTrial(0.2): [0.6, 0.5]}
    ) == BoardTrial(0.1)
    assert best_trial({BoardTrial(1.0): [failed]}) is None


@pytest.mark.parametrize("metric", ["validation_accuracy", "validation_loss"])
def test_a_trial_in_which_a_seed_failed_never_wins(metric: str) -> None:
    """Whatever the others of its seeds reached, and whichever way the metric is better."""

    class Ended:
        def final_values(self, name: str, last: int) -> np.ndarray:
            return np.array([0.5, 0.5, 0.9, np.nan, 0.1, np.nan, 0.9, np.inf, 0.4, 0.4, -np.inf, 0.1])

    tuning = TuningBudget(6, [10, 11], 3, metric)
    scores = tuning.scores(Ended(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # type: ignore[arg-type]
    assert [score == float("-inf") for score in scores] == [False, True, True, True, False, True]
    won = best_trial(
        {BoardTrial(rate): [score] for rate, score in zip([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], scores, strict=True)}
    )
    assert won == BoardTrial(1.0 if metric == "validation_accuracy" else 5.0)


CLASS = '''
from fedsim.strategies import FedAvg

class Half(FedAvg):
    """Goes half of the way."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__(server_lr=share)

board = {"name": "half way", "knob": {"key": "strategy.share", "values": [0.25, 0.5]}}
'''


def test_a_class_in_a_file_is_an_entry(small: Leaderboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    path = tmp_path / "half_way_there.py"
    path.write_text(CLASS)
    entries, digest = submission.read_submission(path)
    found = entries["half way"]
    assert found.overrides == ["strategy=custom", "strategy._target_=half_way_there.Half"]
    assert (found.about, found.knob) == ("Goes half of the way.", TunedParameter("++strategy.share", [0.25, 0.5]))
    submission.add_board_entries(tmp_path, small, entries, digest)
    assert list(small.entries) == ["FedAvg", "MIFA", "half way"]
    del small.entries["half way"]
    assert submission.add_submitted_entries(tmp_path, small).entries["half way"].knob == found.knob
    with pytest.raises(ConfigError, match="was submitted with another file"):
        submission.add_board_entries(tmp_path, small, entries, "another")
    with pytest.raises(ConfigError, match="is an entry of board small"):
        submission.add_board_entries(tmp_path, small, {"MIFA": found}, digest)
    submission.delete_submission(tmp_path, "half way")
    assert "half way" not in (tmp_path / submission.SUBMISSIONS_FILE).read_text()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("nothing_in_it.py", "x = 1", "defines no Strategy and no LocalRule"),
        ("does_not_import.py", "import nowhere_at_all", "cannot be imported"),
        ("json.py", "x = 1", "is the name of another module"),
        ("unknown_key.py", CLASS.replace('"name"', '"titel"'), "not well formed"),
        ("of_yaml.yaml", "mine: {overides: strategy=fedavg}", "must hold NAME"),
        ("nowhere.yaml", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_submission_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, said: str
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        submission.read_submission(tmp_path / name)


@pytest.mark.slow
def test_one_file_and_one_command_give_its_rows(
    boards: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    (results.parent / "all").mkdir()
    results.rename(results.parent / "all" / "small")
    path = tmp_path / "half_of_it.py"
    path.write_text(CLASS)
    where = ["small", "--boards", str(boards), "--results", str(tmp_path / "all"), "--out", str(tmp_path / "out")]
    cli.main([*where, "--jobs", "1", "--entry", str(path)])
    cli.main([*where, "--page"])
    page = (tmp_path / "all" / "small" / "README.md").read_text()
    assert "| half way" in page
    assert "6 rows with numbers" in page
    for name in ("critical_differences.png", "wins.png", "cells.png", "index.html"):
        assert (tmp_path / "all" / "small" / name).stat().st_size > 1000
    cli.main([*where, "--check", "--only", "half way"])
    assert "differ by at most" in capsys.readouterr().out
    cli.main([*where, "--forget", "half way", "--only", "MIFA"])
    cli.main([*where, "--page"])
    assert "half way" not in (tmp_path / "all" / "small" / "README.md").read_text()
