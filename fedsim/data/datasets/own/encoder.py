"""Encodes columns of a table as features; the encoding is fitted to the training rows and applied to further rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.samples import client_or_label_name, sort_names
from fedsim.data.datasets.own.table_columns import MISSING_VALUE_WORDS, Columns, as_numbers
from fedsim.data.datasets.own.table_columns import is_missing as unknown


class ColumnEncoder:
    """Columns → features; numbers are kept, categories become codes or one-hot features.

    Args:
        feature_names: names of the columns.
        tables: training and test rows, which together contain all categories.
        categories, max_categories, missing, standardise: see `Table`.
    """

    def __init__(
        self,
        feature_names: list[str],
        tables: list[Columns],
        categories: str,
        max_categories: int,
        missing: str,
        standardise: bool,
    ) -> None:
        self.missing, self.standardise = missing, standardise
        self.categories: dict[str, list[str] | None] = {
            name: self._column_categories(name, tables, categories, max_categories) for name in feature_names
        }
        self.onehot = categories == "onehot"
        self.names = tuple(
            feature
            for name, vocabulary in self.categories.items()
            for feature in (
                [f"{name}={category}" for category in vocabulary] if vocabulary is not None and self.onehot else [name]
            )
        )

    def _column_categories(
        self, name: str, tables: list[Columns], categories: str, max_categories: int
    ) -> list[str] | None:
        """The categories of a column, or None for a column of numbers; raises an error for missing values that are not
        allowed.
        """
        vocabulary: set[str] = set()
        numeric = True
        for table in tables:
            values, missing_mask = table[name], unknown(table[name])
            self._check_missing(table, name, missing_mask)
            numbers = as_numbers(values, missing_mask)
            numeric &= numbers is not None
            if numbers is None:
                _check_category_column(table, name, missing_mask)
            elif np.isinf(numbers).any():
                row = int(np.flatnonzero(np.isinf(numbers))[0])
                raise ConfigError(
                    f"{table.source}: {table.row_label(row)} holds {numbers[row]} in column {name!r}; correct it"
                )
            if len(vocabulary) <= max_categories:  # the error below needs no more than these
                vocabulary |= {str(client_or_label_name(value)) for value in values[~missing_mask].tolist()}
        if numeric:
            return None
        if categories == "refuse":
            category = next(iter(sorted(vocabulary)))
            raise ConfigError(
                f"{tables[0].source}: column {name!r} holds words, such as {category!r}; exclude it with {{features}}, "
                "or set {categories}=onehot or ordinal",
                mentions=("features", "categories"),
            )
        if len(vocabulary) > max_categories:
            raise ConfigError(
                f"{tables[0].source}: column {name!r} holds more than {{max_categories}}={max_categories} different "
                "words; exclude it with {features}, or raise the limit",
                mentions=("max_categories", "features"),
            )
        return sort_names(vocabulary)

    def _check_missing(self, table: Columns, name: str, missing_mask: np.ndarray) -> None:
        if missing_mask.any() and self.missing == "refuse":
            row = int(np.flatnonzero(missing_mask)[0])
            word = str(table[name][row]).strip()
            note = f" ({word!r} counts as missing)" if word.lower() in MISSING_VALUE_WORDS[1:] else ""
            raise ConfigError(
                f"{table.source}: {table.row_label(row)} has no value "
                f"in column {name!r}{note}; set "
                "{missing}=drop, mean or median",
                mentions=("missing",),
            )
        if missing_mask.all():
            raise ConfigError(
                f"{table.source}: column {name!r} is empty; exclude it with {{features}}", mentions=("features",)
            )

    def codes(self, columns: Columns) -> np.ndarray:
        """[N, k] float64 numbers and codes of categories; NaN for missing values."""
        encoded_columns = []
        for name, vocabulary in self.categories.items():
            numbers = None
            if vocabulary is None:
                numbers = as_numbers(columns[name], unknown(columns[name]))
            if numbers is None:  # a column of words, or words where the data set has numbers, which are refused
                numbers = _category_codes(columns, name, vocabulary or [])
            encoded_columns.append(numbers)
        return np.column_stack(encoded_columns)

    def __call__(self, train: Tensor, test: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Impute missing values by statistics of the training rows, encode categories, and standardise numbers over the
        training rows.
        """
        self._transformer = self._column_transformer()
        self._transformer.fit(train.numpy())
        return self._features(train), None if test is None else self._features(test)

    def encode(self, table: Columns) -> Tensor:
        """[n, d] features of other rows.

        Raises:
            ConfigError: a column or value is missing, or a word is not a category of the data set.
        """
        missing_columns = [name for name in self.categories if name not in table.arrays]
        if missing_columns:
            raise ConfigError(f"{table.source} does not have the column {missing_columns[0]!r} of the data set")
        codes = self.codes(table)
        if np.isnan(codes).any() and self.missing not in ("mean", "median"):
            row, column = (int(indices[0]) for indices in np.nonzero(np.isnan(codes)))
            raise ConfigError(
                f"{table.source}: {table.row_label(row)} has no value in column "
                f"{list(self.categories)[column]!r}; a data "
                "set with "
                "{missing}=mean or median fills it in",
                mentions=("missing",),
            )
        return self._features(torch.from_numpy(codes))

    def _features(self, codes: Tensor) -> Tensor:
        """[N, k] numbers and codes → [N, d] features, float32."""
        return torch.from_numpy(self._transformer.transform(codes.numpy())).float()

    def _column_transformer(self) -> Any:
        """The scikit-learn transformers of the columns. Adjacent columns of the same kind share one, so features keep
        the order of the table, and a wide table of numbers takes one call.
        """
        from sklearn.compose import ColumnTransformer  # imported here: it takes half a second
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        average = "median" if self.missing == "median" else "mean"
        scaling = [StandardScaler()] if self.standardise else []
        transformers = []
        for numeric, columns in itertools.groupby(
            enumerate(self.categories.values()), lambda column: column[1] is None
        ):
            column_indices, vocabulary = zip(*columns, strict=True)
            strategy = average if numeric else "most_frequent"
            # a column that has values in test rows only remains a feature of zeros
            steps: list[Any] = [SimpleImputer(strategy=strategy, keep_empty_features=True)]
            if numeric or not self.onehot:
                steps += scaling
            else:  # all categories of the data set, some of which training rows may lack
                steps.append(
                    OneHotEncoder(categories=[np.arange(float(len(w))) for w in vocabulary], sparse_output=False)
                )
            transformers.append((f"columns from {column_indices[0]}", make_pipeline(*steps), list(column_indices)))
        # arrays are needed here, whatever the user's `sklearn.set_config` is
        return ColumnTransformer(transformers).set_output(transform="default")


