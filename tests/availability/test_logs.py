"""Logs of sessions and long tables: what is played back, whose it is, and which files are refused."""

from __future__ import annotations

import datetime
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told import LOG, PEOPLE, file, played, ready_for

from fedsim import Simulation
from fedsim.availability import Population, Trace, TraceLog, TraceTable
from fedsim.core import ConfigError
from fedsim.data.datasets import Arrays
from fedsim.data.partition import Natural
from fedsim.models import Linear
from fedsim.strategies import FedAvgKnown


def by_hand(sessions: list[tuple[int, int, int]], step: int, cover: Fraction, clients: int) -> list[list[int]]:
    """Moment by moment: the sessions' times are whole, so that a client is there in all of [k, k + 1) or in none."""
    first, last = min(a for _, a, _ in sessions), max(b for _, _, b in sessions)
    there = {(who, k) for who, a, b in sessions for k in range(a, b)}
    rounds = []
    for begin in range(first, last, step):
        covered = [sum((who, k) in there for k in range(begin, begin + step)) for who in range(clients)]
        rounds.append([int(n > 0 if cover == 0 else Fraction(n, step) >= cover) for n in covered])
    return rounds


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stamps=st.booleans())
def test_a_log_is_what_a_count_of_moments_says(data: st.DataObject, stamps: bool) -> None:
    """Sessions that overlap, touch, lie in one another, have no length; numbers and timestamps alike."""
    lines = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 15)).map(
        lambda s: (s[0], s[1], s[1] + s[2])
    )
    sessions = data.draw(st.lists(lines, min_size=1, max_size=25).filter(lambda found: any(b > a for _, a, b in found)))
    step, cover = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    begin = datetime.datetime(2024, 3, 31)
    table = {
        "client": [who for who, _, _ in sessions],
        "from": [str(begin + datetime.timedelta(hours=a)) if stamps else a for _, a, _ in sessions],
        "to": [str(begin + datetime.timedelta(hours=b)) if stamps else b for _, _, b in sessions],
    }
    process = TraceLog(table, f"{step}h" if stamps else step, cover=cover, missing="away")
    if not {str(who) for who in range(4)} & set(process.names or ()):
        return
    expected = by_hand(sessions, step, Fraction(cover), 4)
    assert process.length == len(expected)
    assert played(process, len(expected), None, 4) == expected


def test_a_log_in_words(tmp_path: Path) -> None:
    """Half a round is enough unless `cover` says otherwise; the second session of bob begins before the first ends."""
    path = file(tmp_path, LOG)
    assert played(TraceLog(path, 10), 3) == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert played(TraceLog(path, 10, cover=1.0), 3) == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert played(TraceLog(path, 10, begin=5), 3) == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert played(TraceLog(path, 10, begin=5, cover=0.6), 3) == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert played(TraceLog(path, 10, until=20), 4) == [[1, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]]
    assert TraceLog(path, 7.5).length == 4


ZONES = "device;on;off\n7;2024-05-01T00:00Z;2024-05-01T02:00Z\n11;2024-05-01T03:30+02:00;2024-05-01T04:30+02:00\n"


def test_names_of_columns_are_what_one_says_and_times_have_zones(tmp_path: Path) -> None:
    process = TraceLog(file(tmp_path, ZONES), "1h", client="device", start="on", end="off")
    assert played(process, 3, ("7", "11")) == [[1, 0], [1, 1], [0, 1]]


