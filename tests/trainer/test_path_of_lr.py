"""CONTRIBUTING.md's table of the files that a learning rate goes through is the way it goes."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from hydra import compose, initialize_config_dir

from fedsim.app.build import build
from fedsim.app.config import config_folder

ROOT = Path(__file__).parents[2]
MOST = 8  # files from the configuration to the update


def table() -> list[tuple[Path, list[str]]]:
    """Each line's file, and the functions that it names there."""
    section = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### From `lr` in YAML to the update\n")[2]
    )
    lines = re.findall(r"^\| \d+ \| `([^`]+)`(?:: (.*?))? \|", section.partition("\n## ")[0], re.M)
    return [(Path(file), re.findall(r"`([\w.]+)`", functions)) for file, functions in lines]


def code_of(file: Path, name: str) -> CodeType:
    """The code of a function or method of a module."""
    thing: Any = importlib.import_module(".".join(file.with_suffix("").parts))
    for attribute in name.split("."):
        thing = getattr(thing, attribute)
    return inspect.unwrap(thing).__code__


def test_the_rate_goes_through_the_named_functions_in_this_order(tmp_path: Path) -> None:
    lines = table()
    assert all((ROOT / file).is_file() for file, _ in lines)
    assert 1 < len({file for file, _ in lines}) <= MOST
    named = {code_of(file, name): name for file, names in lines for name in names}
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = named.get(frame.f_code)
        if event == "call" and name is not None and name not in called:
            called.append(name)

    settings = ["lr=0.25", "rounds=1", "clients=3", "local_steps=1", "trainer.executor=vmap", "trainer.compile=never"]
    settings += ["dataset=synthetic"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = compose("config", settings)
    sys.setprofile(note)
    try:
        simulation, *_ = build(cfg)
        simulation.run(tmp_path / "run")
    finally:
        sys.setprofile(None)
    assert called == [name for _, names in lines for name in names]
    assert simulation.trainer.base_learning_rates.tolist() == [0.25]


def test_the_configuration_of_the_rule_takes_the_rate_of_all_rules() -> None:
    (rule, _), *_ = table()
    assert "\nlr: ${lr}\n" in (ROOT / rule).read_text(encoding="utf-8")
    assert re.search(r"^lr: 0\.1\b", (ROOT / "configs" / "config.yaml").read_text(encoding="utf-8"), re.M)
