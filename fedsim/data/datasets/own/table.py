"""Tables of one's own: rows are samples, columns are features, target, client and split, by name."""

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
from fedsim.data.datasets.own.samples import Part, called_of
from fedsim.data.datasets.own.table_columns import Columns, columns
from fedsim.data.datasets.own.table_columns import is_missing as unknown

CATEGORIES = ("onehot", "ordinal", "refuse")
GAPS = ("refuse", "drop", "mean", "median")
TRAIN, TEST = ("train", "training"), ("test", "testing")


class Table(OwnData):
    """Rows of a CSV file, a Parquet file (extra `table`) or a data frame; columns are meant by their names.

    A column all of whose entries are numbers is a feature as it is; one of words is a category. What is empty, NA,
    N/A, NaN, null, None or ? is missing. Clients and labels are taken as they are written: 007 stays 007.

    Args:
        path: of the file; in Python also a data frame (pandas, polars, pyarrow) or a mapping from names to columns.
        target: column that is predicted.
        features: columns to predict it from; None takes all that have no other role.
        client: column that says whose a row is; None lets the partition decide.
        split: column that says 'train' or 'test'; None holds out `test_fraction`.
        test_path: a second table, of rows to test on.
        categories: 'onehot' makes of a column of words a feature 0 or 1 per word; 'ordinal' numbers the words in
            alphabetical order; 'refuse' wants numbers.
        max_categories: a column with more different words is refused: it is text, or an id.
        missing: what becomes of missing features: 'refuse'; 'drop' leaves out the row; 'mean' and 'median' put that of
            the training rows in the place of numbers, and the most frequent word in that of words.
        strategic: columns that people change to please a model (shift=strategic); None for none.
        separator: between the columns of a CSV file; None finds out which of , ; tab and | it is.
        **options: of `OwnData`.

    Attributes:
        feature_names: [d] what every feature is called; 'column=word' where it says that a word is there.

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
        categories: Annotated[str, OneOf(*CATEGORIES)] = "onehot",
        max_categories: Annotated[int, AtLeast(2)] = 100,
        missing: Annotated[str, OneOf(*GAPS)] = "refuse",
        strategic: Sequence[str] | None = None,
        separator: str | None = None,
        standardise: bool = True,
        **options: Any,
    ) -> None:
        if split is not None and test_path is not None:
            raise ConfigError(
                f"{{split}}={split} and {{test_path}}={test_path} both say what is tested; give one",
                mentions=("split", "test_path"),
            )
        if separator is not None and len(separator) != 1:
            raise ConfigError(f"{{separator}}={separator!r} must be a single sign", mentions=("separator",))
        first = columns(path, separator)
        tables = [first] if test_path is None else [first, columns(test_path, separator, "dataset.test_path")]
        roles = {"target": target, "client": client, "split": split}
        feature_names = _features(tables, features, roles)
        if missing == "drop":
            tables = [_drop_incomplete(table, feature_names) for table in tables]
        for table in tables:
            if (missing_mask := unknown(table[target])).any():
                row = table.row_label(int(np.flatnonzero(missing_mask)[0]))
                raise ConfigError(f"{table.source}: {row} has nothing in column {target!r}, the target; leave it out")
        encoder = Encoder(feature_names, tables, categories, max_categories, missing, standardise)
        if split is not None:
            tables = _split_by_column(tables[0], split)
        self.feature_names, self._encoder, self._separator = encoder.names, encoder, separator
        name = Path(path).stem if isinstance(path, (str, Path)) else "table"
        encoded_splits = [
            Part(p.source, encoder.codes(p), p[target], client and p[client], p.row_label) for p in tables
        ]
        super().__init__(
            name, encoded_splits[0], encoded_splits[1] if encoded_splits[1:] else None, encode=encoder, **options
        )
        self.strategic = None if strategic is None else self._numbers(strategic)

    def encode(self, rows: Any) -> Tensor:
        """[n, d] what a model is given for other rows, encoded and standardised as the training rows were.

        Args:
            rows: a path, a data frame, or a mapping from names to columns; other columns are passed over.

        Raises:
            ConfigError: a column or a value is missing, or a word is none of the data set's.
        """
        return self._encoder.encode(columns(rows, self._separator, "rows"))

    def _numbers(self, names: Sequence[str]) -> tuple[int, ...]:
        """Places of features."""
        for name in names:
            if name not in self.feature_names:
                near = checks.nearest(str(name), self.feature_names)
                raise ConfigError(f"{{strategic}} names {name!r}, which is no feature{near}", mentions=("strategic",))
        return tuple(self.feature_names.index(name) for name in names)


def _features(tables: list[Columns], requested: Sequence[str] | None, roles: dict[str, str | None]) -> list[str]:
    """The columns that are features."""
    for table in tables:
        column_names = list(table.of)
        role_options = [(f"dataset.{role}", name) for role, name in roles.items() if name is not None]
        for key, name in [*role_options, *(("dataset.features", name) for name in requested or ())]:
            if name not in column_names:
                near = checks.nearest(str(name), column_names) or f"; it has {', '.join(column_names[:12])}"
                raise ConfigError(f"{key}={name} is no column of {table.source}{near}")
    role_columns = [name for name in roles.values() if name is not None]
    if len(set(role_columns)) < len(role_columns):
        raise ConfigError(
            f"{{target}}, client and split are {', '.join(role_columns)}; a column has one of these roles",
            mentions=("target",),
        )
    if requested is None:
        feature_names = [name for name in tables[0].of if name not in role_columns]
        lacking = [name for name in feature_names if name not in tables[-1].of]
        if lacking:
            raise ConfigError(f"{tables[-1].source} lacks the column {lacking[0]!r} of {tables[0].source}")
    else:
        feature_names = list(dict.fromkeys(requested))
        double = next((name for name in feature_names if name in role_columns), None)
        if double is not None:
            raise ConfigError(
                f"{{features}} names {double!r}, which has another role; leave it out", mentions=("features",)
            )
    if not feature_names:
        raise ConfigError(f"{tables[0].source}: there is no column to predict {roles['target']!r} from")
    return feature_names


def _drop_incomplete(table: Columns, column_names: list[str]) -> Columns:
    """The rows that lack no feature."""
    gaps = np.any([unknown(table[name]) for name in column_names], axis=0)
    if gaps.all():
        raise ConfigError(
            f"{table.source}: {{missing}}=drop leaves no row; leave a column out by {{features}}",
            mentions=("missing", "features"),
        )
    return table.rows(np.flatnonzero(~gaps))


def _split_by_column(table: Columns, split: str) -> list[Columns]:
    """Training and test rows."""
    split_words = [str(called_of(word)).lower() for word in table[split].tolist()]
    invalid_row = next((row for row, word in enumerate(split_words) if word not in (*TRAIN, *TEST)), None)
    if invalid_row is not None:
        raise ConfigError(
            f"{table.source}: {table.row_label(invalid_row)} says {table[split][invalid_row]!r} in column {split!r}; "
            "make it "
            "train or test"
        )
    of_test = np.isin(split_words, TEST)
    if of_test.all() or not of_test.any():
        only = "test" if of_test.all() else "train"
        raise ConfigError(
            f"{table.source}: every row says {only} in column {split!r}; give rows of both, or set it to null"
        )
    return [table.rows(np.flatnonzero(~of_test)), table.rows(np.flatnonzero(of_test))]
