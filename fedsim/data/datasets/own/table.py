"""Your own tables: rows are samples; columns, chosen by name, are features, target, client and split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from fedsim.core.constraints import IntegerAtLeast, OneOf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.encoder import ColumnEncoder
from fedsim.data.datasets.own.samples import RawSamples
from fedsim.data.datasets.own.table_columns import Columns, read_columns
from fedsim.data.datasets.own.table_columns import is_missing as unknown
from fedsim.data.datasets.own.table_roles import check_columns, check_present, read_tables, split_train_test

CATEGORY_ENCODINGS = ("onehot", "ordinal", "refuse")
MISSING_VALUE_POLICIES = ("refuse", "drop", "mean", "median")


class Table(UserDataset):
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
        **options: of `UserDataset`.

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
        max_categories: Annotated[int, IntegerAtLeast(2)] = 100,
        missing: Annotated[str, OneOf(*MISSING_VALUE_POLICIES)] = "refuse",
        strategic: Sequence[str] | None = None,
        separator: str | None = None,
        standardise: bool = True,
        **options: Any,
    ) -> None:
        tables = read_tables(path, split, test_path, separator)
        roles = {"target": target, "client": client, "split": split}
        feature_names = _feature_column_names(tables, features, roles)
        if missing == "drop":
            tables = [_drop_incomplete(table, feature_names) for table in tables]
        check_present(tables, target, "the target")
        encoder = ColumnEncoder(feature_names, tables, categories, max_categories, missing, standardise)
        if split is not None:
            tables = split_train_test(tables[0], split)
        self._encoder, self._separator = encoder, separator
        name = Path(path).stem if isinstance(path, (str, Path)) else "table"
        encoded_splits = [
            RawSamples(p.source, encoder.codes(p), p[target], client and p[client], p.row_label) for p in tables
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


def _feature_column_names(
    tables: list[Columns], requested: Sequence[str] | None, roles: dict[str, str | None]
) -> list[str]:
    """The names of the feature columns."""
    check_columns(tables, [*roles.items(), *(("features", name) for name in requested or ())])
    role_columns = [name for name in roles.values() if name is not None]
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
