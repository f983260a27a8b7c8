"""Next-token prediction on a text file, with clients given by blocks of the text or by speakers."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.constraints import Count, Fraction, OneOf
from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.files import check_regular_path
from fedsim.data.datasets.dataset import Dataset
from fedsim.data.datasets.tokens import UNITS, most_frequent, split_tokens, token_indices

log = logging.getLogger(__name__)

TEXT_OWNERS = ("blocks", "speaker")
SPEECH_PATTERN = re.compile(
    r"""^(?:[ \t]*(?!(?:ACT|SCENE|EXEUNT|EXIT)\b)([A-Z][A-Z0-9 ,&'’-]+)[:.]  # HAMLET. or HAMLET: alone on a line
        |(?:\A|(?<=\n\n))[ \t]*([A-Z][^\n:.]{0,39}):)[ \t]*$                # First Citizen: after an empty one""",
    re.MULTILINE | re.VERBOSE,
)


class Text(Dataset):
    """Sequences of L characters or words [N, L], with the next one of each position as target, [N, L]. A client's text
    is split in two: the last share is held out, and each part is divided into consecutive sequences; an incomplete last
    one is dropped, and no target lies in the other part. Tokens are indices in `vocabulary`, starting at 1; 0 stands
    for characters or words that are not in it, as input and as target. With the whole vocabulary of the training
    sequences no model can learn to predict 0, so it counts as an error. The partition is natural. The construction is
    that of LEAF's Shakespeare (Caldas et al., 2018), in which sequences overlap and only the last position has a
    target.

    Args:
        path: of the file, UTF-8.
        length: L.
        unit: 'characters', or 'words': lower-case words and punctuation marks; spaces and line breaks are left out.
        by: how the text is divided. 'blocks': into as many equal blocks as there are clients; 'speaker': a client holds
            the speeches of one speaker, in order, without the names; the clients are the speakers with the most text,
            in descending order.
        clients: m; None or 'all': all speakers with at least one sequence.
        speaker: regular expression that matches the start of a speech (`^` and `$` match at line ends); its first group
            is the name. None: a line NAME. or NAME: in capitals, or after an empty line a capitalised name with a
            colon.
        test_fraction: share of each client's text that is held out; 0: no test set.
        vocabulary: how many of the most frequent characters or words of the training sequences are kept; None: all.

    Attributes:
        vocabulary: characters or words of the training sequences: characters in order, words as they first occur.
        alphabet: the characters of the vocabulary as one string; '' for words.

    Raises:
        MissingDataError: the file does not exist, or is not text.
        ConfigError: the text is too short for that many clients.
    """

    def __init__(
        self,
        path: str,
        length: Count = 80,
        by: Annotated[str, OneOf(*TEXT_OWNERS)] = "blocks",
        clients: int | str | None = None,
        speaker: str | None = None,
        test_fraction: Fraction = 0.2,
        unit: Annotated[str, OneOf(*UNITS)] = "characters",
        vocabulary: Count | None = None,
    ) -> None:
        client_count = None if clients in (None, "all") else checks.check_whole_number("clients", clients)
        if test_fraction == 1:
            raise ConfigError(key="test_fraction", value=1, needs="leaves no training text; lower it")
        names, numbering = None, _CharacterNumbers() if unit == "characters" else _Vocabulary()
        if by == "speaker":
            pattern = SPEECH_PATTERN if speaker is None else _compiled_pattern(speaker)
            speech_by_speaker = _text_by_speaker(_read_text(path), pattern, path)
            codes_by_speaker = {name: numbering.encode(speech) for name, speech in speech_by_speaker.items()}
            names, codes = _clients_by_text_length(codes_by_speaker, client_count, length, test_fraction, path, unit)
        elif speaker is not None:
            raise ConfigError(f"{{speaker}}={speaker!r} needs {{by}}=speaker", mentions=("speaker", "by"))
        elif client_count is None:
            raise ConfigError(
                f"clients={clients or 'null'} needs {{by}}=speaker; give the number of blocks", mentions=("by",)
            )
        else:
            codes = _text_blocks(numbering.encode(_read_text(path)), client_count, length, test_fraction, unit)
        train_codes, test_codes = _split_train_test_codes(codes, test_fraction)
        used_codes = np.concatenate([codes[: _used_length(len(codes), length)] for codes in train_codes])
        known_codes = most_frequent(used_codes, vocabulary)
        self.vocabulary = numbering.decode(known_codes)
        self.alphabet = "".join(self.vocabulary) if unit == "characters" else ""
        train_x, train_y, owners = _sequences([token_indices(codes, known_codes) for codes in train_codes], length)
        test_x, test_y, test_owners = _sequences([token_indices(codes, known_codes) for codes in test_codes], length)
        if test_fraction and not len(test_x):
            raise ConfigError(
                f"{{test_fraction}}={test_fraction:g} holds out too little of every client's text for a sequence of "
                f"{{length}}={length} plus one of the {unit}; raise it, lower the length, or set it to 0",
                mentions=("test_fraction", "length"),
            )
        super().__init__(
            "text",
            train_x,
            train_y,
            test_x if len(test_x) else None,
            test_y if len(test_x) else None,
            classes=len(known_codes) + 1,
            owners=owners,
            client_names=names,
            test_owners=test_owners if len(test_x) else None,
        )
        unknown_share_text = f", {(test_y == 0).float().mean():.2%} of whose {unit} are unknown" if len(test_x) else ""
        log.info(
            "%s: a vocabulary of %d %s; %d sequences to train on, %d to test on%s",
            path, len(known_codes), unit, len(train_x), len(test_x), unknown_share_text,
        )  # fmt: skip


class _CharacterNumbers:
    """The characters of texts as numbers: their code points."""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le"), np.uint32)

    def decode(self, codes: np.ndarray) -> tuple[str, ...]:
        return tuple(codes.astype("<u4").tobytes().decode("utf-32-le"))


class _Vocabulary:
    """The words and punctuation marks of texts as numbers, in the order in which they first occur."""

    def __init__(self) -> None:
        self._number_by_word: dict[str, int] = {}

    def encode(self, text: str) -> np.ndarray:
        numbers = self._number_by_word
        words = split_tokens(text, "words")
        return np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.uint32)

    def decode(self, codes: np.ndarray) -> tuple[str, ...]:
        words = list(self._number_by_word)
        return tuple(words[code] for code in codes)


