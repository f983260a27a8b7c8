"""Models drawn at random: each is trained as plain PyTorch trains it, or refused in one sentence."""

from __future__ import annotations

import pytest
from random_losses import LOSSES
from random_models import GOOD, Verdict, apart, drawn, kinds, warm

QUICK, SLOW = 6, 60
SEED = 0


@pytest.fixture(scope="module")
def warmed() -> None:
    warm()


def accepted(verdict: Verdict) -> None:
    assert verdict.word in GOOD, verdict.line


@pytest.mark.parametrize("number", range(QUICK))
def test_a_random_model_is_right_or_refused(number: int, warmed: None) -> None:
    accepted(apart(SEED, number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(QUICK, SLOW))
def test_many_random_models_are_right_or_refused(number: int, warmed: None) -> None:
    accepted(apart(SEED, number))


def test_what_is_drawn_from_is_wide_and_is_drawn_alike() -> None:
    assert kinds() >= 150
    assert len(LOSSES) >= 70
    assert drawn(SEED, 3).short == drawn(SEED, 3).short
    nasty = [len(drawn(SEED, number).nasty) for number in range(300)]
    assert 0.35 < nasty.count(1) / 300 < 0.65
    assert 0.2 < nasty.count(2) / 300 < 0.5
