"""Pages name tests; the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")] if path.name != "CHANGELOG.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_test_file_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/.-])tests/[\w/]+\.py", page.read_text(encoding="utf-8")))
    assert not {name for name in named if not (ROOT / name).is_file()}


def test_the_page_on_security_names_the_tests_of_this_subject() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    assert {"tests/app/test_gadgets.py", "tests/core/test_trusted_targets.py", "tests/app/test_trusted.py"} <= set(
        named
    )
