"""Sentences of the pages that promise something of all cases name the test that tries to break them.

`universal_sentences.yaml` lists them. Pages that scripts write are left out: what they say stands in docstrings and
results.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GENERATED = (
    "calibration.md", "configuration.md", "algorithms.md", "what_the_papers_claim.md", "metrics.md", "command_line.md",
)  # fmt: skip
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED)]
KNOWN: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "universal_sentences.yaml").read_text())
HARMLESS = ("definition", "formula", "instruction", "finding")
UNIVERSAL = re.compile(r"\b(any|every|never|always|whatever)\b|\ball\b[^.]*\bever\b|\bno\b[^.]*\bever\b", re.I)
PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=[-*|#] ?)|\n(?=\d+\. )")
SENTENCES = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[(\"])")


def sentences(text: str) -> list[str]:
    """The universal sentences of a page, each on one line; code and comments left out."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    lines = [" ".join(paragraph.split()) for paragraph in PARAGRAPHS.split(text)]
    return [sentence for line in lines for sentence in SENTENCES.split(line) if UNIVERSAL.search(sentence)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_universal_sentence_is_tested_or_promises_nothing(page: Path) -> None:
    listed = KNOWN.get(page.relative_to(ROOT).as_posix(), {})
    unknown = [one for one in sentences(page.read_text()) if not any(words in one for words in listed)]
    assert not unknown, f"narrow them, or list them in {Path(__file__).stem}.yaml: {unknown}"


@pytest.mark.parametrize("page", KNOWN)
def test_tests_that_are_listed_exist(page: str) -> None:
    for words, what in KNOWN[page].items():
        file, _, name = what.partition("::")
        if what in HARMLESS:
            continue
        assert (ROOT / file).is_file(), f"{words!r}: {file}"
        assert not name or re.search(rf"^(async )?def {name}\b", (ROOT / file).read_text(), re.M), f"{words!r}: {what}"


@pytest.mark.parametrize("page", KNOWN)
def test_words_that_are_listed_are_those_of_one_sentence(page: str) -> None:
    """Not of two; and an entry goes when its sentence does."""
    found = sentences((ROOT / page).read_text())
    for words in KNOWN[page]:
        assert sum(words in one for one in found) == 1, words


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Every run is kept.", 1),
        ("A run is kept. No\nrun was ever lost.", 1),
        ("It is kept.\n\n```bash\n# any\n```\n<!-- any -->", 0),
        ("- never\n- always\n", 2),
        ("| any | every |\n| a | b |\n", 1),
        ("Many anyhow everything.", 0),
    ],
)
def test_universal_sentences_are_found(text: str, count: int) -> None:
    assert len(sentences(text)) == count
