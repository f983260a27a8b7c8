"""Adult: does a person earn more than 50,000 dollars a year? (Becker and Kohavi 1996; profl §6)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.files import check_regular_path
from fedsim.data.datasets.data_files import Files, data_root
from fedsim.data.datasets.dataset import Dataset

# Numeric columns of the file, which have no missing entries.
FEATURE_COLUMNS = {
    "age": 0,
    "fnlwgt": 2,
    "education_num": 4,
    "capital_gain": 10,
    "capital_loss": 11,
    "hours_per_week": 12,
}
LABEL, WIDTH = 14, 15


class Adult(Dataset):
    """Numeric features, y = 1 for an income above 50K; loss logistic.

    Read from ROOT/adult/adult.data (32,561 rows, 7,841 positives) and adult.test (16,281 rows, 3,846 positives).
    Features are standardised by the training rows' mean and standard deviation. `balanced` then keeps all positives and
    as many of the first negatives, positives first: 15,682 training and 7,692 test rows. profl uses four features but
        does not name them or say how rows are sampled: features and balance are our choice.

    Args:
        root: see `data_root`.
        features: names in `FEATURE_COLUMNS`.
        balanced: whether classes are made equal in size.
    """

    files = Files(
        (("adult/adult.data", "adult/adult.test"),),
        "archive.ics.uci.edu/dataset/2/adult",
        "https://archive.ics.uci.edu/static/public/2/adult.zip",
        folder="adult",
    )
    counts = ((32_561, 7_841), (16_281, 3_846))

    def __init__(
        self,
        root: str | None = None,
        features: Sequence[str] = ("age", "education_num", "capital_gain", "hours_per_week"),
        balanced: bool = True,
    ) -> None:
        for name in features:
            if name not in FEATURE_COLUMNS:
                raise ConfigError(
                    f"{{features}} names {name!r}; choose from {', '.join(FEATURE_COLUMNS)}", mentions=("features",)
                )
        if not features:
            raise ConfigError(
                key="features", value=[], needs=f"leaves nothing; choose from {', '.join(FEATURE_COLUMNS)}"
            )
        folder, feature_columns = data_root(root) / "adult", [FEATURE_COLUMNS[name] for name in features]
        splits = [
            self._read(folder / file, feature_columns, *counts)
            for file, counts in zip(("adult.data", "adult.test"), self.counts, strict=True)
        ]
        mean, std = splits[0][0].mean(0), splits[0][0].std(0)
        (train_x, train_y), (test_x, test_y) = ((self._standardised_data(x, mean, std, y, balanced)) for x, y in splits)
        super().__init__("adult", train_x, train_y, test_x, test_y, classes=2, loss="logistic")
        self.feature_names = tuple(features)

    @staticmethod
    def _standardised_data(
        x: np.ndarray, mean: np.ndarray, std: np.ndarray, y: np.ndarray, balanced: bool
    ) -> tuple[Tensor, Tensor]:
        """Standardised features and labels; equally many of both classes if `balanced`."""
        indices = np.arange(len(y))
        if balanced:
            indices = np.concatenate([np.flatnonzero(y == 1), np.flatnonzero(y == 0)[: int(y.sum())]])
        return torch.as_tensor(((x - mean) / std)[indices].astype(np.float32)), torch.as_tensor(y[indices])

    @classmethod
    def _read(cls, path: Path, columns: list[int], rows: int, positives: int) -> tuple[np.ndarray, np.ndarray]:
        """x [n, features] and y [n] of one file."""
        try:
            lines = check_regular_path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MissingDataError(
                f"dataset=adult: no usable {path.resolve()} ({{root}}, or the variable FEDSIM_DATA); "
                f"{cls.files.remedy('adult')} ({error})",
                mentions=("root",),
            ) from error
        table = [fields for line in lines if len(fields := [f.strip() for f in line.split(",")]) == WIDTH]
        y = np.array([fields[LABEL].startswith(">50K") for fields in table], dtype=np.int64)
        if len(table) != rows or y.sum() != positives:
            raise MissingDataError(
                f"dataset=adult: {path} has {len(table)} rows and {y.sum()} positives, the published file {rows} and "
                f"{positives}; download it again"
            )
        try:
            return np.array([[float(fields[c]) for c in columns] for fields in table]), y
        except ValueError as error:
            raise MissingDataError(f"dataset=adult: {path} is damaged ({error}); download it again") from error
