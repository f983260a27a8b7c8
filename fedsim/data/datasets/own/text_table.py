"""Your own texts, one per row of a table: to be classified, or to be completed after a prompt."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.constraints import Count, IntegerAtLeast, OneOf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.dataset import NO_LABEL
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.samples import RawSamples, client_or_label_name
from fedsim.data.datasets.own.table_columns import Columns, read_columns
from fedsim.data.datasets.own.table_roles import check_columns, check_present, read_tables, split_train_test
from fedsim.data.datasets.tokens import UNITS, join_tokens, most_frequent, smallest_dtype, split_tokens, token_indices

log = logging.getLogger(__name__)

TEXT_TASKS = ("classification", "completion")
PADDING, UNKNOWN, END = range(3)  # tokens that stand for no word
NUM_SPECIAL_TOKENS = 3
UNKNOWN_WORD = "<unknown>"  # in decoded texts


class TextTable(UserDataset):
    """Texts in the rows of a CSV file, a Parquet file (extra `table`) or a data frame. An input is a sequence of
    `length` tokens [L]: 0 is padding at its end, 1 an unknown word, 2 the end of a text, and 3, 4, … are the words of
    `vocabulary`, which is that of the training rows.

    With task=classification the target is the row's label. A text that is too long is cut at its end.

    With task=completion a model learns to continue a prompt by the row's target text, as in instruction tuning: targets
    [L] are the next tokens, those of the target text and its end; the positions of the prompt have none (−100). Prompts
    leave room for the longest target text; one that is too long is cut at its beginning. A model that predicts every
    target token of a sample correctly is one whose greedy decoding returns the target text, so the metric exact_match
    is what it is of decoded texts.

    Args:
        path: of the file; in Python also a data frame (pandas, polars, pyarrow) or a mapping from names to columns.
        text: column of the texts or, with columns in braces, a template such as 'Question: {question} Answer:'; spaces
            around an entry are dropped.
        target: column of labels; with task=completion a column or template of the texts to be predicted.
        task: 'classification' or 'completion'.
        client: column of the row's client; None: the partition decides.
        split: column with 'train' or 'test'; None: `test_fraction` is held out.
        test_path: a second table with the test rows.
        length: L.
        unit: 'words' in lower case and punctuation marks, or 'characters'.
        vocabulary: how many of the most frequent words of the training rows are kept; None: all.
        separator: of the columns of a CSV file; None: inferred among , ; tab and |.
        **options: `test_fraction`, `min_samples`, `seed` and `classes` of `UserDataset`.

    Attributes:
        vocabulary: the words (characters), of which the first is token 3.
        longest_target: the number of tokens of the longest target text and its end; 0 without task=completion.

    Example:
        >>> reviews = {"review": ["So good!", "bad, bad"], "liked": ["yes", "no"]}
        >>> data = TextTable(reviews, text="review", target="liked", length=4, test_fraction=0)
        >>> data.vocabulary, data.train_x.tolist()
        (('so', 'good', '!', 'bad', ','), [[3, 4, 5, 2], [6, 7, 6, 2]])
        >>> sums = {"a": [1, 2], "b": [2, 2], "sum": [3, 4]}
        >>> data = TextTable(sums, text="{a} + {b} =", target="sum", task="completion", length=5, test_fraction=0)
        >>> data.train_x[0].tolist(), data.train_y[0].tolist()
        ([3, 4, 5, 6, 7], [-100, -100, -100, 7, 2])
    """

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        path: Any,
        text: str,
        target: str,
        task: Annotated[str, OneOf(*TEXT_TASKS)] = "classification",
        client: str | None = None,
        split: str | None = None,
        test_path: Any = None,
        length: Annotated[int, IntegerAtLeast(2)] = 64,
        unit: Annotated[str, OneOf(*UNITS)] = "words",
        vocabulary: Count | None = None,
        separator: str | None = None,
        **options: Any,
    ) -> None:
        self.task, self.length, self.unit = task, length, unit
        self._template, self._separator = text, separator
        is_completion = task == "completion"
        tables = read_tables(path, split, test_path, separator)
        text_columns, target_columns = _template_columns("text", text), [target]
        if is_completion:
            target_columns = _template_columns("target", target)
        roles = {"target": None if is_completion else target, "client": client, "split": split}
        check_columns(tables, [*roles.items(), *(("text", name) for name in text_columns)])
        check_columns(tables, [("target", name) for name in target_columns])
        if not is_completion:
            check_present(tables, target, "the target")
        if split is not None:
            tables = split_train_test(tables[0], split)
        self._code_by_word: dict[str, int] = {}
        self.longest_target = 0
        token_lists = [self._row_tokens(table, text) for table in tables]
        if is_completion:
            target_lists = [self._row_tokens(table, target) for table in tables]
            split_parts = self._prompt_completion_parts(tables, token_lists, target_lists, client)
            options |= {"classes": NUM_SPECIAL_TOKENS + len(self._code_by_word)}
        else:
            split_parts = self._make_classification_parts(tables, token_lists, target, client)
        name = Path(path).stem if isinstance(path, (str, Path)) else "text_table"
        super().__init__(
            name,
            split_parts[0],
            split_parts[1] if split_parts[1:] else None,
            task="positions" if is_completion else "classification",
            inputs="tokens",
            **options,
        )
        self._build_vocabulary(vocabulary)

    def encode(self, rows: Any) -> Tensor:
        """[n, L] the model's input for the texts, or prompts, of other rows.

        Args:
            rows: a path, a data frame, or a mapping from names to columns; other columns are ignored.

        Raises:
            ConfigError: a column or value is missing.
        """
        table = read_columns(rows, self._separator, "rows")
        check_columns([table], [("text", name) for name in _template_columns("text", self._template)])
        texts = _texts_from_template(self._template, table)
        token_lists = [[self._code_by_word.get(w, UNKNOWN) for w in split_tokens(text, self.unit)] for text in texts]
        if self.task == "completion":
            prompts = [tokens[-self._prompt_length :] for tokens in token_lists]
            return torch.from_numpy(self._codes_to_tokens(_padded(prompts, self.length, PADDING)))
        return torch.from_numpy(
            self._codes_to_tokens(_padded(self._append_end_tokens(token_lists), self.length, PADDING))
        )

    def decode_tokens(self, tokens: Sequence[int]) -> str:
        """The text of tokens up to its end."""
        words = []
        for token in itertools.takewhile(lambda token: token != END, tokens):
            if token != PADDING:
                words.append(UNKNOWN_WORD if token == UNKNOWN else self.vocabulary[token - NUM_SPECIAL_TOKENS])
        return join_tokens(words, self.unit)

    def _row_tokens(self, table: Columns, template: str) -> list[list[int]]:
        """The codes of each row's tokens: the number of the word, in the order in which words first occur."""
        codes = self._code_by_word
        token_lists = []
        for text in _texts_from_template(template, table):
            words = split_tokens(text, self.unit)
            token_lists.append([codes.setdefault(word, NUM_SPECIAL_TOKENS + len(codes)) for word in words])
        return token_lists

    def _append_end_tokens(self, token_lists: list[list[int]]) -> list[list[int]]:
        """Texts of at most `length` tokens, the last of which is their end."""
        return [[*tokens[: self.length - 1], END] for tokens in token_lists]

    def _make_classification_parts(
        self, tables: list[Columns], token_lists: list[list[list[int]]], target: str, client: str | None
    ) -> list[RawSamples]:
        num_cut = sum(len(tokens) >= self.length for texts in token_lists for tokens in texts)
        if num_cut:
            log.info(
                "dataset: %d texts are cut to %d %s and the token of their end", num_cut, self.length - 1, self.unit
            )
        return [
            RawSamples(
                table.source,
                _padded(self._append_end_tokens(texts), self.length, PADDING),
                table[target],
                client and table[client],
                table.row_label,
            )
            for table, texts in zip(tables, token_lists, strict=True)
        ]

    def _prompt_completion_parts(
        self,
        tables: list[Columns],
        prompt_lists: list[list[list[int]]],
        target_lists: list[list[list[int]]],
        client: str | None,
    ) -> list[RawSamples]:
        self.longest_target = 1 + max(len(tokens) for targets in target_lists for tokens in targets)
        self._prompt_length = self.length + 1 - self.longest_target
        if self._prompt_length < 1:
            raise ConfigError(
                key="length",
                value=self.length,
                needs=f"leaves no room for prompts beside a target of {self.longest_target - 1} {self.unit}; raise it",
            )
        num_cut = sum(len(tokens) > self._prompt_length for prompts in prompt_lists for tokens in prompts)
        if num_cut:
            log.info("dataset: %d prompts are cut to their last %d %s", num_cut, self._prompt_length, self.unit)
        split_parts = []
        for table, prompts, answers in zip(tables, prompt_lists, target_lists, strict=True):
            inputs, labels = [], []
            for whole_prompt, answer in zip(prompts, answers, strict=True):
                prompt = whole_prompt[-self._prompt_length :]
                inputs.append([*prompt, *answer])
                labels.append([*[NO_LABEL] * (len(prompt) - 1), *answer, END])
            x, y = _padded(inputs, self.length, PADDING), _padded(labels, self.length, NO_LABEL)
            split_parts.append(RawSamples(table.source, x, y, client and table[client], table.row_label))
        return split_parts

    def _build_vocabulary(self, size: int | None) -> None:
        """Number the words of the training rows, the most frequent ones of them; others become the unknown token."""
        training_codes = self.train_x.numpy()
        self._kept_codes = most_frequent(training_codes[training_codes >= NUM_SPECIAL_TOKENS], size)
        words = list(self._code_by_word)
        self.vocabulary = tuple(words[code - NUM_SPECIAL_TOKENS] for code in self._kept_codes)
        self.train_x = torch.from_numpy(self._codes_to_tokens(training_codes))
        if self.test_x is not None:
            self.test_x = torch.from_numpy(self._codes_to_tokens(self.test_x.numpy()))
        if self.task == "completion":
            assert self.train_y is not None
            self.classes = NUM_SPECIAL_TOKENS + len(self.vocabulary)
            self.train_y = torch.from_numpy(self._codes_to_tokens(self.train_y.numpy()).astype(np.int64))
            if self.test_y is not None:
                self.test_y = torch.from_numpy(self._codes_to_tokens(self.test_y.numpy()).astype(np.int64))
        log.info(
            "dataset: a vocabulary of %d %s; %d samples to train on, %d to test on",
            len(self.vocabulary), self.unit, len(self.train_x), 0 if self.test_x is None else len(self.test_x),
        )  # fmt: skip

    def _codes_to_tokens(self, codes: np.ndarray) -> np.ndarray:
        """Codes of all words → tokens, in the smallest type that holds them."""
        index = token_indices(codes, self._kept_codes).astype(np.int64)
        tokens = np.where(index > 0, index + NUM_SPECIAL_TOKENS - 1, UNKNOWN)
        is_special = codes < NUM_SPECIAL_TOKENS  # −100 among them
        return np.where(is_special, codes, tokens).astype(smallest_dtype(len(self.vocabulary) + NUM_SPECIAL_TOKENS))


