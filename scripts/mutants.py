"""Mutation testing: would the tests notice, if the package were wrong?

A mutant is one source file with one place changed, in a copy of the package: a comparison, a sign, a constant, a
branch, a purpose of random numbers, a statement left out, a copy that is not made, another axis, swapped arguments, a
slice off by one, round t ± 1. Quick tests that execute the place run on it until one fails: first those in files that
name most of what surrounds it. Which tests execute which line is measured once, by --cover; a place that runs at import
or in another process alone is tried by the test files that name it. Where no test fails, the tests lack a fact, or the
mutant is an equivalent program, which `scripts/mutants.txt` lists with the reason.

python scripts/mutants.py --cover                                      # which test executes which line, once per state
python scripts/mutants.py --count 300 --seed 1 --out mutants.jsonl     # a sample of all areas; started again it goes on
python scripts/mutants.py --again --out mutants.jsonl                  # survivors of that file, with many more tests,
                                                                       # slow cases of these tests among them
python scripts/mutants.py --report --out mutants.jsonl                 # kills by area and by operator
python scripts/mutants.py --count 0 fedsim/strategies/fedau.py         # all mutants of one file
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENTS = ROOT / "scripts" / "mutants.txt"
COVERAGE = ROOT / ".mutants-coverage"  # what --cover measured, and beside it how long each test takes
FIRST, MORE, MANY = 3, 9, 24  # test files of a first look, of a second one at survivors, and of `--again`
SECONDS = 5.0  # of tests that execute the place, in the stead of one test file
# At whatever survives the first look: tests of what runs at import, which no coverage of tests shows.
ALWAYS = ("app/test_defaults.py", "app/test_settings_without_effect.py", "core/test_distinct_keys.py")
TOP_LEVEL = "package"  # the area of files that lie in no folder
ALSO = {  # area → folders of tests, beside the one of its own name, whose files count as near
    "app": ("scripts",),
    "availability": ("run",),
    "core": ("strategies", "run"),
    "data": ("trainer", "core"),
    "evaluation": ("run", "shift"),
    "local": ("papers", "trainer"),
    "models": ("trainer",),
    "strategies": ("papers",),
    "studies": ("app", "scripts"),
    "trainer": ("models", "run"),
    TOP_LEVEL: ("run", "app"),
}
PURPOSES = ("PARTITION", "AVAILABILITY", "BATCH", "AUGMENT", "DROPOUT", "NOISE", "EVALUATION", "CONTAMINATION")
COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALCULATED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.RShift: ast.LShift, ast.LShift: ast.RShift,
}  # fmt: skip
CALLED = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "argmin": "argmax", "argmax": "argmin",
    "any": "all", "all": "any", "mean": "sum", "sum": "mean", "zeros_like": "ones_like", "zeros": "ones",
    "ones": "zeros", "floor": "ceil", "ceil": "floor",
}  # fmt: skip
COPIES = ("clone", "copy", "deepcopy")
AXES = {1: 0, -1: 0, 2: 1}  # 0 → 1 is a constant that is one larger
AXIS_KEYWORDS = ("dim", "axis")
AXIS_CALLS = {  # methods whose only number is an axis
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "cumsum", "flip", "logsumexp", "max", "mean",
    "median", "min", "nanmean", "norm", "prod", "ptp", "softmax", "sort", "std", "sum", "unsqueeze", "var",
}  # fmt: skip
ROUNDS = ("t",)
LEFT_ALONE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)  # words, and what is imported
LEFTMOST = (ast.BinOp, ast.Compare, ast.Call, ast.Attribute, ast.Subscript, ast.Expr)
TYPES = ("annotation", "returns", "decorator_list", "bases", "type_params")


@dataclass(frozen=True)
class Mutant:
    """A place that is changed, and what became of it.

    Attributes:
        file: relative to the checkout.
        number: of the file's changes.
        operator: what kind of change it is.
        where: class and function.
        before, after: the first line of the statement.
        lines: the first and last line of the statement, or of its head.
        fate: 'killed', 'survived', 'timeout' (its tests end in time without the change, and not with it),
            'unknown' (they do not end in time without it either), 'equivalent' (listed).
        by: the test that killed it.
    """

    file: str
    number: int
    operator: str
    where: str
    before: str
    after: str
    lines: tuple[int, int] = (0, 0)
    fate: str = ""
    by: str = ""

    @property
    def name(self) -> str:
        """The same wherever its lines stand."""
        return f"{self.file} {self.where}: {self.before} → {self.after}"

    @property
    def area(self) -> str:
        """The folder of the package that the file lies in."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else TOP_LEVEL


