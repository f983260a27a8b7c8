"""Runs that have rounds to go are marked in a table, in each of its forms, and named below it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fedsim.studies.results.table_cli import main


@pytest.fixture(name="sweep")
def sweep_fixture(tmp_path: Path) -> Path:
    """Two finished runs, one that was stopped early by its own rule, and one that failed on the way."""
    for number, (lr, rounds, summary) in enumerate(((1, 40, True), (2, 40, False), (3, 20, True), (4, 20, False))):
        folder = tmp_path / f"lr={lr}"
        folder.mkdir()
        with open(folder / "metrics.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["round", "seed", "test_loss"])
            writer.writerows([(t, seed, 1 / (1 + t + seed)) for t in range(0, rounds + 1, 20) for seed in (0, 1)])
        OmegaConf.save({"lr": lr, "rounds": 40}, folder / "config.yaml")
        if summary:
            (folder / "summary.json").write_text("{}")
        status = "done" if summary else "failed"
        (tmp_path / ".runs").mkdir(exist_ok=True)
        record = {"number": number, "overrides": [], "folder": str(folder), "status": status, "message": "disk full"}
        (tmp_path / ".runs" / f"{number}.json").write_text(json.dumps(record))
    return tmp_path


def test_a_star_and_a_note(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep)])
    shown = capsys.readouterr().out.splitlines()
    assert [line.endswith("*") for line in shown[2:6]] == [False, False, False, True]
    assert shown[-1] == "* unfinished: lr=4 (failed, round 20 of 40)"


def test_other_forms_have_it_too_and_numbers_stay_numbers(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep), "--latex"])
    assert capsys.readouterr().out.count("$^{*}$") == 1
    main([str(sweep), "--csv"])
    shown = capsys.readouterr().out
    assert "# * unfinished: lr=4 (failed, round 20 of 40)" in shown
    rows = list(csv.reader(line for line in shown.splitlines() if not line.startswith("#")))
    assert all(float(cell) > 0 for row in rows[1:] for cell in row if cell)


def test_finished_runs_have_no_note(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep / "lr=1"), str(sweep / "lr=3")])
    assert "*" not in capsys.readouterr().out
