"""Mutation testing: would the tests notice, if the algorithms were wrong?

A mutant is one source file with one place changed (a comparison, a sign, a constant, a branch, a purpose of random
numbers, a statement left out) in a copy of the package. The tests that know the file run on it until one fails; where
none does, they lack a fact, or it is no other program, and then `scripts/mutants.txt` says why.

python scripts/mutants.py --out mutants.json                       # 100 of all, drawn by seed 0
python scripts/mutants.py --again mutants.json                     # those of it that survived, with all tests there are
python scripts/mutants.py --sample 0 fedsim/strategies/fedau.py    # all of one file
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = {  # the algorithms → folders of the tests that know them
    "fedsim/strategies": ("strategies", "papers", "core"),
    "fedsim/local": ("local", "papers", "trainer", "samples"),
    "fedsim/availability": ("availability", "papers"),
    "fedsim/shift": ("shift", "performative", "papers"),
    "fedsim/performative": ("performative", "run"),
    "fedsim/contamination": ("contamination",),
    "fedsim/samples": ("samples", "core", "contamination", "datasets", "trainer"),
    "fedsim/partition": ("partition",),
    "fedsim/evaluation": ("evaluation", "run", "personal"),
    "fedsim/core/rng.py": ("core",),
    "fedsim/core/federation.py": ("core", "strategies"),
    "fedsim/core/statistics.py": ("core",),
}
SAME = ROOT / "scripts" / "mutants.txt"
MOST, FEW, ALWAYS = 4, 2, ("core/test_distinct_keys.py", "app/test_defaults.py")
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
LEFT_ALONE = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)  # words, and what is imported
WORDS = re.compile(r"['\"]|log\.")  # docstrings, and what is told
TYPES = ("annotation", "returns", "decorator_list", "bases", "type_params")


@dataclass(frozen=True)
class Mutant:
    """A place that is changed, and what became of it.

    Attributes:
        file: relative to the checkout.
        number: of the file's changes.
        where: class and function.
        before, after: the first line of the statement.
        fate: 'killed', 'survived', 'timeout' (nobody knows), 'same' (listed as no other program).
        by: the test that killed it.
    """

    file: str
    number: int
    where: str
    before: str
    after: str
    fate: str = ""
    by: str = ""

    @property
    def name(self) -> str:
        """The same wherever its lines stand."""
        return f"{self.file} {self.where}: {self.before} → {self.after}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node, each but a little wrong."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield ast.Compare(node.left, [COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in CALCULATED:
        yield ast.BinOp(node.left, CALCULATED[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign):
        yield ast.Pass()
        if type(node.op) in CALCULATED:
            yield ast.AugAssign(node.target, CALCULATED[type(node.op)](), node.value)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        v = node.value
        yield ast.Constant(not v if isinstance(v, bool) else v + 1 if isinstance(v, int) else 2 * v or 1.0)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("Purpose"):
        yield from (ast.Attribute(node.value, purpose, node.ctx) for purpose in PURPOSES if purpose != node.attr)
    elif isinstance(node, ast.Call):
        yield from _called(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def _called(node: ast.Call) -> Iterator[ast.AST]:
    of = node.func
    if isinstance(of, ast.Attribute) and of.attr in CALLED:
        yield ast.Call(ast.Attribute(of.value, CALLED[of.attr], of.ctx), node.args, node.keywords)
    if isinstance(of, ast.Name) and of.id in CALLED:
        yield ast.Call(ast.Name(CALLED[of.id], of.ctx), node.args, node.keywords)
    if isinstance(of, ast.Attribute) and of.attr == "where" and len(node.args) == 3:
        yield ast.Call(of, [node.args[0], node.args[2], node.args[1]], node.keywords)


def places(node: ast.AST, where: tuple[str, ...] = (), line: ast.AST | None = None) -> Iterator[tuple[Any, ...]]:
    """(class and function, statement, node, how to put another in its place) of all that may be changed below."""
    for field, value in ast.iter_fields(node):
        if field in TYPES:
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, LEFT_ALONE) or WORDS.match(_line(child)):
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


def _line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]


def mutants(file: str) -> Iterator[tuple[Mutant, ast.Module]]:
    """All of a file, each with the module as it then stands, until the next one is asked for."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    number = 0
    for where, line, node, put in places(tree):
        for new in changed(node):
            before = _line(line)
            put(new)
            after = _line(new if node is line else line)
            yield Mutant(file, number, ".".join(where), before, after), tree
            put(node)
            number += 1


def source(mutant: Mutant) -> str:
    """Of the file with this change."""
    tree = next(tree for other, tree in mutants(mutant.file) if other.number == mutant.number)
    return ast.unparse(ast.fix_missing_locations(tree))


def files(chosen: list[str]) -> list[str]:
    """Of the algorithms, those that begin with one of the chosen names."""
    found = [
        path for area in TESTS for path in ([ROOT / area] if area.endswith(".py") else (ROOT / area).rglob("*.py"))
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found if path.name != "__init__.py")
    return [name for name in names if not chosen or name.startswith(tuple(chosen))]