def replaced_comparisons(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield ast.Compare(node.left, [COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def replaced_arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and type(node.op) in CALCULATED:
        yield ast.BinOp(node.left, CALCULATED[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in CALCULATED:
        yield ast.AugAssign(node.target, CALCULATED[type(node.op)](), node.value)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        yield node.operand


def replaced_logic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


def replaced_constants(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        v = node.value
        yield ast.Constant(not v if isinstance(v, bool) else v + 1 if isinstance(v, int) else 2 * v or 1.0)


def swapped_branches(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


def replaced_purposes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("Purpose"):
        yield from (ast.Attribute(node.value, purpose, node.ctx) for purpose in PURPOSES if purpose != node.attr)


def replaced_calls(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr in CALLED:
        yield ast.Call(ast.Attribute(called.value, CALLED[called.attr], called.ctx), node.args, node.keywords)
    if isinstance(called, ast.Name) and called.id in CALLED:
        yield ast.Call(ast.Name(CALLED[called.id], called.ctx), node.args, node.keywords)


def missing_statements(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def missing_copies(node: ast.AST) -> Iterator[ast.AST]:
    """x.clone(), x.copy(), copy.copy(x), copy.deepcopy(x) → x."""
    if not isinstance(node, ast.Call) or node.keywords:
        return
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    if name in COPIES and len(node.args) == 1:
        yield node.args[0]
    elif name in COPIES and isinstance(called, ast.Attribute) and not node.args:
        yield called.value


def replaced_axes(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        if keyword.arg in AXIS_KEYWORDS and (axis := _whole(keyword.value)) in AXES:
            other = ast.keyword(keyword.arg, ast.Constant(AXES[axis]))
            yield ast.Call(node.func, node.args, [other if one is keyword else one for one in node.keywords])
    method = isinstance(node.func, ast.Attribute) and node.func.attr in AXIS_CALLS
    if method and len(node.args) == 1 and (axis := _whole(node.args[0])) in AXES:
        yield ast.Call(node.func, [ast.Constant(AXES[axis])], node.keywords)


def _whole(node: ast.AST) -> Any:
    """The whole number that an expression writes; None of another."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return None if (value := _whole(node.operand)) is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def swapped_arguments(node: ast.AST) -> Iterator[ast.AST]:
    """Neighbours among the positional arguments of a call, from the first that may be exchanged."""
    if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    for k in range(len(node.args) - 1):
        one, other = node.args[k : k + 2]
        if ast.dump(one) != ast.dump(other):
            yield ast.Call(node.func, [*node.args[:k], other, one, *node.args[k + 2 :]], node.keywords)


def replaced_slices(node: ast.AST) -> Iterator[ast.AST]:
    """A bound left out, and a bound one further."""
    if not isinstance(node, ast.Slice):
        return
    lower, upper, step = node.lower, node.upper, node.step
    if lower is not None:
        yield ast.Slice(None, upper, step)
        if not isinstance(lower, ast.Constant):  # which is a constant that is one larger
            yield ast.Slice(_plus(lower, 1), upper, step)
    if upper is not None:
        yield ast.Slice(lower, None, step)
        if not isinstance(upper, ast.Constant):
            yield ast.Slice(lower, _plus(upper, 1), step)


def replaced_rounds(node: ast.AST) -> Iterator[ast.AST]:
    """t → t + 1 and t − 1."""
    of = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if of in ROUNDS and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
        yield _plus(node, 1)
        yield _plus(node, -1)


def _plus(node: ast.AST, number: int) -> ast.expr:
    if (value := _whole(node)) is not None:
        return ast.Constant(value + number)
    return ast.BinOp(copy.deepcopy(node), ast.Add() if number > 0 else ast.Sub(), ast.Constant(abs(number)))  # type: ignore[arg-type]


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": replaced_comparisons,
    "arithmetic": replaced_arithmetic,
    "logic": replaced_logic,
    "constant": replaced_constants,
    "branch": swapped_branches,
    "purpose": replaced_purposes,
    "call": replaced_calls,
    "missing statement": missing_statements,
    "missing copy": missing_copies,
    "axis": replaced_axes,
    "swapped arguments": swapped_arguments,
    "slice": replaced_slices,
    "t ± 1": replaced_rounds,
}


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Operators, and what each puts in the place of a node."""
    for name, operator in OPERATORS.items():
        for other in operator(node):
            yield name, other


def places(node: ast.AST, where: tuple[str, ...] = (), line: ast.AST | None = None) -> Iterator[tuple[Any, ...]]:
    """(class and function, statement, node, how to put another in its place) of all that may be changed below."""
    for field, value in ast.iter_fields(node):
        if field in TYPES:
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, LEFT_ALONE) or _is_text(child):
                continue
            inner = (*where, child.name) if isinstance(child, (ast.ClassDef, ast.FunctionDef)) else where
            at = child if isinstance(child, ast.stmt) else line

            def put(new: ast.AST, field: str = field, index: int = index, value: Any = value) -> None:
                if isinstance(value, list):
                    value[index] = new
                else:
                    setattr(node, field, new)

            if inner:
                yield inner, at, child, put
            yield from places(child, inner, at)


def _is_text(node: ast.AST) -> bool:
    """Does an expression begin with a string, or with the log?"""
    while field := next((f for f in ("left", "func", "value") if isinstance(node, LEFTMOST) and hasattr(node, f)), ""):
        node = getattr(node, field)
    return (isinstance(node, ast.Constant) and isinstance(node.value, str)) or (
        isinstance(node, ast.Name) and node.id == "log"
    )


def _line(node: ast.AST) -> str:
    """The first line of a statement, or an expression; what a compound statement contains is not looked at."""
    shown = copy.copy(node)
    if "body" in node._fields and isinstance(node, ast.stmt):
        empty = {"body": [ast.Pass()]} | {f: [] for f in ("orelse", "handlers", "finalbody") if f in node._fields}
        if isinstance(node, ast.Try):
            empty["finalbody"] = [ast.Pass()]
        for name, value in empty.items():
            setattr(shown, name, value)
    return ast.unparse(ast.fix_missing_locations(shown)).split("\n")[0]


def _extent(statement: Any) -> tuple[int, int]:
    """The first and the last line of a statement; of a compound one, those of its head."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    return statement.lineno, max(statement.lineno, last)


def mutants(file: str) -> Iterator[tuple[Mutant, ast.Module]]:
    """All of a file, each with the module as it then stands, until the next one is asked for."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    number = 0
    for where, line, node, put in places(tree):
        others = list(changed(node))
        before = _line(line) if others else ""
        for operator, new in others:
            put(new)
            after = _line(new if node is line else line)
            yield Mutant(file, number, operator, ".".join(where), before, after, _extent(line)), tree
            put(node)
            number += 1


def source(mutant: Mutant) -> str:
    """Of the file with this change."""
    tree = next(tree for other, tree in mutants(mutant.file) if other.number == mutant.number)
    return ast.unparse(ast.fix_missing_locations(tree))


def files(chosen: list[str]) -> list[str]:
    """Of the package, those that begin with one of the chosen names."""
    paths = [path for path in (ROOT / "fedsim").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    return [name for name in names if not chosen or name.startswith(tuple(chosen))]


def equivalents() -> dict[str, str]:
    """Names of mutants that are equivalent programs, and why."""
    found, name = dict[str, str](), ""
    for line in EQUIVALENTS.read_text(encoding="utf-8").splitlines() if EQUIVALENTS.exists() else ():
        if line.startswith(" "):
            found[name] += line.strip()
        elif line and not line.startswith("#"):
            name = line
            found[name] = ""
    return found


@functools.cache
def test_files() -> dict[Path, str]:
    """Files of tests, and their text with that of the modules beside them that they import."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.parent == ROOT / "tests":
            continue  # of pages, not of the package
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^(?:from|import) (\w+)", text, re.M):
            if (beside := path.parent / f"{name}.py").exists():
                text += beside.read_text(encoding="utf-8")
        found[path] = text
    return found


def nearest_tests(mutant: Mutant, count: int) -> list[str]:
    """So many test files, those first that name most of what surrounds the place: the function, its class, its file,
    what else the file defines, and what imports it."""
    body = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8")).body
    kinds = (ast.ClassDef, ast.FunctionDef)
    own = {name for name in mutant.where.split(".") if not name.startswith("_")} - {"main"}
    others = {node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"} - own
    stem = Path(mutant.file).stem
    near = (mutant.area, *ALSO.get(mutant.area, ()))

    weights = dict.fromkeys(own, 3.0) | dict.fromkeys(others, 1.0) | {stem: 2.0}
    found = {path: {name: _named(text, name) for name in weights} for path, text in test_files().items()}
    rare = {name: math.log(len(found) / (1 + sum(named[name] > 0 for named in found.values()))) for name in weights}

    def score(path: Path) -> float:
        folder = path.relative_to(ROOT / "tests").parts[0]
        nearness = 8.0 if folder == near[0] else 3.0 if folder in near else 0.0
        return nearness + 8.0 * (stem in path.stem) + sum(weights[n] * rare[n] * found[path][n] for n in weights)

    scores = {path: score(path) for path in found}
    best = sorted(scores, key=lambda path: -scores[path])
    return [str(path) for path in best[:count] if scores[path] > 0]


def measure_coverage() -> None:
    """Run the quick tests once, and write down which of them executes which line, and how long each takes."""
    times = COVERAGE.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-m", "not slow", "--cov=fedsim", "--cov-context=test"]
    command += ["--cov-report=", f"--junitxml={times}", "-o", "junit_family=xunit1"]
    environment = os.environ | {"COVERAGE_FILE": str(COVERAGE), "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


@functools.cache
def test_seconds() -> dict[str, float]:
    """How long each quick test takes, by its name."""
    found = {}
    for case in ET.parse(COVERAGE.with_suffix(".xml")).iter("testcase"):
        file = case.get("file", "")
        inside = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        found["::".join(filter(None, (file, inside, case.get("name"))))] = float(case.get("time", 0))
    return found


@functools.lru_cache(maxsize=4)
def executed(file: str) -> dict[int, list[str]]:
    """Line → names of the quick tests that execute it, as --cover found them; nothing before it has run."""
    if not COVERAGE.exists():
        return {}
    from coverage import CoverageData

    data = CoverageData(basename=str(COVERAGE))
    data.read()
    lines = data.contexts_by_lineno(str(ROOT / file))
    return {line: [c.rpartition("|")[0] for c in contexts if "|" in c] for line, contexts in lines.items()}


def covering_tests(mutant: Mutant, seconds: float) -> list[str]:
    """Tests that execute the place, at most so many seconds of them: by turns the one in the file that is nearest to
    it, and the shortest."""
    first, last = mutant.lines
    by_line = executed(mutant.file)
    names = {name for line in range(first, last + 1) for name in by_line.get(line, [])}
    if not names:
        return []
    ranks = {str(Path(path).relative_to(ROOT)): rank for rank, path in enumerate(nearest_tests(mutant, 10**6))}
    times = test_seconds()
    nearest = sorted(names, key=lambda name: (ranks.get(name.partition("::")[0], len(ranks)), times.get(name, 1.0)))
    shortest = sorted(names, key=lambda name: (times.get(name, 1.0), name))
    chosen, spent = dict[str, None](), 0.0
    for name in (name for pair in zip(nearest, shortest, strict=True) for name in pair):
        if name not in chosen and spent + times.get(name, 1.0) <= seconds:
            chosen[name] = None
            spent += times.get(name, 1.0)
    return [str(ROOT / name) for name in chosen]


def _named(text: str, name: str) -> float:
    """How much a text is about a name: the logarithm of how often it stands there."""
    return math.log2(1 + len(re.findall(rf"\b{name}\b", text)))


def _tested(folder: str, tests: list[str], log: str, seconds: int, marked: str) -> None:
    """In a process of its own: the tests on the package in this folder; `marked`: for pytest's -m."""
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    resource.setrlimit(
        resource.RLIMIT_CPU, (seconds, seconds + 5)
    )  # by the clock, a busy machine would look like a loop
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    import pytest

    assert importlib.util.find_spec("fedsim").origin.startswith(folder)  # type: ignore[union-attr]
    # Names of tests are paths from the root directory: from / they are whole, wherever the test lies.
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir=/", "-x", "-q", "-m", marked]
    os._exit(int(pytest.main([*options, "-p", "no:cacheprovider", "--tb=no", *tests])))


class Bench:
    """A copy of the package, in which one file after another is changed and the tests are run.

    Args:
        folder: of the copy.
        limit: processor seconds of the tests of one mutant.
        tests: files that are run, in place of the nearest ones.
        slow: all cases of a test are run where one is chosen, the slow ones too.
    """

    def __init__(self, folder: str, limit: int, tests: list[str] | None = None, slow: bool = False) -> None:
        self.tests, self.slow = tests, slow
        self.folder, self.limit, self.log = Path(folder), limit, str(Path(folder) / "log")
        shutil.copytree(ROOT / "fedsim", self.folder / "fedsim", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("configs", "experiments"):
            (self.folder / name).symlink_to(ROOT / name)
        self.context: Any = multiprocessing.get_context("forkserver")  # these imports are most of a short test
        self.context.set_forkserver_preload(["torch", "torch.func", "numpy", "pytest", "hypothesis", "scipy.optimize"])
        self.unchanged = dict[tuple[str, ...], str]()

    def __call__(self, mutant: Mutant, text: str, counts: tuple[int, ...]) -> Mutant:
        """The mutant with its fate, under the nearest test files: so many, and where it survives so many more."""
        done = list[str]()
        for count in counts:
            nearest = self.tests or covering_tests(mutant, SECONDS * count) or nearest_tests(mutant, count)
            nearest = nearest + [str(ROOT / "tests" / name) for name in ALWAYS if count > FIRST and not self.tests]
            nearest = [test.partition("[")[0] for test in nearest] if self.slow else nearest
            tests = [test for test in dict.fromkeys(nearest) if test not in done]
            fate, by = self._judge(mutant.file, text, tests) if tests else ("survived", "")
            done += tests
            if fate != "survived":
                return replace(mutant, fate=fate, by=by)
        return replace(mutant, fate="survived")

    def _judge(self, file: str, text: str, tests: list[str]) -> tuple[str, str]:
        original = (self.folder / file).read_text(encoding="utf-8")
        asked, skipped = list(tests), list[str]()
        while True:
            (self.folder / file).write_text(text, encoding="utf-8")
            fate, by = self._run([*asked, *(f"--deselect={test.lstrip('/')}" for test in skipped)])
            (self.folder / file).write_text(original, encoding="utf-8")
            if fate == "timeout" and self._without(tuple(asked)) == "timeout":
                return "unknown", ""
            if by in skipped:
                return "unknown", by  # it could not be left out, and would fail forever
            if fate != "killed" or not by or self._without((by,)) == "survived":
                return fate, by
            if "::" not in by:
                asked.remove(next(test for test in asked if test.endswith(by.lstrip("./"))))
            skipped.append(by)  # it fails without the change too: its failure says nothing

    def _without(self, tests: tuple[str, ...]) -> str:
        if tests not in self.unchanged:
            self.unchanged[tests] = self._run(list(tests))[0]
        return self.unchanged[tests]

    def _run(self, tests: list[str]) -> tuple[str, str]:
        """What becomes of the package as it lies there, and by which test."""
        marked = "slow or not slow" if self.slow else "not slow"
        process = self.context.Process(target=_tested, args=(str(self.folder), tests, self.log, self.limit, marked))
        process.start()
        process.join(10 * self.limit)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # it has made a group of its own
            process.join()
        if process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
            return "timeout", ""
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", Path(self.log).read_text(errors="replace"), re.M)
        by = str((self.folder / failed[0]).resolve()) if failed else ""
        return ("survived" if process.exitcode in (0, 5) else "killed"), by


def read(path: Path) -> dict[str, Mutant]:
    """Mutants that were tried, by name; the last line about one counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {mutant.name: mutant for mutant in (Mutant(**json.loads(line)) for line in lines)}


def report(tried: list[Mutant]) -> str:
    """Kills by area and by operator, those that survived, and the rate."""

    def row(heading: str, some: list[Mutant]) -> str:
        fates = Counter(mutant.fate for mutant in some)
        judged, killed = len(some) - fates["equivalent"], fates["killed"] + fates["timeout"]
        rate = f"{killed / judged:6.1%}" if judged else "      "
        return f"{heading:20} {killed:4} of {judged:4} killed {rate}, {fates['equivalent']} equivalent"

    lines = [row(area, [m for m in tried if m.area == area]) for area in sorted({m.area for m in tried})]
    lines += ["", *(row(name, some) for name in OPERATORS if (some := [m for m in tried if m.operator == name]))]
    alive = [f"{mutant.fate}: {mutant.name}" for mutant in tried if mutant.fate in ("survived", "unknown")]
    return "\n".join([*lines, "", *alive, *([""] if alive else []), row("all", tried)])


def draw(chosen: list[str], count: int, seed: int) -> list[Mutant]:
    """A sample of the mutants of the chosen files; all of them for count 0."""
    there = [mutant for file in files(chosen) for mutant, _ in mutants(file)]
    return random.Random(seed).sample(there, min(count, len(there))) if count else there


def main() -> None:
    """Draw mutants, try each, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files, or beginnings of their names; the whole package by default")
    parser.add_argument("--count", type=int, default=100, help="how many; 0: all (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--limit", type=int, default=120, help="processor seconds for one mutant (default: 120)")
    parser.add_argument("--out", type=Path, help="JSON lines of what was tried; mutants in it are not tried again")
    parser.add_argument("--list", action="store_true", help="name the mutants, and try none")
    parser.add_argument("--again", action="store_true", help="try those of --out that survived, with many more tests")
    parser.add_argument("--tests", nargs="*", type=Path, help="these files of tests, in place of the nearest ones")
    parser.add_argument("--cover", action="store_true", help="measure which test executes which line, and try none")
    parser.add_argument("--report", action="store_true", help="say what --out holds, and try none")
    asked = parser.parse_args()
    if (asked.again or asked.report) and asked.out is None:
        parser.error("--again and --report need --out FILE")
    if asked.cover:
        measure_coverage()
    known, listed = read(asked.out) if asked.out else {}, equivalents()
    known = {name: replace(one, fate="equivalent") if name in listed else one for name, one in known.items()}
    if asked.report:
        return print(report(list(known.values())))
    if asked.again:
        alive = {name: one for name, one in known.items() if one.fate in ("survived", "unknown")}
        there = [
            m for file in sorted({one.file for one in alive.values()}) for m, _ in mutants(file) if m.name in alive
        ]
    else:
        there = draw(asked.files, asked.count, asked.seed)
    if asked.list:
        return print("\n".join(mutant.name for mutant in there))
    waiting = [mutant for mutant in there if asked.again or mutant.name not in known]
    sources = [source(mutant) for mutant in waiting]  # of now: a checkout may change meanwhile
    counts = (MORE, MANY) if asked.again else (FIRST, FIRST + MORE)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tests = [str(path.resolve()) for path in asked.tests or ()]
        bench = Bench(folder, asked.limit * (10 if asked.again else 1), tests, asked.again)
        for mutant, text in zip(waiting, sources, strict=True):
            judged = replace(mutant, fate="equivalent") if mutant.name in listed else bench(mutant, text, counts)
            known[mutant.name] = judged
            print(f"{judged.fate:10} {mutant.name}  {judged.by}", flush=True)
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(judged), ensure_ascii=False) + "\n")
    asked_for = {mutant.name for mutant in there}
    print(report([one for name, one in known.items() if asked.again or name in asked_for]))


if __name__ == "__main__":
    main()
