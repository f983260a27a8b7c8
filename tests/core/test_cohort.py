"""What a cohort's sums take: whole numbers as well, and one value per replicate where it hands values back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fedsim.core import Cohort, Federation


def cohort() -> Cohort:
    """Two replicates of three clients, of whom two and one take part."""
    counts = np.array([[1, 0, 1], [0, 1, 0]])
    return Federation((0, 1), 3, np.ones(6, np.int64)).make_cohort(counts, np.ones((2, 3)))


def test_whole_numbers_are_averaged_like_others():
    """In integers every weight 1/n would be 0, and so would the mean."""
    for dtype in (torch.int64, torch.int32, torch.bool):
        assert cohort().mean(torch.tensor([3, 4, 7], dtype=dtype).to(dtype)).tolist() == pytest.approx(
            [1.0, 1.0] if dtype is torch.bool else [3.5, 7.0]
        )
    assert cohort().sum(torch.tensor([3, 4, 7])).tolist() == [7.0, 7.0]


def test_rows_of_clients_are_not_taken_for_values_of_replicates():
    assert cohort().broadcast(torch.tensor([[1.0], [2.0]])).tolist() == [[1.0], [1.0], [2.0]]
    with pytest.raises(ValueError, match=r"one value per replicate, \[2, …\], and not \[3, 1\]"):
        cohort().broadcast(torch.ones(3, 1))


@pytest.mark.parametrize("bounds", [(0, 4, 4, 7), (0, 1), (0, 0, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (2, 3), (1, 1)], ids=str)
def test_sums_are_those_of_a_loop_over_rows_of_any_shape(shape: tuple[int, ...], bounds: tuple[int, ...]):
    """Of parts of wider rows, and of rows that are one row's view, too."""
    federation = Federation(tuple(range(len(bounds) - 1)), 1, np.ones(len(bounds) - 1, np.int64))
    generator = torch.Generator().manual_seed(0)
    n = bounds[-1]
    wide = torch.randn(n, *shape[:-1], *([2 * shape[-1]] if shape else []), generator=generator)
    rows, weights = wide[..., : shape[-1]] if shape else wide, torch.rand(n, generator=generator)
    for some in (rows, rows[:1].expand(n, *shape)):
        found = federation.weighted_sum(weights, some, bounds)
        for r, (a, b) in enumerate(itertools.pairwise(bounds)):
            expected = sum((weights[i].double() * some[i].double() for i in range(a, b)), torch.zeros(shape).double())
            torch.testing.assert_close(found[r], expected.float())
