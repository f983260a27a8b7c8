"""Numbers of a run: the end, a window, the first round that reaches a target."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.curves import exponential_moving_average
from fedsim.studies.reproduce.measures import make_measure
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.report import needs_other_cell, number_row, unreached_target_texts
from fedsim.studies.results.crossing import rounds_to_target
from fedsim.studies.results.runs import Run

ROUNDS = [0, 10, 20, 30, 40]
VALUES = {3: [0.1, 0.3, 0.5, 0.6, 0.8], 4: [0.1, 0.5, 0.3, 0.8, 0.8]}


def run() -> Run:
    rows = [{"round": t, "seed": s, "accuracy": VALUES[s][e]} for e, t in enumerate(ROUNDS) for s in VALUES]
    return Run(Path(), rows, {})


def test_the_end_and_a_window_of_rounds() -> None:
    assert make_measure(metric="accuracy")(run()).tolist() == [0.8, 0.8]
    assert np.allclose(
        make_measure(metric="accuracy", last=20)(run()), [0.7, 0.8]
    )  # rounds 30 and 40: later than 40 − 20
    assert make_measure(metric="accuracy", largest=True)(run()).tolist() == [0.8, 0.8]
    assert np.allclose(make_measure(metric="accuracy", last=21, percent=True)(run()), [190 / 3, 190 / 3])
    assert np.allclose(make_measure(metric="accuracy", last=20, times=2)(run()), [1.4, 1.6])
    assert np.allclose(make_measure(metric="accuracy", last=20, spread=True)(run()), [0.1, 0.0])
    assert make_measure(metric="accuracy", largest=True, times=-3)(run()).tolist() == pytest.approx([-2.4, -2.4])


@pytest.mark.parametrize(
    ("target", "every", "expected"),
    [(0.4, 1, 10.0), (0.4, 20, 20.0), (0.7, 1, 30.0), (0.7, 20, 40.0), (0.8, 1, 40.0), (0.81, 1, np.nan)],
)
def test_the_first_round_at_which_the_mean_is_above_a_target(target: float, every: int, expected: float) -> None:
    found = make_measure(metric="accuracy", until="above", target=target, every=every)(run())
    assert np.array_equal(found, [expected], equal_nan=True)
    mirrored = run()
    mirrored.rows = [row | {"accuracy": -row["accuracy"]} for row in mirrored.rows]
    found = make_measure(metric="accuracy", until="below", target=-target, every=every)(mirrored)
    assert np.array_equal(found, [expected], equal_nan=True)


def test_a_monotone_curve_crosses_a_target_between_two_evaluations() -> None:
    """By hand: 0.1, 0.3, 0.5, 0.6, 0.8 and 0.1, 0.5, 0.5 (was 0.3), 0.8, 0.8 at rounds 0, 10, …, 40."""
    expected = {0.05: [0, 0], 0.1: [0, 0], 0.2: [5, 2.5], 0.5: [20, 10], 0.65: [32.5, 25], 0.8: [40, 30]}
    for target, rounds in expected.items():
        measure = make_measure(metric="accuracy", until="above", target=target, each=True, interpolated=True)
        assert measure(run()) == pytest.approx(rounds)
    never = make_measure(metric="accuracy", until="above", target=0.9, each=True, interpolated=True)
    assert never(run()).tolist() == [50, 50]  # the evaluation after the last
    mean = make_measure(metric="accuracy", until="above", target=0.35, interpolated=True)
    assert mean(run()) == pytest.approx([8.3333333333])  # of 0.1, 0.4, 0.4, 0.7, 0.8
    with pytest.raises(ValueError, match="leave out stays"):
        make_measure(metric="accuracy", until="above", target=0.9, interpolated=True, stays=True)


@pytest.mark.parametrize("above", [True, False])
def test_crossings_agree_with_a_search_along_the_curve(above: bool) -> None:
    """The crossing is the first place at which NumPy's interpolation of the best value so far is at the target."""
    draw = np.random.default_rng(2)
    rounds = np.cumsum(draw.integers(1, 6, 30))
    sign = 1 if above else -1
    values = sign * np.cumsum(draw.normal(0.1, 1, (30, 20)), axis=0)
    values[draw.random((30, 20)) < 0.1] = np.nan
    crossings = rounds_to_target(rounds, values, sign * 2.0, above)
    for curve, crossing in zip(values.T, crossings, strict=True):
        numbers = np.isfinite(curve)
        best = np.maximum.accumulate(sign * curve[numbers])
        if np.isnan(crossing):
            assert best.max() < 2
            continue
        reached = np.interp(crossing, rounds[numbers], best)
        before = np.interp(crossing - 1e-6, rounds[numbers], best)
        assert reached >= 2 - 1e-6
        assert crossing == rounds[numbers][0] or before < reached


