"""Ranks, wins and differences of made-up rows against loops; the page's own program against both."""

from __future__ import annotations

import copy
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
from fedsim.studies.board.board import BoardEntry, Leaderboard
from fedsim.studies.board.costs import AlgorithmRoundTimes
from fedsim.studies.board.findings import BoardQuestion, Comparison
from fedsim.studies.board.markdown import standings_markdown
from fedsim.studies.board.page import page_data, page_html, write_pages
from fedsim.studies.board.rows import DONE_STATUS, REFUSED_STATUS, CellRows, Row
from fedsim.studies.board.sentences import finding_outcomes, holm_adjusted, outcome_sentence, p_value
from fedsim.studies.board.standings import Standings
from fedsim.studies.results.friedman import rank_scores
from fedsim.studies.results.paired import PairedDifference

SEEDS = 4
NAMES = ["FedAvg", "MIFA", "slow", "lost", "elsewhere"]


@pytest.fixture
def found(small: Leaderboard) -> Standings:
    """Six cells: `slow` is worst, `lost` lost a seed in one, `elsewhere` cannot run in one."""
    draw = np.random.default_rng(3)
    small.seeds = list(range(SEEDS))
    small.entries = {name: BoardEntry([], remembers=name == "MIFA", about=f"it is {name}") for name in NAMES}
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
            rows[name] = Row(DONE_STATUS, "", ["strategy=x"], numbers, curve, 8.0 * k)
        if n == 2:
            rows["lost"].numbers["accuracy"][1] = math.nan
            rows["elsewhere"] = Row(REFUSED_STATUS, "needs everybody")
        cells.append(CellRows(cell, rows))
    times = {"digits": {name: {"ms": 1.5 + k} for k, name in enumerate(NAMES[:4])}}
    return Standings(small, cells, AlgorithmRoundTimes(times))


def naive_scores(found: Standings, name: str) -> list[float]:
    values = [np.array(c.rows[name].numbers["accuracy"]) for c in found.cell_rows]
    return [float(v.mean()) if np.isfinite(v).all() else -math.inf for v in values]


def interval(differences: np.ndarray) -> tuple[float, float]:
    reach = stats.t.ppf(0.975, SEEDS - 1) * differences.std(ddof=1) / math.sqrt(SEEDS)
    return differences.mean() - reach, differences.mean() + reach


def test_ranks_wins_and_differences_are_those_of_a_loop(found: Standings) -> None:
    assert sorted(found.ranked_entries) == ["FedAvg", "MIFA", "lost", "slow"]
    assert found.unranked_reasons == {"elsewhere": "needs everybody"}
    scores = {name: naive_scores(found, name) for name in found.ranked_entries}
    means = {
        name: np.mean([1 + sum(scores[o][n] > scores[name][n] for o in scores) for n in range(6)]) for name in scores
    }
    assert found.ranked_entries == sorted(means, key=lambda name: means[name])
    assert found.friedman_test is not None
    np.testing.assert_allclose(found.friedman_test.mean_ranks, [means[name] for name in found.ranked_entries])
    for (i, one), (j, other) in itertools.permutations(enumerate(found.ranked_entries), 2):
        won = 0
        for cells in found.cell_rows:
            a, b = (np.array(cells.rows[name].numbers["accuracy"]) for name in (one, other))
            if np.isfinite(a).all() and np.isfinite(b).all():
                won += interval(a - b)[0] > 0
            else:
                won += bool(np.isfinite(a).all())
        assert found.pairwise_win_counts[i, j] == won
    assert found.pairwise_win_counts.sum() > 3


def test_differences_by_seed_are_of_means_over_the_cells_that_both_have(found: Standings) -> None:
    kept = [c for n, c in enumerate(found.cell_rows) if n != 2]
    a, b = (np.array([c.rows[name].numbers["accuracy"] for c in kept]).mean(0) for name in ("lost", "MIFA"))
    paired = found.paired_differences("lost", "MIFA")
    np.testing.assert_allclose(paired.values, a - b)
    np.testing.assert_allclose(paired.confidence_interval, interval(a - b))


def test_entries_without_a_cell_in_common_have_no_differences(found: Standings) -> None:
    nothing = copy.copy(found)
    nothing.cell_rows = []
    assert len(nothing.paired_differences("lost", "MIFA").values) == 0
    assert nothing.num_shared_cells("lost", "MIFA", "accuracy") == 0


