"""Learning-rate factors at known rounds and steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core import ConfigError
from fedsim.local.schedules import Constant, Cosine, Inverse, InverseSqrt, PerStep, Schedule

SETTINGS = settings(max_examples=40, deadline=None)
rounds, inner, steps = st.integers(0, 5000), st.integers(0, 99), st.integers(1, 100)

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "inverse_sqrt": InverseSqrt,
    "per_step": PerStep,
    "inverse": Inverse,
    "inverse_by_round": lambda: Inverse(unit="round"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_step_has_the_base_rate(name: str) -> None:
    assert SCHEDULES[name]().factor(0, 0, 10) == 1.0


@pytest.mark.parametrize("name", SCHEDULES)
@SETTINGS
@given(t=rounds, s=steps)
def test_no_schedule_ever_rises_or_reaches_below_zero(name: str, t: int, s: int) -> None:
    schedule = SCHEDULES[name]()
    within = [schedule.factor(t, k, s) for k in range(s)] + [schedule.factor(t + 1, 0, s)]
    assert all(a >= b >= 0 for a, b in itertools.pairwise(within))


@SETTINGS
@given(t=rounds, k=inner, s=steps)
def test_constant_is_one(t: int, k: int, s: int) -> None:
    assert Constant().factor(t, k, s) == 1.0


@pytest.mark.parametrize(("t", "factor"), [(0, 1.0), (10, 2**-0.5), (30, 0.5), (80, 1 / 3), (990, 0.1)])
def test_inverse_sqrt_at_known_rounds(t: int, factor: float) -> None:
    """1 / √(t/10 + 1), the same for every step of a round (fedawe Table 6)."""
    for k in (0, 3, 9):
        assert InverseSqrt().factor(t, k, 10) == pytest.approx(factor)


def test_inverse_sqrt_stretches_with_its_period() -> None:
    assert InverseSqrt(period=100).factor(300, 0, 10) == pytest.approx(InverseSqrt(period=10).factor(30, 0, 10))


@pytest.mark.parametrize(("t", "k", "exponent"), [(0, 0, 0), (0, 1, 1), (0, 9, 9), (1, 0, 10), (3, 4, 34)])
def test_per_step_at_known_iterations(t: int, k: int, exponent: int) -> None:
    """0.99 to the power of the iterations so far: round 3, step 4 of 10 is iteration 34 (apfl §5)."""
    assert PerStep().factor(t, k, 10) == pytest.approx(0.99**exponent)
    assert PerStep(0.5).factor(t, k, 10) == pytest.approx(0.5**exponent)


def test_per_step_without_decay_is_constant() -> None:
    assert PerStep(1.0).factor(100, 3, 10) == 1.0


@pytest.mark.parametrize(("t", "k", "n"), [(0, 0, 0), (0, 1, 1), (1, 0, 10), (3, 4, 34)])
def test_inverse_at_known_iterations(t: int, k: int, n: int) -> None:
    """a / (n + b), with n in steps."""
    assert Inverse(offset=5.0).factor(t, k, 10) == pytest.approx(1 / (n + 5))


def test_inverse_by_round_is_constant_within_a_round() -> None:
    """p-fedavg's a / (t + b), with t in rounds."""
    schedule = Inverse(offset=8.0, unit="round")
    for t in (0, 1, 92):
        assert [schedule.factor(t, k, 10) for k in (0, 5, 9)] == pytest.approx([1 / (t + 8)] * 3)


def test_inverse_by_local_step_begins_anew_in_each_round() -> None:
    """The rate of lazy deployment, a / (k + b) with k in steps since the deployment."""
    schedule = Inverse(offset=8.0, unit="local_step")
    for t in (0, 1, 92):
        assert [schedule.factor(t, k, 10) for k in (0, 5, 9)] == pytest.approx([1 / 8, 1 / 13, 1 / 17])


@pytest.mark.parametrize("schedule", [PerStep(), Inverse()])
@SETTINGS
@given(t=rounds, k=inner, s=steps)
def test_schedules_by_step_count_iterations_over_rounds(schedule: Schedule, t: int, k: int, s: int) -> None:
    """However the iterations are cut into rounds, iteration n has one rate."""
    assert schedule.factor(t, k, s) == pytest.approx(schedule.factor(0, t * s + k, 1))
    assert schedule.factor(t, s, s) == pytest.approx(schedule.factor(t + 1, 0, s))


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: InverseSqrt(0), r"period=0"),
        (lambda: InverseSqrt(-10), r"period=-10"),
        (lambda: PerStep(0.0), r"decay=0"),
        (lambda: PerStep(1.01), r"decay=1\.01"),
        (lambda: Inverse(0.0), r"offset=0"),
        (lambda: Inverse(unit="rounds"), r"unit='rounds'.*did you mean 'round'"),
    ],
)
def test_impossible_settings_name_their_key(build: Callable[[], Schedule], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build()


@pytest.mark.parametrize(("t", "factor"), [(0, 1 / 3), (1, 2 / 3), (2, 1.0), (6, 0.1 + 0.9 / 2), (10, 0.1), (50, 0.1)])
def test_cosine_warms_up_falls_along_half_a_cosine_and_stays(t: int, factor: float) -> None:
    schedule = Cosine(rounds=10, warmup=2, floor=0.1)
    assert schedule.factor(t, 0, 5) == schedule.factor(t, 4, 5) == pytest.approx(factor)


def test_a_warm_up_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup=5 must be below rounds=5"):
        Cosine(rounds=5, warmup=5)