def test_virtual_seconds_in_the_place_of_rounds() -> None:
    """A second a round, and two: until 40 there are both, and the second replicate is where it was after 20 rounds."""
    rows = [row | {"virtual_seconds": row["round"] * (2 if row["seed"] == 4 else 1)} for row in run().rows]
    timed = Run(Path(), rows, {})
    assert np.allclose(make_measure(metric="accuracy", x="virtual_seconds")(timed), [0.8, 0.3])
    assert np.allclose(make_measure(metric="accuracy", x="virtual_seconds", window=[30, 40])(timed), [0.7, 0.35])
    assert make_measure(metric="accuracy", x="virtual_seconds", until="above", target=0.4)(timed).tolist() == [20.0]


def test_what_only_swings_through_does_not_stay() -> None:
    values = [9.0, 0.5, 4.0, 0.6, 0.4]
    rows = [{"round": t, "seed": 0, "distance": v} for t, v in zip(ROUNDS, values, strict=True)]
    swinging = Run(Path(), rows, {})
    assert make_measure(metric="distance", until="below", target=1.0)(swinging).tolist() == [10.0]
    assert make_measure(metric="distance", until="below", target=1.0, stays=True)(swinging).tolist() == [30.0]
    assert np.isnan(make_measure(metric="distance", until="below", target=0.3, stays=True)(swinging)).all()


@pytest.mark.parametrize(("last", "share", "expected"), [(20, 1.0, 30.0), (1, 1.0, 40.0), (1, 0.5, 10.0)])
def test_a_target_is_a_share_of_the_best_rounded_down_to_tenths(last: int, share: float, expected: float) -> None:
    better, worse = run(), run()  # the best ends at 0.75 over two evaluations: 0.7; at 0.8 over the last one
    worse.rows = [row | {"accuracy": row["accuracy"] - 0.1} for row in worse.rows]
    measure = make_measure(metric="accuracy", until="above", share=share, best_over="algorithm", last=last)
    assert measure(better, [worse, better]).tolist() == [expected]
    assert np.isnan(measure(worse, [worse, better])[0]) == (last == 1 and share == 1)


def falling(values: np.ndarray, rounds: np.ndarray, **settings: object) -> Run:
    """A run with distances [E, R] at these rounds."""
    rows = [
        {"round": int(t), "seed": r, "distance": v}
        for t, each in zip(rounds, values, strict=True)
        for r, v in enumerate(each)
    ]
    return Run(Path(), rows, {"local_steps": 5} | settings)


def test_the_order_is_the_exponent_of_the_mean_square_in_steps_and_offset() -> None:
    rounds = np.arange(0, 500, 10)
    steps = 5 * rounds[:, None] + 300
    both = np.array([1.0, 2.0]) * steps**-0.5  # d² is 1 / (t + γ) and 4 / (t + γ)
    measure = make_measure(metric="distance", order=0.75)
    assert np.allclose(measure(falling(both, rounds, **{"local.schedule.offset": 300})), [-1, -1])
    alone = np.maximum(rounds, 1)[:, None] ** -0.5 * np.array([1.0, 2.0])
    assert np.allclose(measure(falling(alone, rounds)), [-1, -1])  # a rate that does not fall has no γ
    crossing = np.stack([3 - rounds / 100, rounds / 100 - 3], axis=1)  # the mean is 0 throughout, the square is not
    assert np.isfinite(measure(falling(np.abs(crossing) + 0.1, rounds))).all()