def test_the_order_after_half_of_the_rounds_is_held_against_that_at_the_end(found: Standings) -> None:
    taus = [
        stats.kendalltau(*([c.rows[name].curve[1][at] for name in found.ranked_entries] for at in (1, 2))).statistic
        for c in found.cell_rows
    ]
    told = kept = 0
    for cells, (one, other) in itertools.product(found.cell_rows, itertools.permutations(found.ranked_entries, 2)):
        a, b = (np.array(cells.rows[name].numbers["accuracy"]) for name in (one, other))
        lost = [not np.isfinite(x).all() for x in (a, b)]
        if (lost[1] and not lost[0]) or (not any(lost) and interval(a - b)[0] > 0):
            told += 1
            kept += cells.rows[one].curve[1][1] > cells.rows[other].curve[1][1]
    assert found.halfway_rank_correlation() == pytest.approx((np.mean(taus), np.min(taus), told, kept))
    assert 0 < kept < told
    assert f"Of the {told} pairs" in (page := standings_markdown(found, []))
    assert f"{100 * kept / told:.1f}% stood in that order" in page


def test_the_page_says_what_is_there_and_what_is_not(found: Standings, tmp_path: Path) -> None:
    text = standings_markdown(Standings(found.board, found.cell_rows[:4]), ["wins.png"])
    assert "**Not complete**: 2 cells are not computed yet." in text
    assert "4 of 6 cells, 19 rows with numbers, 4 seeds each" in text
    assert "- elsewhere: needs everybody" in text
    whole = standings_markdown(found, [])
    assert "Not complete" not in whole
    low, high = (100 * bound for bound in found.paired_differences("slow", "FedAvg").confidence_interval)
    assert f"{100 * found.paired_differences('slow', 'FedAvg').mean:+.2f} [{low:+.2f}, {high:+.2f}]" in whole
    known = np.concatenate([c.rows["MIFA"].values_of("rounds") for c in found.cell_rows])
    assert f"{np.nanmedian(known):.4g} ({100 * np.isfinite(known).mean():.0f} %)" in whole
    with pytest.raises(ConfigError, match="has no rows yet"):
        write_pages(found.board, tmp_path)


