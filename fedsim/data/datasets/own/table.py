"""Your own tables: rows are samples; columns, chosen by name, are features, target, client and split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from fedsim.core import checks
from fedsim.core.constraints import AtLeast, OneOf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.data import OwnData
from fedsim.data.datasets.own.encoder import Encoder
from fedsim.data.datasets.own.samples import Part, entry_name
from fedsim.data.datasets.own.table_columns import Columns, read_columns
from fedsim.data.datasets.own.table_columns import is_missing as unknown

CATEGORY_ENCODINGS = ("onehot", "ordinal", "refuse")
MISSING_VALUE_POLICIES = ("refuse", "drop", "mean", "median")
TRAIN, TEST = ("train", "training"), ("test", "testing")


class Table(OwnData):
    """Rows of a CSV file, a Parquet file (extra `table`) or a data frame; columns are referred to by name. A column
    whose entries are all numbers is a numeric feature; a column of words is categorical. Missing values are empty
    fields, NA, N/A, NaN, null, None or ?. Clients and labels are taken literally: 007 stays 007.

    Args:
        path: of the file; in Python also a data frame (pandas, polars, pyarrow) or a mapping from names to columns.
        target: column to predict.
        features: columns of features; None: all columns without another role.
        client: column of the row's client; None: the partition decides.
        split: column with 'train' or 'test'; None: `test_fraction` is held out.
        test_path: a second table with the test rows.
        categories: 'onehot' converts a categorical column to one feature 0 or 1 per category; 'ordinal' numbers the
            categories in alphabetical order; 'refuse' raises an error.
        max_categories: a column with more categories raises an error, since it is probably text or an identifier.
        missing: treatment of missing features: 'refuse' raises an error; 'drop' drops the row; 'mean' and 'median'
            impute numbers by that of the training rows, and categories by the most frequent one.
        strategic: features that people change strategically in response to a model (shift=strategic), by their names
            in `feature_names`; None: none.
        separator: of the columns of a CSV file; None: inferred among , ; tab and |.
        **options: of `OwnData`.

    Attributes:
        feature_names: [d] name of every feature; 'column=word' for one-hot features.


    Example:
        >>> people = {"age": [31, 52, 44], "job": ["cook", "smith", "cook"], "ill": ["no", "yes", "yes"]}
        >>> data = Table(people, target="ill", test_fraction=0, standardise=False)
        >>> data.feature_names, data.train_x[0].tolist(), data.label_names
        (('age', 'job=cook', 'job=smith'), [31.0, 1.0, 0.0], ('no', 'yes'))
    """

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        path: Any,
        target: str,
        features: Sequence[str] | None = None,
        client: str | None = None,
        split: str | None = None,
        test_path: Any = None,
        categories: Annotated[str, OneOf(*CATEGORY_ENCODINGS)] = "onehot",
        max_categories: Annotated[int, AtLeast(2)] = 100,
        missing: Annotated[str, OneOf(*MISSING_VALUE_POLICIES)] = "refuse",
        strategic: Sequence[str] | None = None,
        separator: str | None = None,
        standardise: bool = True,
        **options: Any,
    ) -> None:
        if split is not None and test_path is not None:
            raise ConfigError(
                f"{{split}}={split} and {{test_path}}={test_path} both define test rows; set only one",
                mentions=("split", "test_path"),
            )
        if separator is not None and len(separator) != 1:
            raise ConfigError(f"{{separator}}={separator!r} must be a single character", mentions=("separator",))
        training_columns = read_columns(path, separator)
        tables = (
            [training_columns]
            if test_path is None
            else [training_columns, read_columns(test_path, separator, "dataset.test_path")]
        )
        roles = {"target": target, "client": client, "split": split}
        feature_names = _features(tables, features, roles)
        if missing == "drop":
            tables = [_drop_incomplete(table, feature_names) for table in tables]
        for table in tables:
            if (missing_mask := unknown(table[target])).any():
                row = table.row_label(int(np.flatnonzero(missing_mask)[0]))
                raise ConfigError(
                    f"{table.source}: {row} has no value in column {target!r}, the target; remove the row"
                )
        encoder = Encoder(feature_names, tables, categories, max_categories, missing, standardise)
        if split is not None:
            tables = _split_by_column(tables[0], split)
        self._encoder, self._separator = encoder, separator
        name = Path(path).stem if isinstance(path, (str, Path)) else "table"
        encoded_splits = [
            Part(p.source, encoder.codes(p), p[target], client and p[client], p.row_label) for p in tables
        ]
        super().__init__(
            name, encoded_splits[0], encoded_splits[1] if encoded_splits[1:] else None, encode=encoder, **options
        )
        self.feature_names = encoder.names
        self.strategic = (
            None
            if strategic is None
            else self.feature_indices([str(name) for name in strategic], "{strategic}", mentions=("strategic",))
        )

    def encode(self, rows: Any) -> Tensor:
        """[n, d] the model's input for other rows, encoded and standardised like the training rows.

        Args:
            rows: a path, a data frame, or a mapping from names to columns; other columns are ignored.

        Raises:
            ConfigError: a column or value is missing, or a word is not a category of the data set.
        """
        return self._encoder.encode(read_columns(rows, self._separator, "rows"))


def _features(tables: list[Columns], requested: Sequence[str] | None, roles: dict[str, str | None]) -> list[str]:
    """The names of the feature columns."""
    for table in tables:
        column_names = list(table.arrays)
        role_options = [(f"dataset.{role}", name) for role, name in roles.items() if name is not None]
        for key, name in [*role_options, *(("dataset.features", name) for name in requested or ())]:
            if name not in column_names:
                suggestion_text = (
                    checks.nearest_name_hint(str(name), column_names) or f"; it has {', '.join(column_names[:12])}"
                )
                raise ConfigError(f"{key}={name} is not a column of {table.source}{suggestion_text}")
    role_columns = [name for name in roles.values() if name is not None]
    if len(set(role_columns)) < len(role_columns):
        raise ConfigError(
            f"{{target}}, client and split are {', '.join(role_columns)}; a column can have only one of these roles",
            mentions=("target",),
        )
    if requested is None:
        feature_names = [name for name in tables[0].arrays if name not in role_columns]
        missing_columns = [name for name in feature_names if name not in tables[-1].arrays]
        if missing_columns:
            raise ConfigError(
                f"{tables[-1].source} does not have the column {missing_columns[0]!r} of {tables[0].source}"
            )
    else:
        feature_names = list(dict.fromkeys(requested))
        duplicate_name = next((name for name in feature_names if name in role_columns), None)
        if duplicate_name is not None:
            raise ConfigError(
                f"{{features}} names {duplicate_name!r}, which has another role; remove it", mentions=("features",)
            )
    if not feature_names:
        raise ConfigError(f"{tables[0].source}: there is no column to predict {roles['target']!r} from")
    return feature_names


def _drop_incomplete(table: Columns, column_names: list[str]) -> Columns:
    """The rows without missing features."""
    missing_mask = np.any([unknown(table[name]) for name in column_names], axis=0)
    if missing_mask.all():
        raise ConfigError(
            f"{table.source}: {{missing}}=drop leaves no row; exclude a column with {{features}}",
            mentions=("missing", "features"),
        )
    return table.rows(np.flatnonzero(~missing_mask))


def _split_by_column(table: Columns, split: str) -> list[Columns]:
    """Training and test rows."""
    split_words = [str(entry_name(split_cell)).lower() for split_cell in table[split].tolist()]
    invalid_row = next((row for row, split_cell in enumerate(split_words) if split_cell not in (*TRAIN, *TEST)), None)
    if invalid_row is not None:
        raise ConfigError(
            f"{table.source}: {table.row_label(invalid_row)} has {table[split][invalid_row]!r} in column {split!r}; "
            "it must be train or test"
        )
    of_test = np.isin(split_words, TEST)
    if of_test.all() or not of_test.any():
        only_split = "test" if of_test.all() else "train"
        raise ConfigError(
            f"{table.source}: all rows have {only_split} in column {split!r}; both must occur, or set it to null"
        )
    return [table.rows(np.flatnonzero(~of_test)), table.rows(np.flatnonzero(of_test))]