def known_same() -> dict[str, str]:
    """Mutants that are no other programs, and why."""
    found, name = dict[str, str](), ""
    for line in SAME.read_text(encoding="utf-8").splitlines() if SAME.exists() else ():
        if line.startswith(" "):
            found[name] += line.strip()
        elif line and not line.startswith("#"):
            name = line
            found[name] = ""
    return found


def tests_of(file: str, every: bool) -> list[str]:
    """The test files that name most of what the file defines; all its folders' where few do, or `every`."""
    area = next(area for area in TESTS if file == area or file.startswith(f"{area}/"))
    there = [path for folder in TESTS[area] for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_"}
    words = re.compile(r"\b(" + "|".join(sorted(names | {Path(file).stem})) + r")\b")
    own = {path: len(words.findall(path.read_text(encoding="utf-8"))) for path in there}
    fitting = sorted((path for path in there if own[path]), key=lambda path: -own[path])
    wide = every or len(fitting) < FEW
    chosen = fitting[: None if wide else MOST] + [path for path in there if wide and not own[path]]
    return [str(path) for path in [*(ROOT / "tests" / name for name in ALWAYS), *chosen]]


def _tested(folder: str, tests: list[str], log: str) -> None:
    """In a process of its own: the tests on the package in this folder."""
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    import pytest

    assert importlib.util.find_spec("fedsim").origin.startswith(folder)  # type: ignore[union-attr]
    options = ["-c", str(ROOT / "pyproject.toml"), "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no"]
    os._exit(int(pytest.main([*options, *tests])))


class Bench:
    """A copy of the package, in which one file after another is changed and the tests are run."""

    def __init__(self, folder: str, limit: float) -> None:
        self.folder, self.limit, self.log = Path(folder), limit, str(Path(folder) / "log")
        shutil.copytree(ROOT / "fedsim", self.folder / "fedsim", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("configs", "experiments"):
            (self.folder / name).symlink_to(ROOT / name)
        self.context: Any = multiprocessing.get_context("forkserver")  # these imports are most of a short test
        self.context.set_forkserver_preload(["torch", "torch.func", "numpy", "pytest", "hypothesis", "scipy.optimize"])

    def __call__(self, file: str, text: str, tests: list[str]) -> tuple[str, str]:
        """What becomes of the mutant, and by which test."""
        kept = (self.folder / file).read_text(encoding="utf-8")
        (self.folder / file).write_text(text, encoding="utf-8")
        process = self.context.Process(target=_tested, args=(str(self.folder), tests, self.log))
        process.start()
        process.join(self.limit)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # it has made a group of its own
            process.join()
        (self.folder / file).write_text(kept, encoding="utf-8")
        if process.exitcode == -signal.SIGKILL:
            return "timeout", ""
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", Path(self.log).read_text(errors="replace"), re.M)
        return ("survived" if process.exitcode == 0 else "killed"), failed[0] if failed else ""


def main() -> None:
    """Draw mutants, try each, report."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("files", nargs="*", help="files, or beginnings of their names; all algorithms by default")
    asked.add_argument("--sample", type=int, default=100, help="how many; 0: all (default: 100)")
    asked.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    asked.add_argument("--limit", type=float, default=200, help="seconds for one mutant (default: 200)")
    asked.add_argument("--out", type=Path, help="a JSON file of all that was tried")
    asked.add_argument("--list", action="store_true", help="name the mutants, and try none")
    asked.add_argument("--again", type=Path, help="such a file: whatever survived is tried again, with all tests")
    given = asked.parse_args()
    there = [mutant for file in files(given.files) for mutant, _ in mutants(file)]
    tried = list[Mutant]()
    if given.again:
        before = [Mutant(**told) for told in json.loads(given.again.read_text(encoding="utf-8"))]
        alive = {mutant.name for mutant in before if mutant.fate not in ("killed", "same")}
        tried = [mutant for mutant in before if mutant.name not in alive]
        there = [mutant for mutant in there if mutant.name in alive]
    elif given.sample:
        there = random.Random(given.seed).sample(there, min(given.sample, len(there)))
    if given.list:
        return print("\n".join(mutant.name for mutant in there))
    sources, same = [source(mutant) for mutant in there], known_same()  # of now: a checkout may change meanwhile
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(folder, given.limit)
        for mutant, text in zip(there, sources, strict=True):
            tests = tests_of(mutant.file, every=given.again is not None)
            fate, by = ("same", "") if mutant.name in same else bench(mutant.file, text, tests)
            tried.append(replace(mutant, fate=fate, by=by))
            print(f"{fate:8} {mutant.name}  {by}", flush=True)
            if given.out:
                given.out.write_text(json.dumps([asdict(one) for one in tried], indent=1, ensure_ascii=False) + "\n")
    counts = Counter(one.fate for one in tried)
    judged = len(tried) - counts["same"]
    print(
        f"{counts['killed']} of {judged} killed ({counts['killed'] / max(judged, 1):.1%}), {counts['timeout']} too slow"
    )
    print(f"{counts['same']} more are no other programs")


if __name__ == "__main__":
    main()
