"""Random compositions with clients that hold a part of the model: they keep the promises of `test_fuzz.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from small_runs import configuration
from test_fuzz import BASE, WAYS

AVAILABILITY = ["full", "bernoulli", "markov", "uniform_k", "cyclic", "multiset", "sine"]
LOCAL = ["sgd", "momentum", "adam", "fedsam", "fedlc", "fedntd", "fedproto"]


def composition(number: int) -> list[str]:
    """The overrides of one of them; each runs."""
    draw = random.Random(f"capacity {number}")
    availability = draw.choice(AVAILABILITY)
    overrides = ["dataset=digits", "model=mlp", f"model.hidden={draw.choice(['[6]', '[5,7]'])}", "batch_size=4"]
    overrides += [f"capacity={draw.choice(['heterofl', 'fedrolex', 'fjord', 'federated_dropout'])}"]
    overrides += [f"capacity.widths={draw.choice(['[1,0.5]', '[0.4]', '[0.2,0.6,1]'])}"]
    overrides += [f"capacity.assign={draw.choice(['random', 'size'])}"]
    overrides += [f"strategy={draw.choice(['fedavg', 'fedprox', 'fedavgm', 'fedopt'])}", f"local={draw.choice(LOCAL)}"]
    overrides += [f"availability={availability}"]
    overrides += ["availability.k=3"] if availability in ("uniform_k", "multiset") else []
    overrides += ["availability.groups=2"] if availability == "cyclic" else []
    overrides += ["strategy.weighting=data"] if draw.random() < 0.4 else []
    overrides += ["work=uniform"] if draw.random() < 0.3 else []
    return [*overrides, *BASE]


def keeps_a_promise(number: int, folder: Path) -> None:
    WAYS[number % len(WAYS)](configuration(*composition(number)), folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(5))
def test_random_compositions_with_capacities(number: int, tmp_path: Path) -> None:
    keeps_a_promise(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5, 105, 20))
def test_many_random_compositions_with_capacities(first: int, tmp_path: Path) -> None:
    for number in range(first, first + 20):
        keeps_a_promise(number, tmp_path / str(number))
