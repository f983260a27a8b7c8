"""Pages of the API reference, from what is there: one for each package, the layers bottom to top.

A page has the package's docstring, the classes, functions and modules of its `__all__` (what others derive from first),
and a table of its modules. Nothing is imported: griffe reads the sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
INDEX = "api/index.md"
LAYERS = (
    ("core",),
    ("data", "models"),
    ("availability", "shift"),
    ("local",),
    ("trainer",),
    ("uplink",),
    ("strategies",),
    ("evaluation",),
    ("run",),
    ("app",),
    ("studies",),
)
# Modules of what others derive from; a package shows them first.
BASES = {"attack", "availability", "dataset", "huber", "partition", "rule", "shift", "stage", "strategy"}
ORDER = {name: number for number, name in enumerate(name for layer in LAYERS for name in layer)}


@cache
def packages() -> list[griffe.Module]:
    """fedsim and the packages within, in the order of the layers; those that no layer names come last."""
    top = griffe.load("fedsim", search_paths=[str(ROOT)], resolve_aliases=True, allow_inspection=False)
    assert isinstance(top, griffe.Module)
    return [top, *sorted(within(top), key=lambda package: (rank(package), package.path))]


def within(package: griffe.Module) -> Iterator[griffe.Module]:
    """The packages in a package, at any depth."""
    for module in package.modules.values():
        if isinstance(module, griffe.Module) and module.is_init_module and not module.name.startswith("_"):
            yield module
            yield from within(module)


def rank(package: griffe.Module) -> int:
    return ORDER.get(package.path.split(".")[1], len(ORDER))


def titles() -> dict[str, str]:
    """Page → title of every package but fedsim itself."""
    return {f"api/{package.path}.md": package.path for package in packages()[1:]}


@cache
def pages() -> dict[str, str]:
    """Page → what it says. An object is described on the page of the package that it lies in."""
    shown: dict[str, str] = {}
    top, *others = packages()
    made = {f"api/{package.path}.md": "\n\n".join(body(package, shown)) for package in others}
    return {INDEX: "\n\n".join([*body(top, shown, overview())])} | made


def body(package: griffe.Module, shown: dict[str, str], *more: str) -> Iterator[str]:
    """One page; `shown` are the objects that have a place."""
    yield f"---\nsearch: {{boost: 4}}\n---\n# {package.path}"
    yield f"::: {package.path}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"
    yield from more
    for name, path in objects(package):
        if path in shown:
            yield f"`{name}`: see [{shown[path]}][]."
            continue
        shown[path] = f"{package.path}.{name}"
        yield f"::: {shown[path]}"
    if rows := list(modules(package)):
        yield "## Modules"
        yield "\n".join(["| module | |", "|---|---|", *rows])


def objects(package: griffe.Module) -> list[tuple[str, str]]:
    """Name and home of what a package exports, constants aside; what others derive from first."""
    found = []
    for name in map(str, package.exports or []):
        member = package.members[name]
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if target.is_class or target.is_function or target.is_module:
            found.append((name, target.path))
    return sorted(found, key=lambda entry: entry[1].split(".")[-2] not in BASES)


def modules(package: griffe.Module) -> Iterator[str]:
    """A row for each module of a package."""
    for name, module in sorted(package.modules.items()):
        if not (module.is_alias or module.is_init_module or name.startswith("_")):
            yield f"| `{name}` | {summary(module)} |"


def overview() -> str:
    """A table of the packages."""
    rows = [f"| [{package.path}]({package.path}.md) | {summary(package)} |" for package in packages()[1:]]
    return "\n".join(["## Packages, bottom to top", "", "| package | |", "|---|---|", *rows])


def summary(module: griffe.Object | griffe.Alias) -> str:
    """The first paragraph of its docstring, safe in a table."""
    said = module.docstring.value.partition("\n\n")[0] if module.docstring else ""
    return " ".join(said.split()).replace("|", "\\|").replace("<", "&lt;")