@pytest.mark.parametrize("kind", ["log", "table", "wide"])
def test_parquet_and_data_frames_are_read_alike(kind: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    hours = pandas.Timestamp("2024-05-01T00:00") + pandas.to_timedelta([0, 1, 2, 3], unit="h")
    if kind == "log":
        frame = pandas.DataFrame({"client": [*PEOPLE[:2]], "from": hours[:2], "to": hours[2:]})
        made, expected = (lambda source: TraceLog(source, "1h", missing="away")), [[1, 0, 0], [1, 1, 0], [0, 1, 0]]
    elif kind == "table":
        frame = pandas.DataFrame({"client": [*PEOPLE], "round": [4, 5, 6], "available": [True, True, False]})
        made, expected = TraceTable, [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    else:
        frame = pandas.DataFrame({"t": [2, 1, 3], "cem": [1.0, 0.0, 0.0], "ann": [0, 1, 0], "bob": [True, True, False]})
        made, expected = (lambda source: Trace(source, round="t")), [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    frame.to_parquet(tmp_path / "record.parquet")
    frame.to_csv(tmp_path / "record.csv", index=False)
    for source in (frame, str(tmp_path / "record.parquet"), str(tmp_path / "record.csv")):
        process = made(source)
        assert process.length == 3
        assert played(process, 3) == expected
    if kind == "log":
        zoned = frame.assign(**{name: frame[name].dt.tz_localize("Asia/Tokyo") for name in ("from", "to")})
        assert played(made(zoned), 3) == expected
        for source in (frame, str(tmp_path / "record.parquet"), str(tmp_path / "record.csv")):
            later = TraceLog(source, "1h", missing="away", begin="2024-05-01T01:00")
            assert played(later, 2) == expected[1:]


def test_a_long_table_holds_probabilities_or_nothing_but_who_was_there(tmp_path: Path) -> None:
    """Rounds count from the least one; what is not said is 0; a round that nobody mentions is there and empty."""
    text = "round,client,available\n11,bob,0.25\n10,ann,yes\n13,ann,0\n13,cem,1\n"
    process = ready_for(TraceTable(file(tmp_path, text)), (0, 1), 3, names=PEOPLE)
    expected = [[1, 0, 0], [0, 0.25, 0], [0, 0, 0], [0, 0, 1]]
    assert [process.probabilities(t).tolist() for t in range(4)] == [[line, line] for line in expected]
    assert process.length == 4
    assert not process.unknown_reason
    listed = TraceTable(file(tmp_path, "who,t\nann,0\ncem,0\nbob,1\n"), "who", "t", available=None)
    assert played(listed, 4) == [[1, 0, 1], [0, 1, 0]] * 2


def own(names: tuple[str, ...] | None, clients: int) -> Population:
    return Population((0, 5), clients, names=names)


def test_names_decide_whose_record_it_is(tmp_path: Path) -> None:
    """In whatever order file and data have them; also where replicates have clients of their own."""
    text = "cem,ann,bob\n1,0,0\n0,1,0\n"
    assert played(Trace(file(tmp_path, text)), 2) == [[0, 0, 1], [1, 0, 0]]
    assert played(Trace(file(tmp_path, "2,0,1\n1,0,0\n0,1,0\n")), 2, None) == [[0, 0, 1], [1, 0, 0]]
    process = Trace(file(tmp_path, text), unknown="ignore")
    process.setup(Population((0, 1), 2, names_by_replicate=(("ann", "cem"), ("cem", "bob"))))
    assert process.counts(0).tolist() == [[0, 1], [1, 0]]
    assert played(TraceLog(file(tmp_path, LOG), 10, unknown="ignore"), 1, ("bob",)) == [[1]]
    assert played(TraceLog(file(tmp_path, LOG), 10, missing="away"), 1, (*PEOPLE, "dot")) == [[1, 1, 0, 0]]


def test_records_are_taken_in_order_or_drawn_where_one_says_so(tmp_path: Path) -> None:
    """Numbers by their size, words by the alphabet, columns as they stand; draws without replacement, by seed."""
    text = "client,from,to\n10,0,1\n9,1,2\n200,2,3\n"
    assert played(TraceLog(file(tmp_path, text), 1, match="order"), 3) == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert played(Trace(file(tmp_path, "z,b,a\n1,0,0\n0,1,1\n"), match="order"), 2) == [[1, 0, 0], [0, 1, 1]]
    drawn = TraceLog(file(tmp_path, text), 1, match="draw")
    drawn.setup(Population(tuple(range(40)), 2))
    whole = np.stack([drawn.counts(t) for t in range(3)])
    assert (whole.sum(0) == 1).all()
    assert (whole.sum(2) <= 1).all()
    assert len({line.tobytes() for line in np.moveaxis(whole, 1, 0).copy()}) == 6
    alone = TraceLog(file(tmp_path, text), 1, match="draw")
    alone.setup(Population((7,), 2))
    assert np.array_equal(alone.counts(1)[0], whole[1, 7])


@pytest.mark.parametrize(
    ("text", "header", "expected"),
    [
        ("0,1\n1,1\n", "true", [[1, 1]]),
        ("0,1\n1,1\n", "false", [[0, 1], [1, 1]]),
        ("1,0\n1,0\n", True, [[0, 1]]),
        ("true,FALSE\n0,1\n", "auto", [[1, 0], [0, 1]]),
    ],
)
def test_a_first_line_of_noughts_and_ones_is_what_one_says(
    text: str, header: str | bool, expected: list, tmp_path: Path
) -> None:
    process = Trace(file(tmp_path, text), header=header)
    assert process.length == len(expected)
    assert played(process, len(expected), None, 2) == expected


def test_a_first_line_that_may_be_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1 may be the names.*availability\.header=true or false"):
        played(Trace(file(tmp_path, "0,1\n1,1\n")), 1, None, 2)


def test_numbers_name_clients_where_a_round_follows_them(tmp_path: Path) -> None:
    process = Trace(file(tmp_path, "12,976906\n1,0\n"))
    assert process.names == ["12", "976906"]
    assert process.length == 1
    with pytest.raises(ConfigError, match="line 1, column 1: 12 is not between 0 and 1"):
        Trace(file(tmp_path, "12,976906\n"))


def test_a_log_of_the_datas_own_clients_trains_and_what_it_cannot_tell_is_refused(tmp_path: Path) -> None:
    """Ids as in the data; a record has no probabilities; a run longer than a record that does not repeat is refused."""
    draw = np.random.default_rng(0)
    owners = np.repeat([976906, 976911, 12], 8)
    data = Arrays(draw.normal(size=(24, 3)).astype("float32"), draw.choice(["up", "down"], 24), clients=owners)
    path = file(tmp_path, "client,from,to\n976911,0,3\n12,1,2\n976906,2,4\n")

    def simulation(rounds: int, shuffle: bool = False, **options) -> Simulation:
        strategy = options.pop("strategy", None)
        made = TraceLog(path, 1, **options)
        return Simulation(
            data, Linear, 3, Natural(shuffle=shuffle), made, strategy=strategy, rounds=rounds, seeds=[0, 1, 2]
        )

    run = simulation(4)
    assert run.federation.client_names == ("12", "976906", "976911")
    assert [run.availability.counts(t)[0].tolist() for t in range(4)] == [[0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 1, 0]]
    assert run.run().history[-1]["round"] == 4
    shuffled = simulation(1, shuffle=True).availability
    assert shuffled.population.names is None
    at = [names.index("976911") for names in shuffled.population.names_by_replicate]
    assert [shuffled.counts(0)[r].argmax() for r in range(3)] == at
    with pytest.raises(ConfigError, match=r"fedavg_known divides .*=TraceLog replays recorded availability"):
        simulation(4, strategy=FedAvgKnown())
    with pytest.raises(ConfigError, match=r"rounds=5 exceeds the 4 rounds of availability\.path="):
        simulation(5, repeat=False)


def united(sessions: list[tuple[float, float]], begin: float, end: float) -> float:
    """The time between begin and end that sessions cover, one after the other."""
    covered, reached = 0.0, begin
    for a, b in sorted(sessions):
        covered += max(0.0, min(b, end) - max(a, reached))
        reached = max(reached, min(b, end))
    return covered


def test_many_clients_are_counted_as_each_alone() -> None:
    draw = np.random.default_rng(1)
    who, begin = draw.integers(5000, size=30_000), draw.random(30_000) * 1000
    end = begin + draw.random(30_000) * 60
    process = TraceLog({"client": who, "from": begin, "to": end}, 10.0)
    names = tuple(process.names or ())
    process.setup(Population((0,), len(names), names=names))
    for t in (0, 37, process.length - 1):
        counts, at = process.counts(t)[0], begin.min() + 10 * t
        for place in range(0, len(names), 100):
            mine = np.flatnonzero(who == int(names[place]))
            covered = united([(begin[k], end[k]) for k in mine], at, at + 10)
            assert counts[place] == (covered >= 5)
