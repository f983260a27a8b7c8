"""The groups on the help page: in sections, aligned, within the width, those of users' own folders last."""

from __future__ import annotations

from fedsim.app.config import groups
from fedsim.app.help_page import GROUPS_BY_SECTION, LINE_WIDTH, help_text


def test_each_group_of_ours_has_one_section() -> None:
    listed = [group for section in GROUPS_BY_SECTION.values() for group in section]
    assert sorted(listed) == sorted(groups())


def test_choices_are_aligned_and_complete() -> None:
    choices = groups() | {"mine": ["a", "b"]}
    lines = help_text(choices).splitlines()
    assert max(map(len, lines)) <= LINE_WIDTH
    assert lines[-2:] == ["yours:", f"  mine{' ' * (max(map(len, choices)) - 2)}a, b"]
    start = 2 + max(map(len, choices)) + 2
    body = [line for line in lines if not line.endswith(":")]
    assert all(line[start] != " " and line[start - 1] == " " for line in body)
    shown = ", ".join(line[start:].rstrip(",") for line in body).split(", ")
    assert sorted(shown) == sorted(choice for options in choices.values() for choice in options)
