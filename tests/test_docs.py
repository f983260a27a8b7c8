"""Every code block of README and docs runs, at reduced size; one that cannot says why in a comment before it.

`<!-- not executed: REASON -->` leaves the next block out, `<!-- file: NAME -->` writes it to that file, and
`<!-- printed by: COMMAND -->` says whose output it is. Blocks run in order, in a folder of the page's own. `bash`
blocks are commands of fedsim, a line each. A block of another language, or of none, needs one of these comments.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, FencedCodeBlockLexer

from fedsim import Simulation
from fedsim.app import cli, sweep
from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.studies.board import leaderboard_cli as board
from fedsim.studies.plots import plot_cli as plots
from fedsim.studies.reproduce import reproduce_cli as reproduce

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUOTED = ROOT / "examples" / "own_package"  # a page that shows a file of this package shows it as it is
MARKS = ("not executed", "file", "printed by")
SHOWN = ("run           test_loss", "fedsim/\n", "mypackage/\n")  # blocks without a language that need no mark: output
REDUCED = ["rounds=2", "eval_every=1", "tracking.progress=none", "tracking.tensorboard=false"]
LONG = (  # many runs: slow
    "README.md",
    "composing.md",
    "extending.md",
    "first_run.md",
    "how_to_capacity.md",
    "how_to_compare.md",
    "how_to_drift.md",
    "how_to_events.md",
    "how_to_partition.md",
    "how_to_predict.md",
    "how_to_tune.md",
    "own_data.md",
    "own_loss.md",
    "participation.md",
    "performative.md",
    "personal.md",
    "privacy.md",
    "reproducing.md",
    "results.md",
    "tutorial_dropout.md",
    "tutorial_my_data.md",
    "tutorial_shift.md",
)
FAST = {"hydra.sweeper.n_trials": "2"}  # where the command has it
NUMBERS = itertools.count()  # of runs that name no folder: several begin within a second
COMMANDS = {
    "fedsim": cli.main,
    "fedsim-plot": plots.main,
    "fedsim-reproduce": reproduce.main,
    "fedsim-leaderboard": board.main,
}


class Blocks:
    """The fenced blocks of a page, and the comments that say what becomes of the next one.

    Attributes:
        counts: of blocks that were executed, written to a file, left out by a mark, or show what a command prints.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.mark: tuple[str, str] | None = None
        self.python = PythonEvaluator()
        self.lexers = [DirectiveInHTMLCommentLexer(word, arguments=".+?") for word in MARKS]

    def __call__(self, document: Document) -> Iterator[Region]:
        for lexer in self.lexers:
            for found in lexer(document):
                said = found.lexemes["directive"], found.lexemes["arguments"].strip()
                yield Region(found.start, found.end, said, self.note)
        for found in FencedCodeBlockLexer(r"[^\n`]*")(document):
            region = Region(found.start, found.end, found.lexemes["source"], self.evaluate)
            region.lexemes["language"] = found.lexemes["language"].strip()
            yield region

    def note(self, example: Example) -> None:
        """A comment, which is about the very next block."""
        assert self.mark is None, f"two comments about one block: {self.mark} and {example.parsed}"
        self.mark = example.parsed

    def evaluate(self, example: Example) -> None:
        """A block: what its mark says, or else what its language does."""
        (word, argument), self.mark = self.mark or ("", ""), None
        language = example.region.lexemes["language"]
        if word == "file":
            write(argument, example.parsed)
        elif language == "bash" and not word:
            carry_out(example)
        elif language == "python" and not word:
            self.python(example)
        else:
            shown = language == "" and example.parsed.startswith(SHOWN)
            assert word or shown, f"neither bash nor python: mark the block, and why: {example.parsed[:60]!r}"
        self.counts[word or ("printed by" if language == "" else "executed")] += 1


def write(name: str, text: str) -> None:
    """A file that a page shows; one of the example package must be that package's."""
    shipped = QUOTED / name
    assert not shipped.exists() or shipped.read_text() == text, f"{shipped} says something else"
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def carry_out(example: Example) -> None:
    """The commands of a bash block."""
    for line in example.parsed.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            command(words)


def command(words: list[str]) -> None:
    """One of fedsim's commands, in this process: each start of a new one takes seconds."""
    if words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True, timeout=60)
        return
    assert words[0] in COMMANDS, f"{words[0]} is no command of fedsim; mark the block as not executed, and why"
    sys.argv[:] = reduced(words)
    sweep.SweepCallback.records = None  # a sweep's, which a process has one of
    try:
        COMMANDS[words[0]]()
    except SystemExit as left:
        if left.code:
            raise AssertionError(f"{shlex.join(sys.argv)}: {left.code}") from left


