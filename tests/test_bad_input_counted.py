"""How much bad input the tests look at: counted in their source, so that docs/reliability.md can say it."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OURS = {"ConfigError", "MissingDataError", "CheckpointError", "NoReferenceError"}


def cases(module: ast.Module) -> int:
    """Calls of tests that are refused by one of our errors: as many as their tables have lines."""
    tables = {}
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            tables[name] = _length(node.value)
    return sum(
        math.prod(_lines(decorator, tables) for decorator in node.decorator_list)
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and _refused(node)
    )


def _refused(test: ast.FunctionDef) -> bool:
    calls = [
        node for node in ast.walk(test) if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"
    ]
    return test.name.startswith("test_a_bad_") or any(ast.unparse(call.args[0]) in OURS for call in calls)


def _length(value: ast.expr | None) -> int:
    if isinstance(value, ast.Dict):
        return len(value.keys)
    return len(value.elts) if isinstance(value, (ast.List, ast.Tuple)) else 1


def _lines(decorator: ast.expr, tables: dict[str, int]) -> int:
    if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != "pytest.mark.parametrize":
        return 1
    return tables.get(ast.unparse(decorator.args[1]).removesuffix(".values()"), _length(decorator.args[1]))


def counted() -> int:
    return sum(cases(ast.parse(path.read_text(encoding="utf-8"))) for path in TESTS.rglob("test_*.py"))


@pytest.mark.slow
def test_as_much_bad_input_is_tried_as_the_page_says() -> None:
    said = re.search(
        r"(\d+) cases of bad input", (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
    )
    assert said is not None
    assert 350 <= int(said[1]) <= counted()
