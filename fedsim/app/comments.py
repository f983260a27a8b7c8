"""Comments of a configuration file on its keys: the comment on a key's line, and the lines below that continue it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml


def comments_by_key(path: Path) -> dict[str, str]:
    """Return dotted key → its comment, for keys that have one."""
    text = path.read_text(encoding="utf-8")
    root, lines = yaml.compose(text), text.splitlines()
    if not isinstance(root, yaml.MappingNode):
        return {}
    return {key: comment for key, node in _leaf_settings(root, "") if (comment := _trailing_comment(lines, node))}


def first_comment(path: Path) -> str:
    """Return the description of the file: the comment lines at its beginning."""
    comment_lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            comment_lines.append(line.lstrip("# "))
    return " ".join(comment_lines)


def _leaf_settings(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yield each dotted key that is not a mapping, and its value."""
    for name, value in node.value:
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _leaf_settings(value, f"{path}{name.value}.")
        else:
            yield f"{path}{name.value}", value


def _trailing_comment(lines: list[str], value: yaml.Node) -> str:
    """Return the comment behind a value, and the indented comment lines below it."""
    if value.start_mark.line != value.end_mark.line:
        return ""
    _, hash_sign, comment = lines[value.end_mark.line][value.end_mark.column :].partition("#")
    if not hash_sign:
        return ""
    comment_lines = [comment.strip()]
    for line in lines[value.end_mark.line + 1 :]:
        if not line.startswith(" ") or not line.lstrip().startswith("#"):
            break
        comment_lines.append(line.lstrip(" #").strip())
    return " ".join(comment_lines)
