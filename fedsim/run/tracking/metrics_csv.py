"""metrics.csv: appended row by row; its first lines describe the columns."""

from __future__ import annotations

import csv
import itertools
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from fedsim.core.errors import CheckpointError
from fedsim.core.files import check_regular_path, flush_to_disk, name_write_errors, no_follow_opener, replacement_file
from fedsim.run.tracking.result import MetricsRow

METRICS_FILENAME = "metrics.csv"
_BYTE_COLUMNS = {"bytes_down", "bytes_up", "total_bytes_down", "total_bytes_up"}
_INTEGER_COLUMNS = {"round", "seed", "samples", "active_clients", "late_clients"} | _BYTE_COLUMNS


def read_metrics(path: Path) -> list[MetricsRow]:
    """Return the rows of a metrics.csv, with numbers converted. A line cut short by a crash is skipped.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: the file holds something else.
    """
    rows: list[MetricsRow] = []
    try:
        with open(check_regular_path(path), newline="", encoding="utf-8") as file:
            lines = [line for line in file if not line.startswith("#") and line.endswith("\n")]
        for record in csv.DictReader(lines):
            if None not in record.values():
                rows.append({k: int(v) if k in _INTEGER_COLUMNS else float(v) for k, v in record.items()})
        if rows and not {"round", "seed"} <= rows[0].keys():
            raise ValueError("it has no columns 'round' and 'seed'")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise CheckpointError(
            f"{path} is not a metrics file of fedsim ({error}); restore it, or choose another out"
        ) from error
    return rows


def read_column_descriptions(path: Path) -> dict[str, str]:
    """Return the descriptions of the columns in the first lines."""
    with open(path, encoding="utf-8") as file:
        comment_lines = itertools.takewhile(lambda line: line.startswith("# "), file)
        return {
            name: description
            for name, _, description in (line[2:].rstrip("\n").partition(": ") for line in comment_lines)
        }


def metrics_checksum(rows: Iterable[MetricsRow], previous_crc: int = 0) -> int:
    """Return the CRC-32 of rows as they are in the file, continued from that of the rows before."""
    for row in rows:
        numbers = [int(value) if name in _INTEGER_COLUMNS else float(value) for name, value in row.items()]
        previous_crc = zlib.crc32(repr(numbers).encode(), previous_crc)
    return previous_crc


def rows_up_to_round(
    path: Path,
    column_descriptions: Mapping[str, str],
    last_kept_round: int,
    row_count: int | None = None,
    expected_crc: int | None = None,
) -> list[MetricsRow]:
    """Return the rows up to a round; none for −1. `row_count` is how many rows the run had written by then,
    `expected_crc` their checksum, if these are known.

    Raises:
        CheckpointError: they are not of a run with these columns, or not all are there.
    """
    rows = (
        [row for row in read_metrics(path) if row["round"] <= last_kept_round]
        if last_kept_round >= 0 and path.exists()
        else []
    )
    if rows and list(rows[0]) != list(column_descriptions):
        raise CheckpointError(f"{path} has other columns than this run; choose another out")
    if last_kept_round >= 0 and row_count is not None and len(rows) != row_count:
        discrepancy = (
            f"has {len(rows)} of the {row_count} rows" if path.exists() else f"is gone, with the {row_count} rows"
        )
        raise CheckpointError(
            f"{path} {discrepancy} that the run had written by round {last_kept_round}; restore it, or "
            "start again with resume=overwrite"
        )
    if last_kept_round >= 0 and expected_crc is not None and metrics_checksum(rows) != expected_crc:
        raise CheckpointError(
            f"{path} is not what the run had written by round {last_kept_round} (its checksum "
            "differs); restore it, or start again with resume=overwrite"
        )
    return rows


class MetricsCSV:
    """Appends rows to a file that `open` has begun.

    Args:
        path: of the file.
        columns: name → what it is, in order.
        file: the same, open for appending; `close` closes it.
        kept_rows: rows that it has already.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], file: TextIO, kept_rows: list[MetricsRow]) -> None:
        self.kept_rows, self._path, self._file = kept_rows, path, file
        self._writer = csv.DictWriter(file, list(columns))

    @classmethod
    def open(cls, path: Path, column_descriptions: Mapping[str, str], last_kept_round: int = -1) -> MetricsCSV:
        """Create the file, or continue it: rows up to the round `last_kept_round` are kept, later ones are dropped; −1
        starts afresh.

        Raises:
            CheckpointError: the rows are not of a run with these columns.
        """
        rows = rows_up_to_round(path, column_descriptions, last_kept_round)
        with replacement_file(path) as file:
            file.writelines(f"# {name}: {description}\n" for name, description in column_descriptions.items())
            writer = csv.DictWriter(file, list(column_descriptions))
            writer.writeheader()
            writer.writerows(rows)
        csv_file = open(  # noqa: SIM115 (closed by close)
            path, "a", newline="", encoding="utf-8", opener=no_follow_opener
        )
        return cls(path, column_descriptions, csv_file, rows)

    def append(self, rows: list[MetricsRow]) -> None:
        """Append rows and flush them to the operating system, so that they survive the end of the process.

        Raises:
            OutputError: the file cannot be written.
        """
        with name_write_errors(self._path):
            self._writer.writerows(rows)
            self._file.flush()

    def flush_to_disk(self) -> None:
        """Wait until all rows are on the disk, since a checkpoint refers to them."""
        with name_write_errors(self._path):
            flush_to_disk(self._file)

    def close(self) -> None:
        with name_write_errors(self._path):
            self._file.close()
