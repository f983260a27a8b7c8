"""P-FedAvg's schemes are defined under one law of who takes part each, and are refused under any other."""

from __future__ import annotations

import pytest

from fedsim import Simulation
from fedsim.availability import Bernoulli, Full, Multiset, Staircase, Uniform, UniformK
from fedsim.core import ConfigError
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean
from fedsim.strategies import PFedAvg

OWN = {"full": Full, "I": lambda: Multiset(8), "II": lambda: UniformK(2)}


def simulation_of(strategy: PFedAvg, availability) -> Simulation:
    return Simulation(Quadratics(4, 2), Mean, clients=4, strategy=strategy, availability=availability, rounds=3)


@pytest.mark.parametrize("scheme", OWN)
def test_each_scheme_runs_under_its_own_law_and_no_other(scheme):
    simulation_of(PFedAvg(scheme), OWN[scheme]()).run()
    for other in OWN.keys() - {scheme}:
        with pytest.raises(ConfigError, match=rf"strategy\.scheme={scheme} .* use availability="):
            simulation_of(PFedAvg(scheme), OWN[other]())


@pytest.mark.parametrize("scheme", OWN)
def test_certain_clients_in_round_0_are_not_enough(scheme):
    """The staircase with p = 1 is full participation in its first half, and shrinks the model in its second."""
    with pytest.raises(ConfigError, match="shrinks or grows"):
        simulation_of(PFedAvg(scheme), Bernoulli(Uniform(1.0), Staircase()))


def test_the_multiset_is_drawn_by_data():
    with pytest.raises(ConfigError, match=r"strategy\.weighting=uniform does not apply"):
        simulation_of(PFedAvg("I", weighting="uniform"), Multiset(2))


@pytest.mark.parametrize("scheme", ["I", "II"])
def test_the_plain_mean_of_the_authors_program_is_of_full_participation(scheme):
    with pytest.raises(ConfigError, match=r"strategy\.average=plain is for full participation"):
        PFedAvg(scheme, average="plain")
