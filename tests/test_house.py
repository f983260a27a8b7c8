"""The shape of the repository: a package that imports nothing from the folders around it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
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


def test_the_package_has_few_rooms_and_names_that_differ() -> None:
    """A stranger finds a module by its name: none stands more than twice."""
    package = ROOT / "fedsim"
    rooms = [path for path in package.iterdir() if path.name != "__pycache__" and not path.name.startswith(".")]
    assert len(rooms) <= 16, sorted(path.name for path in rooms)
    names = Counter(path.stem for path in package.rglob("*.py") if path.name != "__init__.py")
    assert not {name: count for name, count in names.items() if count > 2}


def test_the_simulator_runs_where_the_studies_are_not_installed(tmp_path: Path) -> None:
    """They are hidden in a process of its own, whose run shows its curves in TensorBoard all the same."""
    program = """if True:
        import importlib.util, sys
        from importlib.abc import MetaPathFinder

        class Hidden(MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition("fedsim.studies")[1]:
                    raise ModuleNotFoundError(name, name=name)

        genuine = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == "fedsim.studies" else genuine(name, *more)
        sys.meta_path.insert(0, Hidden())
        from fedsim.app.cli import main
        main()
    """
    words = ["rounds=1", "clients=4", "local_steps=1", "tracking.progress=none", f"out={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


def test_sections_of_docstrings_begin_a_line() -> None:
    """A section in the middle of a line is missing from `help()`, the API pages and the configuration reference."""
    broken = re.compile(
        r"(?m)\S +(?:Args|Attributes|Raises|Returns):(?: |$)|^ *(?:Args|Attributes|Raises|Returns): +\S"
    )
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in (ROOT / "fedsim").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and broken.search(ast.get_docstring(node) or "")
    ]
    assert not found


def test_no_table_is_indexed_by_one_client_under_vmap() -> None:
    """`table[batch["client"]]` works under vmap from PyTorch 2.11 on; `heterogeneity.entry_of_client` does for all."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("shift", "local", "models", "evaluation/performative", "trainer")
        for path in (ROOT / "fedsim" / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) in ("batch['client']", "batch['row']")
    ]
    assert not found
