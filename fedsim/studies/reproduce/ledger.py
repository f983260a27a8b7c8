"""A paper's ledger: what the paper states, and where; statements.yaml in the paper's folder of experiments/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.reproduce.comparison import Comparison

LEDGER_FILE = "statements.yaml"
STATEMENT_ID_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
PAPER_KEYS = ("short", "title", "authors", "venue", "year", "link")
# Ledgers are long, and every recipe reads its paper's: libyaml parses them several times as fast.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Statement:
    """One assertion of a paper that a reader could dispute.

    Attributes:
        id: its identifier in the ledger.
        item: the figure, table, theorem or section it belongs to.
        place: where exactly.
        states: what it says, in our words.
        not_covered: why no comparison decides it.
        choice: a choice that the paper does not print and on which the verdict depends.
    """

    id: str
    item: str
    place: str
    states: str
    not_covered: str = ""
    choice: str = ""


@dataclass
class StatementLedger:
    """A paper's statements.

    Attributes:
        paper_folder: the paper's folder in experiments/.
        paper_metadata: short, title, authors, venue, year, link.
        paper_items: every figure and table of the paper, and theorems with a consequence that can be checked.
        statements: in the paper's order.
    """

    paper_folder: str
    paper_metadata: dict[str, Any]
    paper_items: list[str]
    statements: list[Statement] = field(default_factory=list)

    def check(self) -> None:
        """Refuse a ledger that contradicts itself."""
        for key in PAPER_KEYS:
            if not self.paper_metadata.get(key):
                raise ConfigError(f"{self._message_prefix}: paper lacks {key}")
        ids: set[str] = set()
        for statement in self.statements:
            self._check_statement(statement)
            if statement.id in ids:
                raise ConfigError(f"{self._message_prefix}: {statement.id}: two statements have this id")
            ids.add(statement.id)
        for item in self.paper_items:
            if all(statement.item != item for statement in self.statements):
                raise ConfigError(f"{self._message_prefix}: no statement belongs to the item {item}")

    def _check_statement(self, statement: Statement) -> None:
        prefix = f"{self._message_prefix}: {statement.id}"
        if not STATEMENT_ID_PATTERN.fullmatch(statement.id):
            raise ConfigError(f"{prefix}: id must be lower-case words and digits joined by hyphens")
        checks.check_choice(f"{prefix}: item", statement.item, self.paper_items)
        for key in ("place", "states"):
            if not getattr(statement, key).strip():
                raise ConfigError(f"{prefix} lacks {key}")
        if any(quotation_mark in statement.states for quotation_mark in '"“”„«»'):
            raise ConfigError(f"{prefix}: states is a restatement and has no quotation marks")

    def check_comparison_statement(self, recipe: str, comparison: Comparison) -> None:
        """Refuse a comparison that does not fit the ledger."""
        if not comparison.statement:
            return
        prefix = f"recipe {recipe}: comparisons"
        by_id = {statement.id: statement for statement in self.statements}
        statement = by_id[checks.check_choice(f"{prefix}: statement", comparison.statement, by_id)]
        if comparison.choice and not statement.choice:
            raise ConfigError(
                f"{prefix}: choice={comparison.choice!r}, but the statement {statement.id} names no choice"
            )

    def check_statements_covered(self, comparisons: Mapping[str, list[Comparison]]) -> None:
        """Refuse statements that nothing decides or excuses; the comparisons are those of all recipes by name."""
        for recipe, of_recipe in comparisons.items():
            for comparison in of_recipe:
                self.check_comparison_statement(recipe, comparison)
        decided_statements = {comparison.statement for of_recipe in comparisons.values() for comparison in of_recipe}
        for statement in self.statements:
            prefix = f"{self._message_prefix}: {statement.id}"
            if statement.id in decided_statements and statement.not_covered:
                raise ConfigError(f"{prefix}: a comparison decides it, so that it cannot have not_covered")
            if statement.id not in decided_statements and not statement.not_covered:
                raise ConfigError(f"{prefix}: no comparison decides it; add one, or say why under not_covered")

    @property
    def _message_prefix(self) -> str:
        return f"{self.paper_folder}/{LEDGER_FILE}"


def load_statement_ledger(paper: str, folder: Path) -> StatementLedger:
    """Read and check a paper's ledger; `folder` holds the papers' folders.

    Raises:
        ConfigError: the ledger is missing, not well formed, or contradicts itself.
    """
    path = folder / paper / LEDGER_FILE
    if not path.exists():
        raise ConfigError(f"{paper} has no {LEDGER_FILE}, which a comparison with statement: ID needs")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
        assert isinstance(content, dict)
        statements = [Statement(**{str(k): _as_text(v) for k, v in entry.items()}) for entry in content["statements"]]
        ledger = StatementLedger(paper, content["paper"], [str(item) for item in content["items"]], statements)
    except (AssertionError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not well formed ({reason})") from error
    ledger.check()
    return ledger


def papers_with_ledger(folder: Path) -> list[str]:
    """Return the names of the papers that have a ledger."""
    return sorted(path.parent.name for path in folder.glob(f"*/{LEDGER_FILE}"))


def _as_text(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())
