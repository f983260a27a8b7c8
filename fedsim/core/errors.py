"""The errors a user meets. Each message is one sentence: the offending key, its value, and what would work."""

from __future__ import annotations

import re


class ConfigError(ValueError):
    """The run cannot start as configured. Raised before the first round, never after."""


class MissingDataError(ConfigError):
    """A data set is not on disk; the message says where it was looked for and how to get it."""


class NoReferenceError(ConfigError):
    """A performatively stable or optimal point does not exist, or was not found; the message says which, and why."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, foreign, or belongs to another configuration."""


class OutputError(OSError):
    """A file of the run cannot be written; the message names it."""


class RunError(RuntimeError):
    """The run cannot go on: memory is exhausted, the device lacks something, or a user's part raised an error."""


class PeerError(RuntimeError):
    """Another rank of the run ended or is out of reach; the message says who noticed, and what the network said."""


class DivergenceError(RuntimeError):
    """A model became non-finite during the run; the message names round, replicate and clients."""


def first_line(error: BaseException, otherwise: str = "no message") -> str:
    """The first line of an error's message, or `otherwise` where it has none."""
    return (str(error) or otherwise).splitlines()[0]


def of_part(error: ConfigError, group: str, part: str) -> ConfigError:
    """An error of an object in a group's, which names its keys as if it were the group's own: `strategy.bad` of a rule
    is `strategy.rule.bad`."""
    message = str(error)
    if f"{group}.{part}." in message:
        return error
    return type(error)(re.sub(rf"\b{group}\.(?=\w)", f"{group}.{part}.", message))
