"""What README and docs show works: every command composes, also those that tests/test_docs.py cannot run."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedsim.app.config import config_folder, register_resolvers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]
LINES = [line for page in PAGES for line in page.replace("\\\n", " ").splitlines()]
# A launcher of an extra composes where the extra is installed, and a package's choices beside the package.
COMMANDS = [
    line
    for line in LINES
    if re.match(r"fedsim( -m)? (?!info|data|export|table|audit|algorithms)\w", line) and not re.search("ray|pkg:", line)
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_compose(command: str) -> None:
    register_resolvers()
    arguments = [a for a in shlex.split(command, comments=True)[1:] if a != "-m"]
    parsed = OverridesParser.create().parse_overrides(arguments)
    sweeps = [o for o in parsed if o.is_sweep_override()]
    one_of_each = [f"{o.key_or_group}={next(iter(o.sweep_string_iterator()))}" for o in sweeps]
    plain = [o.input_line for o in parsed if not o.is_sweep_override()]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        assert compose("config", plain + one_of_each).rounds > 0


def test_every_choice_is_in_the_table_of_groups() -> None:
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
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
