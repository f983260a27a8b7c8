"""The notebook runs from top to bottom, and is committed with what it shows."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

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
