"""Tables of one's own: columns by name, categories, what is missing, and whatever is no table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused

from fedsim.core import ConfigError, MissingDataError
from fedsim.data.datasets import Table
from fedsim.data.datasets.own import table_columns as columns

DRAW = np.random.default_rng(1)
N = 60
AGE, HEIGHT = DRAW.integers(18, 90, N), DRAW.normal(170, 10, N).round(1)
JOB, ILL = DRAW.choice(["cook", "smith", "weaver"], N), DRAW.choice(["no", "yes"], N)
WHO = DRAW.choice(["007", "976906", "ann b."], N)
SPLIT = np.where(np.arange(N) % 4 == 0, "Test", "train")
PEOPLE = {"age": AGE, "height": HEIGHT, "job": JOB, "who": WHO, "part": SPLIT, "ill": ILL}
ROLES = {"target": "ill", "client": "who", "split": "part"}


def written(changes: dict[str, Any] | None = None, path: str = "people.csv", mark: str = ",") -> str:
    table = {name: list(values) for name, values in (PEOPLE | (changes or {})).items()}
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def parquet() -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({k: pyarrow.array(v.tolist()) for k, v in PEOPLE.items()}), "people.parquet")
    return "people.parquet"


def frame(library: str) -> Any:
    return getattr(pytest.importorskip(library), "DataFrame" if library != "pyarrow" else "table")(PEOPLE)


def expected() -> np.ndarray:
    """By hand: numbers standardised over the training rows, a feature per word."""
    train = SPLIT == "train"
    numbers = np.column_stack([AGE, HEIGHT])
    numbers = (numbers - numbers[train].mean(0)) / numbers[train].std(0)
    return np.column_stack([numbers, *(word == JOB for word in ("cook", "smith", "weaver"))]).astype(np.float32)


@pytest.mark.parametrize("categories", ["onehot", "ordinal"])
@pytest.mark.parametrize("standardise", [True, False])
def test_other_rows_are_encoded_as_the_training_rows_were(categories, standardise) -> None:
    data = Table(PEOPLE, **ROLES, categories=categories, standardise=standardise)
    train = SPLIT == "train"
    seen = {name: np.asarray(values)[train] for name, values in PEOPLE.items()}
    assert torch.equal(data.encode(seen), data.train_x)
    unseen = {name: np.asarray(PEOPLE[name])[~train] for name in ("age", "height", "job")}  # neither target nor client
    assert torch.equal(data.encode(unseen), data.test_x)
    assert data.encode({"age": [30], "height": [1.7], "job": ["cook"]}).shape == (1, len(data.feature_names))


def test_gaps_in_other_rows_are_filled_by_the_training_rows_or_refused() -> None:
    data = Table(PEOPLE, **ROLES, missing="mean", standardise=False)
    mean = AGE[SPLIT == "train"].mean()
    rows = {"age": ["", "30"], "height": [170.0, 160.0], "job": ["cook", "smith"]}
    assert data.encode(rows)[:, 0].tolist() == pytest.approx([mean, 30.0], rel=1e-6)
    refused(lambda: Table(PEOPLE, **ROLES).encode(rows), "row 0 has no value in column 'age'; a data set with missi")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"age": [3], "height": [1.0]}, "does not have the column 'job'"),
        ({"age": [3], "height": [1.0], "job": ["smiht"]}, "column 'job' holds 'smiht'.*smith"),
        ({"age": ["old"], "height": [1.0], "job": ["cook"]}, "column 'age' holds 'old'; expected numbers"),
        ({"age": [3, 4], "height": [1.0], "job": ["cook"]}, "make the lengths equal"),
        ("nobody.csv", "rows=nobody.csv is not a file"),
        (7, "rows is a int, not a table"),
    ],
)
def test_other_rows_that_do_not_fit_are_refused(rows, said) -> None:
    with pytest.raises((ConfigError, MissingDataError), match=said):
        Table(PEOPLE, **ROLES).encode(rows)


FORMS: dict[str, Any] = {
    "csv": written,
    "semicolons": lambda: written(mark=";"),
    "tabs": lambda: written(mark="\t"),
    "excel's mark and empty lines": lambda: marked(written()),
    "parquet": parquet,
    "pandas": lambda: frame("pandas"),
    "pyarrow": lambda: frame("pyarrow"),
    "polars": lambda: frame("polars"),
    "columns": lambda: {name: values.tolist() for name, values in PEOPLE.items()},
    "a column of tensors": lambda: PEOPLE | {"age": torch.tensor(AGE)},
}


def marked(path: str) -> str:
    content = Path(path).read_text().replace("\n", "\n\n", 9)
    Path(path).write_text("\ufeff" + content)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_gives_the_same(form: str) -> None:
    data, train, x = Table(FORMS[form](), **ROLES), SPLIT == "train", expected()
    assert data.feature_names == ("age", "height", "job=cook", "job=smith", "job=weaver")
    np.testing.assert_allclose(data.train_x, x[train], atol=1e-5)
    np.testing.assert_allclose(data.test_x, x[~train], atol=1e-5)
    assert np.array(data.label_names)[data.train_y].tolist() == ILL[train].tolist()
    assert data.client_names == ("007", "976906", "ann b.")
    assert np.array(data.client_names)[data.owners].tolist() == WHO[train].tolist()
    assert np.array(data.client_names)[data.test_owners].tolist() == WHO[~train].tolist()


def test_a_second_file_is_tested_on() -> None:
    train = SPLIT == "train"
    some = [{k: v[rows] for k, v in PEOPLE.items() if k != "part"} for rows in (train, ~train)]
    data, like = Table(some[0], "ill", client="who", test_path=some[1]), Table(PEOPLE, **ROLES)
    assert torch.equal(data.train_x, like.train_x)
    assert torch.equal(data.test_x, like.test_x)


def test_ordinal_categories_are_numbered_by_the_alphabet() -> None:
    data = Table(PEOPLE, **ROLES, features=["job"], categories="ordinal", standardise=False)
    assert data.feature_names == ("job",)
    jobs = np.array(["cook", "smith", "weaver"])[data.train_x[:, 0].long()]
    assert jobs.tolist() == JOB[SPLIT == "train"].tolist()


@pytest.mark.parametrize("how", ["mean", "median"])
def test_what_is_missing_is_filled_in_by_what_training_rows_have(how: str) -> None:
    gaps = np.arange(N) % 7 == 3
    job, age = np.where(gaps, "NA", JOB), np.where(gaps, "", AGE.astype(str))
    options = {**ROLES, "features": ["age", "job"], "missing": how, "standardise": False, "categories": "ordinal"}
    data = Table(written({"age": age, "job": job}), **options)
    there = (SPLIT == "train") & ~gaps
    words, counts = np.unique(JOB[there], return_counts=True)
    fill = getattr(np, how)(AGE[there]), {"cook": 0, "smith": 1, "weaver": 2}[words[counts.argmax()]]
    for x, rows in ((data.train_x, SPLIT == "train"), (data.test_x, SPLIT != "train")):
        assert gaps[rows].any()
        np.testing.assert_allclose(x[gaps[rows]], np.tile(fill, (gaps[rows].sum(), 1)), rtol=1e-6)
        np.testing.assert_allclose(x[~gaps[rows], 0], AGE[rows & ~gaps])


@pytest.mark.parametrize("constant", [0.0, 0.1, 3.7, 1e6 / 3])
def test_a_column_that_does_not_vary_says_nothing_also_where_it_was_filled_in(constant: float) -> None:
    """The mean of equal numbers may be off by rounding, which a division by their deviation would blow up."""
    for gaps in (np.arange(N) % 7 == 3, np.arange(N) % 3 > 0, np.arange(N) % 2 > 0):
        height = np.where(gaps, "", str(constant))
        data = Table(PEOPLE | {"height": height}, **ROLES, features=["height", "job"], missing="mean")
        for x in (data.train_x, data.test_x):
            assert x[:, 0].abs().max() < 1e-6


def test_a_column_without_an_entry_in_the_training_rows_is_filled_by_zeros() -> None:
    height = np.where(SPLIT == "train", "", HEIGHT.astype(str))
    data = Table(PEOPLE | {"height": height}, **ROLES, features=["height", "job"], missing="mean", standardise=False)
    assert data.feature_names[0] == "height"
    assert data.train_x[:, 0].tolist() == [0.0] * len(data.train_x)
    np.testing.assert_allclose(data.test_x[:, 0], HEIGHT[SPLIT != "train"], rtol=1e-6)


def test_rows_that_lack_something_may_be_dropped() -> None:
    height = [None if row in (3, 4) else float(h) for row, h in enumerate(HEIGHT)]
    data = Table(PEOPLE | {"height": height}, **ROLES, missing="drop")
    assert len(data.train_x) + len(data.test_x) == N - 2
    like = Table({k: np.delete(v, (3, 4)) for k, v in PEOPLE.items()}, **ROLES)
    assert torch.equal(data.train_x, like.train_x)


def test_regression_and_the_features_that_people_change() -> None:
    data = Table(PEOPLE, "height", client="who", task="regression", features=["job", "age"], strategic=["age"])
    assert (data.loss, data.strategic, data.feature_names[-1]) == ("squared", (3,), "age")
    assert data.train_y.dtype == torch.float32
    assert len(data.test_x) == sum(int(0.2 * (who == WHO).sum()) for who in data.client_names)


def broken(content: str | bytes, path: str = "bad.csv") -> str:
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def put(name: str, row: int, value: Any) -> dict[str, Any]:
    """The table with another value in a row; a CSV file has it on line row + 2."""
    values = PEOPLE[name].astype(object)
    values[row] = value
    return {name: values}


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "absent": (lambda: "nowhere.csv", {}, "dataset.path=nowhere.csv is not a file"),
    "a folder": (lambda: str(Path("d.csv").mkdir() or "d.csv"), {}, "d.csv is not a file"),
    "empty": (lambda: broken(""), {}, "this has 0 lines"),
    "names alone": (lambda: broken("a,ill\n"), {}, "this has 1 lines"),
    "bytes": (lambda: broken(b"\xff\xfe\x00a,b\n"), {}, "cannot be read as CSV"),
    "zeros": (lambda: broken("a,ill\n1,\0\n"), {}, "bad.csv"),
    "a quotation without end": (lambda: broken('a,ill\n"1,2\n'), {}, "cannot be read as CSV"),
    "ragged": (lambda: broken("a,ill\n1,2\n3\n"), {}, "line 3 has 1 entries, but there are 2 columns"),
    "a line too wide": (lambda: broken("a,ill\n1,2\n\n3,4,5\n"), {}, "line 4 has 3 entries"),
    "a nameless column": (lambda: broken("a,,ill\n1,2,3\n"), {}, "column 2 has no name"),
    "two of one name": (lambda: broken("a,a,ill\n1,2,3\n"), {}, "several columns are named 'a'"),
    "no such target": (
        written,
        {"target": "il"},
        "dataset.target=il is not a column of people.csv; did you mean 'ill'?",
    ),
    "no such client": (written, {"client": "id"}, "dataset.client=id is not a column of people.csv"),
    "no such feature": (written, {"features": ["age", "hight"]}, "dataset.features=hight is not a column"),
    "target as feature": (
        written,
        {"features": ["age", "ill"]},
        "features names 'ill', which has another role",
    ),
    "one role each": (written, {"client": "ill"}, "a column can have only one of these roles"),
    "no features": (lambda: broken("ill\n1\n2\n"), {"client": None, "split": None}, "no column to predict 'ill' from"),
    "words refused": (written, {"categories": "refuse"}, "column 'job' holds words, such as 'cook'"),
    "too many words": (written, {"max_categories": 2}, "column 'job' holds more than max_categories=2"),
    "missing": (lambda: written(put("age", 5, "")), {}, "line 7 has no value in column 'age'; set missing=drop"),
    "NA": (
        lambda: written(put("job", 5, "n/a")),
        {},
        "line 7 has no value in column 'job' ('n/a' counts as missing); set missing=drop",
    ),
    "infinite": (lambda: written(put("age", 5, "inf")), {}, "line 7 holds inf in column 'age'"),
    "all dropped": (lambda: written({"age": [""] * N}), {"missing": "drop"}, "missing=drop leaves no row"),
    "an empty column": (lambda: written({"age": [""] * N}), {"missing": "mean"}, "column 'age' is empty"),
    "no target": (lambda: written(put("ill", 0, "?")), {}, "line 2 has no value in column 'ill', the target"),
    "3.7 is no label": (
        lambda: written(put("age", 1, "3.7")),
        {"target": "age"},
        "line 3 has the target 3.7, which is",
    ),
    "one class": (lambda: written({"ill": ["no"] * N}), {}, "all labels are 'no'"),
    "no client": (lambda: written(put("who", 1, " ")), {}, "line 3 has no client"),
    "another split": (
        lambda: written(put("part", 2, "val")),
        {},
        "line 4 has 'val' in column 'part'; it must be train or",
    ),
    "test rows alone": (lambda: written({"part": ["test"] * N}), {}, "all rows have test in column 'part'"),
    "split and file": (written, {"test_path": "people.csv"}, "both define test rows; set only one"),
    "test without column": (
        lambda: (written(), written({"age": AGE}, "b.csv"), broken("ill,who\n1,2\n", "c.csv"))[0],
        {"split": None, "test_path": "c.csv"},
        "c.csv does not have the column 'age' of people.csv",
    ),
    "no second file": (written, {"split": None, "test_path": "b.csv"}, "dataset.test_path=b.csv is not a file"),
    "a separator": (written, {"separator": ",,"}, "separator=',,' must be a single character"),
    "strategic": (written, {"strategic": ["aje"]}, "strategic names 'aje', which is not a feature; did you mean"),
    "words to regress": (written, {"target": "job", "task": "regression"}, "is not a number, which task=regression"),
    "an option": (written, {"missing": "zero"}, "missing='zero' is unknown"),
    "no parquet": (lambda: broken("PAR1", "bad.parquet"), {}, "cannot be read as Parquet"),
    "lists": (lambda: PEOPLE | {"age": [[1, 2]] * N}, {}, "column 'age' holds neither numbers nor words"),
    "matrices": (lambda: PEOPLE | {"age": np.zeros((N, 2))}, {}, "column 'age' holds 2-dimensional values"),
    "unequal columns": (lambda: PEOPLE | {"age": AGE[:7]}, {}, "column 'height' has 60 entries, 'age' 7"),
    "dates": (lambda: PEOPLE | {"age": np.array(["2020-01-01"] * N, "M8[D]")}, {}, "neither numbers nor words"),
    "no table": (lambda: 7, {}, "dataset.path is a int, not a table"),
    "a column of nothing": (lambda: PEOPLE | {"age": 7}, {}, "has a column that is 7"),
    "no rows": (lambda: {name: [] for name in PEOPLE}, {}, "the table has no rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables(case: str) -> None:
    make, changes, says = BAD[case]
    if case == "no parquet":
        pytest.importorskip("pyarrow")
    table = make()
    refused(lambda: Table(table, **ROLES | changes), says)


def test_parquet_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    broken("PAR1", "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDataError, match=r"pip install 'fedsim-torch\[table\]'"):
        Table("a.parquet", "ill")


def test_numbers_are_what_numpy_reads_and_python_alone_does_not() -> None:
    none = np.zeros(2, dtype=bool)
    assert columns.as_numbers(np.array(["1_000", "2"], dtype=object), none) is None
    assert columns.as_numbers(np.array([" 1e3", "-2"], dtype=object), none).tolist() == [1000.0, -2.0]
    assert columns.as_numbers(np.array([True, 2], dtype=object), none) is None
