"""Knobs, the schedule, and the choice, on numbers that are made up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.studies.tuning.choice import ChoiceRule, choose
from fedsim.studies.tuning.schedule import Halving, promoted
from fedsim.studies.tuning.space import Grid, Interval, as_override, parse, product

NOISE = np.array([-0.02, 0.01, 0.0, 0.02, -0.01])


def lr(value: float):
    return (("lr", value),)


def test_knobs_are_written_as_hydra_writes_sweeps() -> None:
    fixed, knobs = parse([
        "clients=10", "lr=log(0.001,1,4)", "strategy=fedavg,mifa", "batch_size=range(8,33,8)",
        "strategy.server_lr=log(0.1,10)", "local.clip=interval(1,5)", "partition.alpha=0.1,null",
    ])  # fmt: skip
    assert fixed == ("clients=10",)
    assert knobs == [
        Grid("lr", (0.001, 0.01, 0.1, 1.0)), Grid("strategy", ("fedavg", "mifa")), Grid("batch_size", (8, 16, 24, 32)),
        Interval("strategy.server_lr", 0.1, 10.0, True), Interval("local.clip", 1.0, 5.0, False),
        Grid("partition.alpha", (0.1, "null")),
    ]  # fmt: skip
    assert [as_override("lr", 1e-05), as_override("strategy", "mifa")] == ["lr=1e-05", "strategy=mifa"]
    assert product(knobs[:2])[1] == (("lr", 0.001), ("strategy", "mifa"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=0.1"], "nothing is tuned"),
        (["lr=0.1,0.2", "lr=0.3,0.4"], "lr is given twice"),
        (["seeds=0,1"], "seeds cannot be tuned"),
        (["lr=log(1,0.1,3)"], "needs 0 < low < high"),
        (["lr=0.1,0.1"], "a value is listed twice"),
        (["lr=interval(2,1)"], "a lower bound below the upper one"),
        (["lr="], "nothing is tuned"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words)


@pytest.mark.parametrize(
    ("values", "at", "following"),
    [
        ((0.1, 0.3, 1.0), 1.0, 3.2),
        ((0.1, 0.3, 1.0), 0.1, 0.032),
        ((0.1, 0.3, 1.0), 0.3, None),
        ((0.1, 0.2, 0.3), 0.3, None),  # not geometric
        ((5, 10, 20), 20, 40),
        ((5, 10, 20), 5, None),  # 2.5 is not a whole number
        ((0.0, 1.0), 1.0, None),
    ],
)
def test_a_geometric_grid_goes_on_beyond_its_edges(values: tuple, at: float, following: float | None) -> None:
    assert Grid("lr", values).beyond(at) == following


def test_rungs_are_multiples_of_evaluations_and_reach_the_finalists() -> None:
    halving = Halving(eta=3, rungs=4, finalists=3)
    assert halving.completed_rounds(600, 1, 64) == [22, 66, 198, 600]
    assert halving.completed_rounds(600, 10, 64) == [20, 60, 180, 600]
    assert halving.completed_rounds(600, 10, 8) == [200, 600]  # one reduction: 8 → 3
    assert halving.completed_rounds(600, 10, 3) == [600]
    assert halving.completed_rounds(5, 10, 64) == [5]
    assert Halving(eta=1).completed_rounds(600, 10, 64) == [600]
    assert [halving.survivors(count) for count in (64, 22, 8, 2)] == [22, 8, 3, 3]


def test_the_best_of_all_that_were_compared_continue_and_failures_do_not() -> None:
    halving = Halving(eta=2, finalists=1)
    assert promoted([0.1, 0.4, 0.2, 0.3], [0, 1, 2, 3], halving) == [1, 3]
    assert promoted([0.1, 0.4, 0.2, 0.3], [0, 2], halving) == []  # these came later, and two earlier ones are better
    assert promoted([-math.inf, 0.4, -math.inf, -math.inf], [0, 1, 2, 3], halving) == [1]
    assert promoted([1.0, 1.0, 1.0, 1.0], [0, 1, 2, 3], halving) == [0, 1]


def test_of_trials_not_distinguishable_from_the_best_the_smallest_is_chosen() -> None:
    values = {
        lr(0.01): 0.70 + NOISE,  # worse by 0.2 on each seed
        lr(0.1): 0.895 + NOISE[::-1],  # differences scatter around 0.005
        lr(0.3): 0.90 + NOISE,
        lr(1.0): 0.899 + NOISE,  # worse by 0.001 on each seed: distinguishable, although the means are close
    }
    choice = choose(values, True)
    assert (choice.trial, choice.best, choice.near) == (lr(0.1), lr(0.3), [lr(0.1), lr(0.3)])
    assert choice.mean == pytest.approx(0.895)
    assert choice.error == pytest.approx(NOISE.std(ddof=1) / math.sqrt(5))
    assert choice.loss.mean == pytest.approx(0.005)
    assert choose(values, True, ChoiceRule("best")).trial == lr(0.3)
    assert choose(values, True, ChoiceRule("largest")).trial == lr(0.3)
    losses = {trial: 1 - numbers for trial, numbers in values.items()}
    assert choose(losses, False).trial == lr(0.1)
    difference = 0.005 + NOISE - NOISE[::-1]
    errors = difference.mean() / (difference.std(ddof=1) / math.sqrt(5))
    assert errors == pytest.approx(math.sqrt(1.25))  # Student's t with 4 degrees: 1.13 bounds 68 %, 0.13 bounds 10 %
    assert choose(values, True, ChoiceRule(confidence=0.1)).trial == lr(0.3)  # a narrower interval tells them apart


def test_what_is_not_a_number_stays_that_of_the_best_trial_and_divergence_is_never_chosen() -> None:
    one, other = (("strategy", "fedavg"), ("lr", 0.1)), (("strategy", "mifa"), ("lr", 0.01))
    values = {
        one: 0.9 + NOISE,
        other: 0.899 + NOISE[::-1],
        (("strategy", "fedavg"), ("lr", 0.03)): 0.95 + NOISE * np.nan,
    }
    choice = choose(values, True)
    assert (choice.trial, set(choice.near)) == (one, {one, other})
    with pytest.raises(ConfigError, match="prefer='fastest' is unknown"):
        ChoiceRule("fastest")
    with pytest.raises(ConfigError, match="no trial ended with finite values"):
        choose({one: NOISE * np.nan}, True)
