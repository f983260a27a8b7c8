"""The groups on the page of `fedsim --help`: ordered by topic, aligned, in lines that fit a terminal."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator

from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType

LINE_WIDTH = 100
GROUPS_BY_SECTION = {  # in the order in which a run uses them
    "data": ("dataset", "dataset/augment", "partition", "drift", "contamination"),
    "availability": ("availability", "availability/base", "availability/trajectory"),
    "performative shift": ("shift",),
    "model": ("model", "columns", "capacity", "personal"),
    "local training": ("local", "local/schedule", "work"),
    "server": ("strategy", "strategy/rule", "strategy/server"),
    "communication": ("uplink", "attack", "clock", "delay"),
    "the run": ("trainer", "stop", "tracking"),
    "prepared": ("experiment", "sweep"),
}
USER_SECTION = "yours"  # groups that the user's own folders add


@contextlib.contextmanager
def order_help_groups() -> Iterator[None]:
    """Within the block Hydra's help lists our groups in this order."""
    original_method = Hydra.format_config_groups

    def format_config_groups(self: Hydra, predicate: Callable[[str], bool], compact: bool = True) -> str:
        choices = {group: options for group, options in choices_by_group(self).items() if predicate(group)}
        if "strategy" in choices:
            return help_text(choices)
        return "".join(f"{group}: {', '.join(options)}\n" for group, options in choices.items())

    Hydra.format_config_groups = format_config_groups  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.format_config_groups = original_method  # type: ignore[method-assign]


def choices_by_group(hydra: Hydra) -> dict[str, list[str]]:
    """Return group → its choices, sorted. Hydra's own listing copies all its sources for each group, which takes a
    second."""
    sources = hydra.config_loader.get_sources()

    def choice_names(group: str, kind: ObjectType) -> list[str]:
        return sorted({name for source in sources if source.is_group(group) for name in source.list(group, kind)})

    choices, groups = dict[str, list[str]](), choice_names("", ObjectType.GROUP)
    while groups:
        group = groups.pop()
        groups += [f"{group}/{name}" for name in choice_names(group, ObjectType.GROUP)]
        choices[group] = choice_names(group, ObjectType.CONFIG)
    return {group: choices[group] for group in sorted(choices) if choices[group]}


def help_text(choices: dict[str, list[str]]) -> str:
    """Return sections of groups, each with its choices."""
    listed_groups = {group for section in GROUPS_BY_SECTION.values() for group in section}
    sections = GROUPS_BY_SECTION | {USER_SECTION: tuple(sorted(choices.keys() - listed_groups))}
    width = max(map(len, choices)) + 2
    lines = []
    for title, section in sections.items():
        section_groups = [group for group in section if group in choices]
        if section_groups:
            lines.append(f"{title}:")
        for group in section_groups:
            lines += textwrap.wrap(
                ", ".join(choices[group]),
                LINE_WIDTH,
                initial_indent=f"  {group:{width}}",
                subsequent_indent=" " * (width + 2),
            )
    return "\n".join(lines) + "\n"
