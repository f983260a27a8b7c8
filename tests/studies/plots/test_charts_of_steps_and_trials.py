"""Waterfall charts and pictures of trials: what is drawn is what was measured."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedsim.studies.plots.style import PALETTE
from fedsim.studies.plots.trials import UNSELECTED_COLOUR, TrialCurve, trials_figure
from fedsim.studies.plots.waterfall import waterfall_figure
from fedsim.studies.results.paired import PairedDifference

STEPS = np.array([[0.3, 0.5, 0.4], [-0.2, -0.1, -0.3]])
ROUNDS = [0, 5, 10]


def test_each_step_of_a_waterfall_begins_where_the_one_before_it_ends() -> None:
    (axes,) = waterfall_figure(["drift", "noise"], STEPS, 1.0, "loss").axes
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in axes.patches]
    np.testing.assert_allclose(bars, [(0, 0, 1.0), (1, 1.0, 0.4), (2, 1.4, -0.2), (3, 0, 1.2)], atol=1e-12)
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches[1:3]] == [to_hex(PALETTE[0]), to_hex(PALETTE[1])]
    joints = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] == line.get_ydata()[1]]
    np.testing.assert_allclose([j.get_ydata()[0] for j in joints], [1.0, 1.4])
    np.testing.assert_allclose([j.get_xdata() for j in joints], [[0.35, 0.65], [1.35, 1.65]])
    whiskers = [collection.get_segments()[0][:, 1] for collection in axes.collections]
    for top, step, whisker in zip([1.4, 1.2], STEPS, whiskers, strict=True):
        low, high = PairedDifference(step).confidence_interval
        np.testing.assert_allclose(whisker, [top - (high - low) / 2, top + (high - low) / 2])
    low, high = axes.get_ylim()
    assert low < min(whisker.min() for whisker in whiskers) < low + 0.3
    assert high - 0.3 < max(whisker.max() for whisker in whiskers) < high
    assert [label.get_text() for label in axes.get_xticklabels()] == ["without all", "drift", "noise", "as it is"]


def test_one_seed_has_no_interval() -> None:
    (axes,) = waterfall_figure(["drift"], STEPS[:1, :1], 1.0, "loss").axes
    assert not axes.collections


def trial(position: float, last: float, finalist: bool = True, chosen: bool = False) -> TrialCurve:
    ends = np.array([[1.0, 1.2], [0.8, 0.9], [last, last + 0.1]])
    return TrialCurve(position, ROUNDS, ends, finalist, chosen)


def test_a_trial_is_a_curve_and_a_point_with_its_error() -> None:
    trials = [trial(0.01, 0.7, chosen=True), trial(0.1, 0.75), trial(1.0, 0.9, finalist=False)]
    over_rounds, over_knob = trials_figure(trials, "test_loss", "lr").axes
    drawn = sorted(trials, key=lambda one: (one.is_chosen, one.is_finalist))  # the chosen one on top
    assert len(over_rounds.lines) == 3
    for line, one in zip(over_rounds.lines, drawn, strict=True):
        np.testing.assert_allclose(line.get_xdata(), ROUNDS)
        np.testing.assert_allclose(line.get_ydata(), one.values.mean(1))
    assert [line.get_color() for line in over_rounds.lines] == [UNSELECTED_COLOUR, PALETTE[0], PALETTE[1]]
    assert [line.get_linewidth() for line in over_rounds.lines] == [1, 1, 2]
    points = [container[0] for container in over_knob.containers]
    np.testing.assert_allclose([p.get_xdata()[0] for p in points], [one.colour_position for one in drawn])
    np.testing.assert_allclose([p.get_ydata()[0] for p in points], [one.values[-1].mean() for one in drawn])
    assert [p.get_markersize() for p in points] == [4, 4, 7]
    for container, one in zip(over_knob.containers, drawn, strict=True):
        low, high = container[2][0].get_segments()[0][:, 1]
        assert (high - low) / 2 == pytest.approx(PairedDifference(one.values[-1]).standard_error)
    assert over_knob.get_xscale() == "log"


def test_a_knob_with_words_or_a_narrow_range_has_no_logarithmic_axis() -> None:
    _, over_knob = trials_figure([trial(0, 0.7), trial(1, 0.8)], "test_loss", "strategy", ["fedavg", "mifa"]).axes
    assert [label.get_text() for label in over_knob.get_xticklabels()] == ["fedavg", "mifa"]
    for positions in ((0.1, 0.9), (0.0, 1.0)):
        _, over_knob = trials_figure([trial(at, 0.7) for at in positions], "test_loss", "lr").axes
        assert over_knob.get_xscale() == "linear"


def test_a_trial_that_diverges_does_not_hide_the_others() -> None:
    """The axis ends at most two ranges of the middle nine tenths beyond them."""
    trials = [trial(number, 0.6 + 0.01 * number) for number in range(1, 20)] + [trial(20, 1e6), trial(21, np.nan)]
    means = np.concatenate([one.values.mean(1) for one in trials])
    low, high = np.percentile(means[np.isfinite(means)], [5, 95])
    for axes in trials_figure(trials, "test_loss", "lr").axes:
        bottom, top = axes.get_ylim()
        lowest, highest = max(np.nanmin(means), low - 2 * (high - low)), high + 2 * (high - low)
        margin = 0.05 * (highest - lowest)
        np.testing.assert_allclose([bottom, top], [lowest - margin, highest + margin])
