"""The page of the command line has the options that the commands have."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "command_line_page.py"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("title", "module"), [(title, module) for title, module, _ in SCRIPT["PROGRAMS"]])
def test_the_commands_have_the_options_that_the_page_shows(title: str, module: str) -> None:
    """Versions of Python lay help out differently; the options are the same."""
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert section is not None
    shown, given = (
        set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) for text in (section[1], SCRIPT["printed"](title, module))
    )
    assert shown - {"--help"} == given - {"--help"}
