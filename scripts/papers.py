"""The reproduced papers: their ledgers, their committed results judged anew, and how pages link to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from fedsim.studies.reproduce import stored
from fedsim.studies.reproduce.comparison import Comparison, Judgement
from fedsim.studies.reproduce.ledger import LEDGER_FILE, StatementLedger, load_statement_ledger
from fedsim.studies.reproduce.recipe import Recipe, list_recipe_names, load_recipe
from fedsim.studies.reproduce.statements import (
    StatementEvidence,
    StatementJudgement,
    evidence_by_statement,
    judge_statement,
)
from fedsim.studies.reproduce.stored import StoredRecipeResult

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
TITLES = {"p_fedavg": "P-FedAvg", "profl": "ProFL", "fedpbc": "FedPBC", "fedawe": "FedAWE", "apfl": "APFL"}
CLASSICS = {  # results that everybody knows; docs/calibration.md shows them beside ours
    "mcmahan": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "scaffnew": "Scaffnew",
    "fednova": "FedNova",
    "mifa": "MIFA",
    "qffl": "q-FFL",
    "afl": "Agnostic federated learning",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "adaptive_clipping": "Adaptive clipping",
    "dp_ftrl": "DP-FTRL",
    "dsgd": "Decentralised gradient descent",
    "perdomo": "Performative prediction",
    "mendler": "Greedy and lazy deployment",
    "izzo": "PerfGD",
    "miller": "Two stages",
}
OWN = {  # comparisons of our own, in the settings of several papers
    "robust": "Robust aggregation",
    "privacy": "Differential privacy",
    "fedstale": "FedStale",
    "focus": "FOCUS",
    "amplified_scaffold": "Amplified SCAFFOLD",
    "late": "Late clients",
    "time_to_accuracy": "Time to accuracy",
    "tracking": "Tracking data that drift and react",
    "players": "Players in one market",
    "true_size": "A column at its true size",
}
MATH = re.compile(r"(\$[^$]+\$)")


@dataclass
class Paper:
    """A folder of recipes and what came of them.

    Attributes:
        folder: its name in experiments/.
        ledger: of its statements; None of a folder of comparisons of our own.
        recipes: by their names.
        results: its committed results.
        judged: (recipe, scale) → the verdicts of the recipe as it is now, on the stored numbers.
    """

    folder: str
    ledger: StatementLedger | None
    recipes: dict[str, Recipe]
    results: list[StoredRecipeResult] = field(default_factory=list)
    judged: dict[tuple[str, str], list[Judgement]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What people call it."""
        return title(self.folder)

    def judgements(self, result: StoredRecipeResult) -> list[Judgement]:
        """Of one of its results."""
        return self.judged[result.recipe, result.scale]

    def evidence(self) -> dict[str, list[StatementEvidence]]:
        """Statement → the comparisons that decide it; '' → controls of our own."""
        seeds = {(result.recipe, result.scale): len(result.report_content["seeds"]) for result in self.results}
        return evidence_by_statement(self.recipes.values(), self.judged, seeds)

    def seeds_now(self, evidence: StatementEvidence) -> int:
        """How many seeds the recipe asks for at the scale of this evidence; 0 where its overrides do not say."""
        settings = self.recipes[evidence.recipe].settings(evidence.scale) if evidence.scale else []
        lists = [
            each.removeprefix("seeds=")
            for each in (settings[0].overrides if settings else ())
            if each.startswith("seeds=")
        ]
        return len(yaml.safe_load(lists[-1])) if lists else 0

    def verdicts(self) -> list[StatementJudgement]:
        """On every statement of its ledger."""
        evidence = self.evidence()
        statements = self.ledger.statements if self.ledger is not None else []
        return [judge_statement(statement, evidence.get(statement.id, [])) for statement in statements]


def papers(root: Path = EXPERIMENTS) -> dict[str, Paper]:
    """Folder → paper, those with titles first, then the classics."""
    recipe_names = sorted(list_recipe_names(root), key=stored.natural_sort_key)
    folders = {name.partition("/")[0] for name in recipe_names}
    read = {}
    known = [name for name in (*TITLES, *CLASSICS) if name in folders]
    for folder in [*known, *sorted(folders - set(known))]:
        ledger = load_statement_ledger(folder, root) if (root / folder / LEDGER_FILE).exists() else None
        read[folder] = Paper(
            folder, ledger, {n: load_recipe(n, root) for n in recipe_names if n.startswith(f"{folder}/")}
        )
    for result in stored.load_stored_results(root):
        paper = read.get(result.paper)
        if paper is not None and result.recipe in paper.recipes:
            paper.results.append(result)
            paper.judged[result.recipe, result.scale] = stored.judge(result, paper.recipes[result.recipe])
    return read


def title(folder: str) -> str:
    """What people call it."""
    return (TITLES | CLASSICS | OWN).get(folder, folder)


def heading(result: StoredRecipeResult) -> str:
    """Of its entry in the gallery."""
    return f"{result.recipe}, {result.scale}"


def entry_link(recipe: str, scale: str, up: str) -> str:
    """To its entry in the gallery; `up` leads to the root."""
    paper, _, name = recipe.partition("/")
    return f"[{name}, {scale}]({up}experiments/{paper}/README.md#{anchor(f'{recipe}, {scale}')})"


def anchor(heading: str) -> str:
    """The link to a heading, as a code host makes it."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")


def shown_by(comparison: Comparison, up: str) -> str:
    """A link to the test or recipe that shows why a comparison does not hold; `up` leads to the root.

    A test's name is a sentence and is printed as one.
    """
    file, _, test = comparison.shown_by.partition("::")
    if not test:
        return f"[{file}]({up}experiments/{file}.yaml)"
    words = test.removeprefix("test_").replace("_", " ")
    return f'the test ["{words}"]({up}{file})'


def escaped(text: str) -> str:
    """Safe in a line or a table of Markdown; formulas stay formulas."""
    parts = MATH.split(" ".join(text.split()))
    return "".join(
        part.replace("|", r"\vert ")
        if number % 2
        else part.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
        for number, part in enumerate(parts)
    )


def sentence(text: str) -> str:
    """With one full stop at its end."""
    return text.strip().rstrip(".") + "."


def lines_of(path: Path) -> Iterator[str]:
    """Of a page that others write; none where it is not there."""
    if path.exists():
        yield from path.read_text(encoding="utf-8").strip().splitlines()
