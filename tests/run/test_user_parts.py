"""Parts that users might write: each gives the same numbers however it is run, or one sentence."""

from __future__ import annotations

import pytest
from user_parts import GOOD, Case, cases, fold_verdict, sample, verdict

COUNT, SEED = 48, 0


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(COUNT, SEED), ids=lambda case: case.label)
def test_a_part_is_right_or_refused(case: Case) -> None:
    word, message = verdict(case)
    assert word in GOOD, message
    assert word == "right" or not case.harmless, message


FOLD_COUNT, FOLD_SEED = 12, 1
FOLDED_WRONGLY = ("draws shared by replicates", "mean over replicates since 4", "init counts instances on class")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sample(FOLD_COUNT, FOLD_SEED) + [case for case in cases() if case.name in FOLDED_WRONGLY],
    ids=lambda case: case.label,
)
def test_a_job_has_the_numbers_that_it_has_alone_when_jobs_are_folded(case: Case) -> None:
    word, message = verdict(case, fold_verdict)
    assert word in GOOD, message


def test_what_is_drawn_from_is_wide_and_has_no_name_twice() -> None:
    labels = [case.label for case in cases()]
    assert len(labels) == len(set(labels)) >= 300
    assert len({case.kind for case in cases()}) >= 14
