"""How many names of the package are bare participles, determiners or pronouns, which a reader cannot guess?

python scripts/bare_names.py               # the share of bindings; exit code 1 above the limit
python scripts/bare_names.py --list        # each of them, with its place

Counted are assigned variables and attributes, parameters, functions and classes. `make lint` runs this: the share may
fall and does not rise. Lower LIMIT after renaming.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.002  # share of all bindings
GOAL = 0.002
WORDS = """
found own known part parts kept told said place places seen given made left much most least other others whole
wanted asked some one ones many few each every all both there here now then so same alike more less further
rest want has had is was what who whom whose which where when how why this that these those it its them they
done gone come shown written held taken meant moved ended begun used called named beside within without alone
together apart about around inside outside late early again
"""
BARE = frozenset(WORDS.split())


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a module binds, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


def main() -> int:
    """Count, report, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each bare name with its file and line")
    options = parser.parse_args()
    total, words = 0, Counter[str]()
    for path in sorted((ROOT / "fedsim").rglob("*.py")):
        for name, line in bindings(ast.parse(path.read_text(encoding="utf-8"))):
            total += 1
            if name.strip("_") in BARE and name != "__all__":
                words[name.strip("_")] += 1
                if options.list:
                    print(f"{path.relative_to(ROOT)}:{line} {name}")
    share = words.total() / total
    often = ", ".join(f"{name} {count}" for name, count in words.most_common(8))
    print(
        f"{words.total()} of {total} bindings are bare words: {share:.1%} (limit {LIMIT:.1%}, goal {GOAL:.1%}); {often}"
    )
    return int(share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
