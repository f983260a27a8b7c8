"""What of the repository is part of the site, and how its pages link to one another there.

A page of docs/ is read on a code host too, so its links lead to files of the repository. Whatever file a page leads to
becomes part of the site: Markdown and notebooks as pages, pictures and tables as they are, a package of fedsim as its
page of the API, every other file on a page that shows it. A link to anything else becomes plain text.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PROSE = (".md", ".ipynb")
COPIED = (".csv", ".json", ".pdf", ".png", ".svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
FENCE = r"^```.*?^```"
CODE = r"`(?:[^`\n]|\n(?!\n))*`"
LINK = r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)"
ELSEWHERE = re.compile(r"#|\w+:")  # in the page itself, or not in the repository
FORMULA = r"\$[^$\n]+\$"  # E[x](y) in one is no link
CODE_OR_LINK = re.compile(f"{FENCE}|{CODE}|{FORMULA}|{LINK}", re.M | re.S)


@cache
def parts() -> dict[str, str]:
    """The pages, and every file that they lead to → its address in the site."""
    docs = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]
    ahead = [*docs, "experiments/README.md", *TOP]
    found: dict[str, str] = {}
    while ahead:
        path = ahead.pop(0)
        if path not in found and (ROOT / path).is_file():
            found[path] = address(path)
            ahead += targets(path) if path.endswith(PROSE) else []
    return found


def address(path: str) -> str:
    """Where the site has a file of the repository."""
    inside = path.removeprefix("docs/")
    if package := re.fullmatch(r"(fedsim(?:/\w+)*)/__init__\.py", path):
        return f"api/{package[1].replace('/', '.')}.md".replace("api/fedsim.md", "api/index.md")
    if path in TOP or inside.endswith((".md", *COPIED)):
        return TOP.get(path, inside)
    return f"{inside}.md" if inside != path else f"source/{path.lstrip('.')}.md"


def targets(path: str) -> Iterator[str]:
    """The files that a page leads to."""
    for found in CODE_OR_LINK.finditer(text(path)):
        if found["target"] and (target := resolved(found["target"], path)):
            yield target


def resolved(target: str, path: str) -> str | None:
    """The file that a link of a page means, for a folder the one that says what it is; None where there is none."""
    if ELSEWHERE.match(target):
        return None
    file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))
    candidates = [file, f"{file}/README.md", f"{file}/__init__.py"]
    return next((one for one in candidates if not one.startswith("..") and (ROOT / one).is_file()), None)


def rewritten(markdown: str, path: str) -> str:
    """A page of the repository, as it stands in the site."""

    def led(found: re.Match[str]) -> str:
        target = found["target"]
        if not target or ELSEWHERE.match(target):
            return found[0]
        file = resolved(target, path)
        if file is None:
            return found["text"]
        new = posixpath.relpath(address(file), posixpath.dirname(address(path)) or ".")
        return f"{found['picture']}[{found['text']}]({new}{''.join(target.partition('#')[1:])})"

    named = re.sub(r"^<!-- file: (\S+) -->\n(```\w+)$", r'\2 title="\1"', markdown, flags=re.M)
    plain = re.sub(r"^<!-- not executed: .*? -->\n", "", named, flags=re.M | re.S)
    return CODE_OR_LINK.sub(led, plain)


def text(path: str) -> str:
    """A file as a page."""
    content = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return content
    if path.endswith(".ipynb"):
        return "\n\n".join(cells(json.loads(content)))
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n~~~~~~{language}\n{content}\n~~~~~~\n"


def cells(notebook: dict) -> Iterator[str]:
    """A notebook's cells, and what they showed."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield f"![what the cell draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
            elif said := "".join(output.get("text", data.get("text/plain", ""))):
                yield f"```\n{said.rstrip()}\n```"
