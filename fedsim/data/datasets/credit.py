"""Give Me Some Credit: loan applicants, as the performative literature prepares them (Perdomo et al. 2020)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch

from fedsim.core.errors import MissingDataError
from fedsim.core.files import check_regular_path
from fedsim.data.datasets.data_files import Files, data_root
from fedsim.data.datasets.dataset import Dataset

CSV_PATH = "give_me_some_credit/cs-training.csv"


class GiveMeSomeCredit(Dataset):
    """10 features, y = 1 for applicants who defaulted; loss logistic (one output; the bias is the model's own and does
    not move with the shift).

    Read from ROOT/give_me_some_credit/cs-training.csv. Of 150,000 rows the 120,269 complete ones are standardised (each
    feature to mean 0 and variance 1 over them), then all 8,357 positives and the first 10,000 negatives are kept,
    positives first: 18,357 rows, no test set. Strategic features: 0, 5, 7 = revolving utilisation, open credit lines,
    real-estate loans. The literature's ridge is of order 1/n: model.ridge=5e-5.

    Args:
        root: see `data_root`.
        balanced: whether classes are made nearly equal in size as described; otherwise all complete rows are kept in
            file order, of which 7 % are positive.
    """

    files = Files(((CSV_PATH,),), "www.kaggle.com/competitions/GiveMeSomeCredit/data")
    rows, complete, positives, negatives = 150_000, 120_269, 8_357, 10_000

    def __init__(self, root: str | None = None, balanced: bool = True) -> None:
        column_names, table = self._read(data_root(root) / CSV_PATH)
        table = table[np.isfinite(table).all(1)]
        labels, features = table[:, 1].astype(np.int64), table[:, 2:]
        self._check_published_count("complete rows", len(table), self.complete)
        self._check_published_count("positives", int(labels.sum()), self.positives)
        scaled_features = (features - features.mean(0)) / features.std(0)
        indices = np.arange(len(labels))
        if balanced:
            indices = np.concatenate([np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)[: self.negatives]])
        x, y = torch.as_tensor(scaled_features[indices].astype(np.float32)), torch.as_tensor(labels[indices])
        super().__init__("give_me_some_credit", x, y, classes=2, loss="logistic", strategic=(0, 5, 7))
        self.feature_names = column_names[2:]

    def _read(self, path: Path) -> tuple[tuple[str, ...], np.ndarray]:
        """The names of the columns and [150000, 12]: row number, label, features; missing entries NaN."""
        try:
            text = check_regular_path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise MissingDataError(
                f"dataset=give_me_some_credit: no usable {path.resolve()} ({{root}}, or the variable FEDSIM_DATA); "
                f"{self.files.remedy('give_me_some_credit')} ({error})",
                mentions=("root",),
            ) from error
        try:
            table = np.loadtxt(io.StringIO(text.replace("NA", "nan")), delimiter=",", skiprows=1, ndmin=2)
        except ValueError as error:
            raise MissingDataError(
                f"dataset=give_me_some_credit: {path} is damaged ({error}); download it again"
            ) from error
        self._check_published_count("rows", len(table), self.rows)
        self._check_published_count("columns", table.shape[1], 12)
        return tuple(name.strip().strip('"') for name in text.partition("\n")[0].split(",")), table

    @staticmethod
    def _check_published_count(counted_noun: str, count: int, published_count: int) -> None:
        if count != published_count:
            raise MissingDataError(
                f"dataset=give_me_some_credit: {CSV_PATH} has {count} {counted_noun}, the published "
                f"file {published_count}; "
                "download it "
                "again"
            )
