"""Recorded traces: what is played back, and which files are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from told import TRACE, ready_for

from fedsim import Simulation
from fedsim.availability import (
    Trace,
)
from fedsim.core import ConfigError, MissingDataError
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import FedAvg


def save(folder: Path, name: str, content: str | np.ndarray) -> str:
    path = folder / name
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.save(path, content, allow_pickle=content.dtype == object)
    return str(path)


NAMES = ("phone", "tablet", "watch")
GOOD = {
    "csv": ("t.csv", "0,0.5,1\n1,1,0\n"),
    "csv with header": ("t.csv", "phone,tablet,watch\n0,0.5,1\n1,1,0\n"),
    "csv without last newline": ("t.csv", "0,0.5,1\n1,1,0"),
    "csv of Windows": ("t.csv", "phone,tablet,watch\r\n0,0.5,1\r\n1,1,0\r\n"),
    "csv with spaces": ("t.csv", "0, .5, 1\n1.0, 1e0, 0\n"),
    "npy": ("t.npy", np.array([[0, 0.5, 1], [1, 1, 0]])),
    "npy float32": ("t.npy", np.array([[0, 0.5, 1], [1, 1, 0]], dtype=np.float32)),
}


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("repeat", [True, False])
def test_a_trace_is_read_line_by_line(case: str, repeat: bool, tmp_path: Path) -> None:
    process = ready_for(Trace(save(tmp_path, *GOOD[case]), repeat), (0, 1, 2), 3, names=NAMES)
    process.check_rounds(2)
    for t, line in enumerate(([0, 0.5, 1], [1, 1, 0])):
        assert process.probabilities(t).tolist() == [line] * 3
    assert process.counts(1).tolist() == [[1, 1, 0]] * 3
    assert (process.counts(0)[:, [0, 2]] == [0, 1]).all()


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64])
def test_a_recording_of_zeros_and_ones_is_played_back_as_it_is(dtype: type, tmp_path: Path) -> None:
    recorded = np.random.default_rng(1).random((9, 4)) < 0.5
    process = ready_for(Trace(save(tmp_path, "t.npy", recorded.astype(dtype)), repeat=False), clients=4)
    for t in range(9):
        assert np.array_equal(process.counts(t), [recorded[t]] * 2)


def test_a_trace_starts_again_at_its_end(path: str) -> None:
    """Line t mod length; where it tosses coins, they are fresh ones in every turn."""
    process = ready_for(Trace(path), clients=5)
    process.check_rounds(10_000)
    for t in (0, 6, 7, 13, 700):
        assert np.array_equal(process.probabilities(t), [TRACE[t % 7]] * 2)
    assert any((process.counts(t) != process.counts(t + 7)).any() for t in range(7))


def simulation_of(path: str, repeat: bool, rounds: int, clients: int = 5) -> Simulation:
    return Simulation(
        Quadratics(clients=clients, dimension=2),
        Mean,
        clients=clients,
        availability=Trace(path, repeat),
        strategy=FedAvg(),
        local=SGD(steps=1),
        rounds=rounds,
    )


def test_a_trace_that_ends_before_the_run_is_refused_before_the_first_round(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"rounds=8 exceeds the 7 rounds of availability\.path={re.escape(path)}"):
        simulation_of(path, False, 8)
    assert simulation_of(path, False, 7).run().history[-1]["round"] == 7
    assert simulation_of(path, True, 8).run().history[-1]["round"] == 8


def test_a_trace_of_other_clients_is_refused_before_the_first_round(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"availability\.path={re.escape(path)} has 5 clients, but clients=4"):
        simulation_of(path, True, 3, clients=4)


BAD = {
    "ragged": ("t.csv", "1,0,1\n1,0\n0,0,1\n", r"line 2: 2 columns, expected 3"),
    "too long a line": ("t.csv", "a,b\n1,0\n1,0,1\n", r"line 3: 3 columns, expected 2"),
    "ragged header": ("t.csv", "a,b\n1,0,1\n", r"line 2: 3 columns, expected 2"),
    "blank line": ("t.csv", "1,0\n\n1,1\n", r"line 2: 0 columns, expected 2"),
    "empty cell": ("t.csv", "1,0\n1,\n", r"line 2, column 2: '' is not a number"),
    "empty cell after a header": ("t.csv", "a,b\n1,0\n,1\n", r"line 3, column 1: '' is not a number"),
    "empty cell in the first line": ("t.csv", "1,\n1,0\n", r"line 1, column 2: '' is not a number"),
    "empty cells for a header": ("t.csv", ",\n1,0\n", r"line 1"),
    "text": ("t.csv", "1,0\n1,on\n", r"line 2, column 2: 'on' is not a number"),
    "a second header": ("t.csv", "a,b\nc,d\n1,0\n", r"line 2, column 1: 'c' is not a number"),
    "semicolons": ("t.csv", "1,0\n0.5;1\n", r"line 2: 1 columns, expected 2"),
    "not a number": ("t.csv", "a,b\n1,0\n1,nan\n", r"line 3, column 2: nan is not between 0 and 1"),
    "infinite": ("t.csv", "1,0\n-inf,1\n", r"line 2, column 1: -inf is not between 0 and 1"),
    "above one": ("t.csv", "1,0\n1,1.5\n", r"line 2, column 2: 1\.5 is not between 0 and 1"),
    "below zero": ("t.csv", "a,b\n-0.1,0\n", r"line 2, column 1: -0\.1 is not between 0 and 1"),
    "no line": ("t.csv", "", r"shape \[0\]; expected \[rounds, clients\]"),
    "header only": ("t.csv", "a,b\n", r"shape \[0\]; expected \[rounds, clients\]"),
    "npy of one dimension": ("t.npy", np.ones(4), r"shape \[4\]; expected \[rounds, clients\]"),
    "npy of three dimensions": ("t.npy", np.ones((2, 2, 2)), r"shape \[2, 2, 2\]; expected \[rounds, clients\]"),
    "npy without rounds": ("t.npy", np.ones((0, 3)), r"shape \[0, 3\]"),
    "npy above one": ("t.npy", np.array([[0, 1], [1, 1], [2, 0]]), r"line 3, column 1: 2 is not between 0 and 1"),
    "npy with a gap": ("t.npy", np.array([[0, 1], [1, np.nan]]), r"line 2, column 2: nan is not between 0 and 1"),
    "npy of objects": ("t.npy", np.array([[0, None]], dtype=object), r"not a numeric \.npy array"),
    "npy of text": ("t.npy", np.array([["on", "off"]]), r"not a numeric \.npy array"),
    "npy of records": ("t.npy", np.zeros(3, dtype=[("a", float), ("b", float)]), r"not a numeric \.npy array"),
    "npy of complex numbers": ("t.npy", np.full((2, 2), 0.5 + 1j), r"not a numeric \.npy array"),
    "not an npy": ("t.npy", "1,0\n0,1\n", r"not a numeric \.npy array"),
    "an empty npy": ("t.npy", "", r"not a numeric \.npy array"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_by_path_and_line(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    path = save(tmp_path, name, content)
    with pytest.raises(ConfigError, match=rf"availability\.path={re.escape(path)}\b.*{message}"):
        Trace(path)


def test_an_archive_of_arrays_under_the_name_of_one_is_refused(tmp_path: Path) -> None:
    """An .npz loads without an error, into something that is no array."""
    np.savez(tmp_path / "t.npz", a=np.ones((2, 2)))
    path = (tmp_path / "t.npz").rename(tmp_path / "t.npy")
    with pytest.raises(ConfigError, match=rf"availability\.path={re.escape(str(path))}\b.*not a numeric \.npy array"):
        Trace(str(path))


@pytest.mark.parametrize("name", ["no.csv", "no.npy", "no/such/folder.csv"])
def test_a_missing_file_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    with pytest.raises(MissingDataError, match=rf"availability\.path={re.escape(path)} does not exist"):
        Trace(path)


def test_a_folder_and_bytes_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe1,0\n")
    for path in (tmp_path, tmp_path / "t.csv"):
        with pytest.raises(ConfigError, match=rf"availability\.path={re.escape(str(path))} cannot be read as CSV"):
            Trace(str(path))


def test_a_csv_saved_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Excel's 'CSV UTF-8' begins with one; it is no part of the first number."""
    for text, first in (("0.5,1\n1,0\n", [0.5, 1.0]), ("a,b\n0.5,1\n1,0\n", [0.5, 1.0]), ("0.5\n1\n", [0.5])):
        (tmp_path / "t.csv").write_text(text, encoding="utf-8-sig")
        process = ready_for(Trace(str(tmp_path / "t.csv")), (0,), len(first), names=("a", "b")[: len(first)])
        assert process.probabilities(0).tolist() == [first]


def test_arrays_tensors_and_lists_are_read_as_the_file_that_holds_them(tmp_path: Path) -> None:
    table = np.array([[1.0, 0.25], [0.5, 0.0], [0.0, 1.0]])
    np.save(tmp_path / "trace.npy", table)
    expected = Trace(tmp_path / "trace.npy")
    for values in (table, torch.tensor(table), table.tolist()):
        trace = Trace(values)
        assert [trace.recorded_probabilities(t).tolist() for t in range(3)] == table.tolist()
        assert trace.unknown_reason == expected.unknown_reason
    for bad, message in (
        ([[0.5, 2.0]], "line 1, column 2: 2 is not between 0 and 1"),
        ([0.5, 1.0], "has shape .2.; expected .rounds, clients."),
        ([["a", "b"]], "availability.path is not a numeric array"),
        ([[0.5], [0.5, 1.0]], "availability.path is not a numeric array"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trace(bad)