def test_the_error_of_an_order_is_that_of_leaving_out_replicates() -> None:
    """Noise of standard deviation s on log d² at two rounds: the slope's error is about s √2 / (√R log 2)."""
    draw, replicates, s = np.random.default_rng(0), 400, 0.1
    rounds = np.array([0, 10, 20])
    squares = np.exp(s * draw.standard_normal((3, replicates))) / np.maximum(rounds, 1)[:, None]
    values = make_measure(metric="distance", order=0.75)(falling(np.sqrt(squares), rounds))
    assert values.shape == (replicates,)
    error = values.std(ddof=1) / np.sqrt(replicates)
    expected = s * np.sqrt(2) / np.sqrt(replicates) / np.log(2)
    assert error == pytest.approx(expected, rel=0.2)
    assert abs(values.mean() + 1) < 5 * expected


def test_a_bound_is_kept_or_broken_by_the_mean_square() -> None:
    """Where both replicates follow one curve up to a factor, leaving one out changes nothing."""
    rounds = np.array([0, 100, 200])
    steps = 5 * rounds[:, None] + 1000
    signs = np.array([[1.0, 3.0]])
    kept = (
        10 * signs * (steps / 1000) ** -0.6
    )  # d² falls like (t + γ)^−1.2: the ratio is largest at the first evaluation
    measure = make_measure(metric="distance", bound=True)
    offset = {"local.schedule.offset": 1000}
    assert measure(falling(kept, rounds, **offset)) == pytest.approx([1.5**-0.2] * 2)
    broken = kept.copy()
    broken[2] = [10.0, 30.0]  # as far as at the start, at twice the clock
    assert measure(falling(broken, rounds, **offset)) == pytest.approx([2.0] * 2)


def test_a_bounds_values_are_those_of_leaving_out_replicates() -> None:
    rounds, squares = np.array([0, 200]), np.array([[1.0, 1.0, 1.0], [0.2, 0.5, 0.8]])
    values = make_measure(metric="distance", bound=True)(
        falling(np.sqrt(squares), rounds, **{"local.schedule.offset": 1000})
    )
    assert values == pytest.approx(2 * squares[1])  # a ratio of means over equal starts is a mean: its own values
    assert np.isnan(make_measure(metric="distance", bound=True)(falling(np.ones((1, 2)), np.array([0])))).all()


def test_how_long_it_takes_in_local_steps() -> None:
    rounds = np.array([0, 10, 20])
    seen = falling(np.array([[4.0], [2.0], [1.0]]), rounds)
    measure = {"metric": "distance", "until": "below", "target": 2.0}
    assert make_measure(**measure)(seen).tolist() == [10.0]
    assert make_measure(**measure, iterations=True)(seen).tolist() == [50.0]


def test_how_long_each_replicate_takes_and_that_never_is_after_the_end() -> None:
    seen = falling(np.array([[4.0, 4.0], [2.0, 4.0], [1.0, 4.0]]), np.array([0, 10, 20]))
    assert make_measure(metric="distance", until="below", target=2.0, each=True)(seen).tolist() == [10.0, 30.0]
    assert np.isnan(make_measure(metric="distance", until="below", target=2.0)(seen)).all()


@pytest.mark.parametrize(
    ("each", "target", "shown"),
    [(True, 0.5, "> 20"), (True, 2.0, "≥ 20"), (True, 4.0, None), (False, 0.5, "not reached"), (False, 3.0, None)],
)
def test_a_target_that_was_not_reached_shows_no_round_beyond_the_end(
    each: bool, target: float, shown: str | None
) -> None:
    seen = falling(np.array([[4.0, 4.0], [2.0, 4.0], [1.0, 4.0]]), np.array([0, 10, 20]))
    measure = make_measure(metric="distance", until="below", target=target, each=each)
    cell = ResultCell({"algorithm": "A"}, run=seen)
    row = number_row(MeasuredNumber(cell.axis_labels, measure(seen)), "rounds", has_several_measures=False)
    recipe: Any = SimpleNamespace(measures={"rounds": measure})
    assert unreached_target_texts(recipe, [row], [cell]) == ({row.name: shown} if shown else {})