def _check_category_column(table: Columns, name: str, missing_mask: np.ndarray) -> None:
    """Raise an error for a column of dates, lists and the like, judged by its first entry."""
    values, row = table[name], int(np.flatnonzero(~missing_mask)[0])
    kind = values.dtype.kind if values.dtype != object else type(values[row]).__name__
    if kind not in ("U", "S", "str", "bytes", "bool"):
        raise ConfigError(
            f"{table.source}: column {name!r} holds neither numbers nor words ({values[row]!r}); leave it "
            "out by {features}",
            mentions=("features",),
        )


def _category_codes(columns: Columns, name: str, vocabulary: list[str]) -> np.ndarray:
    """[N] the code of each entry of a column among the categories of the data set; NaN for missing values."""
    values, missing_mask = columns[name], unknown(columns[name])
    index_of = {category: float(number) for number, category in enumerate(vocabulary)}
    entries = [str(client_or_label_name(value)) for value in values[~missing_mask].tolist()]
    for category in entries:
        if category not in index_of:
            expected = "numbers"
            if vocabulary:
                hint = checks.nearest_name_hint(category, index_of) or f": {', '.join(vocabulary[:12])}"
                expected = f"a word of the data set{hint}"
            raise ConfigError(f"{columns.source}: column {name!r} holds {category!r}; expected {expected}")
    word_indices = np.full(len(columns), np.nan)
    word_indices[~missing_mask] = [index_of[category] for category in entries]
    return word_indices
