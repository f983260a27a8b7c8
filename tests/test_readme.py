"""What the README shows works: its Python runs, its commands compose."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedsim.config import config_folder, register_resolvers

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if re.match(r"fedsim( -m)? \w", line)]


def test_the_library_example_runs() -> None:
    (example,) = re.findall(r"```python\n(from fedsim import Simulation.*?)```", README, re.S)
    scope: dict[str, object] = {}
    exec(example.replace("rounds=100", "rounds=2"), scope)
    assert "test_accuracy" in scope["result"].final  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_compose(command: str) -> None:
    register_resolvers()
    arguments = [a for a in shlex.split(command)[1:] if a != "-m"]
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
    ):
        for path in (config_folder() / group).glob("*.yaml"):
            if path.stem not in ("none", "custom"):
                assert path.stem in table, f"{group}={path.stem}"