def test_a_second_moment_is_the_mean_of_the_squares() -> None:
    seen = falling(np.array([[9.0, 9.0], [1.0, 2.0], [3.0, 0.0]]), np.array([0, 10, 20]))
    assert make_measure(metric="distance", last=20, square=True)(seen).tolist() == [5.0, 2.0]
    assert make_measure(metric="distance", last=20, square=True, plus=1)(seen).tolist() == [10.0, 5.0]


def test_how_long_it_takes_needs_a_target() -> None:
    for wrong in (
        {"until": "above"},
        {"until": "over", "target": 1.0},
        {"until": "below", "target": 1, "best_over": "a"},
    ):
        with pytest.raises(ValueError, match="until"):
            make_measure(metric="accuracy", **wrong)


def test_the_moving_average_starts_at_the_first_value() -> None:
    values = np.array([[4.0], [0.0], [0.0]])
    assert exponential_moving_average(values, 0.5)[:, 0].tolist() == [4.0, 2.0, 1.0]


def test_the_first_of_two_metrics_that_a_run_has() -> None:
    assert make_measure(metric="own or accuracy")(run()).tolist() == [0.8, 0.8]
    both = run()
    both.rows = [row | {"own": row["seed"]} for row in both.rows]
    assert make_measure(metric="own or accuracy")(both).tolist() == [3.0, 4.0]


def test_newcomers_count_epochs() -> None:
    late = run()
    late.newcomers = [{"epoch": e, "own": [0.1 * e, 0.2 * e]} for e in range(4)]
    epochs, values = late.curve("newcomers accuracy or own")
    assert epochs.tolist() == [0, 1, 2, 3]
    assert np.allclose(make_measure(metric="newcomers accuracy or own", percent=True)(late), [30, 60])
    assert values.shape == (4, 2)


def test_a_window_of_rounds_in_the_middle() -> None:
    assert np.allclose(make_measure(metric="accuracy", window=(10, 29), percent=True)(run()), [40, 40])
    assert np.isnan(make_measure(metric="accuracy", window=(11, 19))(run())).all()


def test_until_when_a_run_is_ahead_is_where_its_summed_lead_is_largest() -> None:
    """A single round behind does not end a lead that goes on; who never leads was ahead until round 0."""
    leads = {3: [9.0, 0.3, -0.1, 0.2, -0.4], 4: [9.0, -0.1, -0.2, 0.2, -0.5]}  # what is before training does not count
    ahead = run()
    ahead.rows = [row | {"accuracy": row["accuracy"] + leads[row["seed"]][row["round"] // 10]} for row in ahead.rows]
    measure = make_measure(metric="accuracy", ahead_of={"algorithm": "FedAvg"})
    assert measure(ahead, [run()]).tolist() == [30.0, 0.0]
    rarely = run()
    rarely.rows = [row for row in rarely.rows if row["round"] % 20 == 0]  # rounds that both were judged at
    assert measure(ahead, [rarely]).tolist() == [0.0, 0.0]
    assert np.isnan(measure(ahead)).all()


def test_a_run_is_compared_with_that_at_the_named_labels() -> None:
    cells = [ResultCell({"data": d, "algorithm": a}, run()) for d in "xy" for a in ("APFL", "FedAvg")]
    measure = make_measure(metric="accuracy", ahead_of={"algorithm": "FedAvg"})
    rivals = [[other.axis_labels for other in cells if needs_other_cell(measure, other, cell)] for cell in cells]
    assert rivals == [[{"data": "x", "algorithm": "FedAvg"}], [], [{"data": "y", "algorithm": "FedAvg"}], []]
