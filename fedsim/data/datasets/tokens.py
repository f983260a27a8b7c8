"""Texts as sequences of tokens, characters or words, and the numbers of tokens."""

from __future__ import annotations

import re

import numpy as np

UNITS = ("characters", "words")
WORD_PATTERN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")  # words, with apostrophes inside, and single punctuation marks


def split_tokens(text: str, unit: str) -> list[str]:
    """The tokens of a text: its characters, or its words in lower case and its punctuation marks."""
    return list(text) if unit == "characters" else WORD_PATTERN.findall(text.lower())


def join_tokens(tokens: list[str], unit: str) -> str:
    """The text of tokens; words and punctuation marks are separated by spaces."""
    return ("" if unit == "characters" else " ").join(tokens)


def most_frequent(codes: np.ndarray, count: int | None) -> np.ndarray:
    """The `count` most frequent codes (of equally frequent ones the smaller ones), or all of them; ascending."""
    occurring, frequencies = np.unique(codes, return_counts=True)
    return occurring if count is None else np.sort(occurring[np.argsort(-frequencies, kind="stable")[:count]])


def token_indices(codes: np.ndarray, vocabulary: np.ndarray) -> np.ndarray:
    """Codes [n] → their indices in the ascending vocabulary, starting at 1; 0 for unknown ones."""
    index = np.searchsorted(vocabulary, codes).clip(max=len(vocabulary) - 1)
    return np.where(vocabulary[index] == codes, index + 1, 0).astype(smallest_dtype(len(vocabulary)))


def smallest_dtype(largest: int) -> type[np.signedinteger]:
    """The smallest signed integer type that fits; unsigned bytes would be interpreted as pixels."""
    return next(kind for kind in (np.int8, np.int16, np.int32) if largest <= np.iinfo(kind).max)