def reduced(words: list[str]) -> list[str]:
    """The same command at a size for tests."""
    if words[0] == "fedsim-reproduce" and "--scale" in words:
        return [*words, "--scale", "smoke", "--jobs", "1"]
    if words[0] != "fedsim" or words[1] in COMMAND_DESCRIPTIONS or {"--help", "--cfg"} & set(words):
        return words
    folder = [] if any(word.startswith(("out=", "resume=")) for word in words) else [f"out=outputs/{next(NUMBERS)}"]
    return [
        *words,
        *folder,
        *REDUCED,
        *(f"{key}={value}" for key, value in FAST.items() if any(key in word for word in words)),
    ]


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of Python blocks at a size for tests."""
    genuine = Simulation.__init__

    def short(simulation: Simulation, *arguments: Any, rounds: int = 100, **options: Any) -> None:
        genuine(simulation, *arguments, rounds=min(rounds, 5), **options)

    monkeypatch.setattr(Simulation, "__init__", short)


@pytest.mark.usefixtures("composed_once", "shorter")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else []) for page in PAGES],
    ids=lambda page: page.name,
)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["fedsim"])
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "mypackage").is_dir()])
    for name in [name for name in sys.modules if name.split(".")[0] == "mypackage"]:
        monkeypatch.delitem(sys.modules, name)  # the example's own tests import it; a page writes its own
    known = set(sys.modules)
    blocks = Blocks()
    for example in Sybil([blocks], encoding="utf-8").parse(page).examples():
        example.evaluate()
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    assert blocks.mark is None, f"no block follows {blocks.mark}"
    text = page.read_text()
    assert blocks.counts["not executed"] == text.count("<!-- not executed:")
    assert blocks.counts["file"] == text.count("<!-- file:")
    assert 2 * blocks.counts.total() == len(re.findall(r"^ *```", text, re.M))


PAGE = """
<!-- file: play.txt -->
```
MACBETH.
```

```bash
python -c "assert open('play.txt').read() == 'MACBETH.\\n'; open('ran', 'w')"
```

<!-- not executed: needs a network -->
```bash
curl example.org
```

```python
assert open("ran").read() == ""
```
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAGE, None),
        (PAGE.replace("<!-- file: play.txt -->", ""), "mark the block"),
        (PAGE.replace("<!-- not executed: needs a network -->", ""), "curl is no command"),
        (PAGE.replace("python\nassert", "yaml\nassert"), "mark the block"),
        ("<!-- file: a -->\n" + PAGE, "two comments about one block"),
        (PAGE.replace("'MACBETH.", "'BANQUO."), "returned non-zero exit status 1"),
    ],
)
def test_every_kind_of_block_is_executed_written_or_marked(
    text: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(text)
    blocks = Blocks()
    examples = Sybil([blocks], encoding="utf-8").parse(tmp_path / "page.md").examples()

    def evaluate() -> None:
        for example in examples:
            example.evaluate()

    if said is None:
        evaluate()
        assert blocks.counts == {"file": 1, "executed": 2, "not executed": 1}
        return
    with pytest.raises((AssertionError, subprocess.CalledProcessError), match=said):
        evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_of_output_looks_like_a_command(page: Path) -> None:
    fence = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        assert not (fence == "```" and re.match(r"(fedsim|make|python|pip|torchrun)\b(?![:/])", line)), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """A table begins with its heading and a rule, and each of its lines has as many cells."""
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    for table in tables:
        lines = table.splitlines()
        assert len(lines) > 1, lines
        assert re.fullmatch(r"\|(:?-+:?\|)+", lines[1].replace(" ", "")), lines[:2]
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert len(cells) == 1, lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_test_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"\btests/[\w./-]*\w", page.read_text()):
        assert any((root / end).exists() for root in (ROOT, QUOTED) for end in (name, f"{name}.py")), name


def test_make_docs_runs_all_scripts_that_write_pages() -> None:
    recipe = re.search(r"^docs: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    writers = {path.name for path in (ROOT / "scripts").glob("*.py") if path.read_text().startswith('"""Write ')}
    assert {"algorithms_page.py", "config_reference.py", "notebook.py", "printed_output.py"} <= writers
    assert writers == set(re.findall(r"scripts/(\w+\.py)", recipe[1]))
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert {"config_reference.py", "algorithms_page.py"} <= set(re.findall(r"scripts/(\w+\.py)", contributing))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
