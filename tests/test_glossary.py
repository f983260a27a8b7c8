"""The glossary: what it names exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import fedsim
from fedsim.app.config import groups
from fedsim.evaluation.columns import COLUMN_DESCRIPTIONS

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (?!term|---)(.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
ELSEWHERE = ("hydra/launcher",)  # Hydra's own group, to which the package adds choices
CONFIG = (ROOT / "docs" / "configuration.md").read_text()


def classes() -> dict[str, type]:
    """All public classes of the package, by name."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(fedsim.__path__, "fedsim."):
        if not module.name.endswith("__main__"):
            found |= {n: c for n, c in vars(importlib.import_module(module.name)).items() if isinstance(c, type)}
    return found


def test_each_term_stands_once_and_is_a_sentence() -> None:
    terms = [term for term, _, _ in ROWS]
    assert len(terms) == len(set(terms)) >= 55
    assert all(meaning.endswith(".") for _, meaning, _ in ROWS)


@pytest.mark.parametrize(("term", "where"), [(term, where) for term, _, where in ROWS])
def test_what_is_named_exists(term: str, where: str) -> None:
    known = classes()
    for name in re.findall(r"`([^`]+)`", where):
        group, is_setting, choice = name.partition("=")
        if is_setting:
            named = f"| `{group}`" in CONFIG or group in groups() or group in ELSEWHERE
            assert named or f".{group}`" in CONFIG, (term, name)
            assert not choice or group not in groups() or choice in groups()[group] or f"`{group}`" in CONFIG
        elif re.fullmatch(r"[A-Z]\w+(\.\w+)?", name):
            holder, _, attribute = name.partition(".")
            assert holder in known, (term, name)
            fields = {
                n for base in known[holder].__mro__ for n in (*vars(base), *vars(base).get("__annotations__", {}))
            }
            text = Path(importlib.import_module(known[holder].__module__).__file__ or "").read_text()
            assert not attribute or attribute in fields or f"self.{attribute}" in text, (term, name)
        elif name in {"distance_to_ps", "distance_to_po"}:
            assert name in COLUMN_DESCRIPTIONS
