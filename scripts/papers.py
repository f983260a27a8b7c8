"""The reproduced papers, their committed results and how pages link to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
TITLES = {"p_fedavg": "P-FedAvg", "profl": "ProFL", "fedpbc": "FedPBC", "fedawe": "FedAWE", "apfl": "APFL"}
OWN = {  # comparisons of our own, in the settings of several papers
    "robust": "Robust aggregation",
    "privacy": "Differential privacy",
    "fedstale": "FedStale",
    "focus": "FOCUS",
    "amplified_scaffold": "Amplified SCAFFOLD",
    "late": "Late clients",
    "players": "Players in one market",
    "true_size": "A column at its true size",
}
HELD, REFUTED, OPEN = "held", "refuted", "open"


@dataclass
class Report:
    """A committed result: its folder, and what its report.json says."""

    folder: Path
    content: dict[str, Any]

    @property
    def paper(self) -> str:
        """The folder of its paper."""
        return self.folder.parents[1].name

    @property
    def heading(self) -> str:
        """Of its entry in the gallery."""
        return f"{self.content['recipe']}, {self.content['scale']}"

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The rows that are numbers."""
        return [row for row in self.content["rows"] if not row["claim"]]

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The rows that are claims."""
        return [row for row in self.content["rows"] if row["claim"]]

    def count(self) -> dict[str, int]:
        """Verdict → how many claims."""
        return {word: sum(verdict(row) == word for row in self.claims) for word in (HELD, REFUTED, OPEN)}


def verdict(row: dict[str, Any]) -> str:
    """Of a claim; a report that knows no verdicts has the comparison, and no reason why it failed."""
    return str(row.get("verdict") or (HELD if row["held"] else OPEN))


def reports(root: Path = EXPERIMENTS) -> dict[str, list[Report]]:
    """Paper → its committed results, those with titles first."""
    found = [Report(path.parent, json.loads(path.read_text())) for path in root.glob("*/results/*/report.json")]
    found.sort(key=lambda report: in_order(report.folder.name))
    papers = [*TITLES, *sorted({report.paper for report in found} - set(TITLES))]
    return {p: those for p in papers if (those := [report for report in found if report.paper == p])}


def in_order(name: str) -> list[tuple[str, int]]:
    """A key by which fig2 stands before fig10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def title(paper: str) -> str:
    """What people call it."""
    return (TITLES | OWN).get(paper, paper)


def anchor(heading: str) -> str:
    """The link to a heading, as a code host makes it."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")


def shown_by(row: dict[str, Any], up: str) -> str:
    """A link to the test or recipe that shows why a claim does not hold; `up` leads to the root."""
    file, _, test = row["shown_by"].partition("::")
    return f"[`{test}`]({up}{file})" if test else f"[{file}]({up}experiments/{file}.yaml)"


def escaped(text: str) -> str:
    """Safe in a line or a table of Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def sentence(text: str) -> str:
    """With one full stop at its end."""
    return text.strip().rstrip(".") + "."


def lines_of(path: Path) -> Iterator[str]:
    """Of a page that others write; none where it is not there."""
    if path.exists():
        yield from path.read_text(encoding="utf-8").strip().splitlines()
