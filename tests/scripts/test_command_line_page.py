"""The vocabulary of metrics and the command line: what is committed is what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from fedsim.evaluation.columns import MEASURED, PLACE, TIME, WORK

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "reference_pages.py"))


def test_the_vocabulary_is_current_and_has_all_columns() -> None:
    page = SCRIPT["METRICS"].read_text(encoding="utf-8")
    assert page == SCRIPT["metrics"](), "out of date: python scripts/reference_pages.py writes it again"
    for name in PLACE | MEASURED | WORK | TIME:
        assert f"\n| `{name}` | " in page


@pytest.mark.parametrize(("title", "module"), [(title, module) for title, module, _ in SCRIPT["PROGRAMS"]])
def test_the_commands_have_the_options_that_the_page_shows(title: str, module: str) -> None:
    """Versions of Python lay help out differently; the options are the same."""
    page = SCRIPT["COMMANDS"].read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert section is not None
    shown, given = (
        set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) for text in (section[1], SCRIPT["printed"](title, module))
    )
    assert shown - {"--help"} == given - {"--help"}
