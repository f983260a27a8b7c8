"""Give Me Some Credit and Adult: the rows that are kept, and messages where the files are not as published."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.core import ConfigError, MissingDataError
from fedsim.data.datasets import Adult, GiveMeSomeCredit
from fedsim.data.datasets.data_files import data_root

HEADER = ",SeriousDlqin2yrs,a,b,c,d,e,f,g,h,i,j\n"
needs_credit = pytest.mark.skipif(not (data_root(None) / "give_me_some_credit").exists(), reason="no credit data")
needs_adult = pytest.mark.skipif(not (data_root(None) / "adult").exists(), reason="no Adult data")


class SmallCredit(GiveMeSomeCredit):
    rows, complete, positives, negatives = 60, 50, 12, 20


class SmallAdult(Adult):
    counts = ((40, 9), (20, 6))


def write_credit(folder, seed: int = 0) -> np.ndarray:
    """60 rows, of which 10 have a missing entry and 12 of the others are positive."""
    draw = np.random.default_rng(seed)
    labels = np.zeros(60, dtype=int)
    labels[draw.permutation(50)[:12]] = 1
    features = draw.normal(5.0, 3.0, (60, 10))
    lines = [",".join([str(i + 1), str(labels[i]), *map(repr, features[i].tolist())]) for i in range(60)]
    lines[50:] = [",".join([*line.split(",")[:6], "NA", *line.split(",")[7:]]) for line in lines[50:]]
    order = draw.permutation(60)
    (folder / "give_me_some_credit").mkdir()
    (folder / "give_me_some_credit" / "cs-training.csv").write_text(HEADER + "\n".join(lines[i] for i in order) + "\n")
    complete = [i for i in order if i < 50]
    return np.column_stack([labels[complete], features[complete]])


def test_credit_is_standardised_over_complete_rows_then_balanced(tmp_path):
    table = write_credit(tmp_path)
    data = SmallCredit(str(tmp_path))
    scaled = (table[:, 1:] - table[:, 1:].mean(0)) / table[:, 1:].std(0)
    expected = np.concatenate([scaled[table[:, 0] == 1], scaled[table[:, 0] == 0][:20]])
    np.testing.assert_allclose(data.train_x, expected, atol=1e-5)
    assert data.train_y.tolist() == [1] * 12 + [0] * 20
    assert (data.strategic, data.loss, data.classes) == ((0, 5, 7), "logistic", 2)
    assert data.feature_names == tuple(HEADER.strip().split(",")[2:])
    whole = SmallCredit(str(tmp_path), balanced=False)
    np.testing.assert_allclose(whole.train_x, scaled, atol=1e-5)
    assert whole.train_y.tolist() == table[:, 0].tolist()


def test_a_credit_file_that_is_not_the_published_one_is_refused(tmp_path):
    with pytest.raises(MissingDataError, match=r"no usable .*cs-training\.csv.*kaggle"):
        GiveMeSomeCredit(str(tmp_path))
    write_credit(tmp_path)
    with pytest.raises(MissingDataError, match="has 60 rows, the published file 150000"):
        GiveMeSomeCredit(str(tmp_path))
    path = tmp_path / "give_me_some_credit" / "cs-training.csv"
    path.write_text(path.read_text().replace("\n", "\nx", 3))
    with pytest.raises(MissingDataError, match="is damaged"):
        SmallCredit(str(tmp_path))


@needs_credit
def test_the_published_credit_data():
    """Counts of the literature; the three strategic features are those with these names in the file's header."""
    data = GiveMeSomeCredit()
    assert data.train_x.shape == (18_357, 10)
    assert int(data.train_y.sum()) == 8_357
    header = (data_root(None) / "give_me_some_credit" / "cs-training.csv").open().readline().strip().split(",")[2:]
    names = ["RevolvingUtilizationOfUnsecuredLines", "NumberOfOpenCreditLinesAndLoans", "NumberRealEstateLoansOrLines"]
    assert [header[f] for f in data.strategic] == names


def write_adult(folder) -> dict[str, np.ndarray]:
    """Rows as UCI prints them; the test file has a comment line and full stops."""
    draw, kept = np.random.default_rng(1), {}
    (folder / "adult").mkdir()
    for file, rows, positives, stop in (("adult.data", 40, 9, ""), ("adult.test", 20, 6, ".")):
        numbers = draw.integers(1, 99, (rows, 6))
        y = np.zeros(rows, dtype=int)
        y[draw.permutation(rows)[:positives]] = 1
        lines = ["|1x3 Cross validator"] if stop else []
        for n, label in zip(numbers, y, strict=True):
            fields = [n[0], "Private", n[1], "Bachelors", n[2], "a", "?", "c", "d", "e", n[3], n[4], n[5], "Cuba"]
            lines.append(", ".join(map(str, fields)) + (", >50K" if label else ", <=50K") + stop)
        (folder / "adult" / file).write_text("\n".join(lines) + "\n\n")
        kept[file] = np.column_stack([y, numbers])
    return kept


@pytest.mark.parametrize("balanced", [True, False])
def test_adult_is_standardised_by_its_training_rows(tmp_path, balanced):
    kept = write_adult(tmp_path)
    data = SmallAdult(str(tmp_path), features=["capital_gain", "age"], balanced=balanced)
    train, test = kept["adult.data"], kept["adult.test"]
    mean, std = train[:, [4, 1]].mean(0), train[:, [4, 1]].std(0)
    for x, y, table in ((data.train_x, data.train_y, train), (data.test_x, data.test_y, test)):
        positive, negative = table[table[:, 0] == 1], table[table[:, 0] == 0]
        rows = np.concatenate([positive, negative[: len(positive)]]) if balanced else table
        np.testing.assert_allclose(x, (rows[:, [4, 1]] - mean) / std, atol=1e-5)
        assert torch.equal(y, torch.as_tensor(rows[:, 0]))


def test_adult_files_and_settings_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(MissingDataError, match=r"no usable .*adult\.data.*archive\.ics\.uci\.edu"):
        Adult(str(tmp_path))
    write_adult(tmp_path)
    with pytest.raises(MissingDataError, match="has 40 rows and 9 positives, the published file 32561"):
        Adult(str(tmp_path))
    with pytest.raises(ConfigError, match=r"features names 'height'"):
        SmallAdult(str(tmp_path), features=["height"])


@needs_adult
def test_the_published_adult_data():
    data = Adult()
    assert data.train_x.shape == (15_682, 4)
    assert data.test_x.shape == (7_692, 4)
    assert (int(data.train_y.sum()), int(data.test_y.sum())) == (7_841, 3_846)
    assert Adult(balanced=False).train_x.shape == (32_561, 4)
