"""Numbers that are given for every client are used as they are given."""

from __future__ import annotations

import pytest
import torch

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import HousePrices, Market, Pricing
from fedsim.data.partition import Natural
from fedsim.models import Linear, Mean
from fedsim.shift import Demand, Elastic, Players, Response, Strategic

GIVEN = [1.0, 2.0, 3.0]


def attached(shift, dataset, model, **options):
    return Simulation(dataset, model, partition=Natural(), clients=3, shift=shift, rounds=1, **options).shift


def houses(shift):
    from functools import partial

    return attached(shift, HousePrices(3), partial(Linear, bias=False))


@pytest.mark.parametrize("options", [{}, {"spread": 0.0}])
def test_a_number_for_each_client_is_not_spread(options):
    assert attached(Demand(GIVEN, **options), Pricing(3), Mean).gammas.tolist() == GIVEN
    players = attached(Players(GIVEN, coupling=0.0, **options), Market(3), Mean)
    assert torch.equal(players.response_matrix, -torch.diag(torch.tensor(GIVEN, dtype=torch.float64)))
    assert houses(Response(GIVEN, **options)).gammas.tolist() == GIVEN
    assert HousePrices(3, coefficient=GIVEN, **options).coefficients[:, 0].tolist() == GIVEN
    for kind in (Strategic, Elastic):
        assert houses(kind(GIVEN, features=[0], **options)).epsilons.tolist() == GIVEN


def test_one_number_for_all_is_spread():
    gammas = attached(Demand(2.0), Pricing(3), Mean).gammas
    assert len(set(gammas.tolist())) == 3
    assert bool(((gammas - 2).abs() <= 1).all())


def test_a_spread_around_given_numbers_is_refused():
    said = r"shift\.spread=0\.3 is around one number, but shift\.gamma gives one to each client"
    with pytest.raises(ConfigError, match=said):
        attached(Demand(GIVEN, spread=0.3), Pricing(3), Mean)
    with pytest.raises(ConfigError, match=r"dataset\.spread=0\.2 is around one number, but dataset\.coefficient"):
        HousePrices(3, coefficient=GIVEN, spread=0.2)
