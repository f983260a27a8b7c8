"""The committed reference is what the configurations say now."""

from __future__ import annotations

import runpy
from pathlib import Path

from fedsim.app.config import groups

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "config_reference.py"))


def test_the_page_is_up_to_date_and_has_every_choice() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert page == SCRIPT["page"](), "out of date: python scripts/config_reference.py writes it again"
    for group, choices in groups().items():
        for choice in choices:
            assert f"\n### {group}={choice}\n" in page


def test_where_a_docstring_names_another_class_the_page_says_what_that_says() -> None:
    from fedsim.local import SGD

    assert SCRIPT["documented"](SGD)["epochs"] == "passes over the client's own data per round"


def test_what_a_docstring_says_of_its_arguments() -> None:
    text = "What.\n\nArgs:\n    a, b: two\n        of them.\n    c: one: more.\n\nAttributes:\n    d: last."
    assert SCRIPT["arguments"](text) == {"a": "two of them", "b": "two of them", "c": "one: more", "d": "last"}
