"""The shape of the repository: a package that imports nothing from the folders around it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def package_nodes() -> list[tuple[Path, list[ast.AST]]]:
    """Each file of the package, with its syntax tree."""
    paths = sorted((ROOT / "fedsim").rglob("*.py"))
    return [(path, list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))) for path in paths]


def test_the_package_imports_nothing_around_it() -> None:
    found = set()
    for _, nodes in package_nodes():
        for node in nodes:
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
        for path, nodes in package_nodes()
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and broken.search(ast.get_docstring(node) or "")
    ]
    assert not found


DOCUMENTED_NAMES = re.compile(r"^ *(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")


def documented_names(docstring: str) -> set[str]:
    """The names that the sections on arguments and attributes describe."""
    names, indent = set[str](), -1
    for line in docstring.splitlines():
        width = len(line) - len(line.lstrip())
        if re.fullmatch(r" *(?:Args|Attributes):", line):
            indent = width + 4
        elif line.strip() and width < indent:
            indent = -1
        elif width == indent and (match := DOCUMENTED_NAMES.match(line)):
            names |= set(match[1].replace("*", "").split(", "))
    return names


def bound_names(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """What a class or function binds: parameters of its functions, fields, methods and attributes of self."""
    names = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self":
            names.add(child.attr)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, ast.FunctionDef):
            names.add(child.name)
    return names


def test_docstrings_describe_names_that_exist() -> None:
    """A renamed attribute keeps its old name in the docstring otherwise. What a class inherits, or hands on to its
    subclasses, counts as its own."""
    documented: list[tuple[str, str, set[str]]] = []
    bound: dict[str, set[str]] = {}
    relatives: dict[str, set[str]] = {}
    for path, nodes in package_nodes():
        for node in nodes:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                continue
            names = documented_names(ast.get_docstring(node) or "")
            if isinstance(node, ast.FunctionDef):
                assert names <= bound_names(node) | {"options"}, (path.name, node.name, names - bound_names(node))
                continue
            documented.append((path.name, node.name, names))
            bound.setdefault(node.name, set()).update(bound_names(node))
            for base in re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))):
                relatives.setdefault(node.name, set()).add(base)
                relatives.setdefault(base, set()).add(node.name)
    missing = []
    for file, name, names in documented:
        near = {name} | relatives.get(name, set())
        near |= {further for relative in relatives.get(name, ()) for further in relatives.get(relative, ())}
        unknown = names - {n for relative in near for n in bound.get(relative, ())}
        missing += [f"{file}: {name}: {n}" for n in sorted(unknown)]
    assert not missing


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
