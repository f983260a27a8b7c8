"""What user code changes outside of its results is put back."""

from __future__ import annotations

import functools

import torch
from torch import nn

from fedsim.core.rewind import Rewind
from fedsim.core.snapshot import LARGE_ARRAY_BYTES

CALLS: list[int] = []


@functools.lru_cache
def remembered(number: int) -> int:
    CALLS.append(number)
    return len(CALLS)


WORD = "WORD"  # a value that is its own name


class Labelled:
    word = "word"


def relabels() -> None:
    global WORD
    WORD, Labelled.word, Labelled.other = "changed", "changed", 1  # type: ignore[attr-defined]


def test_globals_and_class_attributes_are_put_back_and_new_ones_removed() -> None:
    rewind = Rewind(relabels)
    relabels()
    assert (WORD, Labelled.word) == ("changed", "changed")
    rewind()
    assert (WORD, Labelled.word, hasattr(Labelled, "other")) == ("WORD", "word", False)


def asks(number: int) -> int:
    return remembered(number)


def test_what_a_cache_was_given_since_is_forgotten() -> None:
    """A value that a trial put there would be taken for the run's own."""
    remembered.cache_clear()
    assert asks(7) == 1
    rewind = Rewind(asks)
    rewind()
    assert remembered.cache_info().currsize == 1  # what was there before is, where nothing was added
    asks(8)
    rewind()
    assert remembered.cache_info().currsize == 0
    assert CALLS == [7]
    assert asks(8) == 2
    rewind()
    assert CALLS == [7]
    rewind()
    assert asks(8) == 2


def test_tensors_are_put_back_where_they_are() -> None:
    """Views and optimisers that hold a parameter see its old numbers too; a larger one is left as it is."""
    module = nn.Linear(2, 1)
    module.register_buffer("large", torch.zeros(LARGE_ARRAY_BYTES // 4 + 1))
    weight, view, numbers = module.weight, module.weight.data[0], module.weight.detach().clone()
    rewind = Rewind(module)
    with torch.no_grad():
        module.weight.add_(1.0)
        module.large.add_(1.0)
    rewind()
    assert module.weight is weight
    assert torch.equal(weight, numbers)
    assert torch.equal(view, numbers[0])
    assert bool((module.large == 1).all())
