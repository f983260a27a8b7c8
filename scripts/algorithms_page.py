"""Write docs/algorithms.md: what `fedsim algorithms` says, and which tests show what of each.

python scripts/algorithms_page.py
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from fedsim.app.commands.algorithms import LISTED_GROUPS, AlgorithmChoice, algorithms

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
FOLDERS = ("strategies", "papers", "local", "uplink", "evaluation/personal", "evaluation/performative", "trainer")
SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns)\b.*:$", re.M)
MARKDOWN = re.compile(r"(?<=\w)\*|(?<=[∇|)}])_(?=[\w{])")  # what Markdown would take for emphasis in a formula
MOST = 6  # tests that are named of each
TITLES = {
    "strategy": "Strategies: the next model",
    "local": "Local rules: one step of local training",
    "columns": "Columns: parameters that are private to the client",
    "uplink": "Uplinks: compression, clipping and noise of updates",
    "attack": "Attacks: Byzantine clients",
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """All of it."""
    lines = [
        "# Algorithms",
        "",
        "Written by `python scripts/algorithms_page.py` from the classes and the tests; do not edit.",
        "`fedsim algorithms` lists them, and `fedsim algorithms NAME` prints one entry.",
        "",
        "*Remembers* is what is stored between rounds in addition to the server's model; a row is d numbers. *Sends*",
        "is what each participating client sends and receives in a round, in float32. *Assumes* lists hard",
        "requirements. The tests named are those that mention few other algorithms.",
        "",
        "In the formulas $x$ is the server's model, $x_i$ a client's, $G_i$ = start − end of a client's local work",
        "(its innovation), $A$ the clients that participate in round $t$, $w_i$ a client's weight, $\\eta$ a local and",
        "$\\eta_g$ the server's learning rate.",
    ]
    for group in LISTED_GROUPS:
        lines += [
            "",
            f"## {TITLES[group]}",
            "",
            "| choice | source | remembers |",
            "|---|---|---|",
        ]
        mine = [one for one in algorithms() if one.group == group]
        lines += [f"| [`{one.name}`](#{anchor(one)}) | {one.paper or '–'} | {one.kept_tensors_text} |" for one in mine]
        for one in mine:
            lines += ["", f"### {one.group}={one.name}", "", *definition(one), ""]
            lines += [f"Sends: {one.traffic_text}. Assumes: {one.assumptions_text}.", ""]
            lines += [f"Tests: {', '.join(shown(one)) or 'that it composes and runs'}."]
    return "\n".join(lines) + "\n"


def anchor(one: AlgorithmChoice) -> str:
    """Of its heading, as the site and code hosts make it."""
    return f"{one.group}{one.name}"


def definition(one: AlgorithmChoice) -> list[str]:
    """What its class's docstring says before its arguments: formulas, what is remembered, special cases."""
    said = SECTION.split(inspect.getdoc(one.kind) or "")[0].strip()
    return MARKDOWN.sub(r"\\\g<0>", said).splitlines() or [one.summary]


def shown(one: AlgorithmChoice) -> Iterator[str]:
    """Tests that mention its class, those of few other algorithms first."""
    name, others = one.kind.__name__, {each.kind.__name__ for each in algorithms()}
    found = [(len(words & others), test, file) for test, file, words in tests() if name in words]
    for _, test, file in sorted(found)[:MOST]:
        path = file.relative_to(ROOT).as_posix()
        yield f"[{test.removeprefix('test_').replace('_', ' ')}](../{path})"


@functools.cache
def tests() -> tuple[tuple[str, Path, frozenset[str]], ...]:
    """Name, file and words of every test: its own, and those of what its module gives it."""
    found: list[tuple[str, Path, frozenset[str]]] = []
    for folder in FOLDERS:
        for file in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            nodes = ast.parse(file.read_text(encoding="utf-8")).body
            given = {name: node for node in nodes for name in names(node)}
            found += [(name, file, words(node, given)) for name, node in given.items() if name.startswith("test_")]
    return tuple(found)


def names(node: ast.stmt) -> list[str]:
    """What a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def words(node: ast.stmt, given: dict[str, ast.stmt]) -> frozenset[str]:
    """Names in a statement, and in what it mentions of its module."""
    seen: set[str] = set()
    left = [node]
    while left:
        for inner in ast.walk(left.pop()):
            if isinstance(inner, ast.Name) and inner.id not in seen:
                seen.add(inner.id)
                if inner.id in given:
                    left.append(given[inner.id])
    return frozenset(seen)


if __name__ == "__main__":
    main()
