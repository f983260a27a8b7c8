"""Ranks, wins and differences of made-up rows against loops; the page's own program against both."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedsim.core import ConfigError
from fedsim.studies.board.board import Board, Entry
from fedsim.studies.board.costs import RoundTimes
from fedsim.studies.board.findings import Comparison, Finding
from fedsim.studies.board.markdown import markdown
from fedsim.studies.board.page import page_data, page_html, write_pages
from fedsim.studies.board.rows import DONE, REFUSED, CellRows, Row
from fedsim.studies.board.standings import Standings
from fedsim.studies.results.friedman import rank_scores

SEEDS = 4
NAMES = ["FedAvg", "MIFA", "slow", "lost", "elsewhere"]


@pytest.fixture
def found(small: Board) -> Standings:
    """Six cells: `slow` is worst, `lost` lost a seed in one, `elsewhere` cannot run in one."""
    draw = np.random.default_rng(3)
    small.seeds = list(range(SEEDS))
    small.entries = {name: Entry([], remembers=name == "MIFA", about=f"it is {name}") for name in NAMES}
    small.axes = {"availability": {f"a{n}": [] for n in range(6)}}
    cells = []
    for n, cell in enumerate(small.cells()):
        rows = {}
        common = draw.normal(0, 0.05, SEEDS)
        for k, name in enumerate(NAMES):
            accuracy = 0.8 - 0.01 * k + common + draw.normal(0, 0.012, SEEDS)
            rounds = np.where(draw.random(SEEDS) < 0.3, math.nan, draw.integers(5, 100, SEEDS))
            numbers = {"accuracy": accuracy.tolist(), "received": (accuracy - 0.1).tolist(), "rounds": rounds.tolist()}
            curve = [[0.0, 5.0, 10.0], [0.1, float(draw.random()), float(accuracy.mean())]]
            rows[name] = Row(DONE, "", ["strategy=x"], numbers, curve, 8.0 * k)
        if n == 2:
            rows["lost"].numbers["accuracy"][1] = math.nan
            rows["elsewhere"] = Row(REFUSED, "needs everybody")
        cells.append(CellRows(cell, rows))
    times = {"digits": {name: {"ms": 1.5 + k} for k, name in enumerate(NAMES[:4])}}
    return Standings(small, cells, RoundTimes(times))


def naive_scores(found: Standings, name: str) -> list[float]:
    values = [np.array(c.rows[name].numbers["accuracy"]) for c in found.cells]
    return [float(v.mean()) if np.isfinite(v).all() else -math.inf for v in values]


def interval(differences: np.ndarray) -> tuple[float, float]:
    reach = stats.t.ppf(0.975, SEEDS - 1) * differences.std(ddof=1) / math.sqrt(SEEDS)
    return differences.mean() - reach, differences.mean() + reach


def test_ranks_wins_and_differences_are_those_of_a_loop(found: Standings) -> None:
    assert sorted(found.ranked) == ["FedAvg", "MIFA", "lost", "slow"]
    assert found.unranked_reasons == {"elsewhere": "needs everybody"}
    scores = {name: naive_scores(found, name) for name in found.ranked}
    means = {
        name: np.mean([1 + sum(scores[o][n] > scores[name][n] for o in scores) for n in range(6)]) for name in scores
    }
    assert found.ranked == sorted(means, key=lambda name: means[name])
    assert found.test is not None
    np.testing.assert_allclose(found.test.ranks, [means[name] for name in found.ranked])
    for (i, one), (j, other) in itertools.permutations(enumerate(found.ranked), 2):
        won = 0
        for cells in found.cells:
            a, b = (np.array(cells.rows[name].numbers["accuracy"]) for name in (one, other))
            if np.isfinite(a).all() and np.isfinite(b).all():
                won += interval(a - b)[0] > 0
            else:
                won += bool(np.isfinite(a).all())
        assert found.wins[i, j] == won
    assert found.wins.sum() > 3


def test_differences_by_seed_are_of_means_over_the_cells_that_both_have(found: Standings) -> None:
    kept = [c for n, c in enumerate(found.cells) if n != 2]
    a, b = (np.array([c.rows[name].numbers["accuracy"] for c in kept]).mean(0) for name in ("lost", "MIFA"))
    paired = found.paired("lost", "MIFA")
    np.testing.assert_allclose(paired.values, a - b)
    np.testing.assert_allclose(paired.interval, interval(a - b))


def test_the_order_after_half_of_the_rounds_is_held_against_that_at_the_end(found: Standings) -> None:
    taus = [
        stats.kendalltau(*([c.rows[name].curve[1][at] for name in found.ranked] for at in (1, 2))).statistic
        for c in found.cells
    ]
    told = kept = 0
    for cells, (one, other) in itertools.product(found.cells, itertools.permutations(found.ranked, 2)):
        a, b = (np.array(cells.rows[name].numbers["accuracy"]) for name in (one, other))
        lost = [not np.isfinite(x).all() for x in (a, b)]
        if (lost[1] and not lost[0]) or (not any(lost) and interval(a - b)[0] > 0):
            told += 1
            kept += cells.rows[one].curve[1][1] > cells.rows[other].curve[1][1]
    assert found.halfway_orders() == pytest.approx((np.mean(taus), np.min(taus), told, kept))
    assert 0 < kept < told
    assert f"Of the {told} pairs" in (page := markdown(found, []))
    assert f"{100 * kept / told:.1f}% stood in that order" in page


def test_the_page_says_what_is_there_and_what_is_not(found: Standings, tmp_path: Path) -> None:
    text = markdown(Standings(found.board, found.cells[:4]), ["wins.png"])
    assert "**Not complete**: 2 cells are not computed yet." in text
    assert "4 of 6 cells, 19 rows with numbers, 4 seeds each" in text
    assert "- elsewhere: needs everybody" in text
    whole = markdown(found, [])
    assert "Not complete" not in whole
    low, high = (100 * bound for bound in found.paired("slow", "FedAvg").interval)
    assert f"{100 * found.paired('slow', 'FedAvg').mean:+.2f} [{low:+.2f}, {high:+.2f}]" in whole
    known = np.concatenate([c.rows["MIFA"].of("rounds") for c in found.cells])
    assert f"{np.nanmedian(known):.4g} ({100 * np.isfinite(known).mean():.0f} %)" in whole
    with pytest.raises(ConfigError, match="has no rows yet"):
        write_pages(found.board, tmp_path)


def test_sentences_are_shown_by_intervals_or_said_not_to_be(found: Standings) -> None:
    low, high = found.paired("FedAvg", "slow").interval
    assert 0 < low < high  # the rows are made so
    few = Standings(found.board, found.cells[3:5]).paired("MIFA", "FedAvg", "received")
    widest = max(map(abs, few.interval))
    ahead = Comparison("FedAvg", "slow")
    behind = Comparison("slow", "FedAvg")
    alike = Comparison("MIFA", "FedAvg", "alike", "received", ["digits/a3", "*/a4"], within=1.01 * widest)
    unlike = Comparison("MIFA", "FedAvg", "alike", "received", ["digits/a3", "*/a4"], within=0.99 * widest)
    assert [found.compared_difference(each)[1:] for each in (ahead, behind, alike, unlike)] == [
        (6, True),
        (6, False),
        (2, True),
        (2, False),
    ]
    cheaper = Comparison("MIFA", "FedAvg", measure="rounds")
    by, cells, shown = found.compared_difference(cheaper)
    assert (cells, shown) == (
        len(found._value_pairs("MIFA", "FedAvg", "rounds")),
        by.interval[1] < 0,
    )  # fewer are better
    but = Comparison("MIFA", "FedAvg", "alike", "received", ["digits/a3", "*/a4"], ["digits/a3"], 1.0)
    alone = Standings(found.board, found.cells[4:5]).paired("MIFA", "FedAvg", "received")
    assert (found.compared_difference(but)[0].interval, found.compared_difference(but)[1]) == (alone.interval, 1)
    everywhere = Comparison("MIFA", "FedAvg", "alike", "received", but=["*/a4"], within=1.0)
    slow, same = [ahead, behind, but, everywhere], [alike, unlike]
    found.board.findings = [Finding("Slow is slow.", slow), Finding("It does not matter.", same)]
    text = markdown(found, [])
    assert "1. **Slow is slow.**" in text
    assert text.count("**not shown**") == 2
    assert "received, 1 cell (`digits/a3`, `*/a4` but `digits/a3`)" in text
    assert "received, 5 cells (but `*/a4`)" in text
    assert f"   - MIFA less FedAvg, received, 2 cells (`digits/a3`, `*/a4`): {100 * few.mean:+.2f} [" in text
    assert f"within ±{101 * widest:g}" in text
    assert page_html(found).count("not shown") == 2


def test_milliseconds_are_those_of_all_tracks_that_have_rows(found: Standings) -> None:
    assert found.milliseconds("MIFA") == 2.5
    assert found.milliseconds("elsewhere") is None
    found.times.by_track["other"] = {"MIFA": {"ms": 100.0}}
    assert found.milliseconds("MIFA") == 2.5  # it has no rows here
    assert [line.split(" | ")[-1] for line in markdown(found, []).splitlines() if line.startswith("| MIFA")] == [
        "2.5 |"
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_own_program_says_the_same(found: Standings, tmp_path: Path) -> None:
    """Its filters against the same cells in Python: all of them, and a part."""
    scripts = re.findall(r"<script>\n(.*?)</script>", page_html(found), re.DOTALL)
    (tmp_path / "page.js").write_text(scripts[-1])
    (tmp_path / "data.json").write_text(json.dumps(page_data(found), default=str).replace("NaN", "null"))
    program = (
        "const {standings} = require('./page.js'); const data = require('./data.json');"
        "const filter = JSON.parse(process.argv[1]); console.log(JSON.stringify(standings(data, filter).lines));"
    )
    for labels in ([f"a{n}" for n in range(6)], ["a0", "a2", "a5"]):
        filter_ = {"tracks": ["digits"], "axes": {"availability": labels}, "measure": "accuracy", "against": "FedAvg"}
        command = ["node", "-e", program, json.dumps(filter_ | {"memory": "all"})]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        lines = {line["name"]: line for line in json.loads(said)}
        part = Standings(found.board, [c for c in found.cells if dict(c.cell.at)["availability"] in labels])
        assert list(lines) == part.ranked
        assert part.test is not None
        for place, name in enumerate(part.ranked):
            assert lines[name]["rank"] == pytest.approx(part.test.ranks[place])
            assert lines[name]["ms"] == found.milliseconds(name)
            if name == "FedAvg":
                continue
            by, against = part.paired(name, "FedAvg"), part.ranked.index("FedAvg")
            assert lines[name]["difference"] == pytest.approx([by.mean, *by.interval], rel=1e-9)
            won, lost = part.wins[place, against], part.wins[against, place]
            assert (lines[name]["won"], lines[name]["lost"]) == (won, lost)


def test_means_that_are_equal_but_for_rounding_share_a_rank(found: Standings) -> None:
    """The same four numbers in another order, and a last digit of seven that rounding may have moved."""
    cell = found.cells[0]
    numbers = [0.7, 0.1, 0.2, 0.3]
    for name, values in (("MIFA", numbers), ("slow", numbers[::-1]), ("FedAvg", [0.7000001, 0.1, 0.2, 0.3])):
        cell.rows[name].numbers["accuracy"] = values
    alone = Standings(found.board, [cell], found.times)
    ranks = dict(zip(alone.ranked, rank_scores(alone.scores())[0], strict=True))
    assert ranks["MIFA"] == ranks["slow"] == ranks["FedAvg"]
    cell.rows["FedAvg"].numbers["accuracy"][0] = 0.70001
    assert ranks != dict(zip(alone.ranked, rank_scores(alone.scores())[0], strict=True))
