"""scripts/mutants.py: what it changes, and that tests notice."""

from __future__ import annotations

import ast
import dataclasses
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
        ("-a", {"a"}),
        ("not a", {"a"}),
        ("a and b", {"a or b"}),
        ("3", {"4"}),
        ("0.5", {"1.0"}),
        ("True", {"False"}),
        ("a if c else b", {"b if c else a"}),
        ("torch.where(c, a, b)", {"torch.where(c, b, a)", "torch.where(a, c, b)"}),
        ("x.argmin()", {"x.argmax()"}),
        ("f'{a + b}'", set()),
        ("x.clone()", {"x"}),
        ("d.copy()", {"d"}),
        ("copy.deepcopy(x)", {"x"}),
        ("deepcopy(x)", {"x"}),
        ("x.clone(memory_format=f)", set()),
        ("x.norm(dim=1)", {"x.norm(dim=0)"}),
        ("x.sort(axis=-1)", {"x.sort(axis=0)"}),
        ("x.unsqueeze(-1)", {"x.unsqueeze(0)"}),
        ("x.reshape(-1)", set()),
        ("f(a, b)", {"f(b, a)"}),
        ("f(a, a)", set()),
        ("f(*a, b)", set()),
        ("t", {"t + 1", "t - 1"}),
        ("plan.t", {"plan.t + 1", "plan.t - 1"}),
        ("s", set()),
    ],
)
def test_one_place_is_changed(mutants, code: str, others: set[str]) -> None:
    node = ast.parse(code).body[0].value
    assert {ast.unparse(other) for _, other in mutants.changed(node)} == others


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("x[1:]", {"x[:]"}),
        ("x[:-1]", {"x[:]", "x[:0]"}),
        ("x[a:b]", {"x[:b]", "x[a + 1:b]", "x[a:]", "x[a:b + 1]"}),
    ],
)
def test_bounds_of_slices_are_changed(mutants, code: str, others: set[str]) -> None:
    subscript = ast.parse(code).body[0].value
    assert {f"x[{ast.unparse(other)}]" for _, other in mutants.changed(subscript.slice)} == others


def test_every_operator_occurs_in_the_package(mutants) -> None:
    found = {
        one.operator
        for file in mutants.files(["fedsim/core/r", "fedsim/strategies/f", "fedsim/data/samples/s"])
        for one, _ in mutants.mutants(file)
    }
    assert found == set(mutants.OPERATORS)


def test_every_area_of_the_package_is_drawn_from(mutants) -> None:
    areas = {path.parent.name for path in (ROOT / "fedsim").glob("*/__init__.py")}
    assert areas <= {mutants.Mutant(file, 0, "", "", "", "").area for file in mutants.files([])}


@pytest.mark.parametrize(
    ("file", "where", "expected"),
    [
        ("fedsim/trainer/joint_executor.py", "JointExecutor._together", "run/test_together.py"),
        ("fedsim/data/partition/class_split.py", "ClassSplit._assign_classes", "data/partition/test_label_skew.py"),
        ("fedsim/strategies/fedau.py", "FedAU.aggregate", "strategies/test_memory_against_formulas.py"),
        ("fedsim/local/profl.py", "ProFL.learn", "local/test_performative_rules.py"),
        ("fedsim/studies/results/paired.py", "paired", "studies/results/test_tables_of_runs.py"),
    ],
)
def test_the_nearest_tests_are_those_that_name_the_place(mutants, file: str, where: str, expected: str) -> None:
    mutant = mutants.Mutant(file, 0, "", where, "", "")
    nearest = [str(Path(test).relative_to(ROOT / "tests")) for test in mutants.nearest_tests(mutant, mutants.FIRST)]
    assert expected in nearest