def _template_columns(key: str, template: str) -> list[str]:
    """The columns that a template names in braces; without braces the template is the name of a column.

    Raises:
        ConfigError: it is not a template, or has more than names in its braces.
    """
    if "{" not in template and "}" not in template:
        return [template]
    try:
        fields = [field for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ConfigError(
            f"dataset.{key}={template!r} is not a template ({error}); write braces as {{{{ and }}}}"
        ) from error
    for _, name, specification, conversion in fields:
        if not name or specification or conversion:
            raise ConfigError(f"dataset.{key}={template!r} may hold nothing but names of columns in braces")
    if not fields:
        raise ConfigError(f"dataset.{key}={template!r} names no column in braces")
    return list(dict.fromkeys(name for _, name, *_ in fields if name))


def _texts_from_template(template: str, table: Columns) -> list[str]:
    """The texts of a table's rows."""
    columns = _template_columns("text", template)
    texts_by_column = {name: _column_texts(table, name) for name in columns}
    if columns == [template]:
        return texts_by_column[template]
    pieces = [(literal, name) for literal, name, *_ in Formatter().parse(template)]
    return [
        "".join(literal + (texts_by_column[name][row] if name else "") for literal, name in pieces)
        for row in range(len(table))
    ]


def _column_texts(table: Columns, column: str) -> list[str]:
    """The entries of a column as texts; words such as NA, which are missing values of other tables, are texts here.

    Raises:
        ConfigError: one of them is missing or empty.
    """
    texts = [client_or_label_name(value) for value in table[column].tolist()]
    if None in texts:
        row = table.row_label(texts.index(None))
        raise ConfigError(f"{table.source}: {row} has no text in column {column!r}; fill it in, or remove the row")
    return [text for text in texts if text is not None]


def _padded(token_lists: list[list[int]], length: int, filler: int) -> np.ndarray:
    """[N, L] int64, the rest of each row filled."""
    padded = np.full((len(token_lists), length), filler, dtype=np.int64)
    for row, tokens in enumerate(token_lists):
        padded[row, : len(tokens)] = tokens
    return padded
