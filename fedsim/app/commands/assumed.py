"""The requirements of local rules, found by small runs with more and more features: those of the first run that a
rule accepts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch

from fedsim import Simulation
from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Dataset, GaussianMean, Market, Quadratics
from fedsim.local import LocalRule
from fedsim.models import MLP, Linear, Mean
from fedsim.models.selectors import Head
from fedsim.shift import Location, Players


def example_labelled_dataset() -> Dataset:
    """Return a data set of three clients with two samples each, of two classes."""
    return Dataset("few", torch.zeros(6, 2), torch.arange(6) % 2, classes=2, owners=torch.arange(6) % 3)


def shifting_simulation(**options: object) -> Simulation:
    """Return a data set of means that react to the deployed model."""
    return Simulation(GaussianMean(3), Mean, clients=3, shift=Location(references="none", **options))  # type: ignore[arg-type]


def _tiny_mlp(shape: tuple[int, ...], classes: int = 1, outputs: int | None = None) -> MLP:
    """Return a model with two hidden units."""
    return MLP(shape, outputs or classes, hidden=(2,))


RUN_BY_ASSUMPTION: dict[str, Callable[[], Simulation]] = {  # assumption → a run that satisfies it, weakest first
    "nothing": lambda: Simulation(Quadratics(3, 2), Mean, clients=3),
    "a model with a hidden layer": lambda: Simulation(
        Quadratics(3, 2), functools.partial(_tiny_mlp, outputs=2), clients=3
    ),
    "classes": lambda: Simulation(example_labelled_dataset(), Linear, clients=3),
    "classes and a model with a hidden layer": lambda: Simulation(example_labelled_dataset(), _tiny_mlp, clients=3),
    "columns that keep something": lambda: Simulation(example_labelled_dataset(), _tiny_mlp, clients=3, columns=Head()),
    "data whose location reacts to the model": shifting_simulation,
    "a shift that keeps what was deployed (shift.redraw)": lambda: shifting_simulation(deploy="round", redraw=2),
    "players (shift=players)": lambda: Simulation(Market(3, 1), Mean, clients=3, shift=Players(references="none")),
}


def requirements_text(rule: LocalRule) -> str:
    """Describe the requirements of a rule; requirements beyond all these features are in its docstring."""
    for description in RUN_BY_ASSUMPTION:
        run = _build_simulation(description)
        try:
            copy.deepcopy(rule).setup(run.data, run.shift, run.model)  # it stores what it derives from the model
        except ConfigError:
            continue
        return description
    return "more than the small runs have that it was tried on"


@functools.cache
def _build_simulation(name: str) -> Simulation:
    return RUN_BY_ASSUMPTION[name]()
