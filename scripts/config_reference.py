"""Write docs/configuration.md: every group, choice and key, from the YAML files, their comments, and docstrings.

python scripts/config_reference.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import OmegaConf

from fedsim.app.build import EVALUATION_ARGUMENT_BY_KEY
from fedsim.app.comments import comments_by_key, first_comment
from fedsim.app.config import config_folder, groups
from fedsim.core.constraints import declared_type_hints, describe_allowed_values
from fedsim.core.settings import flatten_settings
from fedsim.evaluation import EvaluationOptions
from fedsim.local import SGD
from fedsim.run.setup import Setup
from fedsim.trainer import Execution

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
SEE = re.compile(r"see `(fedsim\.[\w.]+\.[A-Z]\w*)`")  # a class
SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|Example).*:$", re.M)
ORDER = (
    "dataset",
    "partition",
    "availability",
    "drift",
    "shift",
    "contamination",
    "model",
    "local",
    "strategy",
    "uplink",
    "attack",
    "clock",
    "work",
    "delay",
    "columns",
    "capacity",
    "personal",
    "stop",
    "trainer",
    "tracking",
    "experiment",
    "sweep",
)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """All of it."""
    top = config_folder() / "config.yaml"
    order = {name: number for number, name in enumerate(ORDER)}
    names = sorted(groups(), key=lambda name: (order[name.partition("/")[0]], name))
    lines = [
        "# Configuration reference",
        "",
        "Written by `python scripts/config_reference.py` from `configs/` and the classes' docstrings; do not edit.",
        "`group=choice` selects a choice, `key=value` sets a key: `partition=dirichlet partition.alpha=0.1`.",
        "A value `${lr}` refers to the key `lr`.",
        "The column *allowed* lists the values that the constructor of a class accepts for the parameter.",
        "",
        "Groups: " + ", ".join(f"[{name}](#{name.replace('/', '')})" for name in names) + ".",
        "",
        "## Top level",
        "",
        *table(top, "", {}, ranges_of_top_level()),
        "",
        "Defaults: " + ", ".join(f"`{choice}`" for choice in defaults(top)) + ".",
    ]
    for name in names:
        lines += ["", f"## {name}", ""]
        for choice in groups()[name]:
            lines += [*entry(name, config_folder() / name / f"{choice}.yaml"), ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def entry(group: str, path: Path) -> Iterator[str]:
    """One choice: what it is, what its class says, its keys."""
    yield f"### {group}={path.stem}"
    what = first_comment(path).rstrip(".")
    if what:
        yield from ("", escaped(f"{what[0].upper() if what[0].isascii() else what[0]}{what[1:]}."))
    if group in ("experiment", "sweep"):
        file = f"configs/{group}/{path.name}"
        yield from ("", f"[{file}](../{file})")
        return
    made = target(path)
    if said := " ".join(SECTION.split(inspect.getdoc(made) or "")[0].split()) if made else "":
        yield from ("", escaped(said))
    known = documented(made)
    known |= {f"{path.stem}.{name}": said for name, said in known.items()}
    ranges = of_group(group, made)
    ranges |= {f"{path.stem}.{name}": range for name, range in ranges.items()}
    if rows := list(table(path, group.replace("/", ".") + ".", known, ranges)):
        yield from ("", *rows)
    if chosen := defaults(path):
        yield from ("", "With " + ", ".join(f"`{group}/{choice}`" for choice in chosen) + ".")


def target(path: Path) -> Any:
    """A choice's class, or that of the part that has its name; None where it has none, or the user names it."""
    own = content(path)
    part = own.get(path.stem)
    name = (part if isinstance(part, dict) else own).get("_target_", "???")
    return None if name == "???" else get_object(name)


def content(path: Path) -> dict[str, Any]:
    """A file as it stands."""
    plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def documented(made: Any) -> dict[str, str]:
    """Argument → what the docstrings of a class and of those it derives from say."""
    found: dict[str, str] = {}
    for kind in reversed(getattr(made, "__mro__", [made])):
        if kind is not object and kind.__doc__:
            found |= arguments(inspect.cleandoc(kind.__doc__))
    return {name: said_elsewhere(name, said) for name, said in found.items()}


def said_elsewhere(name: str, said: str) -> str:
    """What another class says of an argument, where a docstring only names that class."""
    named = SEE.fullmatch(said)
    return documented(get_object(named[1])).get(name, said) if named else said


def arguments(text: str) -> dict[str, str]:
    """Argument → what a docstring says of it; several may share an entry."""
    found: dict[str, str] = {}
    for section in SECTION.split(text)[1:]:
        for names, said in re.findall(r"^([\w, ]+): (.*(?:\n +.*)*)", textwrap.dedent(section), re.M):
            found |= dict.fromkeys(names.split(", "), " ".join(said.split()).rstrip("."))
    return found


def defaults(path: Path) -> list[str]:
    """The choices of a file's defaults list, as group=choice."""
    pairs = [next(iter(item.items())) for item in content(path).get("defaults", []) if isinstance(item, dict)]
    return [f"{name}={choice}" for name, choice in pairs if not name.startswith("override ") and choice]


def of_group(group: str, made: Any) -> dict[str, str]:
    """Argument → what the constructor allows; of groups without a class, of the one that takes their keys."""
    if group == "model":
        return ranges(made) | {"ridge": ranges(Setup)["ridge"]}
    if group == "tracking":
        return ranges(made) | {"client_samples": ranges(EvaluationOptions)["client_samples"]}
    return ranges(Execution if group == "trainer" else made)


def ranges_of_top_level() -> dict[str, str]:
    """Key → what is allowed, of those that a class takes under another name, too."""
    of_evaluation, of_rule = ranges(EvaluationOptions), ranges(SGD)
    shared = content(config_folder() / "local" / "sgd.yaml")
    named = {key: of_evaluation[name] for key, name in EVALUATION_ARGUMENT_BY_KEY.items() if name in of_evaluation}
    for key, value in shared.items():
        if (key_of_top_level := re.search(r"\$\{(\w+)\}", str(value))) and key in of_rule:
            named[key_of_top_level[1]] = of_rule[key]
    return ranges(Setup) | named


def ranges(made: Any) -> dict[str, str]:
    """Argument → what its declaration allows."""
    return {name: describe_allowed_values(hint) for name, hint in declared_type_hints(made).items()} if made else {}


def table(path: Path, prefix: str, known: dict[str, str], ranges: dict[str, str]) -> Iterator[str]:
    """Keys, values, what is allowed, and the comments beside them, or else what the class says."""
    kept = {key: value for key, value in content(path).items() if key not in ("defaults", "hydra", "_target_")}
    said = known | comments_by_key(path)
    rows = [(name, value) for name, value in flatten_settings(kept) if not name.endswith("_target_")]
    rows += [(name, value) for name, value in kept.items() if value == {}]
    if rows:
        yield "| key | value | allowed | |"
        yield "|---|---|---|---|"
    for name, value in rows:
        may_be, meaning = escaped(ranges.get(name, "")), escaped(said.get(name, ""))
        yield f"| `{prefix}{name}` | `{shown(value)}` | {may_be} | {meaning} |"


def shown(value: Any) -> str:
    """As it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(shown(entry) for entry in value)}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def escaped(text: str) -> str:
    """Safe in a Markdown table; what stands in backticks keeps its signs but for the bar."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;").replace("*", "\\*") for i, part in enumerate(parts))


if __name__ == "__main__":
    main()
