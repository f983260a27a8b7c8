"""What README and docs show works: every command composes, also those that tests/test_docs.py cannot run.

The README is short, its numbers are those of the results and pages that it names, and its badges say what is true.
"""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.commands.algorithms import algorithms
from fedsim.app.config import config_folder, register_resolvers
from fedsim.app.per_choice import add_plus_prefix

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = [block for page in PAGES for block in re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)]
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
# A launcher of an extra composes where the extra is installed, and a package's choices beside the package.
COMMANDS = [
    line
    for line in LINES
    if re.match(rf"fedsim( -m)? (?!{'|'.join(COMMAND_DESCRIPTIONS)})\w", line) and not re.search("ray|pkg:", line)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_compose(command: str) -> None:
    register_resolvers()
    arguments = add_plus_prefix([a for a in shlex.split(command, comments=True)[1:] if a != "-m"])
    parsed = OverridesParser.create().parse_overrides(arguments)
    sweeps = [o for o in parsed if o.is_sweep_override()]
    one_of_each = [f"{o.key_or_group}={next(iter(o.sweep_string_iterator()))}" for o in sweeps]
    plain = [o.input_line for o in parsed if not o.is_sweep_override()]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        assert compose("config", plain + one_of_each).rounds > 0


def test_every_choice_is_in_the_table_of_groups() -> None:
    choices = (ROOT / "docs" / "choices.md").read_text()
    table = "\n".join(line for line in choices.splitlines() if line.startswith("| `"))
    for group in (
        "dataset",
        "partition",
        "availability",
        "shift",
        "contamination",
        "model",
        "local",
        "local/schedule",
        "strategy",
        "uplink",
        "attack",
        "clock",
        "work",
        "delay",
    ):
        for path in (config_folder() / group).glob("*.yaml"):
            if path.stem not in ("none", "custom"):
                assert path.stem in table, f"{group}={path.stem}"


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def test_it_is_read_in_a_few_minutes_and_names_both_commands() -> None:
    assert len(README.split()) <= 900
    assert "\nmake run " in README
    assert "\nmake test " in README


def test_its_caption_is_that_of_the_committed_results() -> None:
    caption = page("README.md").partition("## What participation does")[2].partition("## Why fedsim")[0]
    ends = dict(re.findall(r"^(Fed\w+|MIFA) .*?([\d.]+) ± [\d.]+ %", page_of_table(), re.M))
    assert f"ends at {float(ends['FedAvg']):.0f} %" in caption
    others = sorted(round(float(ends[name])) for name in ("FedAU", "FedAWE", "MIFA"))
    assert f"end at {others[0]} to {others[-1]} %" in caption
    assert "one digit" in caption
    assert "0.2/√(t/10 + 1)" in caption
    board = (ROOT / "experiments/leaderboard/results/participation/README.md").read_text()
    behind = re.search(r"FedAWE is worse than FedAvg in accuracy in (\d+) cells .*?\*\*-([\d.]+)", board)
    assert behind is not None
    assert f"{behind[1]} cells" in caption
    assert f"ends {float(behind[2]):.0f} points behind FedAvg's" in caption
    names = "MIFA", "FedVARP", "SCAFFOLD", "MimiC"
    leads = [
        re.search(rf"- {name} is better than FedAvg in accuracy in 27 cells .*?\*\*\+([\d.]+)", board) for name in names
    ]
    assert {round(float(lead[1]), 1) if lead else None for lead in leads} <= {1.1, 1.2}
    assert f"({', '.join(names)}) lead FedAvg by 1.1 to 1.2 points" in caption


def page_of_table() -> str:
    """The main job's table, as `make run` prints it, from its page."""
    rows = (ROOT / "experiments/quickstart/README.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith(("| Fed", "| MIFA"))
    ]
    return "\n".join(f"{cell[0]} {cell[2]}" for cell in cells if "±" in cell[2])


MEASURED = {  # words that a row of the README has → the page, and what stands there
    "random ones": ("docs/reliability.md", ["295 matched it, 204 were refused", "1 was stopped"]),
    "killed": ("docs/reliability.md", ["One run is killed 30 times", "900 cases of bad input"]),
    "ε right": ("docs/privacy.md", ["ε claimed 3.617, lower bound 2.545"]),
}


@pytest.mark.parametrize("words", MEASURED)
def test_what_it_says_was_measured_stands_on_the_page_that_it_links(words: str) -> None:
    (row,) = (line for line in README.splitlines() if line.startswith("|") and words in line)
    name, said = MEASURED[words]
    assert f"]({name}" in row
    assert not [one for one in said if one not in page(name)]


def test_it_counts_the_compared_programs() -> None:
    table = (
        (ROOT / "docs/authors_programs.md")
        .read_text()
        .partition("| here |")[2]
        .partition("Differences between fedsim and the programs")[0]
    )
    compared = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    }
    assert f"{len(compared)} of {len(algorithms())} compared" in README


def test_its_badges_say_what_the_project_says() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "page_pictures.py"))
    for name, (label, value, colour) in script["badges"]().items():
        path = f"docs/assets/badge_{name}.svg"
        assert path in README
        assert (ROOT / path).read_text() == script["badge"](label, value, colour), "python scripts/page_pictures.py"
    (shown,) = re.findall(r"!\[(\d+) algorithms\]", README)
    assert int(shown) == len(algorithms())