def _split_train_test_codes(
    codes: Sequence[np.ndarray], test_fraction: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The codes of every client's training text, and of the text that is held out after it."""
    lengths = [_training_text_length(len(text_codes), test_fraction) for text_codes in codes]
    train_codes = [text_codes[:length] for text_codes, length in zip(codes, lengths, strict=True)]
    return train_codes, [text_codes[length:] for text_codes, length in zip(codes, lengths, strict=True)]


def _read_text(path: str) -> str:
    """The text of the file."""
    try:
        text = check_regular_path(Path(path).expanduser()).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MissingDataError(
            f"{{path}}={path} is not UTF-8 text ({error}); convert it", mentions=("path",)
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MissingDataError(
            f"{{path}}={path} cannot be read ({reason}); give a text file", mentions=("path",)
        ) from error
    if not text.strip():
        raise MissingDataError(f"{{path}}={path} is empty; give a nonempty text file", mentions=("path",))
    return text


def _compiled_pattern(speaker: str) -> re.Pattern[str]:
    """A regular expression of the user, which must have a group."""
    try:
        pattern = re.compile(speaker, re.MULTILINE)
    except re.error as error:
        raise ConfigError(
            f"{{speaker}}={speaker!r} is not a regular expression ({error})", mentions=("speaker",)
        ) from error
    if not pattern.groups:
        raise ConfigError(
            f"{{speaker}}={speaker!r} has no group; put the name in parentheses, such as '^(\\w+):'",
            mentions=("speaker",),
        )
    return pattern


def _text_by_speaker(text: str, pattern: re.Pattern[str], path: str) -> dict[str, str]:
    """Name → all speeches of this speaker, separated by line breaks."""
    starts = list(pattern.finditer(text))
    speeches_by_name: dict[str, list[str]] = {}
    for i, start in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(text)
        name = next((group for group in start.groups() if group), "").strip()
        speeches_by_name.setdefault(name, []).append(text[start.end() : end].strip())
    if len(speeches_by_name) < 2:
        finding = f"only one speaker, {next(iter(speeches_by_name))}," if speeches_by_name else "no speaker"
        raise ConfigError(
            f"{{by}}=speaker finds {finding} in {path}; describe the start of a speech in {{speaker}}, or set "
            f"{{by}}=blocks",
            mentions=("by", "speaker"),
        )
    return {name: "\n".join(filter(None, speeches)) for name, speeches in speeches_by_name.items()}


def _clients_by_text_length(
    codes_by_name: dict[str, np.ndarray], clients: int | None, length: int, test_fraction: float, path: str, unit: str
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The clients' names and texts, longest text first."""
    long_enough_names = [
        name for name, codes in codes_by_name.items() if _training_text_length(len(codes), test_fraction) > length
    ]
    names = sorted(long_enough_names, key=lambda name: -len(codes_by_name[name]))
    if clients is not None and clients > len(names):
        raise ConfigError(
            f"clients={clients}, but of the {len(codes_by_name)} speakers in {path} only {len(names)} have enough text "
            f"for a sequence of {{length}}={length} plus one of the {unit}; lower either",
            mentions=("length",),
        )
    if not names:
        raise ConfigError(key="length", value=length, needs=f"exceeds the text of every speaker in {path}; lower it")
    names = names[:clients]
    return tuple(names), [codes_by_name[name] for name in names]


def _text_blocks(codes: np.ndarray, clients: int, length: int, test_fraction: float, unit: str) -> list[np.ndarray]:
    """Contiguous blocks whose lengths differ by one at most."""
    training_length = _training_text_length(len(codes) // clients, test_fraction)
    if training_length <= length:
        raise ConfigError(
            f"{{length}}={length} is too long for clients={clients}: of {len(codes)} {unit}, each client has "
            f"{training_length} to train on, and a sequence needs one more than its length; lower either, or use a "
            "longer text",
            mentions=("length",),
        )
    bounds = [len(codes) * i // clients for i in range(clients + 1)]
    return [codes[a:b] for a, b in itertools.pairwise(bounds)]


def _training_text_length(text_length: int, test_fraction: float) -> int:
    """The length of a client's training text."""
    return text_length - int(text_length * test_fraction)


def _num_sequences(text_length: int, length: int) -> int:
    """The number of sequences in a text, whose last target must lie in it."""
    return max(0, (text_length - 1) // length)


def _used_length(text_length: int, length: int) -> int:
    """How much of a text is used in sequences, as inputs or targets."""
    count = _num_sequences(text_length, length)
    return count * length + 1 if count else 0


def _sequences(texts: list[np.ndarray], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of every client → inputs [N, L], targets [N, L] int64, owners [N]."""
    usable_tokens = [tokens[: _used_length(len(tokens), length)] for tokens in texts]
    x, y = (
        np.concatenate([tokens[a : len(tokens) + a - 1].reshape(-1, length) for tokens in usable_tokens])
        for a in (0, 1)
    )
    owners = np.repeat(np.arange(len(texts)), [_num_sequences(len(tokens), length) for tokens in usable_tokens])
    return torch.as_tensor(x), torch.as_tensor(y.astype(np.int64)), torch.as_tensor(owners)