def test_what_was_tried_is_read_back_and_counted(mutants, tmp_path: Path) -> None:
    def line(number: int, fate: str, area: str = "core") -> str:
        named = {"file": f"fedsim/{area}/a.py", "number": number, "operator": "axis", "where": "f", "before": "a"}
        return json.dumps(named | {"after": str(number), "fate": fate, "by": ""})

    path = tmp_path / "tried.jsonl"
    fates = ["survived", "killed", "timeout", "equivalent", "unknown"]
    lines = [line(number, fate) for number, fate in enumerate(fates)] + [line(5, "killed", "run"), line(0, "killed")]
    path.write_text("\n".join(lines) + "\n")
    found = mutants.read(path)
    assert [one.fate for one in found.values()] == ["killed", *fates[1:], "killed"]
    said = mutants.report(list(found.values()))
    assert "core                    3 of    4 killed  75.0%, 1 equivalent" in said
    assert "all                     4 of    5 killed  80.0%, 1 equivalent" in said
    assert "unknown: fedsim/core/a.py f: a → 4" in said


def test_every_mutant_is_another_module_and_leaves_the_next_one_whole(mutants) -> None:
    file = "fedsim/strategies/fedau.py"
    whole = ast.unparse(ast.parse((ROOT / file).read_text()))
    found = list(mutants.mutants(file))
    assert len(found) >= 20
    for mutant, _ in found[::7]:
        text = mutants.source(mutant)
        changed = [pair for pair in zip(text.splitlines(), whole.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1


def test_mutants_that_are_listed_as_equivalent_exist(mutants) -> None:
    names = {
        mutant.name
        for file in {n.partition(" ")[0] for n in mutants.equivalents()}
        for mutant, _ in mutants.mutants(file)
    }
    assert mutants.equivalents().keys() <= names
    assert all(mutants.equivalents().values())


FEDAU = "fedsim/strategies/fedau.py"


@pytest.mark.slow
def test_a_handful_of_mutants_is_killed_once(tmp_path: Path) -> None:
    """Started again nothing is tried twice."""
    out = tmp_path / "mutants.jsonl"
    command = [sys.executable, str(SCRIPT), "--count", "4", "--seed", "3", "--out", str(out), FEDAU]
    for _ in range(2):
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        assert "4 of    4 killed 100.0%" in done.stdout
        assert [json.loads(line)["fate"] for line in out.read_text().splitlines()] == ["killed"] * 4


@pytest.mark.slow
def test_a_failure_without_a_change_kills_nothing(mutants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails anyway, and one that does not end, are held against no mutant."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # where its processes import it from
    monkeypatch.setattr(mutants, "executed", lambda file: {})
    tests = {
        "fails": "def test_it(): assert False",
        "ends": "def test_it():\n    while True: pass",
        "holds": "def test_it(): pass",
    }
    for name, text in tests.items():
        (tmp_path / f"test_{name}.py").write_text(text + "\n")
    bench = mutants.Bench(str(tmp_path), 4)
    mutant, text = next((one, mutants.source(one)) for one, _ in mutants.mutants(FEDAU))
    for name, fate in {"fails": "survived", "ends": "unknown", "holds": "survived"}.items():
        monkeypatch.setattr(mutants, "nearest_tests", lambda _, count, name=name: [str(tmp_path / f"test_{name}.py")])
        assert bench(mutant, text, (1, 1)).fate == fate


def test_tests_that_execute_the_place_are_chosen(mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    """By turns the nearest and the shortest, as long as the time suffices."""
    near, short, long, other = (f"tests/{name}" for name in (
        "strategies/test_memory_against_formulas.py::near", "app/test_a.py::short", "app/test_a.py::long", "app/b.py::c"
    ))  # fmt: skip
    monkeypatch.setattr(mutants, "executed", lambda file: {7: [near, short], 8: [long], 9: [other]})
    monkeypatch.setattr(mutants, "test_seconds", lambda: {near: 2.0, short: 0.5, long: 3.0, other: 0.1})
    mutant = mutants.Mutant(FEDAU, 0, "", "FedAU.aggregate", "", "", (7, 8))
    assert mutants.covering_tests(mutant, 10) == [str(ROOT / name) for name in (near, short, long)]
    assert mutants.covering_tests(mutant, 2.6) == [str(ROOT / name) for name in (near, short)]
    assert mutants.covering_tests(dataclasses.replace(mutant, lines=(1, 2)), 10) == []
