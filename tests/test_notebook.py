"""The notebook runs from top to bottom, and is committed with what it shows."""

from __future__ import annotations

import copy
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "notebook.py"))
NOTEBOOK = Path(__file__).parents[1] / "docs" / "first_run.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """Kinds of output of every cell of code."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [{kind for output in cell.outputs for kind in output.get("data", {})} for cell in cells]


@pytest.mark.slow
def test_it_runs_and_shows_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = outputs(notebook)
    assert "image/png" in committed[-1]
    assert NOTEBOOK.stat().st_size < 60_000
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "rounds=100" in source
    for cell in notebook.cells:
        cell.source = cell.source.replace("rounds=100", "rounds=5")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert outputs(notebook) == committed


def shown(notebook: Any) -> Any:
    """The numbers' output."""
    return next(o for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "execute_result")


def test_rounding_and_times_are_no_change_and_other_results_are() -> None:
    committed = nbformat.read(NOTEBOOK, as_version=4)
    again = copy.deepcopy(committed)
    again.cells[1].metadata["execution"] = {"iopub.execute_input": "2030-01-01T00:00:00Z"}
    shown(again)["data"]["text/plain"] = shown(again)["data"]["text/plain"].replace("0.89", "0.895")
    assert SCRIPT["same"](committed, again)
    shown(again)["data"]["text/plain"] = shown(committed)["data"]["text/plain"].replace("0.89", "0.7")
    assert not SCRIPT["same"](committed, again)
    shown(again)["data"]["text/plain"] = shown(committed)["data"]["text/plain"].replace("FedAWE", "FedAU")
    assert not SCRIPT["same"](committed, again)
    other = copy.deepcopy(committed)
    other.cells[1].source += "\n"
    assert not SCRIPT["same"](committed, other)


@pytest.mark.slow
def test_written_again_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    path = tmp_path / "short.ipynb"
    path.write_text(NOTEBOOK.read_text().replace("rounds=100", "rounds=5"))
    monkeypatch.setattr(sys, "argv", ["notebook.py", str(path)])
    texts = [path.read_text()]
    for _ in range(2):
        SCRIPT["main"]()
        texts.append(path.read_text())
    assert texts[0] != texts[1]
    assert texts[1] == texts[2]
