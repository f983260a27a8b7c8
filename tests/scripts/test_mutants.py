"""scripts/mutants.py: what it changes, and that tests notice."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutants.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("a < b", {"a <= b"}),
        ("a - b", {"a + b"}),
        ("not a", {"a"}),
        ("a and b", {"a or b"}),
        ("3", {"4"}),
        ("0.5", {"1.0"}),
        ("True", {"False"}),
        ("a if c else b", {"b if c else a"}),
        ("torch.where(c, a, b)", {"torch.where(c, b, a)"}),
        ("x.argmin()", {"x.argmax()"}),
        ("f'{a + b}'", set()),
    ],
)
def test_one_place_is_changed(mutants, code: str, others: set[str]) -> None:
    node = ast.parse(code).body[0].value
    assert {ast.unparse(other) for other in mutants.changed(node)} == others


def test_every_mutant_is_another_module_and_leaves_the_next_one_whole(mutants) -> None:
    file = "fedsim/strategies/fedau.py"
    whole = ast.unparse(ast.parse((ROOT / file).read_text()))
    found = list(mutants.mutants(file))
    assert len(found) >= 20
    for mutant, _ in found[::7]:
        text = mutants.source(mutant)
        changed = [pair for pair in zip(text.splitlines(), whole.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1
        assert mutant.before != mutant.after


def test_what_is_said_to_be_no_other_program_is_there(mutants) -> None:
    names = {
        mutant.name
        for file in {n.partition(" ")[0] for n in mutants.known_same()}
        for mutant, _ in mutants.mutants(file)
    }
    assert mutants.known_same().keys() <= names
    assert all(mutants.known_same().values())


@pytest.mark.slow
def test_a_handful_of_mutants_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "mutants.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--sample",
        "4",
        "--seed",
        "3",
        "--out",
        str(out),
        "fedsim/strategies/fedau.py",
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert {mutant["fate"] for mutant in json.loads(out.read_text())} == {"killed"}
