"""Write docs/first_run.ipynb with the outputs of now, where they have changed.

python scripts/notebook.py [NOTEBOOK]

Times, versions and rounding are no change: an accuracy may differ by a few test samples where another processor adds in
another order, and pixels by the fonts that are there. So a second call, here or elsewhere, leaves the file alone.
"""

from __future__ import annotations

import base64
import copy
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "first_run.ipynb"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
ROUNDING = 0.012  # of a number that is shown: four of the digits' 359 test images
PIXELS = 3.0  # mean difference of pixels, of 255


def executed(notebook: Any) -> Any:
    """A copy with the outputs of now, in a folder of its own, without times and versions."""
    found = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(found, timeout=600, record_timing=False, resources={"metadata": {"path": folder}})
        client.execute()
    found.metadata.language_info = notebook.metadata.get("language_info", found.metadata.language_info)
    return found


def same(one: Any, other: Any) -> bool:
    """Do two notebooks show the same, cell by cell?"""
    if len(one.cells) != len(other.cells):
        return False
    return all(
        a.cell_type == b.cell_type
        and a.source == b.source
        and _same_outputs(a.get("outputs", []), b.get("outputs", []))
        for a, b in zip(one.cells, other.cells, strict=True)
    )


def _same_outputs(ours: list[Any], theirs: list[Any]) -> bool:
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        if one.output_type != other.output_type or one.get("text") != other.get("text"):
            return False
        data, others = one.get("data", {}), other.get("data", {})
        if data.keys() != others.keys() or not all(_same_data(kind, data[kind], others[kind]) for kind in data):
            return False
    return True


def _same_data(kind: str, one: str, other: str) -> bool:
    if kind != "image/png":
        ours, theirs = ([float(number) for number in NUMBER.findall(text)] for text in (one, other))
        return NUMBER.sub("", one) == NUMBER.sub("", other) and np.allclose(ours, theirs, rtol=0, atol=ROUNDING)
    a, b = (np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"), float) for text in (one, other))
    return a.shape == b.shape and float(np.abs(a - b).mean()) <= PIXELS


def main() -> None:
    """Write the notebook, where it shows something else."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    before = nbformat.read(path, as_version=4)
    after = executed(before)
    if not same(before, after):
        nbformat.write(after, path)


if __name__ == "__main__":
    main()
