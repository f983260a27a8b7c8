"""The errors that a user may see. Each message is one sentence with the key, its value, and what would work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import Self

from fedsim.core.speaking import strip_numpy_scalar_reprs

UNSET: Any = ...  # a key whose value is not shown in messages


class ConfigError(ValueError):
    """The run cannot start as configured. Raised before the first round, never after.

    A part names its own parameters: `FedAvg(server_lr=-1)` says "server_lr=-1 must be positive". Whoever puts the part
    into something larger adds where it stands there (`with_key_prefix`), and the command line says
    "strategy.server_lr=-1 …".

    Example:
        >>> str(ConfigError(key="server_lr", value=-1, needs="must be positive").under("strategy"))
        'strategy.server_lr=-1 must be positive'
        >>> str(ConfigError("{low}=3 exceeds {high}=2", mentions=("low", "high")).under("dataset"))
        'dataset.low=3 exceeds dataset.high=2'

    Args:
        message: the whole sentence; or leave it out and give `key` and `needs`.
        key: of the parameter, as the part calls it; of an entry of a list with its index, "server_lr[1]".
        value: it has; left out: the message is "key needs".
        needs: what would work, as the rest of the sentence.
        mentions: parameters of the same part that stand in `message` or `needs` as {name}.
    """

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        value: Any = UNSET,
        needs: str = "",
        mentions: Iterable[str] = (),
    ) -> None:
        self.message, self.key, self.value, self.needs = message, key, value, needs
        self.mentions = {name: name for name in mentions}
        super().__init__(self._message_text())

    def with_key_prefix(self, prefix: str) -> Self:
        """Return the same error with `prefix` before its keys; keys that begin with the prefix are unchanged."""
        return self._apply_renames(lambda key: key if key.startswith(f"{prefix}.") else f"{prefix}.{key}")

    def with_renamed_keys(self, names: Mapping[str, str]) -> Self:
        """Return the same error with keys renamed by `names`; indices of entries are kept."""

        def renamed_key(key: str) -> str:
            name, bracket, index = key.partition("[")
            return names.get(name, name) + bracket + index

        return self._apply_renames(renamed_key)

    def _apply_renames(self, rename: Callable[[str], str]) -> Self:
        self.key = None if self.key is None else rename(self.key)
        self.mentions = {name: rename(key) for name, key in self.mentions.items()}
        self.args = (self._message_text(),)
        return self

    def _message_text(self) -> str:
        value_text = "" if self.value is UNSET else f"={self.value!r}"
        sentence = (
            self._fill_placeholders(self.message) or f"{self.key}{value_text} {self._fill_placeholders(self.needs)}"
        )
        return strip_numpy_scalar_reprs(sentence)  # np.float64(0.5) is 0.5

    def _fill_placeholders(self, text: str) -> str:
        for name, key in self.mentions.items():
            text = text.replace(f"{{{name}}}", key)
        return text


class ClientCountError(ConfigError):
    """The number of training clients does not fit; newcomers, who join later, are not among them.

    Args:
        message: the sentence, in which {clients} stands for "clients=…" and {settable} for a number to set it to.
        clients: how many train.
        settable: a number of them that would work.
    """

    def __init__(self, message: str = "", *, clients: int = 0, settable: int = 0, **options: Any) -> None:
        self.clients, self.can_be_set, self.newcomers = clients, settable, 0
        super().__init__(message, **options)

    def with_newcomer_count(self, newcomers: int) -> Self:
        """Return the same error, with `clients` increased by the number of newcomers."""
        self.newcomers = newcomers
        return self._apply_renames(lambda key: key)

    def _fill_placeholders(self, text: str) -> str:
        all_clients = f"clients={self.clients + self.newcomers}"
        if self.newcomers:
            all_clients = (
                f"the {self.clients} of {all_clients} that are no newcomers (personal.newcomers={self.newcomers})"
            )
        text = text.replace("{clients}", all_clients)
        return super()._fill_placeholders(text.replace("{settable}", str(self.can_be_set + self.newcomers)))


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


def first_message_line(error: BaseException, default_text: str = "no message") -> str:
    """Return the first line of an error's message, or `default_text` if it has none."""
    return (str(error) or default_text).splitlines()[0]


@contextlib.contextmanager
def prefix_error_keys(prefix: str) -> Iterator[None]:
    """Within the block errors name the parameters of a part with `prefix` before them."""
    try:
        yield
    except ConfigError as error:
        error.with_key_prefix(prefix)
        raise
