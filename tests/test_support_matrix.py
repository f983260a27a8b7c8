"""The support matrix has its versions from pyproject.toml, and the written record is of the bounds that stand there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [Requirement(line) for line in PROJECT["dependencies"]]


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = (Version(part.version) for part in requirement.specifier if part.operator == ">=")
    return bound


def pythons() -> list[str]:
    prefix = "Programming Language :: Python :: "
    return [line.removeprefix(prefix) for line in PROJECT["classifiers"] if re.fullmatch(prefix + r"3\.\d+", line)]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_dependency_has_the_lower_bound_of_the_record(requirement: Requirement) -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    (record,) = re.findall(r"^`lowest` installs (.*?)\.$", page, flags=re.MULTILINE | re.DOTALL)
    recorded = dict(entry.split(" ") for entry in " ".join(record.split()).split(", "))
    assert Version(recorded[requirement.name]) == lower_bound(requirement)
    assert len(recorded) == len(REQUIREMENTS)


def test_the_oldest_python_is_the_one_that_the_package_asks_for() -> None:
    assert PROJECT["requires-python"] == f">={pythons()[0]}"


def test_the_sessions_write_no_version_again() -> None:
    """Python's are the classifiers', but for the one of development; the lower bounds are what uv resolves to."""
    source = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert {text for text in strings if isinstance(text, str) and re.fullmatch(r"3\.\d+", text)} <= {"3.11"}
    assert "--resolution=lowest-direct" in strings
    assert "3.11" in pythons()


def test_hosted_ci_has_the_rows_of_the_noxfile() -> None:
    path = ROOT / ".github" / "workflows" / "ci.yml"
    if not path.exists():
        pytest.skip("not in a source distribution")
    versions = path.read_text(encoding="utf-8").partition("  rows:\n")[2]
    assert "nox --list --json" in versions
    assert "include: ${{ fromJSON(needs.rows.outputs.rows) }}" in versions
    assert not re.findall(r"3\.\d+", versions)
