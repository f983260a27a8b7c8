"""The shape of the repository: a package that imports nothing from the folders around it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_package_imports_nothing_around_it() -> None:
    found = set()
    for path in (ROOT / "fedsim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    assert not found & {"tests", "scripts", "examples", "experiments", "docs"}


def test_no_table_is_indexed_by_one_client_under_vmap() -> None:
    """`table[batch["client"]]` works under vmap from PyTorch 2.11 on; `heterogeneity.entry` does for all."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("shift", "local", "models", "performative", "trainer")
        for path in (ROOT / "fedsim" / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) in ("batch['client']", "batch['row']")
    ]
    assert not found
