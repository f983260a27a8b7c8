"""The roles that columns of your own tables play: target, client, split; and the rows of each split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.samples import client_or_label_name
from fedsim.data.datasets.own.table_columns import Columns, is_missing, read_columns

UNIQUE_ROLES = ("target", "client", "split")
TRAIN, TEST = ("train", "training"), ("test", "testing")


def read_tables(path: Any, split: str | None, test_path: Any, separator: str | None) -> list[Columns]:
    """The columns of a table and, with `test_path`, of the table of the test rows.

    Raises:
        ConfigError: test rows are given twice, or a table cannot be read.
    """
    if split is not None and test_path is not None:
        raise ConfigError(
            f"{{split}}={split} and {{test_path}}={test_path} both define test rows; set only one",
            mentions=("split", "test_path"),
        )
    if separator is not None and len(separator) != 1:
        raise ConfigError(f"{{separator}}={separator!r} must be a single character", mentions=("separator",))
    tables = [read_columns(path, separator)]
    if test_path is not None:
        tables.append(read_columns(test_path, separator, "dataset.test_path"))
    return tables


def check_columns(tables: list[Columns], column_roles: Sequence[tuple[str, str | None]]) -> None:
    """Check that columns, given as pairs (role, column or None), exist, and that target, client and split differ.

    Raises:
        ConfigError: naming the role and the column.
    """
    columns = [(role, str(name)) for role, name in column_roles if name is not None]
    for table in tables:
        column_names = list(table.arrays)
        for role, name in columns:
            if name not in column_names:
                suggestion_text = checks.nearest_name_hint(name, column_names)
                suggestion_text = suggestion_text or f"; it has {', '.join(column_names[:12])}"
                raise ConfigError(f"dataset.{role}={name} is not a column of {table.source}{suggestion_text}")
    unique_columns = [name for role, name in columns if role in UNIQUE_ROLES]
    if len(set(unique_columns)) < len(unique_columns):
        raise ConfigError(
            f"{{target}}, client and split are {', '.join(unique_columns)}; a column can have only one of these roles",
            mentions=("target",),
        )


def check_present(tables: list[Columns], column: str, description: str) -> None:
    """Check that every row has a value in a column.

    Raises:
        ConfigError: naming the first row without one.
    """
    for table in tables:
        if (missing_mask := is_missing(table[column])).any():
            row = table.row_label(int(np.flatnonzero(missing_mask)[0]))
            raise ConfigError(f"{table.source}: {row} has no value in column {column!r}, {description}; remove the row")


def split_train_test(table: Columns, split: str) -> list[Columns]:
    """Training and test rows."""
    split_words = [str(client_or_label_name(split_cell)).lower() for split_cell in table[split].tolist()]
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
