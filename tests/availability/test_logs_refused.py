"""Logs, long tables and tables of columns that are no such thing: one sentence each, with the line or the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from told import LOG, PEOPLE, file, played

from fedsim.availability import Trace, TraceLog, TraceTable
from fedsim.core import ConfigError

WHOSE = {
    "nobody known": (
        LOG,
        {},
        ("dan", "eve", "fay"),
        r"has none .* it has 'ann', 'bob', 'cem', and the run's clients",
    ),
    "no names in the data": (
        LOG,
        {},
        None,
        r"the data have no client names, so clients are named 0 to 2; .*order or",
    ),
    "a stranger": (LOG, {}, ("ann", "bobby", "cem"), r"has 'bob', and .* did you mean 'bobby'\?"),
    "somebody missing": (
        LOG,
        {"unknown": "ignore"},
        (*PEOPLE, "dan"),
        r"no record of client 'dan' \(clients=4\); .*missing=away",
    ),
    "many strangers": (LOG, {}, ("ann",), r"has 'bob', 'cem', and .*availability\.unknown=ignore"),
    "too many in order": (LOG, {"match": "order"}, ("x",), r"has 3 clients, but clients=1"),
    "too few in order": (LOG, {"match": "order"}, ("x",) * 5, r"has 3 clients, but clients=5.*missing=away"),
    "too few to draw": (LOG, {"match": "draw"}, ("x",) * 5, r"has 3 clients, too few to draw clients=5"),
}


@pytest.mark.parametrize("case", WHOSE)
def test_names_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    text, options, names, message = WHOSE[case]
    path = file(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^availability\.path={re.escape(path)}\b.*{message}"):
        played(TraceLog(path, 10, **options), 1, names)


BAD = {
    "ends before it begins": ("client,from,to\nann,1,2\nbob,5,4\n", 1, "line 3: the session ends before it begins"),
    "an end is missing": ("client,from,to\nann,1,\n", 1, "line 2 has no 'to'"),
    "a beginning is NaN": ("client,from,to\nann,nan,2\n", 1, "line 2 has no 'from'"),
    "infinite": ("client,from,to\nann,1,inf\n", 1, "line 2: inf in 'to' is not a time"),
    "nobody": ("client,from,to\nann,1,2\n,1,2\n", 1, "line 3 has no 'client'"),
    "empty": ("client,from,to\n", 1, "at least one row"),
    "nothing at all": ("", 1, "at least one row"),
    "other columns": ("client,start,end\nann,1,2\n", 1, "no column 'from' (availability.start); it has client"),
    "no times": ("client,from,to\nann,soon,later\n", 1, "line 2: 'soon' in 'from' is neither a number nor a timestamp"),
    "other dates": ("client,from,to\nann,01/02/2024,02/02/2024\n", "1h", "'01/02/2024' in 'from' is neither"),
    "two kinds": ("client,from,to\nann,1,2024-05-01\n", 1, "'from' and 'to' are times of different kinds"),
    "some zones": (
        "client,from,to\nann,2024-05-01,2024-05-02\nbob,2024-05-01T00:00Z,2024-05-02\n", "1d",
        "some entries of 'from' have a time zone and some have none",
    ),
    "a length for numbers": (LOG, "1h", "round='1h' is for timestamps, but the times"),
    "a number for stamps": ("client,from,to\nann,2024-05-01,2024-05-02\n", 9, "round=9 must be a length"),
    "an unknown unit": ("client,from,to\nann,2024-05-01,2024-05-02\n", "5m", "units are ms, s, min, h, d, w"),
    "a round of no length": (LOG, 0, "round=0 must be positive"),
    "a negative round": (LOG, -2.5, "round=-2.5 must be positive"),
    "rounds without number": (LOG, 1e-300, "cuts"),
    "no time passes": ("client,from,to\nann,3,3\n", 1, "no time lies between its beginning and end"),
    "ragged": ("client,from,to\nann,1,2\nbob,1\n", 1, "line 3 has 2 entries"),
    "two columns of a name": ("client,from,from\nann,1,2\n", 1, "several columns are named 'from'"),
    "two columns for one": (LOG, {"round": 1, "end": "from"}, "must be columns of their own"),
    "it begins elsewhere": (LOG, {"round": 1, "begin": "2024-05-01"}, "begin='2024-05-01' is of other times"),
    "it begins after its end": (LOG, {"round": 1, "begin": 99}, "no time lies between"),
    "no such cover": (LOG, {"round": 1, "cover": 1.5}, "cover=1.5"),
    "no such match": (LOG, {"round": 1, "match": "name"}, "match='name' is unknown"),
    "underscores": ("client,from,to\nann,1_0,20\n", 1, "'1_0' in 'from' is neither"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_log_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    text, options, message = BAD[case]
    with pytest.raises(ConfigError) as refused:
        TraceLog(file(tmp_path, text), **(options if isinstance(options, dict) else {"round": options}))
    said = str(refused.value)
    assert message in said
    assert "\n" not in said
    assert "log.csv" in said or any(
        said.startswith(f"{key}=") for key in ("round", "begin", "client", "cover", "match")
    )


BAD_TABLES = {
    "twice": (
        "client,round,available\nann,1,1\nbob,1,1\nann,1,0\n",
        "line 4 is a second row of 'ann' in the same round",
    ),
    "twice in a later round": (
        "client,round,available\nann,1,1\nann,2,1\nbob,2,1\nbob,2,0\n",
        "line 5 is a second row of 'bob' in the same round",
    ),
    "half a round": ("client,round,available\nann,1.5,1\n", "line 2: '1.5' in 'round' is not a round"),
    "a round in words": ("client,round,available\nann,0,1\nann,first,1\n", "line 3: 'first' in 'round' is not a round"),
    "no round": ("client,round,available\nann,,1\n", "line 2: '' in 'round' is not a round"),
    "a probability above one": ("client,round,available\nann,1,1.5\n", "line 2: '1.5' in 'available' is neither"),
    "a probability is missing": ("client,round,available\nann,1,1\nann,2,\n", "line 3: '' in 'available' is neither"),
    "maybe": ("client,round,available\nann,1,maybe\n", "line 2: 'maybe' in 'available' is neither"),
    "nobody": ("client,round,available\n ,1,1\n", "line 2 has no 'client'"),
    "no column": ("client,round,there\nann,1,1\n", "no column 'available' (availability.available)"),
    "no rows": ("client,round,available\n", "at least one row"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    text, message = BAD_TABLES[case]
    with pytest.raises(ConfigError) as refused:
        TraceTable(file(tmp_path, text))
    assert message in str(refused.value)


BAD_TRACES = {
    "a number for a round": ("round,a,b\n0,1,1\n2,0,1\n", {}, "1: 2 is not between 0 and 1; if it counts rounds, set"),
    "no such column": ("t,a\n0,1\n", {"round": "time"}, "no column 'time' (availability.round)"),
    "a gap in the rounds": ("t,a\n0,1\n2,1\n", {"round": "t"}, "line 3: the rounds in 't' must follow one another"),
    "a round twice": ("t,a\n0,1\n1,1\n1,1\n", {"round": "t"}, "line 4: the rounds in 't' must follow one another"),
    "a round without a client": ("t\n0\n1\n", {"round": "t"}, "no column of a client"),
    "no names for a round": ("0,1\n1,1\n", {"round": "t"}, "has no line of names"),
    "names twice": ("a,b,a\n1,1,1\n", {}, "line 1: several columns are named 'a'"),
    "a nameless one": ("a,,b\n1,1,1\n", {}, "line 1, column 2: '' is not a number, and no name"),
    "words": ("a,b\nyes,1\n", {}, "line 2, column 1: 'yes' is not a number"),
    "ragged": ("a,b\n1,1\n0\n", {}, "line 3"),
    "nothing": ("", {}, "has shape [0]; expected [rounds, clients]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_bad_table_of_columns_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    text, options, message = BAD_TRACES[case]
    with pytest.raises(ConfigError) as refused:
        Trace(file(tmp_path, text), **options)
    assert message in str(refused.value)