def test_a_page_without_the_reference_says_what_is_missing(
    found: Standings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever computes rows in a folder of their own needs the committed ones beside them."""
    monkeypatch.setattr(Standings, "read_folder", lambda *arguments: found)
    write_pages(found.board, tmp_path)
    assert not caplog.records
    others = [
        CellRows(cells.cell, {name: row for name, row in cells.rows.items() if name != found.board.against})
        for cells in found.cell_rows
    ]
    without_reference = Standings(found.board, others, found.round_times)
    monkeypatch.setattr(Standings, "read_folder", lambda *arguments: without_reference)
    write_pages(found.board, tmp_path)
    assert "has no rows of FedAvg" in caplog.text


def test_p_values_are_those_of_paired_tests_and_holms_correction_multiplies_the_smallest_most() -> None:
    values = np.array([0.3, 0.1, 0.25, 0.2])
    by = PairedDifference(values)
    assert p_value(by) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-12)
    above, below = (stats.ttest_1samp(values, m, alternative=a).pvalue for m, a in ((-0.4, "greater"), (0.4, "less")))
    assert p_value(by, 0.4) == pytest.approx(2 * max(above, below), rel=1e-12)
    assert p_value(by, 0.1) == 1  # the mean lies outside
    low, high = by.confidence_interval
    edge = max(abs(low), abs(high))
    assert p_value(by, edge * 1.001) < 0.05 < p_value(by, edge * 0.999)  # the 95 % interval inside the margin
    assert [p_value(PairedDifference(np.array(v))) for v in ([1.0], [0.0, 0.0], [1.0, 1.0])] == [1, 1, 0]
    assert holm_adjusted([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm_adjusted([]) == []


def test_sentences_state_their_cells_and_where_the_order_is_the_reverse(found: Standings) -> None:
    """`slow` is made much worse than FedAvg; in the last two cells the two have each other's rows."""
    for cells in found.cell_rows:
        cells.rows["slow"].numbers["accuracy"] = [a - 0.2 for a in cells.rows["slow"].numbers["accuracy"]]
    for cells in found.cell_rows[4:]:
        cells.rows["FedAvg"], cells.rows["slow"] = cells.rows["slow"], cells.rows["FedAvg"]
    found.board.equivalence_margins = {"received": 0.5, "accuracy": 1e-9}
    few = ["digits/a0", "digits/a1", "*/a3"]
    found.board.findings = [
        BoardQuestion(
            "Is it slow?", [Comparison("FedAvg", "slow", cells=few), Comparison("slow", "FedAvg", cells=few)]
        ),
        BoardQuestion(
            "Does it matter?",
            [
                Comparison("MIFA", "FedAvg", "equivalent", "received", but=["*/a4"]),
                Comparison("MIFA", "FedAvg", "equivalent", cells=["digits/a0"]),
            ],
        ),
    ]
    (better, worse), (same, unlike) = finding_outcomes(found)
    subset = Standings(found.board, [found.cell_rows[n] for n in (0, 1, 3)])
    assert (
        better.paired_differences.confidence_interval == subset.paired_differences("FedAvg", "slow").confidence_interval
    )
    p = stats.ttest_1samp(subset.paired_differences("FedAvg", "slow").values, 0).pvalue
    p_same = p_value(
        found.restricted_to_cells(lambda name: "a4" not in name).paired_differences("MIFA", "FedAvg", "received"), 0.5
    )
    assert p_same < p < 0.05 / 3
    assert [each.p_value for each in (same, better, worse, unlike)] == pytest.approx(
        [4 * p_same, 3 * p, 3 * p, 1], rel=1e-9
    )
    single = [
        Standings(found.board, [found.cell_rows[n]]).paired_differences("FedAvg", "slow").confidence_interval
        for n in (0, 1, 3)
    ]
    assert better.num_better_cells == sum(low > 0 for low, _ in single) == worse.num_worse_cells
    assert (better.num_cells, better.num_worse_cells, worse.num_better_cells) == (3, 0, 0)
    rest = (
        Standings(found.board, [found.cell_rows[n] for n in (2, 4, 5)])
        .paired_differences("FedAvg", "slow")
        .confidence_interval
    )
    assert better.direction_by_other_track == {"digits": 1 if rest[0] > 0 else -1 if rest[1] < 0 else 0}
    text = standings_markdown(found, [])
    assert "1. **Is it slow?**" in text
    assert "FedAvg is better than slow in accuracy in 3 cells (`digits/a0`, `digits/a1`, `*/a3`): **+" in text
    assert "slow is worse than FedAvg in accuracy in 3 cells (`digits/a0`, `digits/a1`, `*/a3`): **-" in text
    assert 'MIFA and FedAvg differ by at most 50 points in "received" in 5 cells (but `*/a4`): ' in text
    assert "**Not shown**: that MIFA and FedAvg differ by at most 1e-07 points in accuracy in 1 cell" in text
    assert text.count("In the other cells: ") == 4
    assert "corrected for the 4 comparisons" in text
    assert page_html(found).count("Not shown") == 1


def test_lower_may_be_better_and_only_cells_with_numbers_count(found: Standings) -> None:
    for cells in found.cell_rows:
        cells.rows["MIFA"].numbers["rounds"] = [10.0, 12.0, 9.0, 11.0]
        cells.rows["FedAvg"].numbers["rounds"] = [30.0, 29.0, 33.0, 31.0]
    found.cell_rows[1].rows["MIFA"].numbers["rounds"] = [math.nan] * SEEDS
    for cells in found.cell_rows[1:]:
        cells.rows["lost"].numbers["rounds"] = [math.nan] * SEEDS
    names = ("FedAvg", "elsewhere"), ("lost", "FedAvg")
    comparisons = [Comparison("MIFA", "FedAvg", measure="rounds"), *(Comparison(*pair) for pair in names)]
    comparisons.append(Comparison("lost", "FedAvg", measure="rounds", cells=["*/a1"]))
    found.board.findings = [BoardQuestion("Is it cheaper?", comparisons)]
    ((cheaper, elsewhere, lost, none),) = finding_outcomes(found)
    assert (cheaper.num_cells, cheaper.num_better_cells, cheaper.num_worse_cells) == (5, 5, 0)
    assert outcome_sentence(found, cheaper).startswith('MIFA is better than FedAvg in "rounds" in 5 cells: **-20.25 [')
    assert (elsewhere.num_cells, lost.num_cells, none.num_cells) == (5, 5, 0)
    assert "too few numbers in common" in outcome_sentence(found, none)


def test_rates_at_an_edge_of_their_grid_are_marked(found: Standings) -> None:
    trials = [[0.1, 1, 0.5], [0.3, 1, 0.6], [1.0, 1, 0.4], [9.0, 2, 0.1]]
    found.tuned_rates.by_track["digits"] = {
        name: {"lr": lr, "knob": 1, "trials": trials} for name, lr in (("FedAvg", 0.3), ("MIFA", 1.0), ("slow", 0.1))
    }
    text = standings_markdown(found, [])
    marked = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ") and "‡" in line]
    assert sorted(marked) == ["| MIFA‡", "| slow‡"]
    assert "‡ The tuned rate is the lowest or highest of its grid (" in text


def test_the_page_says_which_commits_made_the_rows(found: Standings) -> None:
    origins = iter([{"commit": "0123456789ab"}, {"commit": "abcdef0123456+"}, {"commit": None}])
    for cells in found.cell_rows[:3]:
        cells.rows["MIFA"].made = {"command": "fedsim board", "versions": {"torch": "2.6"}} | next(origins)
    assert standings_markdown(found, []).splitlines()[-3:] == [
        "- 1 rows: `fedsim board`, commit 0123456, torch 2.6",
        "- 1 rows: `fedsim board`, commit abcdef0 with changes, torch 2.6",
        "- 1 rows: `fedsim board`, commit unknown, torch 2.6",
    ]


def test_entries_without_a_number_in_some_cell_stand_below_without_a_rank(found: Standings) -> None:
    line = next(line for line in standings_markdown(found, []).splitlines() if line.startswith("| *elsewhere*"))
    assert line.startswith("| *elsewhere*, 5 of 6 cells | – | ")
    assert "elsewhere" not in found.ranked_entries


def test_milliseconds_are_those_of_all_tracks_that_have_rows(found: Standings) -> None:
    assert found.milliseconds_per_round("MIFA") == 2.5
    assert found.milliseconds_per_round("elsewhere") is None
    found.round_times.by_track["other"] = {"MIFA": {"ms": 100.0}}
    assert found.milliseconds_per_round("MIFA") == 2.5  # it has no rows here
    assert [
        line.split(" | ")[-1] for line in standings_markdown(found, []).splitlines() if line.startswith("| MIFA")
    ] == ["2.5 |"]


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
        part = Standings(
            found.board, [c for c in found.cell_rows if dict(c.cell.axis_labels)["availability"] in labels]
        )
        assert list(lines) == part.ranked_entries
        assert part.friedman_test is not None
        for place, name in enumerate(part.ranked_entries):
            assert lines[name]["rank"] == pytest.approx(part.friedman_test.mean_ranks[place])
            assert lines[name]["ms"] == found.milliseconds_per_round(name)
            if name == "FedAvg":
                continue
            by, against = part.paired_differences(name, "FedAvg"), part.ranked_entries.index("FedAvg")
            assert lines[name]["difference"] == pytest.approx([by.mean, *by.confidence_interval], rel=1e-9)
            won, lost = part.pairwise_win_counts[place, against], part.pairwise_win_counts[against, place]
            assert (lines[name]["won"], lines[name]["lost"]) == (won, lost)


def test_means_that_are_equal_but_for_rounding_share_a_rank(found: Standings) -> None:
    """The same four numbers in another order, and a last digit of seven that rounding may have moved."""
    cell = found.cell_rows[0]
    numbers = [0.7, 0.1, 0.2, 0.3]
    for name, values in (("MIFA", numbers), ("slow", numbers[::-1]), ("FedAvg", [0.7000001, 0.1, 0.2, 0.3])):
        cell.rows[name].numbers["accuracy"] = values
    alone = Standings(found.board, [cell], found.round_times)
    ranks = dict(zip(alone.ranked_entries, rank_scores(alone.scores())[0], strict=True))
    assert ranks["MIFA"] == ranks["slow"] == ranks["FedAvg"]
    cell.rows["FedAvg"].numbers["accuracy"][0] = 0.70001
    assert ranks != dict(zip(alone.ranked_entries, rank_scores(alone.scores())[0], strict=True))
